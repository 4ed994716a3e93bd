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
)

// Placer places orders, as PlaceOrder does. An order that comes alone goes at once. Orders that come while others are
// being inserted wait for those, and are then inserted together, in one transaction: a commit costs more than an order.
// It is safe for concurrent use.
type Placer struct {
	pool *Pool
	// most is how many groups are under way at most: the other connections are for reading.
	most int
	// holds is groupHolds but in tests.
	holds time.Duration

	mu      sync.Mutex
	waiting []*placement
	// groups are under way; holding says that the latest of them keeps others waiting.
	groups  int
	holding bool
}

// NewPlacer returns one that inserts over half of the connections of pool, which is one of OrderPoolConfig. It does no
// I/O.
func NewPlacer(pool *Pool) *Placer {
	return &Placer{pool: pool, most: max(1, int(pool.Config().MaxConns)/2), holds: groupHolds}
}

// Place inserts o, and e beside it, in one transaction, which may have orders of other calls in it. All else is as with
// PlaceOrder, its errors, too. Where the server refuses a group, each of its orders is tried by itself: one that cannot
// be written does not keep others from it. A lock that one waits for is waited for by its group.
func (w *Placer) Place(ctx context.Context, o *Order, e *Event) (placed bool, err error) {
	p, err := newPlacement(o, e)
	if err != nil {
		return false, err
	}
	ctx, cancel := context.WithTimeout(ctx, orderTimeout)
	defer cancel()
	p.ctx, p.done = ctx, make(chan struct{})
	w.mu.Lock()
	w.waiting = append(w.waiting, p)
	w.next()
	w.mu.Unlock()
	if err := w.wait(ctx, p); err != nil {
		return false, err
	}
	if p.alone {
		err := insert(ctx, w.pool, []*placement{p})
		return p.placed, err
	}
	return p.placed, p.err
}

// wait returns when p is done, or an error.
func (w *Placer) wait(ctx context.Context, p *placement) error {
	t := time.NewTimer(orderAcquireTimeout)
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
		return fmt.Errorf("insert order %s: wait for those before it: %w", p.order.ID, cause)
	}
	select {
	case <-p.done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("%w: insert order %s: %w", ErrCommitUnknown, p.order.ID, ctx.Err())
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
	if w.holding || w.groups >= w.most || len(w.waiting) == 0 {
		return
	}
	w.holding, w.groups = true, w.groups+1
	go w.place(w.take())
}

// take returns the next group. Several attempts to pay one order give it the same id: they go one after the other, so
// that one of them has placed it, with its event, and the others have not.
func (w *Placer) take() []*placement {
	group, rest := w.waiting[:0:0], w.waiting[:0:0]
	ids := make(map[uuid.UUID]bool, len(w.waiting))
	for _, p := range w.waiting {
		if len(group) == groupMost || ids[p.order.ID] {
			rest = append(rest, p)
			continue
		}
		ids[p.order.ID] = true
		group = append(group, p)
	}
	w.waiting = rest
	return group
}

// place inserts a group, and has the next one begin.
func (w *Placer) place(group []*placement) {
	// Only one group holds others at a time: the next begins when this one has let go, here or below.
	t := time.AfterFunc(w.holds, func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.holding = false
		w.next()
	})
	err := w.insert(group)
	w.mu.Lock()
	w.groups--
	if t.Stop() {
		w.holding = false
	}
	w.next()
	w.mu.Unlock()
	alone := len(group) > 1 && refused(err)
	for _, p := range group {
		p.err, p.alone = err, alone
		close(p.done)
	}
}

// insert is a group's, whoever of its callers is still there. A panic is no other request's end.
func (w *Placer) insert(group []*placement) (err error) {
	defer func() {
		if v := recover(); v != nil {
			err = fmt.Errorf("%w: panic: %v\n%s", ErrCommitUnknown, v, debug.Stack())
		}
	}()
	// For a trace the statement is the first one's.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(group[0].ctx), orderTimeout)
	defer cancel()
	return insert(ctx, w.pool, group)
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
