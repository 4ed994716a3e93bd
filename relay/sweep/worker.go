package sweep

import (
	"context"
	crand "crypto/rand"
	"errors"
	"math/rand/v2"
	"slices"
	"sync/atomic"
	"time"

	"posthaste/internal/pause"
	"posthaste/outbox"
)

// worker is one connection that sweeps. It belongs to one goroutine.
type worker struct {
	s     *Sweeper
	scope Scope
	// page ends a moment after the context of the worker, so that a page which has begun is completed.
	page context.Context //nolint:containedctx // as long as the worker
	// conn has no claim between two calls of sweep. It is nil after a failure.
	conn  Conn
	nonce outbox.Nonce
	// passes are the passes that the worker has begun and not ended.
	passes [outbox.Partitions]*outbox.PartPass
	// settled are the newest batches of each part that are settled, by stream; untold those of them that no report to
	// the gates has yet.
	settled [outbox.Partitions]map[string]outbox.Mark
	untold  []outbox.Mark
	// sent are the numbers of events of each part that are published, or dead, in front of their mark: a blocked stream
	// keeps it from moving.
	sent  [outbox.Partitions]map[int64]bool
	last  int // the part claimed last
	idle  pause.Backoff
	fails pause.Backoff
}

func newWorker(page context.Context, s *Sweeper, scope Scope) *worker {
	w := &worker{
		s: s, scope: scope, page: page, idle: pause.Backoff{First: idleFirst, Most: idleMost},
		fails: pause.Backoff{First: failFirst, Most: failMost},
		last:  rand.N(outbox.Partitions), //nolint:gosec // no secret
	}
	for part := range w.settled {
		w.settled[part], w.sent[part] = map[string]outbox.Mark{}, map[int64]bool{}
	}
	return w
}

// stream is where an event goes.
func (w *worker) stream(e *outbox.Record) string {
	return w.scope.Layout.Stream(e.AggregateType, e.AggregateID)
}

func (w *worker) close() {
	if w.conn != nil {
		w.conn.Close()
		w.conn = nil
	}
}

// connect takes a connection that an earlier worker has left, or opens one.
func (w *worker) connect() error {
	if w.conn != nil && !w.conn.Closed() {
		return nil
	}
	w.close()
	conn, err := w.s.open(w.page)
	if err != nil {
		return err
	}
	w.conn = conn
	// The server may have lost the snapshot of a pass that no mark has, and numbers of claims.
	w.passes = [outbox.Partitions]*outbox.PartPass{}
	_, _ = crand.Read(w.nonce[:]) // never fails
	for part := range w.settled {
		clear(w.settled[part])
		clear(w.sent[part])
	}
	return nil
}

// failed waits after a failure and returns the error if it is final. It closes the session, whose state is unknown.
func (w *worker) failed(ctx context.Context, err error) error {
	w.close()
	if ctx.Err() != nil {
		return nil //nolint:nilerr // stopping
	}
	w.scope.Outcome(err)
	if end := w.final(ctx, err); end != nil {
		return end
	}
	w.s.log.Debug("a page is polled again", "err", err)
	w.fails.Wait(ctx)
	return nil
}

// final returns the error that ends the scope, or nil if err only ends the claim.
func (w *worker) final(ctx context.Context, err error) error {
	var fenced *outbox.FencedError
	var foreign *outbox.ForeignError
	switch {
	case errors.Is(err, outbox.ErrGap), errors.Is(err, outbox.ErrSuperseded), errors.As(err, &foreign):
		return err
	case !errors.As(err, &fenced):
		return nil
	case fenced.Epoch != w.scope.Owner.Epoch:
		return err
	}
	// A fence of our own epoch is a newer claim's, or that of another holder of the same epoch (a restored or copied
	// database). The gate tells them apart.
	ctx, cancel := context.WithTimeout(ctx, publishTimeout)
	defer cancel()
	err = w.s.o.Sink.Check(ctx, w.scope.Owner, []string{fenced.Stream})
	if errors.Is(err, outbox.ErrGap) || errors.As(err, &foreign) || errors.As(err, &fenced) {
		return err
	}
	return nil
}

