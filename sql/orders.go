package sql

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"
)

// Statuses of an order.
const (
	OrderPending  = "PENDING"
	OrderRejected = "REJECTED"
)

// PayCredits is the one way of paying that this program carries out itself.
const PayCredits = "credits"

// orderTimeout is the longest that writing an order takes; it is shorter than the guard's lease. Of it, so much is for
// getting a connection: a client should not wait longer to hear that Postgres is gone or overrun.
const (
	orderTimeout        = 5 * time.Second
	orderAcquireTimeout = 2 * time.Second
)

// orderSettings are the server's own limits for sessions that write orders: what a client sent that has vanished ends,
// too, and before the guard's lease does. A lock is waited for no longer than a client waits for an order in flight.
var orderSettings = map[string]string{
	"statement_timeout": "4500ms", "lock_timeout": "2000ms", "idle_in_transaction_session_timeout": "5000ms",
}

var (
	orderInsertSQL     = query("order_insert")
	orderInsertManySQL = query("order_insert_many")
	orderByKeySQL      = query("order_by_key")
	orderByIDSQL       = query("order_by_id")
	orderListSQL       = query("order_list")
	orderPurgeSQL      = query("order_purge")
)

var (
	// ErrOrderNotFound means that there is no such row.
	ErrOrderNotFound = errors.New("no such order")
	// ErrOrderLocked means that another transaction holds the order's key and did not end in time. Nothing was written.
	ErrOrderLocked = errors.New("another transaction holds the order's key")
	// ErrCommitUnknown means that the order was sent and its outcome cannot be known from this connection. The row may
	// exist, now or in a moment. Every other error of PlaceOrder means that nothing was written.
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
	// ServerStarted is when the server was started that the order was written or read by; see Incarnation.
	ServerStarted time.Time
}

// Pool is where transactions of their own take a connection from; see PoolConfig.
type Pool = pgxpool.Pool

// orderConns is how many connections the API has, if the URL does not say and pgx would not take more. Commits wait for
// the disk, not for a processor, and those that come together share its writes: with pgx's four, orders wait in line.
const orderConns = 8

// OrderPoolConfig is PoolConfig for the pool of the API, whose sessions have the server's own limits of time. It has
// eight connections, or one for each processor if these are more, unless url says pool_max_conns.
func OrderPoolConfig(url, schema string) (*pgxpool.Config, error) {
	cfg, err := PoolConfig(url, schema, "api")
	if err != nil {
		return nil, err
	}
	maps.Copy(cfg.ConnConfig.RuntimeParams, orderSettings)
	// What pgxpool takes for itself from the URL, pgx alone leaves among the parameters.
	if own, err := pgx.ParseConfig(url); err == nil && own.RuntimeParams["pool_max_conns"] == "" {
		cfg.MaxConns = max(cfg.MaxConns, orderConns)
	}
	return cfg, nil
}

// PlaceOrder inserts o, and e beside it, in one statement, which is a transaction of its own. e is nil for an order
// that announces nothing. placed is false if the user has an order under this key already, committed; nothing was
// written then. A concurrent transaction with the same key is waited for, for as long as the session's lock_timeout
// says; see OrderPoolConfig. It takes 5 s at most.
//
// Errors: ErrCommitUnknown; ErrOrderLocked and any other mean that nothing was written. RetryOrder tells whether a new
// connection may do better.
func PlaceOrder(ctx context.Context, pool *Pool, o *Order, e *Event) (placed bool, err error) {
	p, err := newPlacement(o, e)
	if err != nil {
		return false, err
	}
	ctx, cancel := context.WithTimeout(ctx, orderTimeout)
	defer cancel()
	return insertAlone(ctx, pool, orderAcquireTimeout, p)
}

