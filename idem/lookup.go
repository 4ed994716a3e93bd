package idem

import (
	"context"
	"sync"
	"time"
)

// waiter is a request that waits for another attempt.
type waiter struct {
	g        *Guard
	r        *Request
	deadline time.Time
	// asked: the database was queried.
	asked bool
	// waited: time has passed.
	waited bool
}

// wait waits for the attempt that v met and returns when acquiring may succeed, or it sets the decision in v.
//
// A pending record of another command is suspicious, so wait queries the database at once. It also does so if the
// attempt takes long, because that one may have committed and crashed. Otherwise it queries the database before it
// gives up.
func (w *waiter) wait(ctx context.Context, v *verdict) (decided bool, err error) {
	lease := time.Now().Add(v.leaseLeft)
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
	f, err := w.g.lookups.ask(ctx, w.r)
	if err != nil || !f.Exists {
		return false, err
	}
	if !f.Matches {
		*v = verdict{Decision: Decision{Outcome: Mismatch}, outcome: OutcomeMismatch}
		return true, nil
	}
	t := &Ticket{guard: w.g, key: w.r.Key, in: w.r.in, fp: w.r.Fingerprint}
	t.Commit(ctx, f.Record)
	*v = verdict{Decision: Decision{Outcome: Replay, Record: f.Record, FromStore: true}, outcome: OutcomeReplayPG}
	return true, nil
}

// lookupTimeout bounds one query. All waiters share the query, so no single client's end cancels it.
const lookupTimeout = 3 * time.Second

// lookups are the running queries. Concurrent requests for one key share a query.
type lookups struct {
	mu sync.Mutex
	m  map[question]*lookup
}

type question struct {
	key Key
	fp  Fingerprint
}

type lookup struct {
	// done is closed when found and err are set.
	done  chan struct{}
	found Found
	err   error
}

// ask runs a request's Lookup, or joins one that is running. Its error is the lookup's or that of ctx.
func (l *lookups) ask(ctx context.Context, r *Request) (Found, error) {
	q := question{r.Key, r.Fingerprint}
	l.mu.Lock()
	if c := l.m[q]; c != nil {
		l.mu.Unlock()
		select {
		case <-c.done:
			return c.found, c.err
		case <-ctx.Done():
			return Found{}, ctx.Err()
		}
	}
	if l.m == nil {
		l.m = make(map[question]*lookup)
	}
	c := &lookup{done: make(chan struct{}), err: context.Canceled} // the result if Lookup panics
	l.m[q] = c
	l.mu.Unlock()
	defer func() {
		l.mu.Lock()
		delete(l.m, q)
		l.mu.Unlock()
		close(c.done)
	}()
	shared, cancel := context.WithTimeout(context.WithoutCancel(ctx), lookupTimeout)
	defer cancel()
	c.found, c.err = r.Lookup(shared)
	return c.found, c.err
}
