package main

import (
	"encoding/json"
	"net"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"posthaste/internal/testenv"
)

// ofShop matches the words of the shop, and errors about its tables.
var ofShop = regexp.MustCompile(`(?i)\b(orders?|credits?|payments?|shop\b[^":]|idem)|credits?_|orders?_|does not exist`)

// A relay migrates an empty database to an outbox without the shop, and publishes. All processes and commands work
// without the shop's tables, which a later migration adds.
func TestAnOutboxAlone(t *testing.T) {
	t.Parallel()
	w := worldOf(t, testenv.Empty(t), testenv.Redis(t))
	r := w.relayIn("cdc", "--migrate")
	id := w.insert("invoice", "a", 1)
	w.waitIDs("outbox.invoice", id)
	w.oracle.WaitEmpty(t, 20*time.Second)
	if n := testenv.Value[int](t, w.db, `SELECT count(*) FROM pg_class
		WHERE relnamespace = 'public'::regnamespace AND relname ~ '^(orders|order_|credit_)'`); n != 0 {
		t.Errorf("%d tables and indexes of the shop", n)
	}
	for _, args := range [][]string{
		{"status"},
		{"status", "--json"},
		{"doctor"},
		{"trace", id},
		{"dead", "list"},
		{"groups", "list"},
		{"replay", "--all", "--rate=0"},
		{"migrate", "--only=outbox"},
		{"mode", "poll"},
	} {
		if res := w.once(args...); res.code != 0 || ofShop.MatchString(res.out+res.errOut) {
			t.Errorf("%v: exit %d: %s%s", args, res.code, res.out, res.errOut)
		}
	}
	w.waitMode("poll", 20*time.Second)
	r.waitReady(t, 200, "", 30*time.Second)
	text, err := r.metrics()
	must(t, err)
	for _, path := range []string{"/readyz", "/relay", "/console/api/trace?id=" + id, "/console/api/state"} {
		var answer json.RawMessage
		if status, err := r.get(path, &answer); err != nil || status != 200 {
			t.Errorf("%s: %d, %v", path, status, err)
		}
		text += path + string(answer)
	}
	if found := ofShop.FindAllString(text, -1); len(found) > 0 {
		t.Errorf("the relay's pages have %q", found)
	}
	if log := r.output(); ofShop.MatchString(log) || strings.Contains(log, `"level":"ERROR"`) {
		t.Errorf("the relay logs %s", log)
	}
	if list := w.redis.Client.FunctionList(t.Context(), redis.FunctionListQuery{}).Val(); len(list) != 0 {
		t.Errorf("the relay has loaded functions: %v", list)
	}
	if res := w.once("migrate"); res.code != 0 || res.out != "applied migration 1 of shop\n" {
		t.Errorf("migrate: exit %d: %s%s", res.code, res.out, res.errOut)
	}
	testenv.Eventually(t, 30*time.Second, func() error {
		return r.shows("credits_sync_lag_seconds 0", true)
	})
	w.once("trace", id).says(t, 0)
}

// A relay reports to systemd why it is not ready, that it is ready, that it runs, and that it stops.
func TestSystemdIsNotified(t *testing.T) {
	t.Parallel()
	w := worldOf(t, testenv.Empty(t), testenv.Redis(t))
	socket := filepath.Join(t.TempDir(), "notify")
	heard, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: socket, Net: "unixgram"})
	must(t, err)
	defer heard.Close()
	wait := func(text string) {
		t.Helper()
		must(t, heard.SetReadDeadline(time.Now().Add(time.Minute)))
		for b := make([]byte, 4096); ; {
			n, err := heard.Read(b)
			if err != nil {
				t.Fatalf("nothing with %q: %v", text, err)
			}
			if strings.Contains(string(b[:n]), text) {
				return
			}
		}
	}
	w.env = append(w.env, "NOTIFY_SOCKET="+socket, "WATCHDOG_USEC=100000")
	r := w.spawn("relay")
	wait("STATUS=not ready: schema")
	w.once("migrate").says(t, 0)
	wait("READY=1")
	wait("WATCHDOG=1")
	r.stops()
	wait("STOPPING=1")
}

// A relay started with --migrate waits for Postgres.
func TestARelayMigratesWhenPostgresIsThere(t *testing.T) {
	t.Parallel()
	server := testenv.NewServer(t)
	d := server.Empty(t)
	w := worldOf(t, d, testenv.Redis(t))
	must(t, server.Stop("immediate"))
	r := w.spawn("relay", "--migrate")
	r.waitReady(t, 503, "postgres: ", 30*time.Second)
	must(t, server.Start(t.Context()))
	r.waitReady(t, 200, "", 30*time.Second)
	w.waitMode("cdc", 30*time.Second)
}

// If a session that is not a relay holds the leader's lock, relays are soon able to lead anyway.
func TestAStrandedLeadersLock(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.db.Strand(t)
	w.wrote(testenv.LoadOptions{Total: 10})
	w.spawn("relay")
	w.oracle.WaitEmpty(t, 90*time.Second)
}
