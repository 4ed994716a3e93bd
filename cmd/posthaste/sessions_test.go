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
	"github.com/jackc/pgx/v5/pgxpool"

	"posthaste/internal/testenv"
)

// A transaction is open for long while the relay sweeps, and the WAL grows so much that the slot is to follow it: the
// stream is taken up all the same, with what that transaction writes.
func TestStreamingAgainBesideAnOpenTransaction(t *testing.T) {
	t.Parallel()
	server := testenv.NewServer(t)
	w := worldOf(t, server.Database(t), testenv.Redis(t))
	r := w.relayIn("cdc", "--wal-budget=64MiB") // helped along from 16 MiB on
	r.setMode("poll")
	w.waitMode("poll", 20*time.Second)
	before := testenv.Value[string](t, w.db, "SELECT confirmed_flush_lsn::text FROM pg_replication_slots")
	tx, err := w.db.Pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(context.Background()) }()
	const insert = "INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload) VALUES " +
		"(gen_random_uuid(), 'late', 'a', 'x', '{}')"
	if _, err := tx.Exec(t.Context(), insert); err != nil {
		t.Fatal(err)
	}
	w.db.Exec(t, "CREATE TABLE churn (b text); ALTER TABLE churn ALTER b SET STORAGE EXTERNAL")
	w.db.Exec(t, "INSERT INTO churn SELECT repeat('0123456789', 100000) FROM generate_series(1, 20)")
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
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	w.oracle.WaitEmpty(t, 20*time.Second)
	if n := w.redis.Client.XLen(t.Context(), "outbox.late").Val(); n != 2 {
		t.Errorf("%d events of the transaction are in the stream, want 2", n)
	}
	w.delivers()
}

// Commits are held back by a synchronous standby while the relay sweeps and the WAL grows; then another relay takes
// over and streams. The slot was not moved past what nobody could see, or it would come late, behind what its
// aggregates write next.
func TestHeldBackCommitsKeepTheirOrderOverAChangeOfLeader(t *testing.T) {
	t.Parallel()
	server := testenv.NewServer(t)
	w := worldOf(t, wide(t, server.Database(t)), testenv.Redis(t))
	w.pgURL += "&synchronous_commit=local" // only the writers wait for the standby
	r := w.relayIn("cdc", "--wal-budget=64MiB")
	r.setMode("poll")
	w.waitMode("poll", 20*time.Second)
	const position = "SELECT confirmed_flush_lsn::text FROM pg_replication_slots"
	before := testenv.Value[string](t, w.db, position)
	w.db.Standby(t, "nobody")
	w.db.WaitHeld(t)
	load := testenv.StartLoad(t, w.db, testenv.LoadOptions{Writers: 12, Total: 72})
	testenv.Eventually(t, 20*time.Second, func() error {
		if n := testenv.Value[int](t, w.db,
			"SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep' AND datname = $1", w.db.Name); n < 6 {
			return fmt.Errorf("%d commits are held back", n)
		}
		return nil
	})
	local, err := pgx.Connect(t.Context(), w.pgURL)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = local.Close(context.Background()) }()
	for _, stmt := range []string{
		"CREATE TABLE churn (b text)", "ALTER TABLE churn ALTER b SET STORAGE EXTERNAL",
		"INSERT INTO churn SELECT repeat('0123456789', 100000) FROM generate_series(1, 20)",
	} {
		if _, err := local.Exec(t.Context(), stmt); err != nil {
			t.Fatal(err)
		}
	}
	testenv.Eventually(t, 20*time.Second, func() error {
		if now := testenv.Value[string](t, w.db, position); now == before && !r.logged("the slot follows when") {
			return errors.New("the slot is not to follow")
		}
		return nil
	})
	r.kill()
	w.desire("auto")
	w.spawn("relay", "--wal-budget=64MiB")
	w.waitMode("cdc", 30*time.Second)
	w.db.Standby(t, "")
	load.Wait()
	w.oracle.Check(t, load, 30*time.Second)
}

