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

// AcceptFunc decides whether an order may be placed. A refusal is final for its key: it is stored, and every retry gets
// it. An error decides nothing, and the client may retry. It may be called several times for one order and must have no
// side effects.
type AcceptFunc func(ctx context.Context, c Command) (*Refusal, error)

// Refusal is the business reason why an order may not be placed.
type Refusal struct {
	// Status is 402 or 409.
	Status int
	// Code names the reason in snake_case, for example insufficient_credits.
	Code string
	// Title is the reason for people. Detail is about this order and may be empty.
	Title, Detail string
}

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
	if p.expired {
		return s.placeExpired(ctx, p)
	}
	s.fail(ctx, "before_acquire")
	d, err := s.guard.Begin(ctx, idem.Request{
		Key: p.key, Fingerprint: p.fp, Route: routeOrders, Wait: p.wait,
		Lookup: func(ctx context.Context) (idem.Found, error) { return s.lookup(ctx, p) },
	})
	if err != nil {
		return placed{}, fmt.Errorf("ask the guard: %w", err)
	}
	switch d.Outcome {
	case idem.Replay:
		return s.replay(ctx, p, d.Record)
	case idem.Mismatch:
		return placed{}, errReused
	case idem.Busy:
		return placed{}, errInProgress
	default:
		return s.execute(ctx, p, d.Ticket)
	}
}

// lookup finds the key in Postgres.
func (s *Server) lookup(ctx context.Context, p *placing) (idem.Found, error) {
	o, err := sql.OrderByKey(ctx, s.pool, p.cmd.UserID, p.key)
	if errors.Is(err, sql.ErrOrderNotFound) {
		return idem.Found{}, nil
	}
	if err != nil {
		return idem.Found{}, err
	}
	return idem.Found{Exists: true, Matches: p.cmd.matches(o), Record: s.record(o)}, nil
}

// placeExpired replays an existing order for a key that is too old to be executed.
func (s *Server) placeExpired(ctx context.Context, p *placing) (placed, error) {
	o, err := sql.OrderByKey(ctx, s.pool, p.cmd.UserID, p.key)
	if errors.Is(err, sql.ErrOrderNotFound) {
		return placed{}, errExpired
	}
	if err != nil {
		return placed{}, err
	}
	return s.settle(p, o, nil)
}

// replay answers from the guard's record, without Postgres if record and request suffice.
func (s *Server) replay(ctx context.Context, p *placing, rec idem.Record) (placed, error) {
	if o, ok := p.cmd.restore(rec); ok {
		return placed{order: o, replayed: true}, nil
	}
	o, err := sql.OrderByKey(ctx, s.pool, p.cmd.UserID, p.key)
	if err != nil {
		return placed{}, fmt.Errorf("read the recorded order: %w", err)
	}
	return s.settle(p, o, nil)
}

// execute does the work under a ticket. From here on, a client that disconnects does not cancel it.
func (s *Server) execute(ctx context.Context, p *placing, t *idem.Ticket) (res placed, err error) {
	work, cancel := context.WithTimeout(context.WithoutCancel(ctx), workTimeout)
	defer cancel()
	kept, stop := t.Keep(work)
	w := &writing{s: s, work: work, p: p}
	defer func() {
		stop()
		// Abort releases the key, also after a panic, but only if certainly nothing was done.
		if res.order == nil && !w.doubt {
			t.Abort(work)
		}
	}()
	s.fail(work, "after_acquire")
	o, e, err := s.newOrder(kept, p, t)
	if err != nil {
		return placed{}, err
	}
	var step payStep
	if o.PayWith != "" && e != nil {
		if step, err = s.pay(work, p, o); err != nil {
			w.doubt = errors.Is(err, credits.ErrUnknown)
			return placed{}, err
		}
		if step.order == nil {
			return s.placedBefore(work, p, t)
		}
		o, e = step.order, step.event
	}
	won, created, err := w.write(kept, o, e)
	if err != nil && step.deducted {
		// The deduction is done. The next attempt or Payments places the order.
		w.doubt, err = true, fmt.Errorf("%w: %w", sql.ErrCommitUnknown, err)
	}
	if err != nil {
		if errors.Is(err, sql.ErrCommitUnknown) {
			s.guard.Count(routeOrders, idem.OutcomeUnknown)
		}
		if errors.Is(context.Cause(kept), idem.ErrLost) && !errors.Is(err, sql.ErrCommitUnknown) {
			return s.overtaken(work, p)
		}
		return placed{}, err
	}
	s.fail(work, "after_commit")
	if step.deducted && !paidBy(won.Status, won.PayWith) {
		s.takeBack(work, step.payment)
	}
	if created {
		s.countPaid(&step)
	} else {
		s.guard.Count(routeOrders, idem.OutcomeReplayPG)
		res, err = s.settle(p, won, t)
		res.degraded = t.Degraded()
		return res, err
	}
	if e != nil {
		s.metrics.written.WithLabelValues(e.Type).Inc()
	} else {
		s.guard.Count(routeOrders, idem.OutcomeRejected)
	}
	return placed{order: won, degraded: t.Degraded(), after: s.publish(ctx, t, won)}, nil
}

