package consumer_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/go-redis/v9"

	"posthaste/consumer"
	"posthaste/internal/lab/testenv"
)

// failing fails for the ids in it.
type failing struct {
	record
	ids   sync.Map
	tries atomic.Int64
}

func (f *failing) run(ctx context.Context, ev consumer.Event) error {
	if err, ok := f.ids.Load(ev.ID); ok {
		f.tries.Add(1)
		return err.(error)
	}
	return f.handle(ctx, ev)
}

func dead(tb testing.TB, client redis.UniversalClient) []consumer.DeadEntry {
	tb.Helper()
	list, err := consumer.Dead(tb.Context(), client, "outbox.")
	must(tb, err)
	return list
}

func TestDeadListRetryDrop(t *testing.T) {
	t.Parallel()
	r := testenv.Redis(t)
	var f failing
	f.ids.Store("bad", errBoom)
	f.ids.Store("worse", consumer.Permanent(errors.New("no \xff use")))
	entry := add(t, r.Client, "outbox.order", event{"bad", "s1", 1})
	add(t, r.Client, "outbox.order", event{"worse", "s2", 2})
	add(t, r.Client, "outbox.order", event{"good", "s1", 3})
	reg := prometheus.NewRegistry()
	start(t, consumer.Options{
		Client: r.Client, Prefix: "outbox.", MaxAttempts: 4, ClaimIdle: 300 * time.Millisecond, Handler: f.run,
		Registerer: reg,
	})
	var other record
	start(t, consumer.Options{Client: r.Client, Group: "other", Prefix: "outbox.", Handler: other.handle})
	settled(t, r.Client, 20*time.Second, "g", "outbox.order")
	settled(t, r.Client, 20*time.Second, "other", "outbox.order")
	list := dead(t, r.Client)
	if len(list) != 2 {
		t.Fatalf("dead: %+v, want 2", list)
	}
	byID := map[string]consumer.DeadEntry{}
	for _, d := range list {
		byID[d.EventID] = d
	}
	if d := byID["bad"]; d.EntryID != entry || d.Stream != "outbox.order" || d.Group != "g" || d.Attempts != 4 ||
		d.Error != "boom" || d.Subject != "s1" || d.Type != "order.created" ||
		!strings.Contains(string(d.Data), `"n": 1`) ||
		time.Since(d.At) > time.Minute || d.Time.IsZero() || d.Time.Equal(d.At) {
		t.Errorf("bad: %+v", d)
	}
	if d := byID["worse"]; d.Attempts != 1 || d.Error != "no \uFFFD use" {
		t.Errorf("worse: %+v, want one attempt", d)
	}
	testenv.Equal(t, "failed attempts", f.tries.Load(), 4+1)
	// It is counted when the reply of Redis is there.
	testenv.Becomes(t, "dead events", 2, func() float64 { return sample(t, reg, "outbox_consumer_dead_total") })

	// A retry only reaches the group of the dead event.
	f.ids.Delete("bad")
	must(t, consumer.Retry(t.Context(), r.Client, byID["bad"]))
	testenv.ErrorIs(t, "second retry", consumer.Retry(t.Context(), r.Client, byID["bad"]), consumer.ErrDeadGone)
	testenv.Becomes(t, "runs of bad", 1, func() int { return f.times()["bad"] })
	settled(t, r.Client, 20*time.Second, "g", "outbox.order")

	// The same once the original entry is trimmed: added again, and skipped by the other group.
	f.ids.Delete("worse")
	must(t, r.Client.XTrimMaxLen(t.Context(), "outbox.order", 0).Err())
	must(t, consumer.Retry(t.Context(), r.Client, byID["worse"]))
	testenv.Becomes(t, "runs of worse", 1, func() int { return f.times()["worse"] })
	settled(t, r.Client, 20*time.Second, "g", "outbox.order")
	settled(t, r.Client, 20*time.Second, "other", "outbox.order")
	allOnce(t, []string{"bad", "worse", "good"}, other.times())
	if evs := f.list(); !evs[len(evs)-1].Replayed {
		t.Error("the event that was added again is not marked as replayed")
	}

	testenv.Equal(t, "dead after the retries", len(dead(t, r.Client)), 0)
	f.ids.Store("third", errBoom)
	add(t, r.Client, "outbox.order", event{"third", "s3", 1})
	testenv.Becomes(t, "dead events", 1, func() int { return len(dead(t, r.Client)) })
	third := dead(t, r.Client)[0]
	must(t, consumer.Drop(t.Context(), r.Client, third))
	testenv.ErrorIs(t, "second drop", consumer.Drop(t.Context(), r.Client, third), consumer.ErrDeadGone)
	third.Group = "never existed"
	must(t, r.Client.XAdd(t.Context(),
		&redis.XAddArgs{Stream: third.DeadStream, ID: "*", Values: []any{"id", "x"}}).Err())
	third.DeadID = dead(t, r.Client)[0].DeadID
	testenv.ErrorIs(t, "retry for no group", consumer.Retry(t.Context(), r.Client, third), consumer.ErrGroupGone)
}

