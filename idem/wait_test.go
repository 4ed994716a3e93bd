package idem

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"posthaste/internal/lab/testenv"
)

func TestWaitersGetTheResultOfAnotherProcess(t *testing.T) {
	t.Parallel()
	t.Logf("the last was released after %v", manyWaiters(t, 200))
}

// manyWaiters has n requests wait for one slow operation of another process. It returns how long after the publication
// the last was released.
func manyWaiters(t *testing.T, n int) (slowest time.Duration) {
	t.Helper()
	r := testenv.Redis(t)
	owner, g := guardOn(t, r.URL()), guardOn(t, r.URL())
	d := begin(t, owner, request("k", "a"))
	got := make([]Decision, n)
	released := make([]time.Time, n)
	const answering = 100 * time.Millisecond // a slow database
	var asked atomic.Int64
	var wg sync.WaitGroup
	begun := time.Now()
	for i := range n {
		wg.Go(func() {
			req := request("k", "a")
			req.Wait = 20 * time.Second
			req.Lookup = func(ctx context.Context) (Found, error) {
				asked.Add(1)
				select {
				case <-ctx.Done():
					return Found{}, ctx.Err()
				case <-time.After(answering):
					return Found{}, nil
				}
			}
			got[i] = begin(t, g, req)
			released[i] = time.Now()
		})
	}
	testenv.Becomes(t, "waiters", n, func() int { return waiting(g, d.Ticket.key) })
	before := calls(t, r, "get")
	start := time.Now()
	testenv.Eventually(t, 20*time.Second, func() error {
		return testenv.FailIf(time.Since(start) < 700*time.Millisecond || asked.Load() == 0,
			"polls are being counted, and the database is asked")
	})
	// One poller for all of them: at least every 100 to 200 ms at the end, a few more at the start.
	if polls, took := calls(t, r, "get")-before, time.Since(start); polls > 20+int(took/(pollLast/2)) {
		t.Errorf("%d polls in %v for %d waiters", polls, took, n)
	}
	// A waiter joins a running query: two never overlap, however long all waiters take to arrive.
	if n, most := asked.Load(), 1+int64(time.Since(begun)/answering); n > most {
		t.Errorf("the database was asked %d times for all of them, want %d at most", n, most)
	}
	published := time.Now()
	d.Ticket.Commit(t.Context(), result)
	wg.Wait()
	for i := range n {
		if got[i].Outcome != Replay || got[i].Record != result {
			t.Fatalf("waiter %d got %+v", i, got[i])
		}
		slowest = max(slowest, released[i].Sub(published))
	}
	waited := testutil.ToFloat64(g.metrics.requests.WithLabelValues("/t", OutcomeWaited))
	testenv.Equal(t, "counted as waited", waited, float64(n))
	return slowest
}

func TestWaitersOfTheSameProcessAreWokenAtOnce(t *testing.T) {
	t.Parallel()
	r := testenv.Redis(t)
	g := guardOn(t, r.URL())
	d := begin(t, g, request("k", "a"))
	done := make(chan Decision, 1)
	go func() {
		req := request("k", "a")
		req.Wait = 20 * time.Second
		done <- begin(t, g, req)
	}()
	testenv.Becomes(t, "waiters", 1, func() int { return waiting(g, d.Ticket.key) })
	d.Ticket.Abort(t.Context())
	select {
	case d := <-done:
		wantOutcome(t, d, Proceed) // released by the abort, it does the work
	case <-time.After(20 * time.Second):
		t.Fatal("still waiting")
	}
}

func TestWaitEndsWithTheLease(t *testing.T) {
	t.Parallel()
	r := testenv.Redis(t)
	g := guardOn(t, r.URL(), func(o *Options) { o.Lease = 200 * time.Millisecond })
	begin(t, g, request("k", "a"))
	req := request("k", "a")
	req.Wait = 20 * time.Second
	start := time.Now()
	d := begin(t, g, req)
	wantOutcome(t, d, Proceed)
	if took := time.Since(start); took > req.Wait/2 {
		t.Errorf("took over after %v", took)
	}
}

func TestWaitEndsWithTheClient(t *testing.T) {
	t.Parallel()
	r := testenv.Redis(t)
	g := guardOn(t, r.URL())
	k := begin(t, g, request("k", "a")).Ticket.key
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		req := request("k", "a")
		req.Wait = 20 * time.Second
		_, err := g.Begin(ctx, req)
		done <- err
	}()
	testenv.Becomes(t, "waiters", 1, func() int { return waiting(g, k) })
	cancel()
	testenv.ErrorIs(t, "Begin", <-done, context.Canceled)
	testenv.Equal(t, "waiters left behind", waiting(g, k), 0)
}

func TestTheDatabaseDecidesAboutAPendingRecordOfAnotherCommand(t *testing.T) {
	t.Parallel()
	r := testenv.Redis(t)
	g := guardOn(t, r.URL())
	for name, c := range map[string]struct {
		found Found
		want  Outcome
	}{
		"ours":    {Found{Exists: true, Matches: true, Record: result}, Replay},
		"another": {Found{Exists: true}, Mismatch},
		"none":    {Found{}, Busy},
	} {
		begin(t, g, request(name, "the thief"))
		req := request(name, "a")
		req.Lookup = func(context.Context) (Found, error) { return c.found, nil }
		d := begin(t, g, req)
		testenv.Equal(t, name, d.Outcome, c.want)
		if c.want == Replay {
			hasPrefix(t, rawRecord(t, r.Client, req.Key), "C|"+req.Fingerprint.text())
		}
	}
	req := request("none", "b")
	req.Lookup = func(context.Context) (Found, error) { return Found{}, errors.New("gone") }
	if _, err := g.Begin(t.Context(), req); err == nil {
		t.Error("an error of the lookup was swallowed")
	}
}

func waiting(g *Guard, k Key) int {
	g.flights.mu.Lock()
	defer g.flights.mu.Unlock()
	if f := g.flights.m[k]; f != nil {
		return f.waiters
	}
	return 0
}

// An attempt at another command that never ended keeps its key for its lease, and not as long as its record stays.
func TestADeadAttemptOfAnotherCommandIsTakenOver(t *testing.T) {
	t.Parallel()
	r := testenv.Redis(t)
	g := guardOn(t, r.URL(), func(o *Options) { o.Lease = 50 * time.Millisecond })
	begin(t, g, request("k", "a"))
	req := request("k", "b")
	req.Lookup = func(context.Context) (Found, error) { return Found{}, nil }
	testenv.Eventually(t, 20*time.Second, func() error {
		d := begin(t, g, req)
		return testenv.FailIf(d.Outcome != Proceed, "outcome %d", d.Outcome)
	})
}
