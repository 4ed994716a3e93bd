package idem

import (
	"context"
	"math/rand/v2"
	"strings"
	"sync"
	"time"
)

// waiter is a request that waits for another attempt.
type waiter struct {
	g        *Guard
	r        *Request
	deadline time.Time
	// asked: the database was queried. finished: the record was a finished one.
	asked, finished bool
	// waited: time has passed.
	waited bool
}

// wait waits for the attempt that v met and returns when acquiring may succeed, or it sets the decision in v.
//
// A record of another command is suspicious, so wait queries the database at once. It also does so if the
// attempt takes long, because that one may have committed and crashed. Otherwise it queries the database before it
// gives up.
func (w *waiter) wait(ctx context.Context, v *verdict) (decided bool, err error) {
	lease := time.Now().Add(v.leaseLeft)
	if v.finished && !w.finished { // an earlier answer of the database is outdated
		w.finished, w.asked = true, false
	}
	if w.r.Lookup != nil && !w.asked && !v.contested {
		if changed, err := w.until(ctx, lease, patience); changed || err != nil {
			return false, err
		}
	}
	if left := time.Until(w.deadline); w.r.Lookup != nil && (!w.asked || left <= 0) {
		w.asked = true
		if decided, err := w.lookup(ctx, v); decided || err != nil {
			return decided, err
		}
	}
	if time.Until(w.deadline) <= 0 {
		return true, nil // busy
	}
	_, err = w.until(ctx, lease, w.r.Wait)
	return false, err
}

// until waits for a change of the record, the end of the lease, the deadline, or d, whichever is first. changed reports
// whether acquiring may succeed.
func (w *waiter) until(ctx context.Context, lease time.Time, d time.Duration) (changed bool, err error) {
	left := min(time.Until(w.deadline), time.Until(lease), d)
	if left > 0 {
		w.waited = true
		if changed, err = w.g.await(ctx, w.r.Key, left); err != nil {
			return false, err
		}
	}
	return changed || time.Until(lease) <= 0, nil
}

// lookup queries the database and puts its decision into v.
func (w *waiter) lookup(ctx context.Context, v *verdict) (decided bool, err error) {
	f, err := w.ask(ctx)
	if err != nil || !f.Exists {
		return false, err
	}
	if !f.Matches {
		*v = verdict{Decision: Decision{Outcome: Mismatch}, outcome: OutcomeMismatch}
		return true, nil
	}
	t := &Ticket{guard: w.g, key: w.r.Key, in: w.r.in, fp: w.r.Fingerprint}
	t.Commit(ctx, f.Record)
	*v = verdict{Decision: Decision{Outcome: Replay, Record: f.Record}, outcome: OutcomeReplayPG}
	return true, nil
}

// lookupTimeout bounds one query. All waiters share the query, so no single client's end cancels it.
const lookupTimeout = 3 * time.Second

// ask runs the request's Lookup, or waits for that of another request for the same operation.
func (w *waiter) ask(ctx context.Context) (Found, error) {
	v, err, _ := w.g.lookups.Do(string(w.r.Key[:])+string(w.r.Fingerprint[:]), func() (any, error) {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), lookupTimeout)
		defer cancel()
		return w.r.Lookup(ctx)
	})
	f, _ := v.(Found)
	return f, err
}

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
