package main

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"

	"posthaste/consumer"
	"posthaste/internal/lab/testenv"
)

// hook is a receiver of webhooks. It answers with the status that answer returns for an event's id.
type hook struct {
	*httptest.Server
	answer func(id string) int

	mu  sync.Mutex
	ids []string
}

func newHook(t *testing.T, answer func(id string) int) *hook {
	t.Helper()
	h := &hook{answer: answer}
	h.Server = httptest.NewServer(h)
	t.Cleanup(h.Close)
	return h
}

func (h *hook) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	_, _ = io.Copy(io.Discard, r.Body)
	id := r.Header.Get("Webhook-Id")
	h.mu.Lock()
	h.ids = append(h.ids, id)
	h.mu.Unlock()
	w.WriteHeader(h.answer(id))
}

// got returns the ids of the requests.
func (h *hook) got() []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Clone(h.ids)
}

// waits waits until there were n requests.
func (h *hook) waits(t *testing.T, n int) {
	t.Helper()
	testenv.Eventually(t, 20*time.Second, func() error {
		got := len(h.got())
		return testenv.FailIf(got < n, "%d of %d requests", got, n)
	})
}

// addEvents adds events to a stream as the relay does, each of its own subject, and returns their ids.
func (w *world) addEvents(stream string, n int) (ids []string) {
	w.t.Helper()
	for range n {
		id := uuid.NewString()
		must(w.t, w.redis.Client.XAdd(w.t.Context(), &redis.XAddArgs{Stream: stream, Values: []any{
			"id", id, "type", "order.created", "source", "/posthaste/default", "subject", id, "data", "{}",
		}}).Err())
		ids = append(ids, id)
	}
	return ids
}

// unacknowledged waits until a group has so many events of a stream that it has not acknowledged.
func (w *world) unacknowledged(stream, group string, n int64) {
	w.t.Helper()
	testenv.Eventually(w.t, 30*time.Second, func() error {
		st, err := consumer.Inspect(w.t.Context(), w.redis.Client, stream, group)
		if err != nil {
			return err
		}
		return testenv.FailIf(st.Lag+st.Pending != n, "%d unread and %d pending, want %d", st.Lag, st.Pending, n)
	})
}

// Events come from the outbox to the receiver. One that it refuses is dead, is listed, and arrives after a retry.
func TestDeliverFromTheOutbox(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	var refuse atomic.Bool
	h := newHook(t, func(string) int {
		if refuse.Load() {
			return http.StatusBadRequest
		}
		return http.StatusNoContent
	})
	w.relayIn("cdc")
	secrets := testenv.WriteFile(t, t.TempDir(), "secrets", []byte("whsec_bm90IGEgc2VjcmV0IG9mIGFueXRoaW5n"))
	deliver := func() *child {
		return w.spawn("deliver", "--group=hooks", "--to="+h.URL, "--secret-file="+secrets)
	}
	d := deliver()
	n := w.wrote(testenv.LoadOptions{Total: 100}).Committed()
	h.waits(t, n)
	w.unacknowledged("outbox.order", "hooks", 0)
	if got := d.value(`outbox_deliver_seconds_count{group="hooks",outcome="accepted"}`); int(got) != n {
		t.Errorf("%v events accepted, want %d", got, n)
	}
	d.stops()
	refuse.Store(true)
	bad := w.insert("order", "bad", 1)
	w.waitExactly("outbox.order", int64(n)+1)
	must(t, w.redis.Client.XReadGroup(t.Context(), &redis.XReadGroupArgs{
		Group: "hooks", Consumer: "gone", Streams: []string{"outbox.order", ">"}, Block: -1,
	}).Err())
	w.idles("outbox.order", "hooks", "retrycount", 9) // of ten
	deliver()
	w.waitExactly("dead.outbox.order", 1)
	var list []deadEvent
	w.once("dead", "list", "--json").json(t, &list)
	if len(list) != 1 || list[0].ID != bad || list[0].Source != "hooks" || !strings.Contains(list[0].Error, "400") {
		t.Errorf("dead: %+v", list)
	}
	w.unacknowledged("outbox.order", "hooks", 0)
	refuse.Store(false)
	w.once("dead", "retry", bad).says(t, 0)
	w.unacknowledged("outbox.order", "hooks", 0)
	if ids := h.got(); ids[len(ids)-1] != bad {
		t.Errorf("the last request is %s", ids[len(ids)-1])
	}
	w.once("groups", "list").says(t, 0, "hooks")
}

// idles lets the pending entries of a group be those of a consumer that has been gone for a minute.
func (w *world) idles(stream, group string, options ...any) {
	w.t.Helper()
	pending, err := w.redis.Client.XPendingExt(w.t.Context(), &redis.XPendingExtArgs{
		Stream: stream, Group: group, Start: "-", End: "+", Count: 100,
	}).Result()
	must(w.t, err)
	claim := []any{"xclaim", stream, group, "gone", 0}
	for _, p := range pending {
		claim = append(claim, p.ID)
	}
	do(w.t, w.redis.Client, slices.Concat(claim, []any{"idle", 60_000}, options)...)
}

