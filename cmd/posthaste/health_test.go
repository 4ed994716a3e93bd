package main

import (
	"strings"
	"testing"
	"time"

	"posthaste/internal/testenv"
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
	w.waitMode("cdc", 20*time.Second)
	w.wrote(testenv.LoadOptions{Total: 12})
	entries := func(want int64) {
		t.Helper()
		testenv.Eventually(t, 20*time.Second, func() error {
			n, err := w.redis.Client.XLen(t.Context(), "outbox.order").Result()
			return testenv.FailIf(err != nil || n != want, "%d entries, want %d, %w", n, want, err)
		})
	}
	entries(12)
	must(t, w.redis.Client.FlushAll(t.Context()).Err())
	entries(12)
	r.waitReady(t, 503, "", 20*time.Second) // the configured durability is not reached, and that is reported
}

// Postgres refuses the statements after publishing. Readiness reports that in both modes, and recovers.
func TestNotBeingAbleToSettleIsNotReady(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{"auto", "poll"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			r := w.spawn("relay")
			r.setMode(mode)
			w.waitMode(map[string]string{"auto": "cdc", "poll": "poll"}[mode], 20*time.Second)
			w.refuses("INSERT ON outbox_mark")
			load := w.wrote(testenv.LoadOptions{Total: 24})
			r.waitReady(t, 503, "", 20*time.Second)
			w.fix(`DROP TRIGGER refuse ON outbox_mark`)
			w.oracle.Check(t, load, 20*time.Second)
			r.waitReady(t, 200, "", 20*time.Second)
			if mode == "auto" {
				r.waitLogged("published events cannot be settled")
				r.waitLogged("settling again") // logged after readiness has changed
			}
		})
	}
}

// An event that can neither be published nor parked blocks the stream. The relay must not report itself as ready.
func TestNotBeingAbleToParkIsNotReady(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	r := w.relayIn("cdc")
	w.refuses("INSERT ON outbox_dead")
	must(t, w.redis.Client.Set(t.Context(), "outbox.bad", "x", 0).Err())
	w.db.Exec(t, `INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload) VALUES `+
		`(gen_random_uuid(), 'bad', 'a', 'x', '{}')`)
	r.waitReady(t, 503, "", 20*time.Second)
	w.fix(`DROP TRIGGER refuse ON outbox_dead`)
	w.oracle.WaitEmpty(t, 20*time.Second)
	r.waitReady(t, 200, "", 20*time.Second)
}

// A server has no free walsender: events are swept, auto is degraded, cdc is not ready.
func TestStreamThatCannotStartIsSaid(t *testing.T) {
	t.Parallel()
	w, _ := onServer(t, "max_wal_senders=0")
	r := w.spawn("relay")
	degraded := func() error {
		var h struct{ Degraded []string }
		status, err := r.get("/readyz", &h)
		return testenv.FailIf(err != nil || status != 200 || len(h.Degraded) == 0, "readyz: %d %+v %w", status, h, err)
	}
	testenv.Eventually(t, 20*time.Second, degraded)
	r.setMode("cdc")
	r.waitReady(t, 503, "", 30*time.Second)
	load := w.wrote(testenv.LoadOptions{Total: 60})
	w.oracle.Check(t, load, 20*time.Second)
	r.setMode("auto")
	testenv.Eventually(t, 30*time.Second, degraded)
}

// After a failure of Redis, one of two sweeping relays has nothing to publish. It becomes ready anyway.
func TestReadyAgainWithNothingToPublish(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	relays := []*child{w.spawn("relay"), w.spawn("relay")}
	relays[0].setMode("poll")
	w.waitMode("poll", 20*time.Second)
	must(t, w.redis.Kill())
	load := w.wrote(testenv.LoadOptions{Total: 24})
	for _, r := range relays {
		r.waitReady(t, 503, "", 20*time.Second)
	}
	must(t, w.redis.Start(t.Context()))
	w.oracle.Check(t, load, 20*time.Second)
	for _, r := range relays {
		r.waitReady(t, 200, "", 20*time.Second)
	}
}

// The table cannot be audited any more. No statement fails while nothing is written, but readiness reports it.
func TestTableThatCannotBeAuditedIsNotReady(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	r := w.relayIn("cdc")
	r.waitLogged("the table is audited") // a first audit without an answer would end the stream
	w.fix(`ALTER VIEW outbox_settled RENAME TO elsewhere`)
	r.waitReady(t, 503, `relation "outbox_settled" does not exist`, 30*time.Second)
	w.fix(`ALTER VIEW elsewhere RENAME TO outbox_settled`)
	r.waitReady(t, 200, "", 20*time.Second)
	w.delivers()
}

// Postgres does not answer, at the start and later. From the first to the last failure, the relay is not ready, because
// it is not a standby that could lead.
func TestRelayThatPostgresDoesNotAnswerIsNoStandby(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	proxy := testenv.NewLink(t, hostOf(t, w.db.URL))
	w.pgURL = testenv.Through(w.pgURL, proxy.Addr())
	lost := func() {
		proxy.Set(testenv.Trouble{LoseReplies: true})
	}
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
	lost()
	r := w.spawn("relay")
	unready(r)
	proxy.Set(testenv.Trouble{})
	w.waitMode("cdc", 20*time.Second)
	r.waitReady(t, 200, "", 20*time.Second)

	lost()
	r.waitLogged("the lock session is gone")
	unready(r)
	proxy.Set(testenv.Trouble{})
	r.waitReady(t, 200, "", 30*time.Second)
	w.delivers()
}