// placedBefore answers with the existing order of the key.
func (s *Server) placedBefore(ctx context.Context, p *placing, t *idem.Ticket) (placed, error) {
	o, err := sql.OrderByKey(ctx, s.pool, p.cmd.UserID, p.key)
	if err != nil {
		return placed{}, err
	}
	s.guard.Count(routeOrders, idem.OutcomeReplayPG)
	res, err := s.settle(p, o, t)
	res.degraded = t.Degraded()
	return res, err
}

func (s *Server) countPaid(step *payStep) {
	switch {
	case step.order == nil:
	case step.deducted:
		s.paid.WithLabelValues(payPaid).Inc()
	default:
		s.paid.WithLabelValues(payRefused).Inc()
	}
}

// overtaken answers for an attempt that lost its lease and did nothing: with the order of the next owner, if it exists.
func (s *Server) overtaken(ctx context.Context, p *placing) (placed, error) {
	o, err := sql.OrderByKey(ctx, s.pool, p.cmd.UserID, p.key)
	if err != nil {
		return placed{}, errInProgress
	}
	return s.settle(p, o, nil)
}

// publish returns a function that writes the guard's record of a committed order.
func (s *Server) publish(ctx context.Context, t *idem.Ticket, o *sql.Order) func() {
	ctx = context.WithoutCancel(ctx)
	return func() {
		s.fail(ctx, "before_publish")
		t.Commit(ctx, s.record(o))
		s.fail(ctx, "after_publish")
	}
}

// record is the guard's record of an order, with the incarnation of its database.
func (s *Server) record(o *sql.Order) idem.Record {
	r := record(o)
	r.Incarnation = s.database.Of(o)
	return r
}

// settle answers with an existing order. t is nil if no lease is held.
func (s *Server) settle(p *placing, o *sql.Order, t *idem.Ticket) (placed, error) {
	if !p.cmd.matches(o) {
		return placed{}, errReused
	}
	res := placed{order: o, replayed: true}
	if t != nil {
		res.after = s.publish(context.Background(), t, o)
	}
	return res, nil
}

// newOrder makes the row and its event. A refused order has no event.
func (s *Server) newOrder(ctx context.Context, p *placing, t *idem.Ticket) (*sql.Order, *outbox.Event, error) {
	id, err := uuid.NewV7()
	if err != nil {
		return nil, nil, fmt.Errorf("make an order id: %w", err)
	}
	o := &sql.Order{
		ID: id, UserID: p.cmd.UserID, Key: p.key, Fingerprint: p.fp[:], Fence: t.Token(), Amount: p.cmd.Amount,
		Currency: p.cmd.Currency, Status: sql.OrderPending, PayWith: p.cmd.PayWith,
		CreatedAt: time.Now().UTC().Truncate(time.Microsecond),
	}
	if s.accept != nil {
		refusal, err := s.accept(ctx, *p.cmd)
		if err != nil {
			return nil, nil, fmt.Errorf("ask whether the order is acceptable: %w", err)
		}
		if refusal != nil {
			o.Status, o.RespStatus, o.RespBody = sql.OrderRejected, refusal.Status, refusal.body()
			return o, nil, nil
		}
	}
	e, err := announce(o, p.headers)
	return o, e, err
}

// announce makes the event of a placed order.
func announce(o *sql.Order, headers map[string]string) (*outbox.Event, error) {
	id, err := uuid.NewV7()
	if err != nil {
		return nil, fmt.Errorf("make an event id: %w", err)
	}
	return &outbox.Event{
		ID: id, AggregateType: "order", AggregateID: o.ID.String(), Type: eventOrderCreated, Payload: render(o),
		Headers: headers,
	}, nil
}

// body is the problem for a refusal. It does not name the request, so that every retry gets the same bytes.
func (r *Refusal) body() []byte {
	p := problem{kind: kind{status: r.Status, code: r.Code, title: r.Title, safeNewKey: true}, detail: r.Detail}
	return p.body("")
}
