package sql

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

// Statuses of an order.
const (
	OrderPending  = "PENDING"
	OrderRejected = "REJECTED"
)

// PayCredits is the one way of paying that this program carries out itself.
const PayCredits = "credits"

// OrderTxTimeout is the longest an order's transaction takes, from the first statement to the answer of COMMIT; it is
// shorter than the guard's lease.
const OrderTxTimeout = 5 * time.Second

const orderAcquireTimeout = 2 * time.Second

// The server's own limits for that transaction. A lock is waited for no longer than a client waits for an order in
// flight. A transaction whose owner vanished gives its locks back before the guard's lease ends.
const (
	orderStatementTimeout = "4500ms"
	orderLockTimeout      = "2000ms"
	orderIdleTimeout      = "5000ms"
)

var (
	orderSettingsSQL = query("order_settings")
	orderInsertSQL   = query("order_insert")
	orderByKeySQL    = query("order_by_key")
	orderByIDSQL     = query("order_by_id")
	orderListSQL     = query("order_list")
	orderPurgeSQL    = query("order_purge")
	insertEventSQL   = query("insert_event")
)

var (
	// ErrOrderNotFound means that there is no such row.
	ErrOrderNotFound = errors.New("no such order")
	// ErrOrderLocked means that another transaction holds the order's key and did not end in time. Nothing was written.
	ErrOrderLocked = errors.New("another transaction holds the order's key")
	// ErrCommitUnknown means that COMMIT was sent and its outcome cannot be known from this connection. The row may
	// exist, now or in a moment. Every other error of an OrderTx means that nothing was written.
	ErrCommitUnknown = errors.New("the outcome of the commit is unknown")
)

// Order is one row of orders.
type Order struct {
	ID     uuid.UUID
	UserID uuid.UUID
	// Key is the hashed idempotency key, unique per user.
	Key [16]byte
	// Fingerprint identifies the command, at most 33 bytes.
	Fingerprint []byte
	// Fence is the guard's token, 0 without the guard.
	Fence int64
	// Amount is in minor units, 1 … 999,999,999,999,999.
	Amount int64
	// Currency is three capital letters.
	Currency string
	// Status is OrderPending or OrderRejected.
	Status string
	// PayWith is PayCredits for an order that was paid by credits; "" for others.
	PayWith string
	// RespStatus and RespBody are the stored answer of a rejected order; zero for others.
	RespStatus int
	RespBody   []byte
	// CreatedAt has microseconds.
	CreatedAt time.Time
}

// Pool is where transactions of their own take a connection from; see PoolConfig.
type Pool = pgxpool.Pool

// OrderTx is an order's transaction after its inserts and before its end. It holds a connection: end it with Commit or
// Rollback.
type OrderTx struct {
	conn *pgxpool.Conn
	// Inserted is false when the user has an order under this key already, committed; nothing was written then.
	Inserted bool
}

// BeginOrder opens a transaction and inserts o, and e beside it, in one round trip. e is nil for an order that
// announces nothing. A concurrent transaction with the same key is waited for. Errors: ErrOrderLocked; any other is
// definite too, nothing was written. RetryOrder tells whether a new connection may do better.
func BeginOrder(ctx context.Context, pool *Pool, o *Order, e *Event) (*OrderTx, error) {
	b, err := orderBatch(o, e)
	if err != nil {
		return nil, err
	}
	conn, err := acquire(ctx, pool)
	if err != nil {
		return nil, fmt.Errorf("insert order %s: get a connection: %w", o.ID, err)
	}
	tx := &OrderTx{conn: conn}
	if tx.Inserted, err = sendOrder(ctx, conn, b, e != nil); err != nil {
		tx.Rollback(ctx)
		var pe *pgconn.PgError
		if errors.As(err, &pe) && pe.Code == pgerrcode.LockNotAvailable {
			err = ErrOrderLocked
		}
		return nil, fmt.Errorf("insert order %s: %w", o.ID, err)
	}
	return tx, nil
}