// Commits are held back by a synchronous standby when the WAL budget moves the slot past them: they are in the WAL
// before the slot and visible to nobody. Then the relay is killed, or stopped. Whoever leads next streams only when
// they have come out, and been swept in their place.
func TestTheBudgetPassesHeldBackCommitsAndTheLeaderDies(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ mode, end string }{{"poll", "kill"}, {"poll", "stop"}, {"auto", "kill"}} {
		t.Run(c.mode+" "+c.end, func(t *testing.T) {
			t.Parallel()
			const budget = "--wal-budget=16MiB"
			server := testenv.NewServer(t)
			w := worldOf(t, wide(t, server.Database(t)), testenv.Redis(t))
			w.pgURL += "&synchronous_commit=local" // only the writers wait for the standby
			w.relayIn("cdc", budget).stop()
			w.db.Exec(t, "CREATE TABLE churn (b text); ALTER TABLE churn ALTER b SET STORAGE EXTERNAL")
			w.db.Exec(t, "INSERT INTO churn SELECT repeat('0123456789', 100000) FROM generate_series(1, 20)")
			w.db.Standby(t, "nobody")
			w.db.WaitHeld(t)
			load := testenv.StartLoad(t, w.db, testenv.LoadOptions{Writers: 12, Total: 720})
			testenv.Eventually(t, 20*time.Second, func() error {
				if n := testenv.Value[int](t, w.db,
					"SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep' AND datname = $1",
					w.db.Name); n < 6 {
					return fmt.Errorf("%d commits are held back", n)
				}
				return nil
			})
			held := testenv.Value[string](t, w.db, "SELECT pg_current_wal_insert_lsn()::text")
			local, err := pgx.Connect(t.Context(), w.pgURL)
			if err != nil {
				t.Fatal(err)
			}
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
				if !r.logged("transaction_held") && !r.logged(`"stream opened"`) {
					return errors.New("no hand-over is tried")
				}
				return nil
			})
			w.db.Standby(t, "")
			load.Wait()
			w.oracle.Check(t, load, 30*time.Second)
			w.waitMode("cdc", 30*time.Second)
		})
	}
}

// The same when it is somebody else who moves the slot past them.
func TestSomebodyMovesTheSlotPastHeldBackCommits(t *testing.T) {
	t.Parallel()
	server := testenv.NewServer(t)
	w := worldOf(t, wide(t, server.Database(t)), testenv.Redis(t))
	w.pgURL += "&synchronous_commit=local" // only the writers wait for the standby
	r := w.relayIn("cdc")
	r.setMode("poll")
	w.waitMode("poll", 20*time.Second)
	w.db.Standby(t, "nobody")
	w.db.WaitHeld(t)
	load := testenv.StartLoad(t, w.db, testenv.LoadOptions{Writers: 12, Total: 720})
	testenv.Eventually(t, 20*time.Second, func() error {
		if n := testenv.Value[int](t, w.db,
			"SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep' AND datname = $1", w.db.Name); n < 6 {
			return fmt.Errorf("%d commits are held back", n)
		}
		return nil
	})
	local, err := pgx.Connect(t.Context(), w.pgURL)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = local.Close(context.Background()) }()
	// not while the relay moves it itself, or before it has seen it stand
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
		if !r.logged("transaction_held") && strings.Count(r.output(), `"stream opened"`) == streams {
			return errors.New("no hand-over is tried")
		}
		return nil
	})
	w.db.Standby(t, "")
	load.Wait()
	w.oracle.Check(t, load, 30*time.Second)
	w.waitMode("cdc", 30*time.Second)
}

// The relay's role does not wait for its commits to reach the disk, and Postgres forgets them with a crash: but not
// that an event was settled, for the gate has forgotten that it was published.
//
// The same when that is set while the relay runs.
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
			w := worldOf(t, committing(t, server.Database(t)), testenv.Redis(t))
			if c.when == "before" {
				w.pgURL += "&synchronous_commit=off"
			}
			r := w.relayIn(c.mode)
			w.delivers() // its sessions are open
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
			load := testenv.StartLoad(t, w.db, testenv.LoadOptions{Total: 240})
			load.Wait()
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
			if err := server.Stop("immediate"); err != nil {
				t.Fatal(err)
			}
			if err := server.Start(t.Context()); err != nil {
				t.Fatal(err)
			}
			testenv.Eventually(t, 20*time.Second, func() error { return ready(r, "leader") })
			w.oracle.Check(t, load, 30*time.Second)
		})
	}
}

// committing returns the database with a pool whose commits are waited for, whatever the server says.
func committing(t *testing.T, d *testenv.Database) *testenv.Database {
	t.Helper()
	pool, err := pgxpool.New(t.Context(), d.URL+"&synchronous_commit=on")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	return &testenv.Database{URL: d.URL, Name: d.Name, Relay: d.Relay, Pool: pool}
}

