package consumer_test

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/go-redis/v9"

	"posthaste/consumer"
	"posthaste/internal/lab/testenv"
)

// With eight workers and a handler that fails now and then, the events of each subject run one at a time and in order,
// no event is done before its predecessor, and subjects run concurrently.
func TestOrderPerSubjectWithEightWorkers(t *testing.T) {
	t.Parallel()
	r := testenv.Redis(t)
	n := scale(50_000, 5000)
	fill(t, r.Client, "outbox.order", n, 40)
	var mu sync.Mutex
	running := map[string]bool{}
	done := map[string][]int{}
	beside := make(chan struct{}) // closed once two subjects run at the same time, which the first event waits for
	var once sync.Once
	start(t, consumer.Options{
		Client: r.Client, Workers: 8,
		Backoff: func(int) time.Duration { return time.Millisecond },
		Handler: func(_ context.Context, ev consumer.Event) error {
			num := number(t, ev)
			mu.Lock()
			defer mu.Unlock()
			if running[ev.Subject] {
				t.Errorf("two events of subject %s at once", ev.Subject)
			}
			running[ev.Subject] = true
			if len(running) > 1 {
				once.Do(func() { close(beside) })
			}
			mu.Unlock()
			if num == 0 {
				<-beside
			}
			mu.Lock()
			delete(running, ev.Subject)
			if num%20 == 0 && ev.Attempt < 3 {
				return errBoom
			}
			done[ev.Subject] = append(done[ev.Subject], num)
			return nil
		},
	})
	settled(t, r.Client, 60*time.Second, "g", "outbox.order")
	mu.Lock()
	defer mu.Unlock()
	ascending(t, done, n)
	for s, ns := range done {
		testenv.Equal(t, "events of subject "+s, len(ns), n/40)
	}
}

// A subject with far more failing events than the window holds does not keep the others from running; each of its
// events is tried its times, in order, and ends in the dead stream.
func TestPoisonSubjectIsolatesItself(t *testing.T) {
	t.Parallel()
	r := testenv.Redis(t)
	const bad, good = 300, 2000
	for i := range bad {
		add(t, r.Client, "outbox.order", event{fmt.Sprintf("bad-%d", i), "poison", i})
	}
	fill(t, r.Client, "outbox.order", good, 50)
	var rec record
	release := make(chan struct{})
	var tries atomic.Int64
	start(t, consumer.Options{
		Client: r.Client, Window: 64, MaxAttempts: 3,
		Backoff: func(int) time.Duration {
			select {
			case <-release:
				return 0
			default:
				return time.Hour
			}
		},
		Handler: func(ctx context.Context, ev consumer.Event) error {
			if ev.Subject == "poison" {
				tries.Add(1)
				return errBoom
			}
			return rec.handle(ctx, ev)
		},
	})
	eventuallyRan(t, &rec, 20*time.Second, good)
	testenv.Equal(t, "attempts of the poison subject while its first event waits", tries.Load(), 1)
	// Everything that is not poison is acknowledged; every poison event still pending, none of them passed over.
	pending := func() int64 { return r.Client.XPending(t.Context(), "outbox.order", "g").Val().Count }
	testenv.Becomes(t, "pending", bad, pending)
	close(release)
}

