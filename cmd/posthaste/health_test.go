package main

import (
	"strings"
	"testing"
	"time"

	"posthaste/internal/lab/testenv"
)

// fix changes a table that the relay is using. The two can deadlock, so it may need several attempts.
func (w *world) fix(ddl string) {
	w.t.Helper()
	testenv.Eventually(w.t, 20*time.Second, func() error {
		_, err := w.db.Pool.Exec(w.t.Context(), ddl)
		return err
	})
}

// refuses lets Postgres refuse a kind of statement, until the trigger is dropped.
func (w *world) refuses(what string) {
	w.t.Helper()
	w.fix(`CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
		RAISE EXCEPTION 'not for you' USING errcode = '42501'; END $$`)
	w.fix("CREATE TRIGGER refuse BEFORE " + what + " FOR EACH ROW EXECUTE FUNCTION refuse()")
}

// A gate is lost after an event was published and before it is settled. The event is published again, even if no other
// event follows.
func TestGateLostBeforeTheLastEventIsSettled(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	r := w.spawn("relay", "--redis-durability=replicas=1") // there is no replica, so nothing is settled
	w.waitMode("cdc")
	w.wrote(testenv.LoadOptions{Total: 12})
	w.waitExactly("outbox.order", 12)
	must(t, w.redis.Client.FlushAll(t.Context()).Err())
	w.waitExactly("outbox.order", 12)
	r.waitUnready("") // the configured durability is not reached, and that is reported
}

// Postgres answers, and refuses a statement that a relay needs: to settle, to park an event that cannot be published,
// or to adopt as the holder of the lock. Readiness reports that, and recovers. No event is lost.
func TestARefusedStatementIsNotReady(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ mode, what, table string }{
		"settle":            {"cdc", "INSERT", "outbox_mark"},
		"settle in a sweep": {"poll", "INSERT", "outbox_mark"},
		"park":              {"cdc", "INSERT", "outbox_dead"},
		"adopt":             {"cdc", "UPDATE OF epoch", "relay_state"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			r := w.relayIn(c.mode)
			w.refuses(c.what + " ON " + c.table)
			switch name {
			case "park":
				do(t, w.redis.Client, "set", "outbox.bad", "x")
				w.insert("bad", "a", 1)
			case "adopt":
				w.db.Exec(t, "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = $1",
					"posthaste_"+w.db.Relay)
			}
			load := w.wrote(testenv.LoadOptions{Total: 24})
			r.waitUnready(map[string]string{"adopt": "not for you"}[name])
			w.fix("DROP TRIGGER refuse ON " + c.table)
			w.oracle.Check(t, load, 20*time.Second)
			r.waitReady("")
			if name == "settle" {
				r.waitLogged("published events cannot be settled")
				r.waitLogged("settling again") // logged after readiness has changed
			}
		})
	}
}

// A server has no free walsender: events are swept, auto is degraded, cdc is not ready.
func TestStreamThatCannotStartIsSaid(t *testing.T) {
	t.Parallel()
	w, _ := onServer(t, "max_wal_senders=0")
	r := w.spawn("relay")
	const remedy = "raise max_wal_senders"
	r.waitReady(remedy)
	r.setMode("cdc")
	r.waitUnready("")
	load := w.wrote(testenv.LoadOptions{Total: 60})
	w.oracle.Check(t, load, 20*time.Second)
	r.setMode("auto")
	r.waitReady(remedy)
}

// After a failure of Redis, one of two sweeping relays has nothing to publish. It becomes ready anyway.
func TestReadyAgainWithNothingToPublish(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	relays := []*child{w.spawn("relay"), w.spawn("relay")}
	relays[0].setMode("poll")
	w.waitMode("poll")
	must(t, w.redis.Kill())
	load := w.wrote(testenv.LoadOptions{Total: 24})
	for _, r := range relays {
		r.waitUnready("")
	}
	must(t, w.redis.Start(t.Context()))
	w.oracle.Check(t, load, 20*time.Second)
	for _, r := range relays {
		r.waitReady("")
	}
}

// The table cannot be audited any more. No statement fails while nothing is written, but readiness reports it.
func TestTableThatCannotBeAuditedIsNotReady(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	r := w.relayIn("cdc")
	r.waitLogged("the table is audited") // a first audit without an answer would end the stream
	w.fix(`ALTER VIEW outbox_settled RENAME TO elsewhere`)
	r.waitUnready(`relation "outbox_settled" does not exist`)
	w.fix(`ALTER VIEW elsewhere RENAME TO outbox_settled`)
	r.waitReady("")
	w.delivers()
}

// Postgres does not answer, at the start and later. From the first to the last failure, the relay is not ready, because
// it is not a standby that could lead.
func TestRelayThatPostgresDoesNotAnswerIsNoStandby(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	proxy := testenv.NewLink(t, hostOf(t, w.db.URL))
	w.pgURL = testenv.Through(w.pgURL, proxy.Addr())
	silent := testenv.Trouble{LoseReplies: true}
	// A session that ends has tried to reach Postgres.
	const ended = "relay session ended"
	unready := func(r *child) {
		t.Helper()
		before := strings.Count(r.output(), ended)
		testenv.Eventually(t, 30*time.Second, func() error {
			var h struct{ Role string }
			status, err := r.get("/readyz", &h)
			if err == nil && status != 503 {
				t.Fatalf("readyz is %d %+v while Postgres does not answer, %v", status, h, err)
			}
			return testenv.FailIf(err != nil || strings.Count(r.output(), ended) == before,
				"no session was tried yet, %w", err)
		})
	}
	proxy.Set(silent)
	r := w.spawn("relay")
	unready(r)
	proxy.Set(testenv.Trouble{})
	w.waitMode("cdc")
	r.waitReady("")

	proxy.Set(silent)
	r.waitLogged("the lock session is gone")
	unready(r)
	proxy.Set(testenv.Trouble{})
	r.waitReady("")
	w.delivers()
}