// round finds a part with rows that it can publish, and sweeps it for a turn. If there is no such part, it waits. It
// starts after the part swept last, so a part that fails delays the others at most once per cycle. With a random choice
// it could delay them repeatedly.
func (w *worker) round(ctx context.Context) error {
	err := w.connect()
	var parts []int
	if err == nil {
		parts, err = w.conn.Partitions(w.page)
	}
	if err != nil {
		return w.failed(ctx, err)
	}
	if len(parts) == 0 {
		w.scope.Outcome(nil)
	}
	next := max(slices.IndexFunc(parts, func(part int) bool { return part > w.last }), 0)
	parts = slices.Concat(parts[next:], parts[:next])
	for len(parts) > 0 {
		claimed, progress, err := w.sweep(ctx, parts, nil)
		if err != nil {
			return w.failed(ctx, err)
		}
		if progress {
			w.idle.Reset()
			return nil
		}
		if !claimed {
			break
		}
		parts = parts[1+slices.Index(parts, w.last):]
	}
	w.idle.Wait(ctx)
	return nil
}

// drain takes parts, and gives back those that have not reached the pass, until left are none.
func (w *worker) drain(ctx context.Context, parts chan int, left *atomic.Int64, pass outbox.Pass) error {
	for ctx.Err() == nil {
		var part int
		var some bool
		select {
		case part, some = <-parts:
		case <-ctx.Done():
			continue
		}
		if !some {
			return nil
		}
		progress, done, err := w.reach(ctx, part, pass)
		if !done {
			parts <- part
		} else if left.Add(-1) == 0 {
			close(parts)
		}
		if err != nil {
			err = w.failed(ctx, err)
		} else if progress || done {
			w.idle.Reset()
		} else {
			w.idle.Wait(ctx)
		}
		if err != nil {
			return err
		}
	}
	return ctx.Err()
}

// reach sweeps a part for one turn unless the part has already reached the pass (done). The next turn checks again.
// There is no progress if another relay holds the part, or a stream is blocked.
func (w *worker) reach(ctx context.Context, part int, pass outbox.Pass) (progress, done bool, err error) {
	if err = w.connect(); err == nil {
		done, err = w.conn.Reached(w.page, part, pass)
	}
	if err == nil && !done {
		_, progress, err = w.sweep(ctx, []int{part}, &pass)
	}
	return progress, done, err
}

// sweep claims the first of parts that is free, and sweeps it for a turn, with a claim for each page. Other workers may
// sweep the part between two of its pages. A new pass covers the rows that within sees, if it is not nil. progress is
// false if a blocked stream kept the part from being settled, and nothing was published.
func (w *worker) sweep(ctx context.Context, parts []int, within *outbox.Pass) (claimed, progress bool, err error) {
	defer w.tell(ctx)
	for n, began := 0, time.Now(); n < turn && time.Since(began) < turnTime && ctx.Err() == nil; n++ {
		part, number, ok, err := w.conn.Claim(w.page, parts, w.scope.Owner)
		if err != nil || !ok {
			return claimed, progress, err
		}
		w.last, parts, claimed = part, []int{part}, true
		c := &claim{
			w: w, part: part, lane: outbox.Lane{Part: part, Claim: number, Nonce: w.nonce},
			lanes: map[string]outbox.LanePublisher{}, settled: w.settled[part],
			held: map[[2]string]*outbox.Record{}, within: within, began: time.Now(),
		}
		if err := w.scope.Refresh(w.page); err != nil { // another relay may have parked rows since the last page
			return true, false, err
		}
		sent := len(w.sent[part])
		more, err := c.run(w.page)
		if outbox.Alone(err) { // nothing is wrong with the session, or with other streams
			w.scope.Outcome(err)
		} else if err != nil {
			return true, false, err
		}
		progress = progress || err == nil || len(w.sent[part]) > sent
		w.fails.Reset()
		if !more {
			break
		}
	}
	return claimed, progress, nil
}

// tell reports settled batches to the gates, so that another worker's claim finds nothing in doubt, and streams can be
// trimmed. The next call repeats a report that failed.
func (w *worker) tell(ctx context.Context) {
	if len(w.untold) == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), publishTimeout)
	defer cancel()
	if w.s.o.Sink.Settled(ctx, w.scope.Owner, w.untold) == nil {
		w.untold = nil
	}
}