// An error that is not the event's fault uses up no attempts, however long it lasts.
func TestUnavailableIsNoAttempt(t *testing.T) {
	t.Parallel()
	r := testenv.Redis(t)
	add(t, r.Client, "outbox.order", event{"a", "s", 1})
	var tries atomic.Int64
	start(t, consumer.Options{
		Client: r.Client, MaxAttempts: 2,
		Backoff: func(int) time.Duration { return time.Millisecond },
		Handler: func(_ context.Context, ev consumer.Event) error {
			testenv.Equal(t, "attempt", ev.Attempt, 1)
			return testenv.FailIf(tries.Add(1) < 20, "mail: %w", consumer.Unavailable(errBoom))
		},
	})
	settled(t, r.Client, 20*time.Second, "g", "outbox.order")
	if n := r.Client.XLen(t.Context(), "dead.outbox.order").Val(); n != 0 || tries.Load() != 20 {
		t.Errorf("%d dead, %d tries; want 0 and 20", n, tries.Load())
	}
}

// A panic, and a handler that ends its goroutine, are failed attempts; the workers survive both.
func TestPanicAndGoexitAreFailures(t *testing.T) {
	t.Parallel()
	r := testenv.Redis(t)
	for i := range 8 {
		add(t, r.Client, "outbox.order", event{fmt.Sprintf("panic-%d", i), fmt.Sprintf("p%d", i), i})
		add(t, r.Client, "outbox.order", event{fmt.Sprintf("exit-%d", i), fmt.Sprintf("e%d", i), i})
	}
	ids := fill(t, r.Client, "outbox.order", 50, 10)
	var rec record
	c := start(t, consumer.Options{
		Client: r.Client, Prefix: "outbox.", MaxAttempts: 2, Workers: 4,
		Handler: func(ctx context.Context, ev consumer.Event) error {
			switch {
			case strings.HasPrefix(ev.ID, "panic"):
				panic("no way")
			case strings.HasPrefix(ev.ID, "exit"):
				goexit()
			}
			return rec.handle(ctx, ev)
		},
	})
	settled(t, r.Client, 20*time.Second, "g", "outbox.order")
	must(t, c.stop())
	allOnce(t, ids, rec.times())
	list := dead(t, r.Client)
	if len(list) != 16 {
		t.Fatalf("%d dead, want 16", len(list))
	}
	for _, d := range list {
		if want := map[bool]string{
			true:  "panic: no way",
			false: "Goexit",
		}[strings.HasPrefix(d.EventID, "panic")]; !strings.Contains(d.Error, want) || d.Attempts != 2 {
			t.Errorf("%s: %q after %d attempts", d.EventID, d.Error, d.Attempts)
		}
	}
}

// nameless is an error. The text of a nil one panics.
type nameless struct{ text string }

func (e *nameless) Error() string { return e.text }

// A nil pointer in an error is a failed attempt, as a panic is, and ends neither the process nor the worker.
func TestANilPointerAsErrorIsAFailure(t *testing.T) {
	t.Parallel()
	r := testenv.Redis(t)
	var f failing
	f.ids.Store("bad", (*nameless)(nil))
	add(t, r.Client, "outbox.order", event{"bad", "s1", 1})
	ids := fill(t, r.Client, "outbox.order", 50, 10)
	start(t, consumer.Options{Client: r.Client, MaxAttempts: 2, Workers: 1, Handler: f.run})
	settled(t, r.Client, 20*time.Second, "g", "outbox.order")
	allOnce(t, ids, f.times())
	list := dead(t, r.Client)
	if len(list) != 1 || !strings.Contains(list[0].Error, "nil pointer") || list[0].Attempts != 2 {
		t.Errorf("dead: %+v", list)
	}
}

