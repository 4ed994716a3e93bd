package api

import (
	"context"
	"errors"
	"fmt"
	"time"

	"posthaste/internal/pause"
	"posthaste/sql"
)

// writeAttempts bounds how often a transaction is tried that Postgres asks to try again.
const writeAttempts = 3

// writing is the work of one attempt in Postgres.
type writing struct {
	s *Server
	// work outlives the lease: what was sent is decided by the unique key, and finding out how must not stop when the
	// lease is lost.
	work context.Context //nolint:containedctx // one request's, like the struct
	p    *placing
	// doubt is set while the outcome of an order that was sent is not known. The key must not be released then.
	doubt bool
}

// write inserts o, with e beside it, or finds the order that has the key. created says that the row is o. Nothing is
// sent once kept has ended. Errors are definite, except sql.ErrCommitUnknown.
func (w *writing) write(kept context.Context, o *sql.Order, e *sql.Event) (won *sql.Order, created bool, err error) {
	// A restart of Postgres leaves as many dead connections as the pool holds; no client need hear of it.
	broken := w.s.poolSize
	for try := 1; ; try++ {
		if kept.Err() != nil {
			return nil, false, context.Cause(kept)
		}
		won, created, err = w.once(w.work, o, e)
		if errors.Is(err, sql.ErrCommitUnknown) {
			won, err = w.resolve(o, e, err)
			created = err == nil && won.ID == o.ID
		}
		if err == nil {
			return won, created, nil
		}
		if broken > 0 && sql.BrokenConnection(err) {
			broken--
			try--
			continue
		}
		// A row that was there and is not any more (purged in this very moment) leaves room for ours.
		again := sql.RetryOrder(err) || errors.Is(err, sql.ErrOrderNotFound)
		if try == writeAttempts || !again {
			return nil, false, err
		}
		_ = pause.For(kept, time.Duration(try)*20*time.Millisecond) // its end is noticed above
	}
}

// once sends the order once. Several attempts to pay one order give it the same id, so the id does not tell who created
// it.
func (w *writing) once(ctx context.Context, o *sql.Order, e *sql.Event) (won *sql.Order, created bool, err error) {
	w.s.fail(ctx, "before_insert")
	w.doubt = true // should it panic
	created, err = w.s.orders.Place(ctx, o, e)
	w.doubt = errors.Is(err, sql.ErrCommitUnknown)
	if err != nil || created {
		return o, created, err
	}
	won, err = sql.OrderByKey(ctx, w.s.pool, o.UserID, o.Key)
	return won, false, err
}

// resolve finds out what an order did that was sent and not answered, by inserting the same row again on other
// connections: the unique key makes that wait for the transaction in doubt, and then either finds its row or takes its
// place. One that comes even later finds what this one did.
func (w *writing) resolve(o *sql.Order, e *sql.Event, cause error) (*sql.Order, error) {
	ctx, cancel := context.WithTimeout(w.work, resolveTimeout)
	defer cancel()
	var last error
	for try := 1; ; try++ { // what cut the connection may take a while, and leave the pool full of dead ones
		won, _, err := w.once(ctx, o, e)
		if err == nil {
			w.doubt = false
			return won, nil
		}
		w.doubt, last = true, err
		if pause.For(ctx, min(time.Duration(try)*50*time.Millisecond, 200*time.Millisecond)) != nil {
			break
		}
	}
	cause = fmt.Errorf("%w; then %w", cause, last)
	// Once unknown, a definite failure of a later attempt says nothing about the first.
	return nil, fmt.Errorf("%w: %w", sql.ErrCommitUnknown, cause)
}
