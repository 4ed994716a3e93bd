package main

import (
	"encoding/json"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"posthaste/internal/testenv"
)

func TestConsumePrintsOneLinePerEvent(t *testing.T) {
	t.Parallel()
	const events = 200
	w := newWorld(t)
	w.spawn("relay")
	c := w.start("consume", "--group=g")
	load := w.wrote(testenv.LoadOptions{Total: events, Types: []string{"order", "invoice"}})
	w.oracle.Check(t, load, 20*time.Second)
	testenv.Eventually(t, 20*time.Second, func() error {
		n := strings.Count(c.output(), "\n")
		return testenv.FailIf(n < load.Committed(), "%d lines", n)
	})
	entries := map[string]testenv.Entry{}
	for _, e := range w.oracle.Entries(t, "order", "invoice") {
		entries[e.ID] = e
	}
	for line := range strings.Lines(c.output()) {
		var fields map[string]json.RawMessage
		var v struct {
			ID, Type, Subject, Time, Stream string
			EntryID                         string `json:"entry_id"`
			Data                            map[string]any
		}
		if json.Unmarshal([]byte(line), &fields) != nil || json.Unmarshal([]byte(line), &v) != nil ||
			len(fields) != 7 || v.Data == nil {
			t.Fatalf("line %s", line)
		}
		e, ok := entries[v.ID]
		delete(entries, v.ID)
		if !ok || v.Type != e.Type || v.Subject != e.Subject || v.Time != e.Time || v.Stream != e.Stream ||
			v.EntryID != e.EntryID {
			t.Errorf("line %s for entry %+v", line, e)
		}
	}
	if len(entries) > 0 {
		t.Errorf("%d events were not printed", len(entries))
	}
	c.signal(syscall.SIGTERM)
	c.ends(0)
}

// A wrong name of a stream is an error. While there is no stream, a name with the prefix is only reported, and the
// stream is read when it appears. No stream or group is made.
func TestConsumeOfAStreamThatDoesNotExist(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	makesNothing := func(before []string) {
		t.Helper()
		if got := keysOf(t, w); !slices.Equal(got, before) {
			t.Errorf("keys %q were made", got)
		}
	}
	before := keysOf(t, w)
	w.once("consume", "--group=g", "--stream=").oneLine(t, exitBadUsage, "the name of a stream is empty")
	w.once("consume", "--group=g", "--stream=order").oneLine(t, exitBadUsage, "no such stream; there are none yet")
	early := w.spawn("consume", "--group=g", "--stream=outbox.order")
	early.waitLogged("the stream does not exist yet")
	wait(t, 2*time.Second)
	makesNothing(before)
	w.addEvents("outbox.order", 1)
	early.waitLogged(`"entry_id"`)
	before = keysOf(t, w)
	w.once("consume", "--group=h", "--stream=outbox.nope").
		oneLine(t, exitBadUsage, "no such stream; there are outbox.order")
	makesNothing(before)
}

// keysOf returns the keys of the world's Redis, ascending.
func keysOf(t *testing.T, w *world) []string {
	t.Helper()
	keys, err := w.redis.Client.Keys(t.Context(), "*").Result()
	must(t, err)
	slices.Sort(keys)
	return keys
}
