package api

import (
	"cmp"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"posthaste/credits"
	"posthaste/idem"
	"posthaste/internal/outage"
	"posthaste/internal/pause"
	"posthaste/sql"
)

const (
	// payWithin is the age up to which Payments places an order for a deduction without one. Afterwards it refunds.
	payWithin = 15 * time.Minute
	// straysFor is how long a payment without a deduction is kept: a suspended process may resume and deduct.
	straysFor = 48 * time.Hour
	// repeatWithin is how long a deduction that the ledger does not have is repeated. Redis keeps its id that long.
	repeatWithin = credits.OutcomeTTL - time.Hour

	purgeEvery = time.Hour
	purgeBatch = 1000
	// refusalAge is how long a refusal is kept.
	refusalAge = 30 * 24 * time.Hour

	paymentsEvery = time.Second
	paymentsBatch = 100
	paymentsHold  = 15 * time.Second
	paymentsWork  = 30 * time.Second
)

// Outcomes of payments, the values of the outcome label of credits_order_payments_total.
const (
	payPaid      = "paid"
	payRefused   = "refused"
	payCompleted = "completed"
	payRefunded  = "refunded"
	payRepeated  = "repeated"
	payUnpaid    = "unpaid"
	// payUnrefunded: the account refused the refund.
	payUnrefunded = "unrefunded"
)

// kindRefunded is stored if the order could not be placed in time for its deduction.
var kindRefunded = kind{
	409, "payment_refunded", "The order could not be placed in time, and what it cost was given back", false,
}

func newPaymentMetric(reg prometheus.Registerer) *prometheus.CounterVec {
	m := promauto.With(reg).NewCounterVec(prometheus.CounterOpts{
		Name: "credits_order_payments_total",
		Help: "Payments of orders by credits. A rise of completed means processes end between deduction and order; " +
			"unpaid and unrefunded need an operator.",
	}, []string{"outcome"})
	for _, o := range []string{payPaid, payRefused, payCompleted, payRefunded, payRepeated, payUnpaid, payUnrefunded} {
		m.WithLabelValues(o)
	}
	return m
}

// paymentError is a credits error during the payment of an order.
type paymentError struct{ err error }

func (e *paymentError) Error() string { return "pay the order: " + e.err.Error() }
func (e *paymentError) Unwrap() error { return e.err }

// newPayment makes the note of a payment. The ids of both operations derive from the order's key, so all attempts under
// one key share them.
func newPayment(p *placing, o *sql.Order) *sql.Payment {
	key, user := base64.RawURLEncoding.EncodeToString(p.key[:]), p.cmd.UserID.String()
	return &sql.Payment{
		OpID:     credits.OpID(idem.NewKey("", user, "PAY", routeOrders, key)),
		RefundID: credits.OpID(idem.NewKey("", user, "REFUND", routeOrders, key)),
		UserID:   p.cmd.UserID, Key: p.key, Fingerprint: p.fp[:], OrderID: o.ID, Amount: p.cmd.Amount,
		Currency: p.cmd.Currency, Headers: p.headers, CreatedAt: o.CreatedAt,
	}
}

// deduction is the operation that pays. minted is when the client made its key. If it is zero, Apply checks the ledger
// first, because the operation may be older than Redis keeps ids.
func deduction(p *sql.Payment, minted time.Time) credits.Op {
	op := credits.Op{
		User: p.UserID, ID: p.OpID, Kind: credits.Deduct, Amount: p.Amount, Reference: "order " + p.OrderID.String(),
		MintedAt: minted,
	}
	copy(op.Fingerprint[:], p.Fingerprint)
	return op
}

func refund(p *sql.Payment) credits.Op {
	op := deduction(p, time.Time{})
	op.ID, op.Kind, op.Reference = p.RefundID, credits.Add, "refund of "+op.Reference
	return op
}

// paidOrder returns the order of a payment and its event.
func paidOrder(p *sql.Payment) (draft, error) {
	d, err := newDraft(&sql.Order{
		ID: p.OrderID, UserID: p.UserID, Key: p.Key, Fingerprint: p.Fingerprint, Amount: p.Amount, Currency: p.Currency,
		Status: sql.OrderPending, PayWith: sql.PayCredits, CreatedAt: p.CreatedAt,
	}, p.Headers)
	d.payment = p
	return d, err
}

