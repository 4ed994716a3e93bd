package main

import (
	"net/http"
	"sync"
	"syscall"
	"testing"
	"time"

	"posthaste/internal/lab/testenv"
)

// The API and the commands work through PgBouncer in transaction mode, as it comes.
func TestThroughATransactionPooler(t *testing.T) {
	t.Parallel()
	const orders = 60
	w := newWorld(t)
	w.relayIn("cdc")
	w.pgURL = testenv.PgBouncer(t, w.db.URL, "transaction")
	api := w.spawn("serve")
	api.waitReady("")
	var wg sync.WaitGroup
	for i := range orders {
		wg.Go(func() {
			if a, err := placeOrder(t.Context(), api.http, i+1); err != nil || a.status != http.StatusCreated {
				t.Errorf("order %d: status %d, %v: %s", i, a.status, err, a.body)
			}
		})
	}
	wg.Wait()
	w.oracle.WaitEmpty(t, 20*time.Second)
	w.hasLen("outbox.order", orders)
	id := w.insert("order", "a", 1)
	w.waitLen("outbox.order", orders+1)
	for _, args := range [][]string{
		{"status"},
		{"trace", id},
		{"dead", "list"},
		{"groups", "list"},
		{"phantoms"},
		{"replay", "--all", "--rate=0", "--dry-run"},
		{"migrate"},
		{"mode", "poll"},
		{"mode"},
		{"audit"},
	} {
		w.once(args...).says(t, 0)
	}
	w.waitMode("poll")
	w.once("doctor").says(t, 1, "a pooler in transaction mode")
}

// Through PgBouncer in session mode a relay polls. For cdc it needs a direct connection, and makes no slot without one.
func TestARelayThroughASessionPooler(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.pgURL = testenv.PgBouncer(t, w.db.URL, "session")
	w.desire("poll")
	r := w.spawn("relay")
	w.waitMode("poll")
	w.delivers()
	r.waitLogged("a pooler is between this relay and Postgres: mode poll works, cdc needs a direct connection")
	w.once("doctor").says(t, 0, "a pooler in session mode")
	w.desire("cdc")
	r.waitUnready("slot: pooler: cdc needs a direct connection")
	w.delivers()
	w.has(0, "SELECT count(*) FROM pg_replication_slots WHERE slot_name ~ $1", w.db.Relay)
	w.once("doctor").says(t, 1, "cdc needs a direct connection")
	// A frozen leader loses its locks.
	w.desire("poll")
	w.waitMode("poll")
	r.signal(syscall.SIGSTOP)
	w.spawn("relay")
	w.delivers()
}

// PgBouncer in statement mode refuses transactions. A relay and commands end at once, with the cause and the modes that
// work, which doctor names, too.
func TestStatementPoolerIsRefused(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.pgURL = testenv.PgBouncer(t, w.db.URL, "statement")
	w.once("relay", "--admin-addr=127.0.0.1:0").oneLine(t, 1, "a pooler in statement mode")
	w.once("relay", "--admin-addr=127.0.0.1:0", "--migrate").oneLine(t, 1, "a pooler in statement mode")
	w.once("migrate").oneLine(t, 1, "a pooler in statement mode")
	w.db.Exec(t, "CREATE TABLE events (id uuid, type text, payload jsonb)")
	w.once("bridge", "create", "--yes", "--table=public.events", "--id=id", "--aggregate-type=type",
		"--aggregate-id=id", "--event-type=type", "--payload=payload").oneLine(t, 1, "a pooler in statement mode")
	w.once("doctor").says(t, 1, "fail  pooler", "a pooler in statement mode", "pool_mode to transaction", "to session")
}

// Through PgBouncer in transaction mode a relay ends at once, and leaves no locks behind, whatever PgBouncer ignores.
func TestARelayThroughATransactionPooler(t *testing.T) {
	t.Parallel()
	for name, settings := range map[string][]string{
		"as it comes": nil,
		"ignoring": {
			"ignore_startup_parameters = extra_float_digits,search_path,row_security,jit,options,replication," +
				"default_transaction_isolation,statement_timeout,lock_timeout,idle_in_transaction_session_timeout," +
				"idle_session_timeout,tcp_keepalives_idle,tcp_keepalives_interval,tcp_keepalives_count," +
				"tcp_user_timeout,enable_seqscan,enable_bitmapscan,enable_sort,enable_incremental_sort," +
				"enable_hashjoin,enable_mergejoin,plan_cache_mode",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			w.desire("poll")
			w.pgURL = testenv.PgBouncer(t, w.db.URL, "transaction", settings...)
			w.once("relay", "--admin-addr=127.0.0.1:0").oneLine(t, 1, "a pooler in transaction mode")
			w.has(0, "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND "+
				"database = (SELECT oid FROM pg_database WHERE datname = current_database())")
			w.pgURL = w.db.URL
			w.spawn("relay")
			w.waitMode("poll")
			w.delivers()
		})
	}
}
