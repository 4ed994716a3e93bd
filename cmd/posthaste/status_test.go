package main

import (
	"encoding/json"
	"fmt"
	"strings"
	"syscall"
	"testing"
	"time"

	"posthaste/internal/ops"
	"posthaste/internal/testenv"
	"posthaste/outbox"
)

func TestStatusIsAlignedAndColouredOnATerminal(t *testing.T) {
	t.Parallel()
	v := view{Report: ops.Report{
		Status:  ops.Status{Mode: outbox.ModeCDC, Desired: outbox.ModeAuto, Slot: ops.Slot{Exists: true, Active: true}},
		Verdict: ops.Brief{Word: "degraded", Why: "3 events are parked"},
	}}
	var plain, coloured strings.Builder
	must(t, v.print(&plain, "default", false))
	must(t, v.print(&coloured, "default", true))
	lines := strings.Split(plain.String(), "\n")
	if lines[0] != "degraded: 3 events are parked" || strings.Contains(plain.String(), "\x1b") {
		t.Errorf("plain:\n%s", plain.String())
	}
	for _, l := range lines[2 : len(lines)-1] {
		if len(l) < 11 || l[9] != ' ' || l[10] == ' ' {
			t.Errorf("line %q is not aligned with the others", l)
		}
	}
	if got := coloured.String(); !strings.HasPrefix(got, "\x1b[1;33mdegraded\x1b[0m: ") ||
		strings.Count(got, "\x1b") != 2 {
		t.Errorf("coloured: %q", got)
	}
}

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
			n := strings.Count(human.text(), text)
			return testenv.FailIf(n < least, "%q %d times, want %d: %s", text, n, least, human.text())
		})
	}
	lines(" ok: events are streamed; mode=cdc", 2)
	script.waitText(t, `"mode":"cdc"`)
	p.Down()
	lines(" broken: Postgres does not answer: ", 2)
	script.waitText(t, `{"error":`)
	ok := strings.Count(human.text(), " ok: ")
	p.Up()
	lines(" ok: ", ok+2)
	for _, prog := range []*program{human, script} {
		must(t, prog.cmd.Process.Signal(syscall.SIGINT))
		<-prog.done
		if code := prog.cmd.ProcessState.ExitCode(); code != 0 {
			t.Errorf("exit %d after Ctrl-C", code)
		}
	}
	for line := range strings.Lines(script.text()) {
		if !json.Valid([]byte(line)) {
			t.Errorf("line %q is not JSON", line)
		}
	}
	if strings.Contains(human.text(), "\x1b") {
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
		if r := w.once("status", "--check"); r.code != code {
			t.Errorf("status --check: exit %d, want %d: %s%s", r.code, code, r.out, r.errOut)
		}
	}
	check(0)
	must(t, w.redis.Signal(syscall.SIGSTOP))
	check(1)
	if r := w.once("status"); r.code != 0 || !strings.HasPrefix(r.out, "degraded: redis unreachable") {
		t.Errorf("with a Redis that hangs: exit %d: %s", r.code, r.out)
	}
	must(t, w.redis.Kill())
	testenv.StartLoad(t, w.db, testenv.LoadOptions{Rate: 20})
	testenv.Eventually(t, 20*time.Second, func() error {
		if r := w.once("status"); r.code != 0 || !strings.HasPrefix(r.out, "broken: redis unreachable") ||
			!strings.Contains(r.out, "events wait") {
			return fmt.Errorf("without Redis: exit %d: %s", r.code, r.out)
		}
		return nil
	})
	check(2)
	if r := w.once("status", "--check", "--postgres-url=postgres://127.0.0.1:1/none"); r.code != 2 || r.errOut == "" {
		t.Errorf("without Postgres: exit %d: %s", r.code, r.errOut)
	}
}

// Commands with output for scripts print it as JSON.
func TestOneShotCommandsSpeakJSON(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{"migrate", "--json"}, `{"applied":[]}`},
		{[]string{"mode", "poll", "--json"}, `{"desired":"poll","mode":"standby"}`},
		{[]string{"groups", "list", "--json"}, `[]`},
	} {
		r := w.once(c.args...)
		if got := strings.Join(strings.Fields(r.out), ""); r.code != 0 || got != c.want {
			t.Errorf("%v: exit %d: %s", c.args, r.code, got)
		}
	}
	var v struct{ Version, Go string }
	if r := w.once("version", "--json"); json.Unmarshal([]byte(r.out), &v) != nil || v.Version == "" || v.Go == "" {
		t.Errorf("version: %s", r.out)
	}
}

// status prints how fast a large backlog shrinks and how long that will take. For a small one that comes and goes, it
// prints nothing.
func TestStatusTellsHowABacklogFalls(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name string
		rows []int64
		want string
	}{
		{"one reading", []int64{1000}, ""},
		{"falls", []int64{100_000, 98_000, 96_000}, "falling by 2,000/s, about 48s left"},
		{"grows", []int64{100, 350}, "growing by 250/s"},
		{"stands", []int64{7, 7, 7}, ""},
		{"is a moment's", []int64{0, 5}, ""},
		{"is gone", []int64{5000, 0}, ""},
		{
			"turned round long ago", append([]int64{0, 1_000_000}, 90, 80, 70, 60, 50, 40, 30, 20, 10, 9),
			"falling by 9/s, about 1s left",
		},
	} {
		var tr trend
		got := ""
		for i, n := range c.rows {
			got = tr.note(time.Unix(int64(i), 0), n)
		}
		if got != c.want {
			t.Errorf("a backlog that %s: %q, want %q", c.name, got, c.want)
		}
	}
}
