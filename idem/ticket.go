package idem

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"time"
)

// ErrLost means that another attempt owns the key now. The work may still commit: the database arbitrates.
var ErrLost = errors.New("the lease on the idempotency key is lost")

// heartbeats is how often Keep renews a lease, at most: work that takes longer is better taken over.
const heartbeats = 3

// Ticket is the right to do the work of one key. It belongs to one request.
type Ticket struct {
	guard *Guard
	// key is the record's, in is the incarnation of the database that it is of.
	key   Key
	in    string
	fp    Fingerprint
	token int64
}

// Degraded reports that the ticket was given without Redis: others may hold one for the same key at the same time.
func (t *Ticket) Degraded() bool { return t.token == 0 }

// Token returns the fencing token: higher for every later attempt on the key as long as the server's clock is not set
// back; 0 when degraded. A database row may carry it for people; its unique index is what arbitrates.
func (t *Ticket) Token() int64 { return t.token }

// Commit publishes the result of the committed operation, within a second. Call it only if the row is known to be
// committed, whether or not the ticket still owns the lease: it overwrites any pending record. A failure is counted,
// and later attempts then query the database. If the operation was committed in another incarnation than the ticket's,
// Commit releases the key instead.
func (t *Ticket) Commit(ctx context.Context, rec Record) {
	g := t.guard
	elsewhere := rec.Incarnation != "" && rec.Incarnation != t.in
	if g.database != nil && (t.in == "" || elsewhere) {
		t.Abort(ctx)
		return
	}
	rec.Incarnation = ""
	reply, err := g.publish(context.WithoutCancel(ctx), t.key, t.fp.text(), strconv.FormatInt(t.token, 10),
		strconv.Itoa(rec.Status), rec.Ref, rec.Payload, g.recordTTL(ctx).Milliseconds())
	if err == nil && reply[0] != "OK" && reply[0] != "DONE" {
		err = fmt.Errorf("publish: %s", reply[0])
	}
	if err != nil {
		g.metrics.publishFail.Inc()
		if !errors.Is(err, errUnusable) {
			g.log.Warn("result was not published", "err", err)
		}
	}
	g.flights.finish(t.key, func() { g.cache.put(t.key, t.fp.text(), rec) })
}

// Abort releases the key, so that the next attempt need not wait for the lease to end. Call it only if the work
// certainly was not and will not be committed. It is bounded by 500 ms; a failure only costs that wait.
func (t *Ticket) Abort(ctx context.Context) {
	g := t.guard
	if !t.Degraded() {
		_, err := g.eval(context.WithoutCancel(ctx), scriptRelease, t.key, strconv.FormatInt(t.token, 10))
		if err != nil && !errors.Is(err, errUnusable) {
			g.log.Warn("key was not released", "err", err)
		}
	}
	g.flights.finish(t.key, nil)
}

// Heartbeat renews the lease. ErrLost: another attempt has the key. Any other error: Redis did not answer, and the
// lease has not ended.
func (t *Ticket) Heartbeat(ctx context.Context) error {
	if t.Degraded() {
		return nil
	}
	reply, err := t.guard.eval(ctx, scriptHeartbeat, t.key, strconv.FormatInt(t.token, 10),
		t.guard.lease.Milliseconds())
	if err != nil {
		return err
	}
	if reply[0] == "OK" || reply[0] == "GONE" { // GONE: no attempt has the key, and there is nothing to renew
		return nil
	}
	t.guard.metrics.leaseLost.Inc()
	return ErrLost
}

// Keep renews the lease every third of its length, three times at most, until stop is called. The context it returns
// ends with the cause ErrLost when the lease is lost. stop waits for a renewal that is under way.
func (t *Ticket) Keep(ctx context.Context) (kept context.Context, stop func()) {
	kept, cancel := context.WithCancelCause(ctx)
	if t.Degraded() {
		return kept, func() { cancel(nil) }
	}
	// A timer renews: nearly all requests end before it fires, and need no goroutine.
	var (
		mu      sync.Mutex // held during a renewal
		timer   *time.Timer
		beats   int
		stopped bool
		every   = t.guard.lease / 3
	)
	beat := func() {
		mu.Lock()
		defer mu.Unlock()
		if stopped {
			return
		}
		if err := t.Heartbeat(ctx); errors.Is(err, ErrLost) {
			cancel(ErrLost)
			return
		}
		if beats++; beats < heartbeats {
			timer.Reset(every)
		}
	}
	mu.Lock()
	timer = time.AfterFunc(every, beat)
	mu.Unlock()
	return kept, func() {
		cancel(nil)
		mu.Lock()
		defer mu.Unlock()
		stopped = true
		timer.Stop()
	}
}
