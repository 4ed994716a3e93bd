package idem

import (
	"context"
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
