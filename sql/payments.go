package sql

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
)

// Payment is an order that is being paid with credits. It is recorded before the deduction.
type Payment struct {
	// OpID is the deduction's id in the ledger, RefundID that of the addition that reverses it.
	OpID, RefundID uuid.UUID
	UserID         uuid.UUID
	// Key and Fingerprint are the order's.
	Key         [16]byte
	Fingerprint []byte
	// OrderID is the id that the order will have.
	OrderID  uuid.UUID
	Amount   int64
	Currency string
	// Headers are those of the order's event; nil for none.
	Headers map[string]string
	// CreatedAt is the order's time, in microseconds.
	CreatedAt time.Time
}

// NotePayment records p, to be checked after a while, unless a payment of the operation is recorded or an order has the
// key. It returns the recorded payment, which may be an earlier attempt's, or nil if an order has the key.
func NotePayment(ctx context.Context, pool *Pool, p *Payment, after time.Duration) (*Payment, error) {
	headers, err := encodeHeaders(p.Headers)
	if err != nil {
		return nil, err
	}
	tag, err := pool.Exec(ctx, query("payment_put"), p.OpID, p.RefundID, p.UserID, p.Key[:], p.Fingerprint,
		p.OrderID, p.Amount, p.Currency, headers, p.CreatedAt, after)
	if err != nil {
		return nil, fmt.Errorf("note the payment of order %s: %w", p.OrderID, err)
	}
	if tag.RowsAffected() == 1 {
		return p, nil
	}
	noted := *p
	var text *string
	err = pool.QueryRow(ctx, query("payment_get"), p.OpID, p.UserID, p.Key[:]).Scan(&noted.Fingerprint, &noted.OrderID,
		&noted.CreatedAt, &text)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, nil //nolint:nilnil // documented: the order exists
	}
	if err == nil {
		noted.CreatedAt = noted.CreatedAt.UTC()
		noted.Headers, err = decodeHeaders(text)
	}
	if err != nil {
		return nil, fmt.Errorf("read the noted payment of an order: %w", err)
	}
	return &noted, nil
}

// PaymentNoted reports whether a payment of an operation is recorded.
func PaymentNoted(ctx context.Context, db DB, op uuid.UUID) (noted bool, err error) {
	err = scan(ctx, db, "look for the noted payment of an order", "payment_noted", []any{op}, &noted)
	return noted, err
}

func encodeHeaders(h map[string]string) (*string, error) {
	if len(h) == 0 {
		return nil, nil //nolint:nilnil // NULL
	}
	b, err := json.Marshal(h)
	if err != nil {
		return nil, fmt.Errorf("encode the headers of an event: %w", err)
	}
	s := string(b)
	return &s, nil
}

func decodeHeaders(text *string) (map[string]string, error) {
	if text == nil {
		return nil, nil //nolint:nilnil // NULL
	}
	var h map[string]string
	err := json.Unmarshal([]byte(*text), &h)
	return h, err
}

// DuePayment is a payment that did not complete in time, with the state of its order and operations.
type DuePayment struct {
	Payment
	// OrderStatus and PayWith are those of the order under the payment's key, "" if there is no such order.
	OrderStatus, PayWith string
	// Deducted and Refunded are the outcomes of the two operations in the ledger, "" for an operation that is not in
	// it.
	Deducted, Refunded string
	// Age is measured by the database's clock.
	Age time.Duration
}

// PaymentsDue reports whether any payment is due.
func PaymentsDue(ctx context.Context, db DB) (bool, error) {
	var due bool
	err := scan(ctx, db, "look for payments that are due", "payment_look", nil, &due)
	return due, err
}

// DuePayments takes up to limit payments that are due, oldest first, and defers each by hold, so that no other caller
// takes it until then.
func DuePayments(ctx context.Context, db DB, limit int, hold time.Duration) ([]DuePayment, error) {
	read := func(r pgx.CollectableRow) (d DuePayment, err error) {
		var key []byte
		var headers *string
		var micros int64
		if err = r.Scan(&d.OpID, &d.RefundID, &d.UserID, &key, &d.Fingerprint, &d.OrderID, &d.Amount, &d.Currency,
			&headers, &d.CreatedAt, &d.OrderStatus, &d.PayWith, &d.Deducted, &d.Refunded, &micros); err != nil {
			return d, err
		}
		copy(d.Key[:], key)
		d.CreatedAt, d.Age = d.CreatedAt.UTC(), time.Duration(micros)*time.Microsecond
		d.Headers, err = decodeHeaders(headers)
		return d, err
	}
	return collect(ctx, db, "read the payments that are due", read, "payment_due", limit, hold)
}

// ConfirmPayments deletes the records of up to limit due payments whose order and deduction both exist, and returns how
// many it deleted.
func ConfirmPayments(ctx context.Context, db DB, limit int) (int64, error) {
	return exec(ctx, db, "delete the records of completed payments", "payment_confirm", limit)
}

// DropPayment deletes the record of a payment.
func DropPayment(ctx context.Context, db DB, op uuid.UUID) error {
	_, err := exec(ctx, db, fmt.Sprintf("delete the record of payment %s", op), "payment_drop", op)
	return err
}

// DeferPayment sets when a payment is due next; nil: never, because only an operator can resolve it.
func DeferPayment(ctx context.Context, db DB, op uuid.UUID, after *time.Duration) error {
	_, err := exec(ctx, db, fmt.Sprintf("defer payment %s", op), "payment_defer", op, after)
	return err
}
