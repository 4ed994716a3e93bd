package main

import (
	"bufio"
	"encoding/json"
	"fmt"
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
	c := w.launch("consume", "--group=g")
	load := w.wrote(testenv.LoadOptions{Total: events, Types: []string{"order", "invoice"}})
	w.oracle.Check(t, load, 20*time.Second)
	testenv.Eventually(t, 20*time.Second, func() error {
		n := strings.Count(c.text(), "\n")
		return testenv.FailIf(n < load.Committed(), "%d lines", n)
	})
	entries := map[string]testenv.Entry{}
	for _, e := range w.oracle.Entries(t, "order", "invoice") {
		entries[e.ID] = e
	}
	for line := range strings.Lines(c.text()) {
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
	must(t, c.cmd.Process.Signal(syscall.SIGTERM))
	c.ends(t, 0)
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

// Two consume processes in one group are killed alternately under load. Every event is printed at least once, and
// nothing is pending at the end.
func TestConsumersKilledUnderLoad(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.relayIn("cdc", "--log-level=info")
	load := testenv.StartLoad(t, w.db, testenv.LoadOptions{Rate: 600})
	consume := func() *child { return w.spawn("consume", "--group=printers", "--claim-idle=1s", "--log-level=info") }
	printers := []*child{consume(), consume()}
	kills := scale(12, 4)
	var killed []*child
	for i := range kills {
		w.waitCommitted(load, load.Committed()+300)
		printers[i%2].kill()
		killed = append(killed, printers[i%2])
		printers[i%2] = consume()
	}
	w.ended(load)
	testenv.Eventually(t, 20*time.Second, func() error {
		p, err := w.redis.Client.XPending(t.Context(), "outbox.order", "printers").Result()
		if err != nil {
			return err
		}
		if p.Count > 0 {
			return fmt.Errorf("%d pending", p.Count)
		}
		printed := map[string]bool{}
		for _, c := range append(killed, printers...) {
			printedBy(c, printed)
		}
		n := load.Committed()
		return testenv.FailIf(len(printed) < n, "%d of %d events are printed", len(printed), n)
	})
}

// printedBy adds the ids of the events that a consume process has printed to a set.
func printedBy(c *child, into map[string]bool) {
	lines := bufio.NewScanner(strings.NewReader(c.output()))
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var ev struct {
			ID      string `json:"id"`
			EntryID string `json:"entry_id"`
		}
		if json.Unmarshal(lines.Bytes(), &ev) == nil && ev.EntryID != "" {
			into[ev.ID] = true
		}
	}
}