// insertAlone inserts one order, for which it waits so long for a connection.
func insertAlone(ctx context.Context, pool *Pool, within time.Duration, p *placement) (placed bool, err error) {
	conn, err := acquire(ctx, pool, within)
	if err != nil {
		return false, fmt.Errorf("insert order %s: get a connection: %w", p.id, err)
	}
	defer conn.Release()
	ctx, cancel := context.WithTimeout(ctx, orderTimeout)
	defer cancel()
	err = insert(ctx, conn, []*placement{p})
	return p.result(), err
}

// placement is an order that is to be inserted, and what has become of it.
type placement struct {
	id      uuid.UUID
	order   *Order
	event   *Event // nil: it announces nothing
	headers *string

	// placed is true only after the commit. The server was started then.
	placed  bool
	started time.Time

	// These are a Placer's. err is that of the group; alone: to be tried by itself instead. done is closed when both
	// are set. ctx is the caller's.
	err   error
	alone bool
	done  chan struct{}
	ctx   context.Context //nolint:containedctx // it ends with the call
}

func newPlacement(o *Order, e *Event) (*placement, error) {
	p := &placement{id: o.ID, order: o, event: e}
	if e == nil {
		return p, nil
	}
	var err error
	p.headers, err = encodeHeaders(e.Headers)
	return p, err
}

// result returns placed. It is called when the order is its caller's again, and completes it.
func (p *placement) result() (placed bool) {
	if p.placed {
		p.order.ServerStarted = p.started
	}
	return p.placed
}

// insert inserts a group of orders, no two with one id, in one statement, and says of each if it was placed. It fails
// for all of them, with an error of PlaceOrder, and then none is placed.
func insert(ctx context.Context, conn *pgxpool.Conn, group []*placement) (err error) {
	// Whether the statement was sent is settled here. pgconn.SafeToRetry does not tell: when the reply to what was sent
	// is lost, pgx 5.12 finds the connection closed by its own failed read, and calls that safe to retry.
	if err = ctx.Err(); err == nil {
		err = awaits(ctx, conn.Conn())
	}
	if err != nil {
		return fmt.Errorf("%s: %w", inserting(group), err)
	}
	rows, err := send(ctx, conn.Conn(), group)
	switch {
	case err == nil:
		for _, p := range group {
			i := slices.IndexFunc(rows, func(r inserted) bool { return r.ID == p.id })
			if p.placed = i >= 0; p.placed {
				p.started = rows[i].Started
			}
		}
		return nil
	case !definite(err):
		err = fmt.Errorf("%w: %w", ErrCommitUnknown, err)
	case SQLState(err) == pgerrcode.LockNotAvailable:
		err = ErrOrderLocked
	}
	return fmt.Errorf("%s: %w", inserting(group), err)
}

func inserting(group []*placement) string {
	if len(group) == 1 {
		return fmt.Sprintf("insert order %s", group[0].id)
	}
	return fmt.Sprintf("insert %d orders", len(group))
}

// inserted is a row of the statement's answer.
type inserted struct {
	ID      uuid.UUID
	Started time.Time
}

// send sends the statement, and returns what it has inserted when the server is ready for the next one, which it is
// after the commit.
func send(ctx context.Context, c *pgx.Conn, group []*placement) ([]inserted, error) {
	statement, args := orderInsertManySQL, columnsOf
	if len(group) == 1 { // it costs the server a fifth less this way
		statement, args = orderInsertSQL, argsOf
	}
	rows, err := c.Query(ctx, statement, args(group)...)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, func(r pgx.CollectableRow) (i inserted, err error) {
		err = r.Scan(&i.ID, &i.Started)
		return i, err
	})
}

func acquire(ctx context.Context, pool *Pool, within time.Duration) (*pgxpool.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	return pool.Acquire(ctx)
}

