//go:build versions

package main

import (
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"posthaste/internal/lab/testenv"
)

// These tests need servers of several versions: make test-versions.

// newFollowed starts a world whose standby may take over: only commits that the standby has are streamed. If
// synchronized is set, the standby also has a copy of the relay's slot.
func newFollowed(t *testing.T, synchronized bool) *replicated {
	t.Helper()
	settings := []string{
		"primary_slot_name=standby", "hot_standby_feedback=on", "wal_retrieve_retry_interval=200ms",
	}
	if synchronized {
		settings = append(settings, "sync_replication_slots=on")
	}
	w := newReplicated(t, "cdc", settings...)
	needFailoverSlots(t, w.db)
	for _, stmt := range []string{
		"SELECT pg_create_physical_replication_slot('standby', true)",
		"ALTER SYSTEM SET synchronized_standby_slots = 'standby'", "SELECT pg_reload_conf()",
	} {
		w.db.Exec(t, stmt)
	}
	w.waitHas(true, "SELECT active FROM pg_replication_slots WHERE slot_name = 'standby'") // it follows
	return w
}

func needFailoverSlots(t *testing.T, db *testenv.Database) {
	t.Helper()
	if v := testenv.Value[int](t, db, "SELECT current_setting('server_version_num')::int") / 10000; v < 17 {
		t.Fatalf("Postgres %d has no failover slots: POSTHASTE_TEST_PG_BIN has to name a later one", v)
	}
}

// waitCopied waits until the standby has a copy of the relay's slot that would survive a promotion.
func (r *replicated) waitCopied(other *testenv.Database) {
	r.t.Helper()
	testenv.Eventually(r.t, 60*time.Second, func() error {
		var n int
		err := other.Pool.QueryRow(r.t.Context(), `SELECT count(*) FROM pg_replication_slots
			WHERE slot_name = $1 AND synced AND NOT temporary AND invalidation_reason IS NULL`,
			"posthaste_"+r.db.Relay).Scan(&n)
		return testenv.FailIf(err != nil || n == 0, "the slot is not synchronized, %w", err)
	})
}

// The primary is killed under load, and a standby takes over, with or without the relay's slot. The streams have
// exactly the events that the standby has, once and in order. With a synchronous standby, these are all acknowledged
// events.
func TestVersionsFailover(t *testing.T) {
	for name, c := range map[string]struct{ synchronized, synchronous, killed bool }{
		"synchronous with the slot":                    {synchronized: true, synchronous: true},
		"synchronous without the slot":                 {synchronous: true},
		"asynchronous with the slot":                   {synchronized: true},
		"asynchronous with the slot, the relay killed": {synchronized: true, killed: true},
		"asynchronous without the slot":                {},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newFollowed(t, c.synchronized)
			if c.synchronous {
				w.beSynchronous()
			}
			r := w.relayIn("cdc")
			other := w.other()
			load := testenv.StartLoad(t, w.at(w.front.Addr()), testenv.LoadOptions{Rate: 300, Tolerant: true})
			w.waitCommitted(load, 300)
			if c.synchronized {
				w.waitCopied(other)
			}
			w.waitCommitted(load, load.Committed()+600)
			if c.killed {
				r.kill()
			}
			w.promote(other)
			if c.killed {
				r = w.spawn("relay")
			}
			w.waitCommitted(load, load.Committed()+300)
			streams := map[bool]int{false: 2, true: 1}[c.killed]
			testenv.Eventually(t, 60*time.Second, func() error {
				n := strings.Count(r.output(), `"stream opened"`)
				return testenv.FailIf(n < streams, "%d streams were opened, want %d", n, streams)
			})
			w.waitMode("cdc")
			load.Stop()
			if c.synchronous {
				w.oracle.Check(t, load, 20*time.Second)
			}
			w.holdsWhatIsThere()
			made := map[bool]int{false: 1, true: 0}[c.killed]
			if !c.synchronized {
				made++
			}
			if n := strings.Count(r.output(), `"slot created"`); n != made {
				t.Errorf("%d slots were made, want %d", n, made)
			}
			present(t, r, `outbox_slot_created_total{reason="missing"} 0`)
			if out := w.once("phantoms").out; strings.Contains(out, "order") {
				t.Errorf("phantoms: %s", out)
			}
		})
	}
}

