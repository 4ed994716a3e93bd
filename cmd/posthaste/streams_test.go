package main

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	"posthaste/internal/testenv"
)

// Streams are listed with their groups, also those that have no entries any more.
func TestStreamsList(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.once("streams", "list").says(t, 0, "no streams")
	w.addEvents("outbox.order", 3)
	w.db.Exec(t, "INSERT INTO outbox_stream (stream, base, adopted_epoch) VALUES ('outbox.gone', 'outbox.gone', 0)")
	do(t, w.redis.Client, "xgroup", "create", "outbox.order", "g", "0")
	var list []struct {
		Stream  string
		Entries int
		Last    *time.Time `json:"last_entry_at"`
		Memory  int        `json:"memory_bytes"`
		Groups  []struct {
			Group string
			Lag   int
		}
	}
	if w.once("streams", "list", "--json").json(t, &list); len(list) != 2 {
		t.Fatalf("%+v", list)
	}
	gone, order := list[0], list[1]
	if gone.Stream != "outbox.gone" || gone.Entries != 0 || gone.Last != nil || gone.Memory != 0 ||
		len(gone.Groups) != 0 {
		t.Errorf("a stream that is gone: %+v", gone)
	}
	if order.Entries != 3 || order.Last == nil || order.Memory <= 0 || len(order.Groups) != 1 ||
		order.Groups[0].Group != "g" || order.Groups[0].Lag != 3 {
		t.Errorf("a stream: %+v", order)
	}
	if r := w.once("streams", "list"); !strings.Contains(r.out, "g (3 unread, 0 pending)") {
		t.Errorf("for people: %s", r.out)
	}
}

// A stream deleted by the command stays deleted, under a relay and after its restart, and no loss is reported. A later
// publish creates it again, and if it is then deleted in another way, it is restored.
func TestStreamsDrop(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	r := w.relayIn("cdc", "--stream-maxlen=0")
	write := func(least, settled int) int {
		t.Helper()
		load := w.wrote(testenv.LoadOptions{Total: least})
		w.waitSettled(int64(load.Committed() + settled))
		return load.Committed()
	}
	first := write(150, 0)
	for args, text := range map[string]string{
		"--stream=outbox.order":       "--yes",
		"--stream=outbox.other --yes": "no relay publishes to a stream",
	} {
		w.once(append([]string{"streams", "drop"}, strings.Fields(args)...)...).oneLine(t, 1, text)
	}
	if n := w.redis.Client.XLen(t.Context(), "outbox.order").Val(); int(n) != first {
		t.Fatalf("%d entries after a drop that was refused", n)
	}
	do(t, w.redis.Client, "xgroup", "create", "outbox.order", "group", "0")
	w.waitGroups("outbox.order", "group")
	out := w.once("streams", "drop", "--stream=outbox.order", "--yes", "--json")
	if out.code != 0 || !strings.Contains(out.out, fmt.Sprintf(`"entries": %d`, first)) {
		t.Fatalf("exit %d: %s%s", out.code, out.out, out.errOut)
	}
	noticed := func(repairs int) {
		t.Helper()
		testenv.Eventually(t, 20*time.Second, func() error {
			n := testenv.Value[int](t, w.db, "SELECT count(*) FROM outbox_reconcile WHERE done_at IS NOT NULL")
			if n < repairs {
				return fmt.Errorf("%d repairs, want %d", n, repairs)
			}
			return nil
		})
		w.waitMode("cdc", 20*time.Second)
	}
	holds := func(events, restored int) {
		t.Helper()
		if n := len(w.oracle.Entries(t, "order")); n != events {
			t.Errorf("%d entries, want %d", n, events)
		}
		again := testenv.Value[int](t, w.db, "SELECT coalesce(sum(restored), 0)::int FROM outbox_reconcile")
		if groups := w.redis.Client.XInfoGroups(t.Context(), "outbox.order").Val(); len(groups) > 0 {
			t.Errorf("the stream was dropped with its groups, and has %+v", groups)
		}
		if list := w.losses(); again != restored || len(list) > 0 {
			t.Errorf("%d events were restored, want %d; told: %+v", again, restored, list)
		}
	}
	noticed(1)
	holds(0, 0)
	r.stop()
	w.relayIn("cdc", "--stream-maxlen=0")
	second := write(40, first)
	holds(second, 0)
	n := testenv.Value[int](t, w.db, "SELECT count(*) FROM outbox_reconcile")
	do(t, w.redis.Client, "del", "outbox.order")
	noticed(n + 1)
	holds(second, second)
	if out := w.once("status").out; !strings.Contains(out, fmt.Sprintf("%d events of outbox.order", second)) {
		t.Errorf("status: %s", out)
	}
}

