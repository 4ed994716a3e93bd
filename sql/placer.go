package sql

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"slices"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgconn"
)

const (
	// groupMost is how many orders are inserted together, at most.
	groupMost = 64
	// groupHolds is how long a group that is being inserted keeps others waiting: somewhat longer than a commit takes
	// on a server that is well. Behind one that takes longer, because of a lock or the disk, others go on another
	// connection.
	groupHolds = 5 * time.Millisecond
	// aloneWithin is how long after it came an order may still be tried by itself. Later its client has waited for long
	// enough to be told to try again.
	aloneWithin = 2500 * time.Millisecond
)

// Placer places orders, as PlaceOrder does. An order that comes alone goes at once. Orders that come while others are
// being inserted wait for those, and are then inserted together, in one transaction: a commit costs more than an order.
// It is safe for concurrent use.
type Placer struct {
	pool *Pool
	// These are groupHolds, orderAcquireTimeout and aloneWithin but in tests.
	holds, turn, alone time.Duration

	mu      sync.Mutex
	waiting []*placement
	// holding says that a group keeps others waiting: it waits for a connection, or has begun a moment ago.
	holding bool
}

// NewPlacer returns one that inserts over the connections of pool, which is one of OrderPoolConfig. It does no I/O.
func NewPlacer(pool *Pool) *Placer {
	return &Placer{pool: pool, holds: groupHolds, turn: orderAcquireTimeout, alone: aloneWithin}
}

// Place inserts o, and e beside it, in one transaction, which may have orders of other calls in it. All else is as with
// PlaceOrder, its errors, too, but that it may take 7.5 s. Where the server refuses a group, each of its orders is
// tried by itself: one that cannot be written does not keep others from it. What a group waits for, its connection and
// each lock of one of its orders, all of it wait for.
func (w *Placer) Place(ctx context.Context, o *Order, e *Event) (placed bool, err error) {
	p, err := newPlacement(o, e)
	if err != nil {
		return false, err
	}
	arrived := time.Now()
	p.ctx, p.done = ctx, make(chan struct{})
	w.mu.Lock()
	w.waiting = append(w.waiting, p)
	w.next()
	w.mu.Unlock()
	if err := w.wait(ctx, p); err != nil {
		return false, err
	}
	left := w.alone - time.Since(arrived)
	if !p.alone || left <= 0 {
		return p.result(), p.err
	}
	return insertAlone(ctx, w.pool, left, p)
}

// wait returns when p is done, or an error. Only what has been sent may be in doubt, and nothing is sent for those who
// have given up.
func (w *Placer) wait(ctx context.Context, p *placement) error {
	t := time.NewTimer(w.turn)
	defer t.Stop()
	cause := context.DeadlineExceeded
	select {
	case <-p.done:
		return nil
	case <-t.C:
	case <-ctx.Done():
		cause = ctx.Err()
	}
	if w.withdraw(p) {
		return fmt.Errorf("insert order %s: get a connection: %w", p.id, cause)
	}
	select {
	case <-p.done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("%w: insert order %s: %w", ErrCommitUnknown, p.id, ctx.Err())
	}
}

// withdraw reports whether p was still waiting; it is not any more.
func (w *Placer) withdraw(p *placement) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	i := slices.Index(w.waiting, p)
	if i < 0 {
		return false
	}
	w.waiting = slices.Delete(w.waiting, i, i+1)
	return true
}

// next begins with those that wait, if it may. It is called with mu held.
func (w *Placer) next() {
	if w.holding || len(w.waiting) == 0 {
		return
	}
	w.holding = true
	// For a trace the statement is that of the first.
	go w.place(context.WithoutCancel(w.waiting[0].ctx))
}

// letGo has the next group begin.
func (w *Placer) letGo() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.holding = false
	w.next()
}

// take returns the next group. Several attempts to pay one order give it the same id: they go one after the other, so
// that one of them has placed it, with its event, and the others have not.
func (w *Placer) take() []*placement {
	w.mu.Lock()
	defer w.mu.Unlock()
	group, rest := w.waiting[:0:0], w.waiting[:0:0]
	ids := make(map[uuid.UUID]bool, len(w.waiting))
	for _, p := range w.waiting {
		if len(group) == groupMost || ids[p.id] {
			rest = append(rest, p)
			continue
		}
		ids[p.id] = true
		group = append(group, p)
	}
	w.waiting = rest
	return group
}

// place inserts a group, and tells its callers.
func (w *Placer) place(ctx context.Context) {
	letGo := sync.OnceFunc(w.letGo)
	group, err := w.insert(ctx, letGo)
	letGo()
	alone := len(group) > 1 && refused(err)
	for _, p := range group {
		p.err, p.alone = err, alone
		close(p.done)
	}
}

// insert inserts those that wait when it has a connection, and returns them; letGo is called when they have been at it
// for long. A panic is no other request's end.
func (w *Placer) insert(ctx context.Context, letGo func()) (group []*placement, err error) {
	defer func() {
		v := recover()
		if v == nil {
			return
		}
		if group == nil {
			group = w.take()
		}
		err = fmt.Errorf("%w: panic: %v\n%s", ErrCommitUnknown, v, debug.Stack())
	}()
	conn, err := acquire(ctx, w.pool, orderAcquireTimeout)
	if errors.Is(err, context.DeadlineExceeded) {
		return nil, nil // those who have waited for as long have given up
	}
	group = w.take()
	if err != nil {
		return group, fmt.Errorf("%s: get a connection: %w", inserting(group), err)
	}
	defer conn.Release()
	if len(group) == 0 {
		return nil, nil
	}
	t := time.AfterFunc(w.holds, letGo)
	defer t.Stop()
	ctx, cancel := context.WithTimeout(ctx, orderTimeout)
	defer cancel()
	return group, insert(ctx, conn, group)
}

// refused reports whether the server has answered that it does not write a group, so that nothing of it is written, and
// may write a part of it.
func refused(err error) bool {
	var pe *pgconn.PgError
	var ce *pgconn.ConnectError
	switch {
	case errors.Is(err, ErrCommitUnknown), errors.As(err, &ce):
		return false
	default:
		return errors.Is(err, ErrOrderLocked) || errors.As(err, &pe)
	}
}
