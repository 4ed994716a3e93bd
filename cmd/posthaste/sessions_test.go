package main

import (
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"posthaste/internal/lab/testenv"
)

// fillWAL writes 20 MB of WAL that is no transaction's.
func (w *world) fillWAL() {
	w.t.Helper()
	w.db.Exec(w.t, "SELECT pg_logical_emit_message(false, 'test', repeat('x', 1000000)) FROM generate_series(1, 20)")
}

// position is that of the slot.
const position = "SELECT confirmed_flush_lsn::text FROM pg_replication_slots"

// follows waits until the slot has moved, or the relay has said when it moves it.
func (w *world) follows(r *child, from string) {
	w.t.Helper()
	testenv.Eventually(w.t, 20*time.Second, func() error {
		now := testenv.Value[string](w.t, w.db, position)
		return testenv.FailIf(now == from && !r.logged("the slot follows when"), "the slot is not to follow")
	})
}

// heldBack returns a world on a server of its own, where only the writers wait for a standby.
func heldBack(t *testing.T) *world {
	t.Helper()
	w := worldOf(t, pooled(t, testenv.NewServer(t).Database(t), wide), testenv.Redis(t))
	w.pgURL += "&synchronous_commit=local"
	return w
}

// A transaction stays open while the relay sweeps and the WAL grows beyond the point where the slot must advance. The
// relay streams again anyway, including the rows of that transaction.
func TestStreamingAgainBesideAnOpenTransaction(t *testing.T) {
	t.Parallel()
	w, _ := onServer(t)
	r := w.relayIn("cdc", "--wal-budget=64MiB") // the slot is advanced from 16 MiB on
	w.switches(r, "poll")
	before := testenv.Value[string](t, w.db, position)
	const insert = "INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload) VALUES " +
		"(gen_random_uuid(), 'late', 'a', 'x', '{}')"
	tx := w.begin(insert)
	w.fillWAL()
	w.follows(r, before)
	r.setMode("auto")
	w.waitMode("cdc")
	_, err := tx.Exec(t.Context(), insert)
	must(t, err)
	must(t, tx.Commit(t.Context()))
	w.oracle.WaitEmpty(t, 20*time.Second)
	w.hasLen("outbox.late", 2)
	w.delivers()
}

// Commits are blocked by a synchronous standby while the relay sweeps and the WAL grows. Then another relay takes over
// and streams. The slot was not advanced past the invisible commits: otherwise their events would come late, after
// later events of their aggregates.
func TestHeldBackCommitsKeepTheirOrderOverAChangeOfLeader(t *testing.T) {
	t.Parallel()
	w := heldBack(t)
	r := w.relayIn("cdc", "--wal-budget=64MiB")
	w.switches(r, "poll")
	before := testenv.Value[string](t, w.db, position)
	load := w.held(testenv.LoadOptions{Writers: 12, Total: 72})
	w.fillWAL()
	w.follows(r, before)
	r.kill()
	w.desire("auto")
	w.relayIn("cdc", "--wal-budget=64MiB")
	w.db.Standby(t, "")
	load.Wait()
	w.oracle.Check(t, load, 30*time.Second)
}