// argsOf are the values for order_insert, of a group of one.
func argsOf(group []*placement) []any {
	p := group[0]
	o, e := p.order, p.event
	var status *int
	if o.RespStatus != 0 {
		status = &o.RespStatus
	}
	args := []any{
		uuidParam(o.ID), uuidParam(o.UserID), o.Key[:], o.Fingerprint, o.Fence, o.Amount, o.Currency, o.Status, status,
		o.RespBody, o.CreatedAt, o.PayWith,
	}
	if e == nil {
		return append(args, nil, nil, nil, nil, nil, nil)
	}
	return append(args, uuidParam(e.ID), e.AggregateType, e.AggregateID, e.Type, string(e.Payload), p.headers)
}

// columnsOf are the values for order_insert_many: a column each.
func columnsOf(group []*placement) []any {
	n := len(group)
	ids, users, events := make([]pgtype.UUID, n), make([]pgtype.UUID, n), make([]pgtype.UUID, n)
	keys, fingerprints, bodies := make([][]byte, n), make([][]byte, n), make([][]byte, n)
	fences, amounts, answers := make([]int64, n), make([]int64, n), make([]int, n)
	currencies, statuses, pays := make([]string, n), make([]string, n), make([]string, n)
	types, aggregates, kinds := make([]string, n), make([]string, n), make([]string, n)
	payloads, headers := make([]string, n), make([]string, n)
	created := make([]time.Time, n)
	for i, p := range group {
		o := p.order
		ids[i], users[i], keys[i], fingerprints[i] = uuidParam(o.ID), uuidParam(o.UserID), o.Key[:], o.Fingerprint
		fences[i], amounts[i], currencies[i], statuses[i] = o.Fence, o.Amount, o.Currency, o.Status
		answers[i], bodies[i], created[i], pays[i] = o.RespStatus, o.RespBody, o.CreatedAt, o.PayWith
		e := p.event
		if e == nil {
			continue
		}
		events[i], types[i], aggregates[i], kinds[i] = uuidParam(e.ID), e.AggregateType, e.AggregateID, e.Type
		payloads[i] = string(e.Payload)
		if p.headers != nil {
			headers[i] = *p.headers
		}
	}
	return []any{
		ids, users, keys, fingerprints, fences, amounts, currencies, statuses, answers, bodies, created, pays,
		events, types, aggregates, kinds, payloads, headers,
	}
}

// errHungUp means that the server had ended the connection before anything was sent.
var errHungUp = errors.New("the connection had been ended by the server")

// awaits closes c and fails if the server has ended it already. A pool is full of such connections after a restart of
// Postgres, and what is sent over one of them has no answer: its outcome would be unknown. A connection may still end
// right after this look.
func awaits(ctx context.Context, c *pgx.Conn) error {
	nc := c.PgConn().Conn()
	if t, ok := nc.(*tls.Conn); ok {
		nc = t.NetConn()
	}
	s, ok := nc.(syscall.Conn)
	if !ok {
		return nil
	}
	ended := false
	raw, err := s.SyscallConn()
	if err == nil {
		// Not raw.Read, which waits for other readers: pgx leaves one behind when a write takes it long.
		err = raw.Control(func(fd uintptr) {
			// What an idle connection has to be read is the server's last words, or its end.
			_, _, err := syscall.Recvfrom(int(fd), make([]byte, 1), syscall.MSG_PEEK|syscall.MSG_DONTWAIT)
			ended = !errors.Is(err, syscall.EAGAIN)
		})
	}
	if err == nil && !ended {
		return nil
	}
	_ = c.Close(ctx)
	return errors.Join(errHungUp, err)
}

// definite reports whether a statement that was sent certainly wrote nothing: the server answered with an error, which
// it cannot any more once the transaction has committed. FATAL and PANIC are about the backend's own end, whenever that
// was.
func definite(err error) bool {
	var pe *pgconn.PgError
	if !errors.As(err, &pe) {
		return false
	}
	return pe.SeverityUnlocalized == "ERROR" && !pgerrcode.IsConnectionException(pe.Code) &&
		!strings.HasPrefix(pe.Code, "57P0") && pe.Code != pgerrcode.StatementCompletionUnknown
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
		&o.RespBody, &o.CreatedAt, &o.PayWith, &o.ServerStarted)
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
