package main

import (
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"posthaste/internal/testenv"
)

// A leader parks an event that Redis refuses. It loses its connection while its statement is in a socket. Its successor
// finds Redis healthy and publishes the event. When the statement arrives, it parks nothing: an event is in its stream
// or dead, never both.
func TestALateParkParksNothing(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	h := testenv.NewLink(t, hostOf(t, w.db.URL))
	direct := w.pgURL
	w.pgURL = strings.Replace(direct, hostOf(t, direct), h.Addr(), 1)
	const nobody = "--redis-durability=replicas=1" // there is no replica, so nothing is settled
	leader := w.relayIn("cdc", nobody)
	first := w.insert("bad", "a", 1)
	w.waitIDs("outbox.bad", first)
	must(t, w.redis.Client.Del(t.Context(), "outbox.bad").Err())
	must(t, w.redis.Client.Set(t.Context(), "outbox.bad", "x", 0).Err())
	const class = "wrongtype" // an argument of the statement
	h.HoldFrom(class)
	second := w.insert("bad", "b", 1)
	testenv.Eventually(t, 20*time.Second, func() error {
		return testenv.FailIf(h.Held(class) == 0, "nothing is parked")
	})
	h.Hold(true)
	must(t, w.redis.Client.Del(t.Context(), "outbox.bad").Err())
	w.pgURL = direct
	successor := w.spawn("relay", nobody)
	published := func() error {
		for _, e := range rawEntries(t, w, "outbox.bad") {
			if e["id"] == second {
				return nil
			}
		}
		return fmt.Errorf("event %s is not published", second)
	}
	testenv.Eventually(t, 30*time.Second, func() error {
		if w.redis.Client.Type(t.Context(), "outbox.bad").Val() != "stream" {
			return errors.New("nothing is published")
		}
		return published()
	})
	h.Release()
	testenv.Eventually(t, 20*time.Second, func() error {
		n := h.Late()
		return testenv.FailIf(n > 0, "%d connections are left over", n)
	})
	leader.kill() // otherwise it would lead again, and settle nothing
	successor.kill()
	w.spawn("relay")
	w.oracle.WaitEmpty(t, 20*time.Second)
	if n := testenv.Value[int](t, w.db, "SELECT count(*) FROM outbox_dead"); n != 0 {
		t.Errorf("%d events are parked, and in their stream", n)
	}
	times := 0
	for _, e := range rawEntries(t, w, "outbox.bad") {
		if e["id"] == second {
			times++
		}
	}
	if times != 1 {
		t.Errorf("the event is %d times in its stream", times)
	}
}

// Row security hides the rows of the table from a relay that does not own it. The views show them: events are published
// in both modes, and doctor names the actions that the relay cannot do.
func TestRowSecurityIsNotAnEmptyTable(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	owner := w.pgURL
	w.pgURL = w.role("REPLICATION")
	r := w.relayIn("cdc")
	w.fix("ALTER TABLE outbox ENABLE ROW LEVEL SECURITY")
	w.delivers()
	w.switches(r, "poll")
	w.delivers()
	w.once("doctor").says(t, 1, "fail  row security")
	w.pgURL = owner
	w.fix("ALTER TABLE outbox DISABLE ROW LEVEL SECURITY")
	w.desire("auto")
	r.waitReady(t, http.StatusOK, "", 20*time.Second)
	w.delivers()
}