// Commits are blocked by a synchronous standby when the WAL budget advances the slot past them: they are in the WAL
// before the slot and not visible yet. Then the relay is killed or stopped. The next leader streams only after the
// commits have become visible and their rows have been swept in order.
func TestTheBudgetPassesHeldBackCommitsAndTheLeaderDies(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ mode, end string }{{"poll", "kill"}, {"poll", "stop"}, {"auto", "kill"}} {
		t.Run(c.mode+" "+c.end, func(t *testing.T) {
			t.Parallel()
			const budget = "--wal-budget=16MiB"
			w := heldBack(t)
			w.relayIn("cdc", budget).stop()
			w.fillWAL()
			load := w.held(testenv.LoadOptions{Writers: 12, Total: 720})
			held := testenv.Value[string](t, w.db, "SELECT pg_current_wal_insert_lsn()::text")
			reached(t, w.db, w.pgURL).Exec(t, "UPDATE relay_state SET desired_mode = $1", c.mode)
			r := w.spawn("relay", budget)
			w.waitHas(true,
				"SELECT EXISTS (SELECT FROM pg_replication_slots WHERE confirmed_flush_lsn >= $1::text::pg_lsn)", held)
			if c.end == "kill" {
				r.kill()
			} else {
				r.stop()
			}
			w.desire("auto")
			r = w.spawn("relay", budget)
			testenv.Eventually(t, 30*time.Second, func() error {
				return testenv.FailIf(!r.logged("transaction_held") && !r.logged(`"stream opened"`),
					"no hand-over is tried")
			})
			w.db.Standby(t, "")
			load.Wait()
			w.oracle.Check(t, load, 30*time.Second)
			w.waitMode("cdc")
		})
	}
}

// The same if an operator advances the slot past them.
func TestSomebodyMovesTheSlotPastHeldBackCommits(t *testing.T) {
	t.Parallel()
	w := heldBack(t)
	r := w.relayIn("cdc")
	w.switches(r, "poll")
	load := w.held(testenv.LoadOptions{Writers: 12, Total: 720})
	local := reached(t, w.db, w.pgURL)
	// The slot is moved repeatedly: the relay may be advancing it at the same time, or may not have read its position
	// before.
	testenv.Eventually(t, 20*time.Second, func() error {
		_, err := local.Pool.Exec(t.Context(), "SELECT pg_logical_emit_message(true, 'test', '')")
		if err == nil {
			_, err = local.Pool.Exec(t.Context(),
				"SELECT pg_replication_slot_advance(slot_name, pg_current_wal_flush_lsn()) FROM pg_replication_slots")
		}
		return testenv.FailIf(err != nil || !r.logged("another program has moved the slot"), "it is not noticed, %w",
			err)
	})
	local.Exec(t, "UPDATE relay_state SET desired_mode = 'auto'")
	streams := strings.Count(r.output(), `"stream opened"`)
	testenv.Eventually(t, 30*time.Second, func() error {
		return testenv.FailIf(!r.logged("transaction_held") && strings.Count(r.output(), `"stream opened"`) == streams,
			"no hand-over is tried")
	})
	w.db.Standby(t, "")
	load.Wait()
	w.oracle.Check(t, load, 30*time.Second)
	w.waitMode("cdc")
}

// The relay's role commits asynchronously, and Postgres loses commits in a crash. The relay must not lose that an event
// was settled, because the gate no longer shows that it was published.
//
// The same if the setting changes while the relay runs.
func TestPostgresForgetsNothingThatWasSettled(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ mode, when string }{
		{"cdc", "before"},
		{"poll", "before"},
		{"cdc", "meanwhile"},
		{"poll", "meanwhile"},
	} {
		t.Run(c.mode+" "+c.when, func(t *testing.T) {
			t.Parallel()
			server := testenv.NewServer(t, "wal_writer_delay=10s", "wal_writer_flush_after=1GB")
			w := worldOf(t, pooled(t, server.Database(t), "&synchronous_commit=on"), testenv.Redis(t))
			if c.when == "before" {
				w.pgURL += "&synchronous_commit=off"
			}
			r := w.relayIn(c.mode)
			w.delivers() // the relay's sessions are open
			if c.when == "meanwhile" {
				w.db.Exec(t, "ALTER SYSTEM SET synchronous_commit = off")
				w.db.Exec(t, "SELECT pg_reload_conf()")
				w.waitHas(1, "SELECT count(*) FROM pg_file_settings WHERE name = 'synchronous_commit' AND applied")
			}
			load := w.wrote(testenv.LoadOptions{Total: 240})
			w.oracle.WaitEmpty(t, 20*time.Second)
			gate := w.gate("outbox.order")
			testenv.Eventually(t, 20*time.Second, func() error {
				fields, err := w.redis.Client.HKeys(t.Context(), gate).Result()
				if len(fields) == 0 {
					return errors.New("there is no gate")
				}
				for _, f := range fields {
					if strings.HasPrefix(f, "u:") {
						return fmt.Errorf("the gate has not heard that %s is settled", f)
					}
				}
				return err
			})
			must(t, server.Stop("immediate"))
			must(t, server.Start(t.Context()))
			r.becomes("leader")
			w.oracle.Check(t, load, 30*time.Second)
		})
	}
}

