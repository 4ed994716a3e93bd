package api

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"

	"posthaste/credits"
	"posthaste/idem"
	"posthaste/outbox"
	"posthaste/sql"
)

type placing struct {
	cmd     *Command
	key     idem.Key
	fp      idem.Fingerprint
	wait    time.Duration
	expired bool
	headers map[string]string
	// minted is when the client made its key, if the key contains a time.
	minted time.Time
}

// placed is the final answer of an attempt. Every retry gets the same.
type placed struct {
	order    *sql.Order
	replayed bool
	// degraded: without Redis.
	degraded bool
	// after is the work that follows the reply; it may be nil.
	after func()
}

// errInProgress and errReused are the guard's refusals. errExpired means that the key is too old.
var (
	errInProgress = errors.New("another attempt is in progress")
	errReused     = errors.New("the key belongs to another command")
	errExpired    = errors.New("the key is past its age")
)

// place takes an order through the guard and the transaction. Errors: errInProgress, errReused, errExpired,
// sql.ErrCommitUnknown. After any other error nothing was written.
func (s *Server) place(ctx context.Context, p *placing) (placed, error) {
	s.failpoint(ctx, "before_acquire")
	d, err := s.guard.Begin(ctx, idem.Request{
		Key: p.key, Fingerprint: p.fp, Route: routeOrders, Wait: p.wait,
		Lookup: func(ctx context.Context) (idem.Found, error) {
			o, err := sql.OrderByKey(ctx, s.o.Pool, p.cmd.UserID, p.key)
			switch {
			case errors.Is(err, sql.ErrOrderNotFound):
				return idem.Found{}, nil
			case err != nil:
				return idem.Found{}, err
			}
			return idem.Found{Exists: true, Matches: p.cmd.matches(o), Record: s.record(o)}, nil
		},
	})
	if err != nil {
		return placed{}, fmt.Errorf("ask the guard: %w", err)
	}
	switch d.Outcome {
	case idem.Replay:
		if o, ok := p.cmd.restore(d.Record); ok { // the record and the request suffice
			return placed{order: o, replayed: true}, nil
		}
		res, err := s.existing(ctx, p, nil)
		if errors.Is(err, sql.ErrOrderNotFound) { // a refusal that was purged
			return s.execute(ctx, p, d.Ticket)
		}
		return res, err
	case idem.Mismatch:
		return placed{}, errReused
	case idem.Busy:
		return placed{}, errInProgress
	default:
		return s.execute(ctx, p, d.Ticket)
	}
}

// existing answers with the stored order of the key; see settle. Errors: sql.ErrOrderNotFound, errReused.
func (s *Server) existing(ctx context.Context, p *placing, t *idem.Ticket) (placed, error) {
	o, err := sql.OrderByKey(ctx, s.o.Pool, p.cmd.UserID, p.key)
	if err != nil {
		return placed{}, err
	}
	return s.settle(p, o, t)
}

// settle answers with an existing order. t is nil if no lease is held.
func (s *Server) settle(p *placing, o *sql.Order, t *idem.Ticket) (placed, error) {
	res := placed{order: o, replayed: true}
	if t != nil {
		s.guard.Count(routeOrders, idem.OutcomeReplayPG)
		res.degraded, res.after = t.Degraded(), s.publish(context.Background(), t, o)
	}
	if !p.cmd.matches(o) {
		return placed{}, errReused
	}
	return res, nil
}

