package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"posthaste/internal/testenv"
)

// fillWAL writes 20 MB of WAL that is no transaction's.
func (w *world) fillWAL() {
	w.t.Helper()
	w.db.Exec(w.t, "SELECT pg_logical_emit_message(false, 'test', repeat('x', 1000000)) FROM generate_series(1, 20)")
}

// A transaction stays open while the relay sweeps and the WAL grows beyond the point where the slot must advance. The
// relay streams again anyway, including the rows of that transaction.
func TestStreamingAgainBesideAnOpenTransaction(t *testing.T) {
	t.Parallel()
	w, _ := onServer(t)
	r := w.relayIn("cdc", "--wal-budget=64MiB") // the slot is advanced from 16 MiB on
	w.switches(r, "poll")
	before := testenv.Value[string](t, w.db, "SELECT confirmed_flush_lsn::text FROM pg_replication_slots")
	tx, err := w.db.Pool.Begin(t.Context())
	must(t, err)
	defer func() { _ = tx.Rollback(context.Background()) }()
	const insert = "INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload) VALUES " +
		"(gen_random_uuid(), 'late', 'a', 'x', '{}')"
	if _, err := tx.Exec(t.Context(), insert); err != nil {
		t.Fatal(err)
	}
	w.fillWAL()
	testenv.Eventually(t, 20*time.Second, func() error {
		if now := testenv.Value[string](t, w.db,
			"SELECT confirmed_flush_lsn::text FROM pg_replication_slots"); now == before &&
			!r.logged("the slot follows when") {
			return errors.New("the slot is not to follow")
		}
		return nil
	})
	r.setMode("auto")
	w.waitMode("cdc", 30*time.Second)
	if _, err := tx.Exec(t.Context(), insert); err != nil {
		t.Fatal(err)
	}
	must(t, tx.Commit(t.Context()))
	w.oracle.WaitEmpty(t, 20*time.Second)
	if n := w.redis.Client.XLen(t.Context(), "outbox.late").Val(); n != 2 {
		t.Errorf("%d events of the transaction are in the stream, want 2", n)
	}
	w.delivers()
}

// Commits are blocked by a synchronous standby while the relay sweeps and the WAL grows. Then another relay takes over
// and streams. The slot was not advanced past the invisible commits: otherwise their events would come late, after
// later events of their aggregates.
func TestHeldBackCommitsKeepTheirOrderOverAChangeOfLeader(t *testing.T) {
	t.Parallel()
	server := testenv.NewServer(t)
	w := worldOf(t, pooled(t, server.Database(t), wide), testenv.Redis(t))
	w.pgURL += "&synchronous_commit=local" // only the writers wait for the standby
	r := w.relayIn("cdc", "--wal-budget=64MiB")
	w.switches(r, "poll")
	const position = "SELECT confirmed_flush_lsn::text FROM pg_replication_slots"
	before := testenv.Value[string](t, w.db, position)
	load := w.held(testenv.LoadOptions{Writers: 12, Total: 72})
	w.fillWAL()
	testenv.Eventually(t, 20*time.Second, func() error {
		now := testenv.Value[string](t, w.db, position)
		return testenv.FailIf(now == before && !r.logged("the slot follows when"), "the slot is not to follow")
	})
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
			server := testenv.NewServer(t)
			w := worldOf(t, pooled(t, server.Database(t), wide), testenv.Redis(t))
			w.pgURL += "&synchronous_commit=local" // only the writers wait for the standby
			w.relayIn("cdc", budget).stop()
			w.fillWAL()
			load := w.held(testenv.LoadOptions{Writers: 12, Total: 720})
			held := testenv.Value[string](t, w.db, "SELECT pg_current_wal_insert_lsn()::text")
			local, err := pgx.Connect(t.Context(), w.pgURL)
			must(t, err)
			defer func() { _ = local.Close(context.Background()) }()
			if _, err := local.Exec(t.Context(), "UPDATE relay_state SET desired_mode = $1", c.mode); err != nil {
				t.Fatal(err)
			}
			r := w.spawn("relay", budget)
			testenv.Eventually(t, 20*time.Second, func() error {
				if !testenv.Value[bool](t, w.db,
					"SELECT EXISTS (SELECT FROM pg_replication_slots WHERE confirmed_flush_lsn >= $1::text::pg_lsn)",
					held) {
					return errors.New("the slot is not moved past the held back commits")
				}
				return nil
			})
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
			w.waitMode("cdc", 30*time.Second)
		})
	}
}