// pay notes the payment and deducts the price; the caller writes the order that pay returns. The order is nil if the
// key already has one. After a paymentError with credits.ErrUnknown the outcome is unknown. After any other error
// nothing was deducted.
func (s *Server) pay(ctx context.Context, p *placing, o *sql.Order) (draft, error) {
	noted, err := sql.NotePayment(ctx, s.o.Pool, newPayment(p, o), s.o.Lease)
	switch {
	case err != nil || noted == nil:
		return draft{}, err
	case string(noted.Fingerprint) != string(p.fp[:]):
		return draft{}, errReused
	}
	s.failpoint(ctx, "after_note")
	if s.o.Credits == nil {
		return draft{}, &paymentError{credits.ErrUnavailable}
	}
	res, err := s.o.Credits.Apply(ctx, deduction(noted, p.minted))
	if err != nil {
		return draft{}, &paymentError{err}
	}
	s.failpoint(ctx, "after_deduct")
	d, err := paidOrder(noted)
	if err != nil {
		return draft{}, &paymentError{fmt.Errorf("%w: %w", credits.ErrUnknown, err)}
	}
	d.order.Fence = o.Fence
	if d.deducted = res.Outcome == credits.OK; !d.deducted {
		d.reject(http.StatusPaymentRequired, marshal(refusal(&res)))
	} else if res.Replayed {
		// The deduction may be old: it was refunded, and the refusal was purged since.
		switch _, err = credits.EntryByOp(ctx, s.o.Pool, noted.UserID, noted.RefundID); {
		case err == nil:
			d.deducted = false
			d.refunded()
		case !errors.Is(err, credits.ErrEntryNotFound):
			return draft{}, &paymentError{fmt.Errorf("%w: %w", credits.ErrUnknown, err)}
		}
	}
	return d, nil
}

// refunded turns the order into the refusal of a deduction that was given back. It does not name the request, so that
// every retry gets the same bytes.
func (d *draft) refunded() {
	d.reject(kindRefunded.status, marshal((&problem{kind: kindRefunded}).body("")))
}

// paidBy reports whether an order was paid by the payment under its key. A key has one payment.
func paidBy(status, payWith string) bool {
	return status == sql.OrderPending && payWith == sql.PayCredits
}

// PaymentsOptions configure Payments. Pool and Credits are required.
type PaymentsOptions struct {
	// Pool reaches Postgres. Its user must be allowed to delete from order_payments. The caller closes it.
	Pool *sql.Pool
	// Credits repeats and refunds deductions.
	Credits *credits.Bank
	// Logger may be nil.
	Logger *slog.Logger
	// Registerer may be nil.
	Registerer prometheus.Registerer
}

// Payments finishes payments that their process did not finish. In the end either the order, its event and one
// deduction exist, or none of them. All its state is in Postgres: the sync writes every deduction to the ledger. It
// also deletes refused orders after 30 days, which takes a right to delete that serve need not have. Several may run
// concurrently.
type Payments struct {
	o       PaymentsOptions
	log     *slog.Logger
	metrics *prometheus.CounterVec
}

// NewPayments returns Payments. It does no I/O.
func NewPayments(o PaymentsOptions) *Payments {
	log := cmp.Or(o.Logger, slog.New(slog.DiscardHandler)).With("component", "payments")
	return &Payments{o, log, newPaymentMetric(o.Registerer)}
}

// Run works until ctx ends, and then returns nil. If a server is down, it retries.
func (r *Payments) Run(ctx context.Context) error {
	var purged time.Time
	var failing outage.Run
	for {
		if time.Since(purged) >= purgeEvery {
			purged = time.Now()
			r.purge(ctx)
		}
		n, err := r.round(ctx)
		if err == nil {
			if attrs, say := failing.Over(); say {
				r.log.Info("payments of orders are finished again", attrs...)
			}
		} else if attrs, say := failing.Failed(err); say && ctx.Err() == nil {
			r.log.Warn("payments of orders are not finished, retrying", attrs...)
		}
		if (n < paymentsBatch || err != nil) && pause.Tick(ctx, paymentsEvery) != nil {
			return nil
		}
	}
}

// purge deletes old refusals in small transactions, and stops at the first error.
func (r *Payments) purge(ctx context.Context) {
	for {
		work, cancel := context.WithTimeout(ctx, paymentsWork)
		n, err := sql.PurgeRejected(work, r.o.Pool, time.Now().Add(-refusalAge), purgeBatch)
		cancel()
		if err != nil {
			r.log.Debug("refusals were not purged", "err", err)
		}
		if err != nil || n < purgeBatch {
			return
		}
	}
}

// round advances the due payments and returns their number.
func (r *Payments) round(ctx context.Context) (int, error) {
	ctx, cancel := context.WithTimeout(ctx, paymentsWork)
	defer cancel()
	if due, err := sql.PaymentsDue(ctx, r.o.Pool); err != nil || !due {
		return 0, err
	}
	for {
		n, err := sql.ConfirmPayments(ctx, r.o.Pool, paymentsBatch)
		if err != nil {
			return 0, err
		}
		if n < paymentsBatch {
			break
		}
	}
	due, err := sql.DuePayments(ctx, r.o.Pool, paymentsBatch, paymentsHold)
	if err != nil {
		return 0, err
	}
	for i := range due {
		if err := r.one(ctx, &due[i]); err != nil {
			r.log.Warn("payment of an order could not be finished, retrying", "order_id", due[i].OrderID, "err", err)
		}
	}
	return len(due), nil
}

