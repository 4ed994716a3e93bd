package main

import (
	"encoding/json"
	"net/url"
	"strings"
	"syscall"
	"testing"
	"time"

	"posthaste/internal/lab/testenv"
)

// A watched status continues when Postgres goes down and comes back. It reports both, and ends in order.
func TestStatusWatchSurvivesPostgres(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.relayIn("cdc")
	p := testenv.NewLink(t, hostOf(t, w.db.URL))
	w.pgURL = strings.Replace(w.db.URL, hostOf(t, w.db.URL), p.Addr(), 1)
	human, script := w.start("status", "--watch"), w.start("status", "--watch", "--json")
	lines := func(text string, least int) {
		t.Helper()
		testenv.Eventually(t, 20*time.Second, func() error {
			n := strings.Count(human.output(), text)
			return testenv.FailIf(n < least, "%q %d times, want %d: %s", text, n, least, human.output())
		})
	}
	lines(" ok: events flow in mode cdc; mode=cdc", 2)
	script.waitLogged(`"mode":"cdc"`)
	p.Down()
	lines(" broken: Postgres does not answer: ", 2)
	script.waitLogged(`{"error":`)
	ok := strings.Count(human.output(), " ok: ")
	p.Up()
	lines(" ok: ", ok+2)
	for _, prog := range []*child{human, script} {
		prog.signal(syscall.SIGINT)
		prog.ends(0)
	}
	for line := range strings.Lines(script.output()) {
		if !json.Valid([]byte(line)) {
			t.Errorf("line %q is not JSON", line)
		}
	}
	if strings.Contains(human.output(), "\x1b") {
		t.Error("control characters without a terminal")
	}
}

// Postgres does not record that Redis is down or does not respond, so status queries Redis itself.
func TestStatusSeesRedis(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.relayIn("cdc")
	check := func(code int) {
		t.Helper()
		w.once("status", "--check").says(t, code)
	}
	testenv.Eventually(t, 20*time.Second, func() error {
		r := w.once("status", "--check")
		return testenv.FailIf(r.code != 0, "exit %d: %s", r.code, r.out)
	})
	must(t, w.redis.Signal(syscall.SIGSTOP))
	check(1)
	const down = "Redis does not take events: Redis unreachable"
	w.once("status").says(t, 0, "degraded: "+down)
	must(t, w.redis.Kill())
	testenv.StartLoad(t, w.db, testenv.LoadOptions{Rate: 20})
	testenv.Eventually(t, 20*time.Second, func() error {
		r := w.once("status")
		return testenv.FailIf(r.code != 0 || !strings.HasPrefix(r.out, "broken: "+down), "exit %d: %s", r.code, r.out)
	})
	check(2)
	w.once("status", "--check", "--postgres-url=postgres://127.0.0.1:1/none").warns(t, 2, "posthaste: ")
}

// If events are late, status names the right of the user of Redis that is missing.
func TestStatusNamesAMissingRight(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	const password = "change-me"
	must(t, w.redis.Client.Do(t.Context(), "ACL", "SETUSER", "weak", "on", ">"+password, "~*", "&*", "+@all",
		"-xadd").Err())
	u, err := url.Parse(w.rdURL)
	must(t, err)
	u.User = url.UserPassword("weak", password)
	w.rdURL = u.String()
	if r := w.once("status"); strings.Contains(r.out, "NOPERM") {
		t.Errorf("nothing waits: %s", r.out)
	}
	w.spawn("relay")
	w.insert("order", "a", 1)
	testenv.Eventually(t, 30*time.Second, func() error {
		r := w.once("status")
		return testenv.FailIf(!strings.Contains(r.out, "Events are late") || !strings.Contains(r.out,
			"NOPERM this user has no permissions to run the 'xadd' command") ||
			!strings.Contains(r.out, "ACL SETUSER"), "exit %d: %s", r.code, r.out)
	})
}

// Commands with output for scripts print it as JSON.
func TestOneShotCommandsSpeakJSON(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	prints := func(command, want string) {
		t.Helper()
		r := w.once(append(strings.Fields(command), "--json")...)
		if got := r.compact(); r.code != 0 || got != want {
			t.Errorf("%s: exit %d: %s", command, r.code, got)
		}
	}
	prints("migrate", `{"applied":[]}`)
	prints("mode poll", `{"desired":"poll","mode":"standby"}`)
	prints("groups list", `[]`)
	prints("adopt --yes", `{"balances":false,"streams":[]}`)
	w.db.Exec(t, "INSERT INTO outbox_stream (stream, base, adopted_epoch) VALUES ('outbox.order', 'outbox.order', 1)")
	prints("adopt --yes", `{"balances":false,"streams":["outbox.order"]}`)
	var v struct{ Version, Go string }
	if r := w.once("version", "--json"); json.Unmarshal([]byte(r.out), &v) != nil || v.Version == "" || v.Go == "" {
		t.Errorf("version: %s", r.out)
	}
}