// The same if an operator advances the slot past them.
func TestSomebodyMovesTheSlotPastHeldBackCommits(t *testing.T) {
	t.Parallel()
	server := testenv.NewServer(t)
	w := worldOf(t, pooled(t, server.Database(t), wide), testenv.Redis(t))
	w.pgURL += "&synchronous_commit=local" // only the writers wait for the standby
	r := w.relayIn("cdc")
	w.switches(r, "poll")
	load := w.held(testenv.LoadOptions{Writers: 12, Total: 720})
	local, err := pgx.Connect(t.Context(), w.pgURL)
	must(t, err)
	defer func() { _ = local.Close(context.Background()) }()
	// The slot is moved repeatedly: the relay may be advancing it at the same time, or may not have read its position
	// before.
	testenv.Eventually(t, 20*time.Second, func() error {
		if _, err := local.Exec(t.Context(), "SELECT pg_logical_emit_message(true, 'test', '')"); err != nil {
			return err
		}
		_, err := local.Exec(t.Context(),
			"SELECT pg_replication_slot_advance(slot_name, pg_current_wal_flush_lsn()) FROM pg_replication_slots")
		if err == nil && !r.logged("another program has moved the slot") {
			err = errors.New("it is not noticed")
		}
		return err
	})
	if _, err := local.Exec(t.Context(), "UPDATE relay_state SET desired_mode = 'auto'"); err != nil {
		t.Fatal(err)
	}
	streams := strings.Count(r.output(), `"stream opened"`)
	testenv.Eventually(t, 30*time.Second, func() error {
		return testenv.FailIf(!r.logged("transaction_held") && strings.Count(r.output(), `"stream opened"`) == streams,
			"no hand-over is tried")
	})
	w.db.Standby(t, "")
	load.Wait()
	w.oracle.Check(t, load, 30*time.Second)
	w.waitMode("cdc", 30*time.Second)
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
				testenv.Eventually(t, 20*time.Second, func() error {
					if n := testenv.Value[int](t, w.db,
						"SELECT count(*) FROM pg_file_settings WHERE name = 'synchronous_commit' AND applied"); n != 1 {
						return errors.New("not reloaded yet")
					}
					return nil
				})
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
			testenv.Eventually(t, 20*time.Second, func() error { return ready(r, "leader") })
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
	w.waitMode("cdc", 20*time.Second)
	api.waitReady(t, http.StatusOK, "", 10*time.Second)
	w.db.Exec(t, "ALTER DATABASE "+w.db.Name+" SET default_transaction_read_only = on")
	since := testenv.Value[time.Time](t, w.db, "SELECT clock_timestamp()")
	testenv.Eventually(t, 30*time.Second, func() error {
		// The sessions are terminated repeatedly: a session that is just starting has no name yet, and may still be
		// able to write.
		w.db.Exec(t, `SELECT pg_terminate_backend(pid) FROM pg_stat_activity
			WHERE datname = current_database() AND application_name LIKE 'posthaste%' AND backend_start < $1`, since)
		var h readiness
		status, err := relay.get("/readyz", &h)
		if why := fmt.Sprint(h.Reasons); err != nil || status != http.StatusServiceUnavailable ||
			!strings.Contains(why, "takes no writes") {
			return fmt.Errorf("readyz of the relay: %d %+v, %w", status, h, err)
		}
		return nil
	})
	api.waitReady(t, http.StatusServiceUnavailable, "read_only", 30*time.Second)
	w.db.Exec(t, "ALTER DATABASE "+w.db.Name+" RESET default_transaction_read_only")
	relay.waitReady(t, http.StatusOK, "", 20*time.Second)
	api.waitReady(t, http.StatusOK, "", 20*time.Second)
	w.delivers()
	if a, err := placeOrder(t.Context(), api.http, 1); err != nil || a.status != http.StatusCreated {
		t.Errorf("order: status %d, %v: %s", a.status, err, a.body)
	}
}

// Postgres answers but refuses a statement that a leader needs. The relay holds the lock and publishes nothing, so it
// must not report itself as ready.
func TestLeaderThatCannotAdoptIsNotReady(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	r := w.relayIn("cdc")
	w.refuses("UPDATE OF epoch ON relay_state")
	w.db.Exec(t, "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = $1", "posthaste_"+
		w.db.Relay)
	r.waitReady(t, http.StatusServiceUnavailable, "not for you", 30*time.Second)
	w.fix(`DROP TRIGGER refuse ON relay_state`)
	r.waitReady(t, http.StatusOK, "", 20*time.Second)
	w.delivers()
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
	r.waitReady(t, http.StatusOK, "wal: ", 30*time.Second)
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
	w.waitMode("cdc", 30*time.Second)
	w.delivers()
	if r.logged("dropping it") || r.logged("slot created") {
		t.Error("the slot was dropped")
	}
}
