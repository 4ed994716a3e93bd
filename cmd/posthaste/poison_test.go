package main

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	"posthaste/internal/testenv"
)

// deadEvent is one element of `dead list --json`.
type deadEvent struct {
	Source        string
	ID            string
	AggregateType string `json:"aggregate_type"`
	AggregateID   string `json:"aggregate_id"`
	Class         string
	Error         string
	Attempts      int
}

// dead waits until n events are parked.
func (w *world) dead(n int, within time.Duration) (list []deadEvent) {
	w.t.Helper()
	testenv.Eventually(w.t, within, func() error {
		if have := testenv.Value[int](w.t, w.db, "SELECT count(*) FROM outbox_dead"); have != n {
			return fmt.Errorf("%d events are parked, want %d", have, n)
		}
		return nil
	})
	r := w.once("dead", "list", "--json")
	if err := json.Unmarshal([]byte(r.out), &list); err != nil || r.code != 0 || len(list) != n {
		w.t.Fatalf("dead list --json: exit %d, %v: %s%s", r.code, err, r.out, r.errOut)
	}
	return list
}

// insert writes one event and returns its id.
func (w *world) insert(typ, aggregate string, n int) string {
	w.t.Helper()
	id := uuid.NewString()
	w.db.Exec(w.t, "INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload) VALUES ($1, $2, $3, "+
		"$4, jsonb_build_object('n', $5::int))",
		id, typ, aggregate, typ+".changed", n)
	return id
}

// waitIDs waits until a stream has exactly these events, in this order.
func (w *world) waitIDs(stream string, ids ...string) {
	w.t.Helper()
	testenv.Eventually(w.t, 20*time.Second, func() error {
		var have []string
		if w.redis.Client.Type(w.t.Context(), stream).Val() == "stream" {
			for _, m := range rawEntries(w.t, w, stream) {
				have = append(have, m["id"])
			}
		}
		if strings.Join(have, " ") != strings.Join(ids, " ") {
			return fmt.Errorf("%s has %v, want %v", stream, have, ids)
		}
		return nil
	})
}

func TestPoisonIsParkedRetriedAndDropped(t *testing.T) {
	t.Parallel()
	inModes(t, func(t *testing.T, mode string) {
		w := newWorld(t)
		if err := w.redis.Client.Set(t.Context(), "outbox.bad", "x", 0).Err(); err != nil {
			t.Fatal(err)
		}
		w.relayIn(mode)
		load := testenv.StartLoad(t, w.db, testenv.LoadOptions{Rate: 200})
		first, second := w.insert("bad", "a", 1), w.insert("bad", "b", 1)
		at := time.Now()
		list := w.dead(2, 20*time.Second)
		t.Logf("parked after %v", time.Since(at).Round(time.Millisecond))
		for _, d := range list {
			if d.Source != "relay" || d.AggregateType != "bad" || d.Class == "" || d.Error == "" ||
				(d.ID != first && d.ID != second) {
				t.Errorf("parked event %+v", d)
			}
		}
		if r := w.once("dead", "drop", second); r.code != 0 || !strings.HasPrefix(r.out, second) {
			t.Errorf("dead drop: exit %d: %s%s", r.code, r.out, r.errOut)
		}
		w.dead(1, 20*time.Second)
		if err := w.redis.Client.Del(t.Context(), "outbox.bad").Err(); err != nil {
			t.Fatal(err)
		}
		if r := w.once("dead", "retry", "--json", first); r.code != 0 ||
			!strings.Contains(r.out, `"id": "`+first+`"`) || !strings.Contains(r.out, `"ok": true`) {
			t.Errorf("dead retry: exit %d: %s%s", r.code, r.out, r.errOut)
		}
		w.waitIDs("outbox.bad", first)
		w.dead(0, 20*time.Second)
		load.Stop()
		w.oracle.Check(t, load, 20*time.Second)
	})
}

func TestPoisonBlocksItsAggregate(t *testing.T) {
	t.Parallel()
	inModes(t, func(t *testing.T, mode string) {
		w := newWorld(t)
		if err := w.redis.Client.Set(t.Context(), "outbox.bad", "x", 0).Err(); err != nil {
			t.Fatal(err)
		}
		w.relayIn(mode, "--poison=block-key")
		ids := []string{w.insert("bad", "a", 1)}
		w.dead(1, 20*time.Second)
		if err := w.redis.Client.Del(t.Context(), "outbox.bad").Err(); err != nil {
			t.Fatal(err)
		}
		// The stream would take them now; the aggregate waits all the same, others do not.
		ids = append(ids, w.insert("bad", "a", 2), w.insert("bad", "a", 3))
		free := w.insert("bad", "b", 1)
		w.waitIDs("outbox.bad", free)
		w.dead(3, 20*time.Second)
		if r := w.once("dead", "retry", "--all"); r.code != 0 || strings.Count(r.out, "\n") != 3 {
			t.Errorf("dead retry --all: exit %d: %s%s", r.code, r.out, r.errOut)
		}
		w.waitIDs("outbox.bad", append([]string{free}, ids...)...)
		w.dead(0, 20*time.Second)
		ids = append(ids, w.insert("bad", "a", 4))
		w.waitIDs("outbox.bad", append([]string{free}, ids...)...)
	})
}