func sample(tb testing.TB, reg *prometheus.Registry, name string) float64 {
	tb.Helper()
	sum, found := find(tb, reg, name)
	if !found {
		tb.Errorf("no metric %s", name)
	}
	return sum
}

// find sums up the series of a metric; found tells whether there is any.
func find(tb testing.TB, reg *prometheus.Registry, name string) (sum float64, found bool) {
	tb.Helper()
	all, err := reg.Gather()
	must(tb, err)
	for _, f := range all {
		if f.GetName() == name {
			found = true
			for _, m := range f.GetMetric() {
				sum += m.GetCounter().GetValue() + m.GetGauge().GetValue()
			}
		}
	}
	return sum, found
}

// An event that was handed to a process and never begun there is not dead, even if only one attempt is allowed: after
// an orderly stop, and after a kill, which leaves it with the delivery count of its read.
func TestWhatWasNeverBegunIsNotDead(t *testing.T) {
	t.Parallel()
	r := testenv.Redis(t)
	ids := fill(t, r.Client, "outbox.order", 20, 20)
	begun, release := make(chan struct{}, len(ids)), make(chan struct{})
	var rec record
	first := start(t, consumer.Options{
		Client: r.Client, MaxAttempts: 1, Workers: 1,
		Handler: func(ctx context.Context, ev consumer.Event) error {
			begun <- struct{}{}
			<-release
			return rec.handle(ctx, ev)
		},
	})
	<-begun
	waitPending(t, r.Client, 20)
	first.cancel()
	close(release)
	must(t, first.stop())
	killed := fill(t, r.Client, "outbox.order", 20, 20)
	must(t, r.Client.XReadGroup(t.Context(), &redis.XReadGroupArgs{
		Group: "g", Consumer: "killed", Streams: []string{"outbox.order", ">"},
	}).Err())
	start(t, consumer.Options{Client: r.Client, MaxAttempts: 1, ClaimIdle: time.Second, Handler: rec.handle})
	settled(t, r.Client, 20*time.Second, "g", "outbox.order")
	testenv.Equal(t, "dead events", len(dead(t, r.Client)), 0)
	allOnce(t, append(ids, killed...), rec.times())
}

// While the dead stream cannot be written, an event that is to go there is not tried again.
func TestADeadStreamThatCannotBeWritten(t *testing.T) {
	t.Parallel()
	r := testenv.Redis(t)
	must(t, r.Client.Set(t.Context(), "dead.outbox.order", "x", 0).Err())
	var f failing
	f.ids.Store("bad", consumer.Permanent(errBoom))
	f.ids.Store("worse", errBoom)
	add(t, r.Client, "outbox.order", event{"bad", "s1", 1})
	add(t, r.Client, "outbox.order", event{"worse", "s2", 2})
	fill(t, r.Client, "outbox.order", 20, 5)
	logs := &syncBuffer{}
	c := create(t, consumer.Options{Client: r.Client, MaxAttempts: 2, Handler: f.run, Logger: logTo(logs)})
	consumer.StallAfter(c, 3*time.Second)
	run(t, c)
	logs.wait(t, "op=dead")
	testenv.Eventually(t, 20*time.Second, func() error {
		return testenv.FailIf(!strings.Contains(c.Stalled(), "WRONGTYPE"), "stalled: %q", c.Stalled())
	})
	must(t, r.Client.Del(t.Context(), "dead.outbox.order").Err())
	settled(t, r.Client, 20*time.Second, "g", "outbox.order")
	for _, d := range dead(t, r.Client) {
		testenv.Equal(t, "error and attempts of "+d.EventID, fmt.Sprint(d.Error, d.Attempts),
			map[string]string{"bad": "boom1", "worse": "boom2"}[d.EventID])
	}
	testenv.Equal(t, "dead events", len(dead(t, r.Client)), 2)
	testenv.Equal(t, "failed attempts", f.tries.Load(), 1+2)
}
