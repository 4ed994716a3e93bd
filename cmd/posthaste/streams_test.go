package main

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"posthaste/internal/lab/testenv"
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
	w.once("streams", "list").says(t, 0, "g (3 unread, 0 pending)")
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
	w.hasLen("outbox.order", int64(first))
	do(t, w.redis.Client, "xgroup", "create", "outbox.order", "group", "0")
	w.waitGroups("outbox.order", "group")
	w.once("streams", "drop", "--stream=outbox.order", "--yes", "--json").
		says(t, 0, fmt.Sprintf(`"entries": %d`, first))
	noticed := func(repairs int) {
		t.Helper()
		w.waitHas(true, "SELECT count(*) >= $1 FROM outbox_reconcile WHERE done_at IS NOT NULL", repairs)
		w.waitMode("cdc")
	}
	holds := func(events, restored int) {
		t.Helper()
		w.hasLen("outbox.order", int64(events))
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
	w.once("status").says(t, 0, fmt.Sprintf("%d events of outbox.order", second))
}