// A standby takes over that lacks some commits whose events are in their stream. The events are named, counted and
// reported, and nothing is published again.
func TestPhantomsAreNamed(t *testing.T) {
	t.Parallel()
	inModes(t, func(t *testing.T, mode string) {
		w := newReplicated(t, mode)
		r := w.spawn("relay")
		w.waitMode(mode, 20*time.Second)
		write := func(settled int) int {
			t.Helper()
			load := w.wrote(testenv.LoadOptions{Total: 20})
			w.waitSettled(int64(load.Committed() + settled))
			return load.Committed()
		}
		kept := write(0)
		other := w.other()
		testenv.Eventually(t, 20*time.Second, func() error {
			var n int
			err := other.Pool.QueryRow(t.Context(), "SELECT count(*) FROM outbox_history").Scan(&n)
			return testenv.FailIf(err != nil || n < kept, "the standby has %d settled events, %w", n, err)
		})
		w.link.To("127.0.0.1:1") // cuts off the standby
		lost := write(kept)
		want := testenv.Value[[]uuid.UUID](t, w.db,
			"SELECT array_agg(id ORDER BY id) FROM (SELECT id FROM outbox ORDER BY seq DESC LIMIT $1) o", lost)
		if out := w.once("phantoms"); out.code != 0 || !strings.HasPrefix(out.out, "no phantoms") {
			t.Errorf("before: exit %d, %s%s", out.code, out.out, out.errOut)
		}
		r.stop()
		w.promote(other)
		r = w.spawn("relay")
		r.waitLogged("postgres has lost commits whose events are in the stream")
		w.waitMode(mode, 20*time.Second)
		var list []struct {
			ID            uuid.UUID
			Stream, Entry string
		}
		w.once("phantoms", "--json").json(t, &list)
		var got []uuid.UUID
		for _, p := range list {
			got = append(got, p.ID)
			if n := len(w.redis.Client.XRange(t.Context(), p.Stream, p.Entry, p.Entry).Val()); n != 1 {
				t.Errorf("%+v: %d entries", p, n)
			}
		}
		slices.SortFunc(got, func(a, b uuid.UUID) int { return strings.Compare(a.String(), b.String()) })
		if !slices.Equal(got, want) {
			t.Errorf("phantoms %v, want %v", got, want)
		}
		if n := len(w.oracle.Entries(t, "order")); n != kept+lost {
			t.Errorf("%d entries, want %d", n, kept+lost)
		}
		present(t, r, fmt.Sprintf("outbox_phantom_events %d", lost))
		if out := w.once("status").out; !strings.Contains(out, fmt.Sprintf("%d events are in their streams", lost)) ||
			!strings.Contains(out, "posthaste phantoms") {
			t.Errorf("status: %s", out)
		}
		var acked struct {
			Phantoms []struct{ ID uuid.UUID }
			WentBack bool `json:"went_back"`
		}
		w.once("phantoms", "--ack", "--json").json(t, &acked)
		if len(acked.Phantoms) != lost || !acked.WentBack {
			t.Errorf("acknowledged: %+v, want %d", acked, lost)
		}
		present(t, r, "outbox_phantom_events 0")
		if out := w.once("status").out; strings.Contains(out, "not in Postgres") || strings.Contains(out, "gone back") {
			t.Errorf("acknowledged, and status still names it: %s", out)
		}
		if out := w.once("phantoms", "--ack"); out.code != 0 || out.out != "no phantoms to acknowledge\n" {
			t.Errorf("again: exit %d, %s%s", out.code, out.out, out.errOut)
		}
	})
}