// acquire waits for a connection no longer than a client should wait to hear that Postgres is gone or overrun.
func acquire(ctx context.Context, pool *Pool) (*pgxpool.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, orderAcquireTimeout)
	defer cancel()
	return pool.Acquire(ctx)
}

func orderBatch(o *Order, e *Event) (*pgx.Batch, error) {
	var status *int
	if o.RespStatus != 0 {
		status = &o.RespStatus
	}
	b := &pgx.Batch{}
	b.Queue("BEGIN")
	b.Queue(orderSettingsSQL, orderStatementTimeout, orderLockTimeout, orderIdleTimeout)
	b.Queue(orderInsertSQL, o.ID, o.UserID, o.Key[:], o.Fingerprint, o.Fence, o.Amount, o.Currency, o.Status, status,
		o.RespBody, o.CreatedAt, o.PayWith)
	if e == nil {
		return b, nil
	}
	headers, err := encodeHeaders(e.Headers)
	if err != nil {
		return nil, err
	}
	b.Queue(insertEventSQL, e.ID, e.AggregateType, e.AggregateID, e.Type, string(e.Payload), headers)
	return b, nil
}

// sendOrder runs the batch. The event is inserted even when the order was not, because that is not known before the
// round trip ends; OrderTx.Commit then rolls back.
func sendOrder(ctx context.Context, conn *pgxpool.Conn, b *pgx.Batch, event bool) (inserted bool, err error) {
	res := conn.SendBatch(ctx, b)
	defer func() {
		if cerr := res.Close(); err == nil { // it repeats the first error
			err = cerr
		}
	}()
	for range 2 { // BEGIN, settings
		if _, err := res.Exec(); err != nil {
			return false, err
		}
	}
	var id uuid.UUID
	if err := res.QueryRow().Scan(&id); err == nil {
		inserted = true
	} else if !errors.Is(err, pgx.ErrNoRows) {
		return false, err
	}
	if event {
		if _, err := res.Exec(); err != nil {
			return false, err
		}
	}
	return inserted, nil
}

// Commit ends the transaction and gives the connection back. If nothing was inserted it rolls back and returns nil.
// ErrCommitUnknown: the outcome cannot be known; after any other error nothing was written.
func (t *OrderTx) Commit(ctx context.Context) error {
	if !t.Inserted {
		t.Rollback(ctx)
		return nil
	}
	defer t.conn.Release()
	// Whether COMMIT was sent is settled here. pgconn.SafeToRetry does not tell: when the reply to a sent COMMIT is
	// lost, pgx 5.12 finds the connection closed by its own failed read, and calls that safe to retry.
	if err := ctx.Err(); err != nil {
		t.hangUp()
		return fmt.Errorf("commit the order: %w", err)
	}
	if t.conn.Conn().IsClosed() {
		return fmt.Errorf("commit the order: %w", pgconn.ErrConnClosed)
	}
	tag, err := t.conn.Exec(ctx, "COMMIT")
	switch {
	case err == nil && tag.String() == "COMMIT":
		return nil
	case err == nil:
		return fmt.Errorf("commit the order: %w", pgx.ErrTxCommitRollback)
	case definite(err):
		return fmt.Errorf("commit the order: %w", err)
	default:
		return fmt.Errorf("commit the order: %w: %w", ErrCommitUnknown, err)
	}
}

// Rollback ends the transaction without a trace and gives the connection back. A connection that does not answer is
// closed, which the server takes for a rollback.
func (t *OrderTx) Rollback(ctx context.Context) {
	defer t.conn.Release()
	if t.conn.Conn().IsClosed() {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	// The pool closes a connection that is still in a transaction.
	_, _ = t.conn.Exec(ctx, "ROLLBACK")
}

// hangUp closes the connection, which the server takes for a rollback.
func (t *OrderTx) hangUp() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	_ = t.conn.Conn().Close(ctx)
}