// one advances a payment by one step, by the table in docs/credits.md.
func (r *Payments) one(ctx context.Context, d *sql.DuePayment) error {
	ok := string(credits.OK)
	switch {
	case paidBy(d.OrderStatus, d.PayWith):
		if d.Deducted == ok { // recorded after the query for due payments
			return nil
		}
		return r.repeat(ctx, d)
	case d.Deducted == ok && d.Refunded == ok:
		r.metrics.WithLabelValues(payRefunded).Inc()
		return sql.DropPayment(ctx, r.o.Pool, d.OpID)
	case d.Deducted == ok && d.OrderStatus != "":
		return r.refund(ctx, &d.Payment)
	case d.Deducted == ok:
		return r.place(ctx, d)
	case d.Deducted != "": // the refusal is final
		return sql.DropPayment(ctx, r.o.Pool, d.OpID)
	case d.Age > straysFor:
		never, err := r.o.Credits.Undone(ctx, d.UserID, d.OpID)
		if err != nil || !never { // it may be on its way into the ledger
			return err
		}
		return sql.DropPayment(ctx, r.o.Pool, d.OpID)
	default:
		later := min(max(d.Age/2, paymentsHold), time.Hour)
		return sql.DeferPayment(ctx, r.o.Pool, d.OpID, &later)
	}
}

// place writes the order of a deduction. If it is too late, place writes a refusal and refunds.
func (r *Payments) place(ctx context.Context, d *sql.DuePayment) error {
	order, err := paidOrder(&d.Payment)
	if err != nil {
		return err
	}
	if d.Age > payWithin {
		order.refunded()
	}
	placed, err := sql.PlaceOrder(ctx, r.o.Pool, order.order, order.event)
	switch {
	case err != nil: // the next round sees the outcome
		return err
	case !placed: // another attempt was first; the next round sees its order
	case order.event != nil:
		r.metrics.WithLabelValues(payCompleted).Inc()
		r.log.Info("order placed for a deduction that was found without one", "order_id", d.OrderID, "age_seconds",
			d.Age.Seconds())
	default:
		return r.refund(ctx, &d.Payment)
	}
	return nil
}

// refund returns a deduction. The key must already have an answer other than the paid order. A refused refund is final,
// like every outcome of an id, so refund logs an error for the operator and does not retry.
func (r *Payments) refund(ctx context.Context, p *sql.Payment) error {
	res, err := r.o.Credits.Apply(ctx, refund(p))
	if err != nil {
		return fmt.Errorf("take back a deduction: %w", err)
	}
	if res.Outcome == credits.OK {
		return nil
	}
	r.metrics.WithLabelValues(payUnrefunded).Inc()
	r.log.Error("deduction cannot be taken back: the account refuses the addition", "order_id", p.OrderID, "user_id",
		p.UserID, "outcome", res.Outcome)
	return sql.DeferPayment(ctx, r.o.Pool, p.OpID, nil)
}

// repeat deducts again what Redis lost after the order was placed. Redis ignores an id that it still has.
func (r *Payments) repeat(ctx context.Context, d *sql.DuePayment) error {
	unpaid := d.Deducted != ""
	var err error
	switch {
	case unpaid:
	case d.Age > repeatWithin:
		unpaid, err = r.o.Credits.Undone(ctx, d.UserID, d.OpID)
	default:
		var res credits.Result
		if res, err = r.o.Credits.Apply(ctx, deduction(&d.Payment, time.Time{})); err != nil {
			return fmt.Errorf("repeat a deduction: %w", err)
		}
		if res.Outcome == credits.OK && !res.Replayed {
			r.metrics.WithLabelValues(payRepeated).Inc()
			r.log.Warn("deduction repeated: redis had lost it after the order was placed", "order_id", d.OrderID)
		}
		if unpaid = res.Outcome != credits.OK; res.Replayed && !unpaid { // is it in quarantine?
			unpaid, err = r.o.Credits.Undone(ctx, d.UserID, d.OpID)
		}
	}
	if err != nil || !unpaid {
		return err
	}
	r.metrics.WithLabelValues(payUnpaid).Inc()
	r.log.Error("order is not paid: redis had lost its deduction, and it cannot be repeated", "order_id", d.OrderID,
		"user_id", d.UserID)
	return sql.DeferPayment(ctx, r.o.Pool, d.OpID, nil)
}