// execute does the work under a ticket. From here on, a client that disconnects does not cancel it.
func (s *Server) execute(ctx context.Context, p *placing, t *idem.Ticket) (res placed, err error) {
	work, cancel := context.WithTimeout(context.WithoutCancel(ctx), workTimeout)
	defer cancel()
	kept, stop := t.Keep(work)
	w := &writing{s: s, work: work}
	defer func() {
		stop()
		// Abort releases the key, also after a panic, but only if certainly nothing was done.
		if res.order == nil && !w.doubt {
			t.Abort(work)
		}
	}()
	s.failpoint(work, "after_acquire")
	d, err := newOrder(p, t)
	if err == nil && p.expired { // and no attempt is under way
		if res, err = s.existing(work, p, t); !errors.Is(err, sql.ErrOrderNotFound) {
			return res, err
		}
		var noted bool // a payment whose order is not placed yet
		noted, err = sql.PaymentNoted(work, s.o.Pool, newPayment(p, d.order).OpID)
		if err == nil && !noted {
			err = errExpired
		}
	}
	if err == nil && d.order.PayWith != "" {
		d, err = s.pay(work, p, d.order)
	}
	switch {
	case err != nil:
		w.doubt = errors.Is(err, credits.ErrUnknown)
		return placed{}, err
	case d.order == nil:
		return s.existing(work, p, t)
	}
	won, created, err := w.write(kept, d.order, d.event)
	if err != nil && d.deducted {
		// The deduction is done. The next attempt or Payments places the order.
		w.doubt, err = true, fmt.Errorf("%w: %w", sql.ErrCommitUnknown, err)
	}
	switch {
	case errors.Is(err, sql.ErrCommitUnknown):
		s.guard.Count(routeOrders, idem.OutcomeUnknown)
		return placed{}, err
	case err != nil && errors.Is(context.Cause(kept), idem.ErrLost):
		// Nothing was done. The next owner's order is the answer, if it exists.
		if res, err = s.existing(work, p, nil); err != nil && !errors.Is(err, errReused) {
			err = errInProgress
		}
		return res, err
	case err != nil:
		return placed{}, err
	}
	s.failpoint(work, "after_commit")
	if !created { // if another order has the key, Payments refunds the deduction once it is in the ledger
		return s.settle(p, won, t)
	}
	if d.payment != nil {
		outcome := payRefused
		if d.deducted {
			outcome = payPaid
		}
		s.paid.WithLabelValues(outcome).Inc()
	}
	if d.event != nil {
		s.metrics.written.WithLabelValues(d.event.Type).Inc()
	} else {
		s.guard.Count(routeOrders, idem.OutcomeRejected)
	}
	return placed{order: won, degraded: t.Degraded(), after: s.publish(ctx, t, won)}, nil
}

// publish returns a function that writes the guard's record of a committed order.
func (s *Server) publish(ctx context.Context, t *idem.Ticket, o *sql.Order) func() {
	ctx = context.WithoutCancel(ctx)
	return func() {
		s.failpoint(ctx, "before_publish")
		t.Commit(ctx, s.record(o))
		s.failpoint(ctx, "after_publish")
	}
}

// record is the guard's record of an order, with the incarnation of its database.
func (s *Server) record(o *sql.Order) idem.Record {
	r := record(o)
	r.Incarnation = s.database.Of(o)
	return r
}

// draft is an order to be written, with its event.
type draft struct {
	order *sql.Order
	// event is nil if the order was refused.
	event *outbox.Event
	// payment is the note of the payment by credits, or nil. deducted: the order must be written, or the deduction
	// refunded.
	payment  *sql.Payment
	deducted bool
}

// newDraft returns a placed order with its event.
func newDraft(o *sql.Order, headers map[string]string) (draft, error) {
	id, err := uuid.NewV7()
	if err != nil {
		return draft{}, fmt.Errorf("make an event id: %w", err)
	}
	return draft{order: o, event: &outbox.Event{
		ID: id, AggregateType: "order", AggregateID: o.ID.String(), Type: eventOrderCreated, Payload: render(o),
		Headers: headers,
	}}, nil
}

// reject turns the order into a refusal with this response.
func (d *draft) reject(status int, body []byte) {
	d.order.Status, d.order.RespStatus, d.order.RespBody, d.event = sql.OrderRejected, status, body, nil
}

// newOrder makes the row and its event.
func newOrder(p *placing, t *idem.Ticket) (draft, error) {
	id, err := uuid.NewV7()
	if err != nil {
		return draft{}, fmt.Errorf("make an order id: %w", err)
	}
	return newDraft(&sql.Order{
		ID: id, UserID: p.cmd.UserID, Key: p.key, Fingerprint: p.fp[:], Fence: t.Token(), Amount: p.cmd.Amount,
		Currency: p.cmd.Currency, Status: sql.OrderPending, PayWith: p.cmd.PayWith,
		CreatedAt: time.Now().UTC().Truncate(time.Microsecond),
	}, p.headers)
}