// Entries taken over from another consumer go before the later ones of their subject that wait here already.
func TestClaimedEntriesGoToTheirPlace(t *testing.T) {
	t.Parallel()
	r := testenv.Redis(t)
	ctx := t.Context()
	must(t, r.Client.XGroupCreateMkStream(ctx, "s", "g", "0").Err())
	for i := range 3 {
		add(t, r.Client, "s", event{strconv.Itoa(i), "k", i})
	}
	// A consumer that is gone has 0 and 1; an event of the subject blocks the consumer under test.
	res, err := r.Client.XReadGroup(ctx, &redis.XReadGroupArgs{
		Group: "g", Consumer: "gone", Streams: []string{"s", ">"}, Count: 2,
	}).Result()
	if err != nil || len(res[0].Messages) != 2 {
		t.Fatalf("%v, %v", res, err)
	}
	add(t, r.Client, "s", event{"3", "k", 3})
	begun, first := make(chan struct{}), make(chan struct{})
	var rec record
	reg := prometheus.NewRegistry()
	start(t, consumer.Options{
		Client: r.Client, Streams: []string{"s"}, ClaimIdle: 6 * time.Second, Registerer: reg, // it looks every 2 s
		Handler: func(ctx context.Context, ev consumer.Event) error {
			if ev.ID == "2" {
				close(begun)
				<-first
			}
			return rec.handle(ctx, ev)
		},
	})
	<-begun
	// Only now have the others been idle for long: 2 runs, and 3 waits.
	long := []any{
		"XCLAIM", "s", "g", "gone", 0, res[0].Messages[0].ID, res[0].Messages[1].ID, "IDLE",
		time.Hour.Milliseconds(), "JUSTID",
	}
	must(t, r.Client.Do(ctx, long...).Err())
	testenv.Eventually(t, 20*time.Second, func() error {
		// Not what Redis says: the entries have to have arrived, too.
		n := sample(t, reg, "outbox_consumer_claimed_total")
		return testenv.FailIf(n < 2, "%v entries are taken over", n)
	})
	close(first)
	settled(t, r.Client, 20*time.Second, "g", "s")
	var got []string
	for _, ev := range rec.list() {
		got = append(got, fmt.Sprintf("%s/%d", ev.ID, ev.Attempt))
	}
	// 2 ran before anything could be known of 0 and 1; these go before 3, and count as tried.
	testenv.Equal(t, "order and attempts", fmt.Sprint(got), "[2/1 0/2 1/2 3/1]")
}

// Events that wait for long, each of a subject of its own, take more than half of the window. The rest is used for new
// entries and for those that another consumer has left behind.
func TestHalfAWindowIsEnough(t *testing.T) {
	t.Parallel()
	r := testenv.Redis(t)
	var ran atomic.Int64
	start(t, consumer.Options{
		Client: r.Client, ClaimIdle: time.Second, Window: 200,
		Backoff: func(int) time.Duration { return time.Hour },
		Handler: func(_ context.Context, ev consumer.Event) error {
			if ev.Subject == "other" {
				ran.Add(1)
			} else if number(t, ev) < 0 {
				return consumer.Unavailable(errBoom)
			}
			return nil
		},
	})
	fill(t, r.Client, "outbox.order", 3000, 50) // the reads are large now
	settled(t, r.Client, 20*time.Second, "g", "outbox.order")
	const waiting = 130
	for i := range waiting {
		add(t, r.Client, "outbox.order", event{uuid.NewString(), fmt.Sprintf("w%d", i), -1})
	}
	waitPending(t, r.Client, waiting)
	id := add(t, r.Client, "outbox.order", event{uuid.NewString(), "other", 1})
	testenv.Becomes(t, "runs", 1, ran.Load)
	pending := func() int64 { return r.Client.XPending(t.Context(), "outbox.order", "g").Val().Count }
	testenv.Becomes(t, "entries that wait", waiting, pending) // when it is acknowledged
	left := []any{"XCLAIM", "outbox.order", "g", "dead", 0, id, "IDLE", time.Hour.Milliseconds(), "FORCE", "JUSTID"}
	must(t, r.Client.Do(t.Context(), left...).Err())
	testenv.Becomes(t, "runs", 2, ran.Load)
}

// Events that wait for long, each of a subject of its own, are more than the window holds. Other events run.
func TestMoreSubjectsWaitThanTheWindowHolds(t *testing.T) {
	t.Parallel()
	r := testenv.Redis(t)
	var available atomic.Bool
	var rec record
	start(t, consumer.Options{
		Client: r.Client, ClaimIdle: time.Second, Window: 64,
		Backoff: func(int) time.Duration {
			if available.Load() {
				return 0
			}
			return 3 * time.Second
		},
		Handler: func(ctx context.Context, ev consumer.Event) error {
			if strings.HasPrefix(ev.Subject, "w") && !available.Load() {
				return consumer.Unavailable(errBoom)
			}
			return rec.handle(ctx, ev)
		},
	})
	var ids []string
	for i := range 200 {
		ids = append(ids, uuid.NewString())
		add(t, r.Client, "outbox.order", event{ids[i], fmt.Sprintf("w%d", i), i})
	}
	good := fill(t, r.Client, "outbox.order", 500, 50)
	eventuallyRan(t, &rec, 30*time.Second, len(good))
	available.Store(true)
	settled(t, r.Client, 20*time.Second, "g", "outbox.order")
	allOnce(t, append(ids, good...), rec.times())
}