// definite reports whether a COMMIT that was sent certainly did not happen: the server refused it for a reason other
// than its own end.
func definite(err error) bool {
	var pe *pgconn.PgError
	if !errors.As(err, &pe) {
		return false
	}
	// 57P0…: the server, or the backend, was ended.
	return !pgerrcode.IsConnectionException(pe.Code) && !strings.HasPrefix(pe.Code, "57P0") &&
		pe.Code != pgerrcode.StatementCompletionUnknown
}

// RetryOrder reports whether a definite failure is worth another attempt at once: Postgres asks for it (deadlock,
// serialization), or BrokenConnection.
func RetryOrder(err error) bool {
	var pe *pgconn.PgError
	if errors.As(err, &pe) && (pe.Code == pgerrcode.SerializationFailure || pe.Code == pgerrcode.DeadlockDetected) {
		return true
	}
	return BrokenConnection(err)
}

// BrokenConnection reports whether a definite failure was that of a connection that had died in the pool. Another one
// may do better; one that was just refused by the server will not.
func BrokenConnection(err error) bool {
	for _, final := range []error{
		nil, ErrCommitUnknown, ErrOrderLocked, ErrOrderNotFound, context.DeadlineExceeded,
		context.Canceled,
	} {
		if errors.Is(err, final) {
			return false
		}
	}
	var ce *pgconn.ConnectError
	if errors.As(err, &ce) {
		return false
	}
	var pe *pgconn.PgError
	if !errors.As(err, &pe) {
		return true
	}
	return pe.Code == pgerrcode.AdminShutdown || pe.Code == pgerrcode.IdleInTransactionSessionTimeout ||
		pgerrcode.IsConnectionException(pe.Code)
}

// OrderByKey returns the user's order under a hashed idempotency key, rejected ones included. Errors: ErrOrderNotFound.
func OrderByKey(ctx context.Context, db DB, user uuid.UUID, key [16]byte) (*Order, error) {
	o, err := scanOrder(db.QueryRow(ctx, orderByKeySQL, user, key[:]))
	if err != nil {
		return nil, fmt.Errorf("select an order by key: %w", err)
	}
	return o, nil
}

// OrderByID returns an order, rejected ones included. Errors: ErrOrderNotFound.
func OrderByID(ctx context.Context, db DB, id uuid.UUID) (*Order, error) {
	o, err := scanOrder(db.QueryRow(ctx, orderByIDSQL, id))
	if err != nil {
		return nil, fmt.Errorf("select order %s: %w", id, err)
	}
	return o, nil
}

// ListOrders returns up to limit of a user's orders, newest first, without rejected ones. before is the last id of the
// page before, uuid.Max for the first page.
func ListOrders(ctx context.Context, db DB, user, before uuid.UUID, limit int) ([]*Order, error) {
	rows, err := db.Query(ctx, orderListSQL, user, before, limit)
	if err != nil {
		return nil, fmt.Errorf("list orders: %w", err)
	}
	orders, err := pgx.CollectRows(rows, func(r pgx.CollectableRow) (*Order, error) { return scanOrder(r) })
	if err != nil {
		return nil, fmt.Errorf("list orders: %w", err)
	}
	return orders, nil
}

// PurgeRejected deletes up to limit refusals made before the given time, oldest first, and returns how many it deleted.
// Their keys are free again; orders and their keys are kept forever.
func PurgeRejected(ctx context.Context, db DB, before time.Time, limit int) (int64, error) {
	tag, err := db.Exec(ctx, orderPurgeSQL, before, limit)
	if err != nil {
		return 0, fmt.Errorf("purge refused orders: %w", err)
	}
	return tag.RowsAffected(), nil
}

func scanOrder(r pgx.Row) (*Order, error) {
	var o Order
	var key []byte
	err := r.Scan(&o.ID, &o.UserID, &key, &o.Fingerprint, &o.Fence, &o.Amount, &o.Currency, &o.Status, &o.RespStatus,
		&o.RespBody, &o.CreatedAt, &o.PayWith)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, ErrOrderNotFound
	}
	if err != nil {
		return nil, err
	}
	copy(o.Key[:], key)
	o.CreatedAt = o.CreatedAt.UTC()
	return &o, nil
}