// holdsWhatIsThere checks that the stream has exactly the rows of the database, each once and in its aggregate's order.
func (r *replicated) holdsWhatIsThere() {
	r.t.Helper()
	r.oracle.WaitEmpty(r.t, 20*time.Second)
	want := testenv.Value[[]string](r.t, r.db, `SELECT array_agg(aggregate_id || ' ' || id
		ORDER BY aggregate_id COLLATE "C", (payload ->> 'n')::int) FROM outbox`)
	entries := r.oracle.Entries(r.t, "order")
	slices.SortStableFunc(entries, func(a, b testenv.Entry) int { return strings.Compare(a.Subject, b.Subject) })
	var got []string
	for _, e := range entries {
		got = append(got, e.Subject+" "+e.ID)
	}
	if i := firstDifference(got, want); i >= 0 {
		r.t.Errorf("%d entries, %d rows; they differ from %d on: %q, want %q", len(got), len(want), i,
			got[i:min(i+3, len(got))], want[min(i, len(want)):min(i+3, len(want))])
	}
}

// firstDifference returns the first index at which a and b differ, or -1.
func firstDifference(a, b []string) int {
	for i := range a {
		if i >= len(b) || a[i] != b[i] {
			return i
		}
	}
	if len(a) < len(b) {
		return len(a)
	}
	return -1
}

// A standby named in synchronized_standby_slots is down. The stream is blocked, and the slot cannot be advanced,
// because the server waits for that standby. The relay sweeps until the standby is back.
func TestVersionsDeadStandby(t *testing.T) {
	t.Parallel()
	w, _ := onServer(t)
	needFailoverSlots(t, w.db)
	r := w.relayIn("cdc")
	load := testenv.StartLoad(t, w.db, testenv.LoadOptions{Rate: 100})
	w.waitLen("outbox.order", 100)
	_, release := w.freezeStream()
	r.waitLogged(`"reason":"stalled"`)
	w.waitMode("poll")
	w.waitLen("outbox.order", int64(load.Committed())) // events that waited for the stream
	// Each attempt to advance the slot takes half a minute. Events are published during each attempt.
	type attempt struct {
		began, seen time.Time
		from, to    int64
	}
	attempts := map[time.Time]*attempt{}
	testenv.Eventually(t, 60*time.Second, func() error {
		var at *time.Time
		const query = "SELECT min(query_start) FROM pg_stat_activity WHERE wait_event = 'WaitForStandbyConfirmation' " +
			"AND query LIKE '%pg_replication_slot_advance%'"
		if err := w.db.Pool.QueryRow(t.Context(), query).Scan(&at); err != nil {
			return err
		}
		entries, err := w.redis.Client.XLen(t.Context(), "outbox.order").Result()
		if err != nil {
			return err
		}
		now := time.Now()
		if at != nil {
			if attempts[*at] == nil {
				attempts[*at] = &attempt{began: now, from: entries}
			}
			attempts[*at].seen, attempts[*at].to = now, entries
		}
		return testenv.FailIf(len(attempts) < 4, "%d attempts to move the slot", len(attempts))
	})
	for _, a := range attempts {
		took := a.seen.Sub(a.began).Round(time.Millisecond)
		t.Logf("%d events in the %v of an attempt to move the slot", a.to-a.from, took)
		if took > 20*time.Second && a.to == a.from {
			t.Errorf("no event in the %v of an attempt to move the slot", took)
		}
	}
	release()
	w.waitMode("cdc")
	w.ended(load)
}

// pg_upgrade moves a database to another server, which may have a later version. The case with the slot simulates
// Postgres 17 and later, where pg_upgrade creates a slot of the same name. POSTHASTE_TEST_PG_UPGRADE names the
// directory of the later version. Without it, both servers have the same version, which pg_upgrade allows.
func TestVersionsUpgrade(t *testing.T) {
	for name, slot := range map[string]bool{"with the slot": true, "without the slot": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w, server := onServer(t)
			r := w.relayIn("cdc")
			before := w.wrote(testenv.LoadOptions{Total: 300, Tag: "before-"})
			w.oracle.Check(t, before, 20*time.Second)
			r.stops()
			// These events are committed after the relay has stopped, so they are unsettled on the new server.
			owed := w.wrote(testenv.LoadOptions{Total: 60, Tag: "owed-"})
			name := "posthaste_" + w.db.Relay
			version := testenv.Value[int](t, w.db, "SELECT current_setting('server_version_num')::int") / 10000
			if version >= 17 && !slot {
				w.db.Exec(t, "SELECT pg_drop_replication_slot($1)", name)
			}
			w.db.Pool.Close()
			server = server.Upgrade(t, os.Getenv("POSTHASTE_TEST_PG_UPGRADE"))
			w.db = w.at(hostOf(t, server.URL("")))
			w.pgURL, w.oracle.DB = w.db.URL, w.db
			if version < 17 && slot {
				w.db.Exec(t, "SELECT pg_create_logical_replication_slot($1, 'pgoutput', false, false)", name)
			}
			r = w.spawn("relay")
			w.refused(r, owed)
			w.adopt()
			r.waitLogged(`"stream opened"`)
			if made := r.logged(`"slot created"`); made == slot {
				t.Errorf("a slot was made: %t", made)
			}
			w.all(owed, before)
			w.delivers()
		})
	}
}