// The database accepts no writes for a while, as after a failover to a server that is not promoted yet. Relay and API
// report it and recover on their own, whatever the server reported when their connections began.
func TestDatabaseThatTakesNoWritesForAWhile(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	relay, api := w.spawn("relay"), w.spawn("serve")
	w.waitMode("cdc")
	api.waitReady("")
	w.db.Exec(t, "ALTER DATABASE "+w.db.Name+" SET default_transaction_read_only = on")
	since := testenv.Value[time.Time](t, w.db, "SELECT clock_timestamp()")
	testenv.Eventually(t, 30*time.Second, func() error {
		// The sessions are terminated repeatedly: a session that is just starting has no name yet, and may still be
		// able to write.
		w.db.Exec(t, `SELECT pg_terminate_backend(pid) FROM pg_stat_activity
			WHERE datname = current_database() AND application_name LIKE 'posthaste%' AND backend_start < $1`, since)
		var h readiness
		status, err := relay.get("/readyz", &h)
		return testenv.FailIf(err != nil || status != http.StatusServiceUnavailable ||
			!strings.Contains(fmt.Sprint(h.Reasons), "takes no writes"), "readyz: %d %+v, %w", status, h, err)
	})
	api.waitUnready("read_only")
	w.db.Exec(t, "ALTER DATABASE "+w.db.Name+" RESET default_transaction_read_only")
	relay.waitReady("")
	api.waitReady("")
	w.delivers()
	if a, err := placeOrder(t.Context(), api.http, 1); err != nil || a.status != http.StatusCreated {
		t.Errorf("order: status %d, %v: %s", a.status, err, a.body)
	}
}

// A role that has lost the right to advance its slot cannot keep the budget: events are swept, and the growing WAL is
// reported.
func TestBudgetThatCannotBeKeptIsSaid(t *testing.T) {
	t.Parallel()
	w, _ := onServer(t)
	w.pgURL = w.role("REPLICATION")
	r := w.relayIn("cdc", "--wal-budget=16MiB")
	w.switches(r, "poll")
	w.db.Exec(t, "ALTER ROLE role_"+w.db.Relay+" NOREPLICATION")
	w.fillWAL()
	r.waitReady("wal: ")
	w.delivers()
	w.db.Exec(t, "ALTER ROLE role_"+w.db.Relay+" REPLICATION")
	r.waitHealthy()
}

// The budget is also kept while a relay that has just started cannot reach Redis and has not adopted yet. The relay
// advances the slot and does not drop it.
func TestBudgetBeforeTheFirstAdoption(t *testing.T) {
	t.Parallel()
	w, _ := onServer(t)
	w.relayIn("cdc", "--wal-budget=16MiB").stop()
	must(t, w.redis.Kill())
	const position = "SELECT coalesce(max(confirmed_flush_lsn), '0/0')::text FROM pg_replication_slots"
	before := testenv.Value[string](t, w.db, position)
	r := w.spawn("relay", "--wal-budget=16MiB")
	r.waitLogged(`"leading"`)
	w.fillWAL()
	testenv.Eventually(t, 20*time.Second, func() error {
		now := testenv.Value[string](t, w.db, position)
		return testenv.FailIf(now == before, "the slot has not moved")
	})
	must(t, w.redis.Start(t.Context()))
	w.waitMode("cdc")
	w.delivers()
	if r.logged("dropping it") || r.logged("slot created") {
		t.Error("the slot was dropped")
	}
}