// The database takes no writes for a while, as after a failover to a server that is not promoted yet: both say so, and
// go on by themselves, whatever their connections were told when they began.
func TestDatabaseThatTakesNoWritesForAWhile(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	relay, api := w.spawn("relay"), w.spawn("serve")
	w.waitMode("cdc", 20*time.Second)
	waitReady(t, api, http.StatusOK, 10*time.Second)
	w.db.Exec(t, "ALTER DATABASE "+w.db.Name+" SET default_transaction_read_only = on")
	since := testenv.Value[time.Time](t, w.db, "SELECT clock_timestamp()")
	testenv.Eventually(t, 30*time.Second, func() error {
		// Again and again: a session that is just beginning has no name yet, and may be one of those that can still
		// write.
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
	api.waitReady(t, http.StatusServiceUnavailable, "read_only")
	w.db.Exec(t, "ALTER DATABASE "+w.db.Name+" RESET default_transaction_read_only")
	waitReady(t, relay, http.StatusOK, 20*time.Second)
	waitReady(t, api, http.StatusOK, 20*time.Second)
	w.delivers()
	if a, err := placeOrder(t.Context(), api.http, 1); err != nil || a.status != http.StatusCreated {
		t.Errorf("order: status %d, %v: %s", a.status, err, a.body)
	}
}

// Postgres answers, and refuses what a leader needs: the lock is held and nothing is published, which must not look
// ready.
func TestLeaderThatCannotAdoptIsNotReady(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	r := w.spawn("relay")
	w.waitMode("cdc", 20*time.Second)
	w.db.Exec(t, `CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'not for `+
		`you' USING errcode = '42501'; END $$`)
	w.fix(`CREATE TRIGGER refuse BEFORE UPDATE OF epoch ON relay_state FOR EACH ROW EXECUTE FUNCTION refuse()`)
	w.db.Exec(t, "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = $1", "posthaste_"+
		w.db.Relay)
	r.waitReady(t, http.StatusServiceUnavailable, "not for you")
	w.fix(`DROP TRIGGER refuse ON relay_state`)
	waitReady(t, r, http.StatusOK, 20*time.Second)
	w.delivers()
}

// A role that has lost the right to move its slot cannot keep the budget: events are swept, and that the disk fills is
// said.
func TestBudgetThatCannotBeKeptIsSaid(t *testing.T) {
	t.Parallel()
	server := testenv.NewServer(t)
	w := worldOf(t, server.Database(t), testenv.Redis(t))
	w.pgURL = w.role("REPLICATION")
	r := w.relayIn("cdc", "--wal-budget=16MiB")
	r.setMode("poll")
	w.waitMode("poll", 20*time.Second)
	w.db.Exec(t, "ALTER ROLE role_"+w.db.Relay+" NOREPLICATION")
	w.db.Exec(t, "CREATE TABLE churn (b text); ALTER TABLE churn ALTER b SET STORAGE EXTERNAL")
	w.db.Exec(t, "INSERT INTO churn SELECT repeat('0123456789', 100000) FROM generate_series(1, 20)")
	r.waitReady(t, http.StatusOK, "wal: ")
	w.delivers()
	w.db.Exec(t, "ALTER ROLE role_"+w.db.Relay+" REPLICATION")
	testenv.Eventually(t, 20*time.Second, func() error {
		var h readiness
		if status, err := r.get("/readyz", &h); err != nil || status != http.StatusOK || len(h.Degraded) > 0 {
			return fmt.Errorf("readyz: %d %+v, %w", status, h, err)
		}
		return nil
	})
}

// The budget is kept as well while a relay that has just been started cannot reach Redis, and has not adopted yet: by
// moving the slot, not by dropping it.
func TestBudgetBeforeTheFirstAdoption(t *testing.T) {
	t.Parallel()
	server := testenv.NewServer(t)
	w := worldOf(t, server.Database(t), testenv.Redis(t))
	w.relayIn("cdc", "--wal-budget=16MiB").stop()
	if err := w.redis.Kill(); err != nil {
		t.Fatal(err)
	}
	const position = "SELECT coalesce(max(confirmed_flush_lsn), '0/0')::text FROM pg_replication_slots"
	before := testenv.Value[string](t, w.db, position)
	r := w.spawn("relay", "--wal-budget=16MiB")
	r.waitLogged(`"leading"`)
	w.db.Exec(t, "CREATE TABLE churn (b text); ALTER TABLE churn ALTER b SET STORAGE EXTERNAL")
	// A transaction that alone has more than the budget would hold the slot back while it is open: it would be dropped.
	w.db.Exec(t, "DO $$ BEGIN FOR i IN 1 .. 20 LOOP INSERT INTO churn VALUES (repeat('0123456789', 100000)); COMMIT; "+
		"END LOOP; END $$")
	testenv.Eventually(t, 20*time.Second, func() error {
		if now := testenv.Value[string](t, w.db, position); now == before {
			return errors.New("the slot has not moved")
		}
		return nil
	})
	if err := w.redis.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	w.waitMode("cdc", 30*time.Second)
	w.delivers()
	if r.logged("dropping it") || r.logged("slot created") {
		t.Error("the slot was dropped")
	}
}