// A process that is killed has repeated, in the end, exactly those events whose requests were in flight.
func TestDeliverKilledRepeatsWhatWasInFlight(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	const events, workers = 40, 8
	released, killed := make(chan struct{}), make(chan struct{})
	var mu sync.Mutex
	accepted, held := 0, map[string]bool{}
	h := newHook(t, func(id string) int {
		mu.Lock()
		if accepted < events/2 {
			accepted++
			mu.Unlock()
			return http.StatusOK
		}
		select {
		case <-killed:
		default:
			held[id] = true
		}
		mu.Unlock()
		<-released
		return http.StatusOK
	})
	ids := w.addEvents("outbox.order", events)
	first := w.spawn("deliver", "--group=hooks", "--to="+h.URL)
	h.waits(t, events/2+workers)
	w.unacknowledged("outbox.order", "hooks", events/2)
	first.kill()
	w.idles("outbox.order", "hooks", "justid")
	close(killed)
	close(released)
	w.spawn("deliver", "--group=hooks", "--to="+h.URL)
	w.unacknowledged("outbox.order", "hooks", 0)
	times := map[string]int{}
	for _, id := range h.got() {
		times[id]++
	}
	mu.Lock()
	defer mu.Unlock()
	if len(held) != workers {
		t.Errorf("%d requests were in flight, want %d", len(held), workers)
	}
	for _, id := range ids {
		if want := 1 + map[bool]int{true: 1}[held[id]]; times[id] != want {
			t.Errorf("event %s was sent %d times, want %d", id, times[id], want)
		}
	}
}

// SIGTERM lets requests in flight finish, and their events are acknowledged. The others are not begun.
func TestDeliverStopsInOrder(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	const events, workers = 30, 8
	release := make(chan struct{})
	h := newHook(t, func(string) int { <-release; return http.StatusOK })
	w.addEvents("outbox.order", events)
	d := w.spawn("deliver", "--group=hooks", "--to="+h.URL, "--drain-timeout=60s")
	h.waits(t, workers)
	d.signal(syscall.SIGTERM)
	d.waitLogged("consumer stopping")
	close(release)
	<-d.done
	if code := d.cmd.ProcessState.ExitCode(); code != 0 {
		t.Errorf("exit %d: %s", code, d.output())
	}
	if n := len(h.got()); n != workers {
		t.Errorf("%d requests, want %d", n, workers)
	}
	w.unacknowledged("outbox.order", "hooks", events-workers)
}

// A receiver that wants no more events ends the command with an error. The events stay with the group.
func TestDeliverEndsWhenTheReceiverIsGone(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	h := newHook(t, func(string) int { return http.StatusGone })
	w.addEvents("outbox.order", 20)
	p := w.start("deliver", "--group=hooks", "--to="+h.URL)
	p.ends(1, "410 Gone: it wants no more events. Change --to, or run posthaste groups drop "+
		"--stream=outbox.order --group=hooks")
	if n := strings.Count("\n"+p.output(), "\nposthaste: "); n != 1 {
		t.Errorf("%d lines of errors in %q", n, p.output())
	}
	if n := len(h.got()); n > 8 {
		t.Errorf("%d requests", n)
	}
	w.unacknowledged("outbox.order", "hooks", 20)
	w.hasLen("dead.outbox.order", 0)
}

// The environment names a proxy, as for net/http.
func TestDeliverThroughAProxy(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	var mu sync.Mutex
	var asked []string
	proxy := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		asked = append(asked, r.URL.String())
	}))
	t.Cleanup(proxy.Close)
	w.addEvents("outbox.order", 1)
	w.spawnAs("", []string{"HTTP_PROXY=" + proxy.URL}, "deliver", "--group=hooks", "--to=http://receiver.invalid/in")
	w.unacknowledged("outbox.order", "hooks", 0)
	mu.Lock()
	defer mu.Unlock()
	if !slices.Equal(asked, []string{"http://receiver.invalid/in"}) {
		t.Errorf("the proxy was asked for %q", asked)
	}
}

// Package deliver tests the other options.
func TestDeliverExplainsMistakes(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ca := testenv.WriteFile(t, t.TempDir(), "ca", testenv.NewCA(t).PEM)
	deliver := func(text string, args ...string) {
		t.Helper()
		w.once(append([]string{"deliver", "--group=g", "--to=https://h"}, args...)...).oneLine(t, 2, text)
	}
	deliver("--timeout must be positive", "--timeout=0s")
	deliver("must begin with https://", "--to=http://h", "--ca="+ca)
	deliver("--stream=order: no such stream; there are none yet", "--stream=order")
	for i := range 12 {
		w.addEvents(fmt.Sprintf("outbox.type%02d", i), 1)
	}
	deliver("--stream=outbox.typo: no such stream; there are outbox.type00, outbox.type01", "--stream=outbox.type00",
		"--stream=outbox.typo")
}

// A stream that is named before its first event is read when it appears, also with several streams of a type.
func TestDeliverWaitsForTheFirstStream(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	h := newHook(t, func(string) int { return http.StatusOK })
	d := w.spawn("deliver", "--group=hooks", "--to="+h.URL, "--stream=outbox.order")
	d.waitLogged("the stream does not exist yet")
	w.addEvents("outbox.order", 3)
	h.waits(t, 3)
	d.stops()
	must(t, w.redis.Client.Set(t.Context(), "outbox.item#sharded", "2", 0).Err())
	w.addEvents("outbox.item.0", 3)
	w.spawn("deliver", "--group=hooks", "--to="+h.URL, "--stream=outbox.item")
	h.waits(t, 6)
}

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
