package sql

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"posthaste/internal/batch"
	"posthaste/outbox"
)

const (
	// groupMost bounds the orders that are inserted together.
	groupMost = 64
	// groupHolds is how long a running insert delays the next group: somewhat longer than a commit takes on a healthy
	// server. After that, for example because of a lock or a slow disk, the next group uses another connection.
	groupHolds = 5 * time.Millisecond
	// aloneWithin is how long after its arrival an order may still be retried without its group. Later its client gets
	// an error, because it has waited long enough.
	aloneWithin = 2500 * time.Millisecond
)

// Placer places orders as PlaceOrder does. An order that arrives alone is inserted at once. Orders that arrive during
// an insert wait for it and are then inserted together in one transaction, because a commit costs more than an order.
// It is safe for concurrent use.
type Placer struct {
	pool *Pool
	// holds, turn and alone are groupHolds, orderAcquireTimeout and aloneWithin; tests change them.
	holds, turn, alone time.Duration

	// queue has one flight at a time: a group that waits for a connection, or has begun a moment ago. Concurrent
	// attempts to pay one order have the same id. They are inserted one after the other, so that only one of them
	// places the order and its event.
	queue batch.Queue[placement]
}

// NewPlacer returns a Placer that uses the connections of pool, which was made from OrderPoolConfig. It does no I/O.
func NewPlacer(pool *Pool) *Placer {
	w := &Placer{pool: pool, holds: groupHolds, turn: orderAcquireTimeout, alone: aloneWithin}
	w.queue.Send, w.queue.Flights, w.queue.Most = w.place, 1, groupMost
	w.queue.Apart = func(a, b *placement) bool { return a.id == b.id }
	return w
}

// Place inserts o and its event e in one transaction, which may include orders of other calls. Results and errors are
// those of PlaceOrder, but it may take 7.5 s. If the server refuses a group, each of its orders is retried alone, so an
// order that cannot be written does not block others. The whole group waits for its connection and for each lock that
// one of its orders needs.
func (w *Placer) Place(ctx context.Context, o *Order, e *outbox.Event) (placed bool, err error) {
	p, err := newPlacement(o, e)
	if err != nil {
		return false, err
	}
	arrived := time.Now()
	p.ctx, p.done = ctx, make(chan struct{})
	if err := w.wait(ctx, p); err != nil {
		return false, err
	}
	left := w.alone - time.Since(arrived)
	if !p.alone || left <= 0 {
		return p.result(), p.err
	}
	return insertAlone(ctx, w.pool, left, p)
}

// wait waits until p is done. Its outcome is unknown only if it was sent, and an order whose caller has given up is not
// sent.
func (w *Placer) wait(ctx context.Context, p *placement) error {
	turn, cancel := context.WithTimeout(ctx, w.turn)
	defer cancel()
	if !w.queue.Do(turn, p, p.done) {
		return fmt.Errorf("insert order %s: get a connection: %w", p.id, turn.Err())
	}
	select {
	case <-p.done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("%w: insert order %s: %w", ErrCommitUnknown, p.id, ctx.Err())
	}
}

// place inserts a group and reports the outcome to its callers.
func (w *Placer) place(next func()) {
	group, err := w.insert(next)
	next()
	alone := len(group) > 1 && refused(err)
	for _, p := range group {
		p.err, p.alone = err, alone
		close(p.done)
	}
}

// insert gets a connection, inserts the waiting orders and returns them. It calls next if that takes longer than
// holds. A panic only fails this group.
func (w *Placer) insert(next func()) (group []*placement, err error) {
	defer func() {
		v := recover()
		if v == nil {
			return
		}
		if group == nil {
			group = w.queue.Take()
		}
		err = fmt.Errorf("%w: panic: %v\n%s", ErrCommitUnknown, v, debug.Stack())
	}()
	conn, err := acquire(context.Background(), w.pool, orderAcquireTimeout)
	if errors.Is(err, context.DeadlineExceeded) {
		return nil, nil // all callers that waited this long have given up
	}
	group = w.queue.Take()
	if err != nil {
		return group, fmt.Errorf("%s: get a connection: %w", inserting(group), err)
	}
	defer conn.Release()
	if len(group) == 0 {
		return nil, nil
	}
	t := time.AfterFunc(w.holds, next)
	defer t.Stop()
	// A trace shows the statement under the first order.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(group[0].ctx), orderTimeout)
	defer cancel()
	return group, insert(ctx, conn, group)
}

// refused reports whether the server has refused a group, so that nothing was written and a part of the group may
// succeed.
func refused(err error) bool {
	if errors.Is(err, ErrCommitUnknown) || errors.As(err, new(*pgconn.ConnectError)) {
		return false
	}
	return errors.Is(err, ErrOrderLocked) || SQLState(err) != ""
}
