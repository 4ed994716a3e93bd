package idem

import (
	"context"
	"math/rand/v2"
	"strings"
	"sync"
	"time"
)

// Bounds of the pause between two polls of a pending record.
const (
	pollFirst = 25 * time.Millisecond
	pollLast  = 200 * time.Millisecond
)

// flights are the keys that requests of this process wait for. One waiter per key polls Redis for all, and an attempt
// of this process ends their wait directly.
type flights struct {
	mu sync.Mutex
	m  map[Key]*flight
}

type flight struct {
	// done is closed when the record has changed.
	done chan struct{}
	// lead has room for one: the request that fills it polls for all, and empties it when it leaves.
	lead chan struct{}
	// pause is used by the leader only.
	pause   time.Duration
	waiters int
}

func (f *flights) join(k Key) *flight {
	f.mu.Lock()
	defer f.mu.Unlock()
	fl := f.m[k]
	if fl == nil {
		fl = &flight{done: make(chan struct{}), lead: make(chan struct{}, 1), pause: pollFirst}
		f.m[k] = fl
	}
	fl.waiters++
	return fl
}

func (f *flights) leave(k Key, fl *flight) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if fl.waiters--; fl.waiters == 0 && f.m[k] == fl {
		delete(f.m, k)
	}
}

// finish ends the wait of all waiters for k. If there are any, it calls before first.
func (f *flights) finish(k Key, before func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if fl := f.m[k]; fl != nil {
		if before != nil {
			before()
		}
		delete(f.m, k)
		close(fl.done)
	}
}

// await returns when the record of k has changed or d has passed; its error is that of ctx.
func (g *Guard) await(ctx context.Context, k Key, d time.Duration) (changed bool, err error) {
	fl := g.flights.join(k)
	defer g.flights.leave(k, fl)
	bounded, cancel := context.WithTimeout(ctx, d)
	defer cancel()
	select {
	case <-fl.done:
		return true, nil
	case <-bounded.Done():
		return false, ctx.Err()
	case fl.lead <- struct{}{}:
	}
	defer func() { <-fl.lead }()
	for {
		select {
		case <-fl.done:
			return true, nil
		case <-bounded.Done():
			return false, ctx.Err()
		case <-time.After(fl.pause/2 + rand.N(fl.pause/2)): //nolint:gosec // spreads pauses, no secret
		}
		if !g.pending(ctx, k) {
			g.flights.finish(k, nil)
			return true, nil
		}
		fl.pause = min(fl.pause*3/2, pollLast)
	}
}

// pending reports whether the record of k is still that of an unfinished attempt. A finished record goes into the
// cache, where all waiters find it.
func (g *Guard) pending(ctx context.Context, k Key) bool {
	n, err := g.nodeOf(ctx, k)
	if err != nil {
		return false
	}
	s, err := call(ctx, n, g.timeout, func(ctx context.Context) (string, error) {
		return g.client.Get(ctx, k.String()).Result()
	})
	if err != nil {
		return false // the record or Redis is gone: the next acquisition finds out which
	}
	if strings.HasPrefix(s, "P") {
		return true
	}
	if rec, fp, err := parseRecord(s); err == nil {
		g.cache.put(k, fp, rec)
	}
	return false
}
