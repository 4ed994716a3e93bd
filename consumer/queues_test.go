package consumer

import (
	"cmp"
	"context"
	"fmt"
	"strconv"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"posthaste/internal/lab/testenv"
)

// entries returns the first n entries of a stream, of one subject or, with "", of a subject each.
func entries(attempt, n int, subject string) (es []*entry) {
	for i := range n {
		id := strconv.Itoa(i+1) + "-0"
		values := map[string]any{"subject": cmp.Or(subject, id)}
		es = append(es, newEntry("s", redis.XMessage{ID: id, Values: values}, attempt, time.Now()))
	}
	return es
}

// A reader finds no room before the woken worker has taken the only queue. It must be woken when that has happened:
// only then can entries be parked, and nothing else may happen while the handler runs.
func TestCapacityIsFoundWhenTheLastQueueIsTaken(t *testing.T) {
	t.Parallel()
	const window = 64
	l := newQueues(window, time.Hour)
	l.idle = 1 // a second worker, which waits
	l.add(entries(1, window-16, "one"))
	n, changed := l.tryCapacity(32)
	if n >= 32 {
		t.Fatalf("room for %d", n)
	}
	if _, ok := l.next(); !ok {
		t.Fatal("nothing to run")
	}
	select {
	case <-changed:
	default:
		t.Fatal("the reader is not told")
	}
	if n, _ := l.tryCapacity(32); n < 32 {
		t.Errorf("room for %d", n)
	}
}

// Two readers wait for room, one for more of it. Both are woken by every change: the first may find too little, and
// must not use up the other's signal.
func TestEverybodyWhoWaitsForRoomIsTold(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const window = 64
		l := newQueues(window, time.Hour)
		es := entries(1, window, "")
		l.add(es)
		for range es {
			e, _ := l.next()
			l.done(e, true)
		}
		var reader, other int
		go func() { reader = l.capacity(t.Context(), 32) }()
		synctest.Wait()
		go func() { other = l.capacity(t.Context(), 16) }()
		synctest.Wait()
		l.acked(es[:8])
		synctest.Wait()
		if reader > 0 || other > 0 {
			t.Fatalf("room for %d and %d while 56 of %d are not acknowledged", reader, other, window)
		}
		l.acked(es[8:])
		synctest.Wait()
		if reader != window || other != window {
			t.Errorf("room for %d and %d, want %d: somebody waits forever", reader, other, window)
		}
	})
}

// A worker finds no lease, and before it has put its entry back everything is dropped and read again: later entries do
// not overtake it. If it is not read again, it is dropped.
func TestWhatIsDroppedComesBackInOrder(t *testing.T) {
	t.Parallel()
	l := newQueues(64, time.Hour)
	l.add(entries(1, 3, "one"))
	first, _ := l.next()
	l.drop("other")
	if n := l.counts(); n.held != 3 {
		t.Fatalf("%d entries are held when another stream's are dropped, want 3", n.held)
	}
	l.drop("s")
	if n := l.counts(); n.held != 1 || l.loaded != 1 {
		t.Fatalf("%d entries are held, %d with payload; want the one that runs", n.held, l.loaded)
	}
	l.add(entries(1, 3, "one"))
	l.retry(first, 0)
	for _, want := range []string{"1-0", "2-0", "3-0"} {
		e, _ := l.next()
		if e.id != want {
			t.Fatalf("%s runs, want %s", e.id, want)
		}
		if want != "3-0" {
			l.done(e, true)
			continue
		}
		l.drop("s")
		l.retry(e, 0)
	}
	if n := l.counts(); n.held != 2 || n.held != n.unacked || l.loaded != 0 {
		t.Errorf("%d entries are held, %d of them done and %d with payload; want 2, 2 and 0", n.held, n.unacked,
			l.loaded)
	}
}

// A renewal that is answered when the lease is over by this process's clock does not bring it back.
func TestALeaseThatIsOverStaysOver(t *testing.T) {
	t.Parallel()
	l, later := newLeases(), time.Now().Add(time.Hour)
	if l.extend("s", later) || l.valid("s") {
		t.Error("a lease that nobody has had is extended")
	}
	l.begin("s", later)
	if !l.extend("s", later.Add(time.Hour)) || time.Until(l.get("s").until) < time.Hour {
		t.Error("a lease is not extended")
	}
	l.begin("s", time.Now())
	if l.extend("s", later) || l.valid("s") {
		t.Error("a lease that is over is extended")
	}
}

// An event fails once, many others succeed, and then nearly all fail: its next failure is due to the outage.
func TestSuccessesBeforeAnOutageDoNotCount(t *testing.T) {
	t.Parallel()
	const n, good, attempts = 70, 50, 10
	l := newQueues(n, time.Hour)
	es := entries(attempts, n, "")
	l.add(es)
	for i := range es {
		if e, ok := l.next(); !ok || e != es[i] {
			t.Fatalf("entry %d does not run", i)
		}
	}
	if l.fail(es[0]) {
		t.Error("a single failure is an outage")
	}
	for _, e := range es[1:good] {
		l.done(e, true)
	}
	if l.fail(es[0]) {
		t.Error("an outage in which others succeed")
	}
	outage := false
	for _, e := range es[good:] {
		outage = l.fail(e)
	}
	if !outage || !l.fail(es[0]) {
		t.Error("an outage is not noticed")
	}
	for _, e := range es[good:] {
		l.done(e, true)
	}
	if l.fail(es[0]) {
		t.Error("an outage after all others have succeeded")
	}
}

// pipelines counts them, and answers each at once.
type pipelines struct {
	redis.Hook
	n int
}

func (h *pipelines) ProcessPipelineHook(redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(context.Context, []redis.Cmder) error {
		h.n++
		return nil
	}
}

func (*pipelines) DialHook(next redis.DialHook) redis.DialHook { return next }

func (*pipelines) ProcessHook(next redis.ProcessHook) redis.ProcessHook { return next }

// What is done when the consumer stops is acknowledged in as few round trips as ever.
func TestAcknowledgementsGoTogetherAtAStop(t *testing.T) {
	t.Parallel()
	client := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1"})
	t.Cleanup(func() { _ = client.Close() })
	h := &pipelines{}
	client.AddHook(h)
	c, err := New(Options{
		Client: client, Group: "g", Streams: []string{"s"},
		Handler: func(context.Context, Event) error { return nil },
	})
	if err != nil {
		t.Fatal(err)
	}
	for i := range ackMax + 1 {
		c.acks <- &entry{stream: "s", id: fmt.Sprintf("1-%d", i)}
	}
	closing := make(chan struct{})
	close(closing)
	c.acknowledge(t.Context(), closing)
	testenv.Equal(t, "round trips", h.n, 2)
}
