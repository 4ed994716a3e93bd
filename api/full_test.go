//go:build full

package api

import (
	"context"
	"fmt"
	"net/http"
	"sort"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"posthaste/idem"
)

// cost is one side of a comparison, such as the same handler with or without the guard. next returns a request.
type cost struct {
	next  func() (url, body, key string)
	done  int64
	spent time.Duration
	each  []time.Duration
}

// ordering is the cost of POST /orders.
func (w *world) ordering() *cost {
	return &cost{next: func() (url, body, key string) { return w.url + "/orders", orderJSON(1), newKey() }}
}

func (c *cost) round(t *testing.T, workers int, d time.Duration) {
	t.Helper()
	var done atomic.Int64
	var mu sync.Mutex
	start := time.Now()
	var wg sync.WaitGroup
	for range workers {
		wg.Go(func() {
			var each []time.Duration
			for time.Since(start) < d {
				url, body, key := c.next()
				begin := time.Now()
				r, err := send(context.Background(), http.MethodPost, url, body, idem.KeyHeader, key)
				if err != nil || r.status/100 != 2 {
					t.Errorf("%v %v", r, err)
					return
				}
				each = append(each, time.Since(begin))
				done.Add(1)
			}
			mu.Lock()
			c.each = append(c.each, each...)
			mu.Unlock()
		})
	}
	wg.Wait()
	c.done += done.Load()
	c.spent += time.Since(start)
}

func (c *cost) rate() float64 { return float64(c.done) / c.spent.Seconds() }

func (c *cost) p50() time.Duration {
	sort.Slice(c.each, func(i, j int) bool { return c.each[i] < c.each[j] })
	return c.each[len(c.each)/2]
}

// attempts is how often a bound on time is tried. Other work on the machine, which may last a minute, only makes a
// result worse.
const attempts = 10

// The guard's cost against the handler without it, measured in alternating rounds of one run.
func TestFullGuardCost(t *testing.T) {
	w := newWorld(t, impatient(t), func(o *Options) { o.Logger = nil })
	bare := w.sibling(func(o *Options) { o.Redis, o.Logger = nil, nil })
	compare := func(workers, rounds int, d time.Duration) (with, without *cost) {
		w.ordering().round(t, workers, 300*time.Millisecond)
		bare.ordering().round(t, workers, 300*time.Millisecond)
		with, without = w.ordering(), bare.ordering()
		for range rounds {
			with.round(t, workers, d)
			without.round(t, workers, d)
		}
		return with, without
	}
	// Without the guard, too, orders are inserted in batches. The guard adds two exchanges with Redis; the bound was
	// 0.75 before the batches made orders a third cheaper.
	const least = 0.55
	best := 0.0
	for n := 0; n < attempts && best < least; n++ {
		with, without := compare(32, 6, 2*time.Second)
		ratio := with.rate() / without.rate()
		fmt.Printf("POST /orders, 32 clients: guarded %.0f/s, bare %.0f/s, ratio %.2f\n", with.rate(), without.rate(),
			ratio)
		best = max(best, ratio)
	}
	if best < least {
		t.Errorf("the guarded handler reaches %.2f of the bare one, want %.2f", best, least)
	}
	lowest := time.Hour
	for n := 0; n < attempts && lowest > 500*time.Microsecond; n++ {
		with, without := compare(1, 6, time.Second)
		over := with.p50() - without.p50()
		fmt.Printf("POST /orders, 1 client: p50 guarded %v, bare %v, overhead %v\n", with.p50(), without.p50(), over)
		lowest = min(lowest, over)
	}
	if lowest > 500*time.Microsecond {
		t.Errorf("the guard costs %v at low load, want 0.5 ms at most", lowest)
	}
}

// The throughput of orders while Redis is down, and while it hangs: Postgres alone guards.
func TestFullDegradedThroughput(t *testing.T) {
	w := newWorld(t, impatient(t), func(o *Options) { o.Logger = nil })
	measure := func(name string) {
		c := w.ordering()
		c.round(t, 32, 4*time.Second)
		p50 := c.p50()
		slowest := c.each[len(c.each)-1]
		fmt.Printf("POST /orders, 32 clients, Redis %s: %.0f/s, p50 %v, slowest %v\n", name, c.rate(), p50, slowest)
		if slowest > 8*time.Second { // the bounds of one request add up to less
			t.Errorf("Redis %s: a request took %v", name, slowest)
		}
	}
	measure("up")
	must(t, w.redis.Signal(syscall.SIGSTOP))
	measure("hanging")
	must(t, w.redis.Signal(syscall.SIGCONT))
	must(t, w.redis.Kill())
	measure("gone")
	w.checkInvariants(w.rows())
}
