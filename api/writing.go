package api

import (
	"context"
	"errors"
	"fmt"
	"time"

	"posthaste/internal/pause"
	"posthaste/outbox"
	"posthaste/sql"
)

// writeAttempts bounds the retries of a transaction that failed with a retryable error.
const writeAttempts = 3

// writing is the Postgres work of one attempt.
type writing struct {
	s *Server
	// work outlives the lease: the unique key decides the outcome of a sent order, and finding it must continue when
	// the lease is lost.
	work context.Context //nolint:containedctx // one request's, like the struct
	// doubt is set while the outcome of a sent order is unknown. The key must not be released then.
	doubt bool
}

// write inserts o and e, or finds the order that has the key. created reports whether o was inserted. Nothing is sent
// after kept has ended. Except for sql.ErrCommitUnknown, an error means that nothing was written.
func (w *writing) write(kept context.Context, o *sql.Order, e *outbox.Event) (won *sql.Order, created bool, err error) {
	// After a restart of Postgres every pooled connection may be broken. Retry past them without an error to the
	// client.
	broken := int(w.s.o.Pool.Stat().MaxConns())
	for try := 1; ; try++ {
		if kept.Err() != nil {
			return nil, false, context.Cause(kept)
		}
		won, created, err = w.once(w.work, o, e)
		if errors.Is(err, sql.ErrCommitUnknown) {
			won, err = w.resolve(o, e, err)
			return won, err == nil && won.ID == o.ID, err
		}
		if err == nil {
			return won, created, nil
		}
		if broken > 0 && sql.BrokenConnection(err) {
			broken--
			try--
			continue
		}
		// If the existing row was purged concurrently, a retry can insert ours.
		again := sql.RetryOrder(err) || errors.Is(err, sql.ErrOrderNotFound)
		if try == writeAttempts || !again {
			return nil, false, err
		}
		_ = pause.For(kept, time.Duration(try)*20*time.Millisecond) // the loop checks kept
	}
}

// once sends the order once. All attempts to pay for an order use the same id, so the id does not identify the creator.
func (w *writing) once(ctx context.Context, o *sql.Order, e *outbox.Event) (won *sql.Order, created bool, err error) {
	w.s.failpoint(ctx, "before_insert")
	w.doubt = true // in case of a panic
	created, err = w.s.orders.Place(ctx, o, e)
	w.doubt = errors.Is(err, sql.ErrCommitUnknown)
	if err != nil || created {
		return o, created, err
	}
	won, err = sql.OrderByKey(ctx, w.s.o.Pool, o.UserID, o.Key)
	return won, false, err
}

// resolve finds the outcome of an order that was sent and not answered. It inserts the same row again on other
// connections: the unique key makes that wait for the transaction in doubt, and then finds its row or takes its place.
// If that transaction arrives later, it finds this row.
func (w *writing) resolve(o *sql.Order, e *outbox.Event, cause error) (*sql.Order, error) {
	ctx, cancel := context.WithTimeout(w.work, resolveTimeout)
	defer cancel()
	for try := 1; ; try++ { // the cause of the disconnect may persist, and leave broken connections in the pool
		won, _, err := w.once(ctx, o, e)
		if err == nil {
			return won, nil
		}
		w.doubt = true // even if this attempt certainly failed, the first one is in doubt
		if pause.For(ctx, min(time.Duration(try)*50*time.Millisecond, 200*time.Millisecond)) != nil {
			return nil, fmt.Errorf("%w: %w; then %w", sql.ErrCommitUnknown, cause, err)
		}
	}
}
