package sql

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"

	"posthaste/outbox"
)

// Statuses of an order.
const (
	OrderPending  = "PENDING"
	OrderRejected = "REJECTED"
)

// PayCredits is the only payment method that this program carries out itself.
const PayCredits = "credits"

// orderTimeout bounds the writing of an order; it is shorter than the guard's lease. orderAcquireTimeout bounds the
// wait for a connection, so that a client soon learns that Postgres is unreachable or overloaded.
const (
	orderTimeout        = 5 * time.Second
	orderAcquireTimeout = 2 * time.Second
)

// orderSettings are the server's own limits for sessions that write orders, so that a statement of a vanished client
// ends before the guard's lease. The limit on locks is how long a client waits for an order in flight.
var orderSettings = map[string]string{
	"statement_timeout": "4500ms", "lock_timeout": "2000ms", "idle_in_transaction_session_timeout": "5000ms",
}

var (
	orderInsertSQL     = query("order_insert")
	orderInsertManySQL = query("order_insert_many")
	orderByKeySQL      = query("order_by_key")
	orderByIDSQL       = query("order_by_id")
)

var (
	// ErrOrderNotFound means that there is no such row.
	ErrOrderNotFound = errors.New("no such order")
	// ErrOrderLocked means that another transaction held the order's key for too long. Nothing was written.
	ErrOrderLocked = errors.New("another transaction holds the order's key")
	// ErrCommitUnknown means that the order was sent and this connection cannot determine the outcome. The row may
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
	// PayWith is PayCredits for an order that was paid with credits, "" for others.
	PayWith string
	// RespStatus and RespBody are the stored answer of a rejected order; zero for others.
	RespStatus int
	RespBody   []byte
	// CreatedAt has microsecond precision.
	CreatedAt time.Time
	// ServerStarted is the start time of the server that wrote or read the order; see Incarnation.
	ServerStarted time.Time
}

// Pool is a connection pool for transactions; see PoolConfig.
type Pool = pgxpool.Pool

// orderConns is the minimum number of the API's connections unless the URL sets one. Commits wait for the disk, not for
// a CPU, and concurrent commits share its writes; with pgx's four connections, orders queue.
const orderConns = 8

// OrderPoolConfig is PoolConfig for the API, whose sessions have the server's own timeouts. The pool has eight
// connections, or one per CPU if there are more, unless url sets pool_max_conns.
func OrderPoolConfig(url, schema string) (*pgxpool.Config, error) {
	cfg, err := PoolConfig(url, schema, "api", orderSettings)
	if err != nil {
		return nil, err
	}
	// pgxpool removes its own parameters from the URL; pgx leaves them among RuntimeParams.
	if own, err := pgx.ParseConfig(url); err == nil && own.RuntimeParams["pool_max_conns"] == "" {
		cfg.MaxConns = max(cfg.MaxConns, orderConns)
	}
	before := cfg.BeforeConnect
	cfg.BeforeConnect = func(ctx context.Context, c *pgx.ConnConfig) error {
		err := before(ctx, c)
		cancelNothing(c)
		return err
	}
	return cfg, nil
}

// cancelNothing makes a connection that is given up send no request to cancel its statement. The server limits the
// statement itself, but not the wait of its commit for a synchronous standby. A request would end that wait: the order
// would then be visible and count as committed, although no standby has it.
func cancelNothing(cfg *pgx.ConnConfig) {
	var connected atomic.Bool
	dial, after := cfg.DialFunc, cfg.AfterConnect
	cfg.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
		if connected.Load() { // pgx dials for a request only
			return nil, errors.New("no statement is cancelled")
		}
		return dial(ctx, network, addr)
	}
	cfg.AfterConnect = func(ctx context.Context, c *pgconn.PgConn) error {
		connected.Store(true)
		return after(ctx, c)
	}
}

// PlaceOrder inserts o and its event e in one statement and transaction. e is nil for an order without an event. placed
// is false, and nothing was written, if a committed order of the user has the key already. The call waits for a
// concurrent transaction with the same key, up to the session's lock_timeout (see OrderPoolConfig), and takes at most 5
// s.
//
// Errors: ErrCommitUnknown; ErrOrderLocked and any other mean that nothing was written. RetryOrder reports whether a
// new attempt may succeed.
func PlaceOrder(ctx context.Context, pool *Pool, o *Order, e *outbox.Event) (placed bool, err error) {
	p, err := newPlacement(o, e)
	if err != nil {
		return false, err
	}
	ctx, cancel := context.WithTimeout(ctx, orderTimeout)
	defer cancel()
	return insertAlone(ctx, pool, orderAcquireTimeout, p)
}

// insertAlone inserts one order. It waits at most within for a connection.
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

// placement is an order to be inserted, with its outcome.
type placement struct {
	id      uuid.UUID
	order   *Order
	event   *outbox.Event // nil: no event
	headers *string

	// placed is set after the commit; started is the start time of the server.
	placed  bool
	started time.Time

	// These belong to a Placer. err is the group's error. alone means that the order must be retried without the group.
	// done is closed when both are set. ctx is the caller's.
	err   error
	alone bool
	done  chan struct{}
	ctx   context.Context //nolint:containedctx // it ends with the call
}

func newPlacement(o *Order, e *outbox.Event) (*placement, error) {
	p := &placement{id: o.ID, order: o, event: e}
	if e == nil {
		return p, nil
	}
	var err error
	p.headers, err = encodeHeaders(e.Headers)
	return p, err
}

// result returns placed and completes the order. Only the order's caller may call it, after done.
func (p *placement) result() (placed bool) {
	if p.placed {
		p.order.ServerStarted = p.started
	}
	return p.placed
}

// insert inserts a group of orders with different ids in one statement and sets placed of each. An error is one of
// PlaceOrder's and applies to the whole group, of which no order is placed.
func insert(ctx context.Context, conn *pgxpool.Conn, group []*placement) (err error) {
	// This determines whether the statement was sent. pgconn.SafeToRetry does not: when the reply to a sent statement
	// is lost, pgx 5.12 finds the connection closed by its own failed read and calls that safe to retry.
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

// inserted is a row that the statement returns.
type inserted struct {
	ID      uuid.UUID
	Started time.Time
}

// send executes the statement and returns the inserted rows once the server is ready for the next statement, which is
// after the commit.
func send(ctx context.Context, c *pgx.Conn, group []*placement) ([]inserted, error) {
	statement, args := orderInsertManySQL, columnsOf
	if len(group) == 1 { // a fifth less work for the server
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

// argsOf returns the arguments of order_insert for a group of one.
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

// columnsOf returns the arguments of order_insert_many, one slice per column.
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

// errHungUp means that the server had closed the connection before anything was sent.
var errHungUp = errors.New("the connection had been ended by the server")

// awaits closes c and returns an error if the server has closed the connection. After a restart of Postgres a pool is
// full of closed connections, and a statement sent over one would have an unknown outcome. The server may still close
// the connection right after this check.
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
		// Not raw.Read, which waits for other readers: pgx leaves one running after a slow write.
		err = raw.Control(func(fd uintptr) { ended = endedByPeer(fd) })
	}
	if err == nil && !ended {
		return nil
	}
	_ = c.Close(ctx)
	return errors.Join(errHungUp, err)
}

// definite reports whether a statement that was sent certainly wrote nothing, because the server answered with an
// error. It cannot do that after the commit. FATAL and PANIC can come at any time, because they report the end of the
// backend.
func definite(err error) bool {
	pe, ok := errors.AsType[*pgconn.PgError](err)
	return ok && pe.SeverityUnlocalized == "ERROR" && !pgerrcode.IsConnectionException(pe.Code) &&
		!strings.HasPrefix(pe.Code, "57P0") && pe.Code != pgerrcode.StatementCompletionUnknown
}

// RetryOrder reports whether an immediate new attempt may succeed: after a deadlock or a serialization failure, or if
// BrokenConnection.
func RetryOrder(err error) bool {
	code := SQLState(err)
	return code == pgerrcode.SerializationFailure || code == pgerrcode.DeadlockDetected || BrokenConnection(err)
}

// BrokenConnection reports whether the failure was that of a pooled connection that had been closed, so that another
// one may succeed. A refused new connection is not one.
func BrokenConnection(err error) bool {
	for _, final := range []error{
		nil, ErrCommitUnknown, ErrOrderLocked, ErrOrderNotFound, context.DeadlineExceeded,
		context.Canceled,
	} {
		if errors.Is(err, final) {
			return false
		}
	}
	if errors.As(err, new(*pgconn.ConnectError)) {
		return false
	}
	pe, ok := errors.AsType[*pgconn.PgError](err)
	return !ok || pe.Code == pgerrcode.AdminShutdown || pe.Code == pgerrcode.IdleInTransactionSessionTimeout ||
		pgerrcode.IsConnectionException(pe.Code)
}

// OrderByKey returns the user's order under a hashed idempotency key, even a rejected one. Errors: ErrOrderNotFound.
func OrderByKey(ctx context.Context, db DB, user uuid.UUID, key [16]byte) (*Order, error) {
	o, err := scanOrder(db.QueryRow(ctx, orderByKeySQL, user, key[:]))
	if err != nil {
		return nil, fmt.Errorf("select an order by key: %w", err)
	}
	return o, nil
}

// OrderByID returns an order, even a rejected one. Errors: ErrOrderNotFound.
func OrderByID(ctx context.Context, db DB, id uuid.UUID) (*Order, error) {
	o, err := scanOrder(db.QueryRow(ctx, orderByIDSQL, id))
	if err != nil {
		return nil, fmt.Errorf("select order %s: %w", id, err)
	}
	return o, nil
}

// ListOrders returns up to limit orders of a user, newest first, without rejected ones. before is the last id of the
// previous page, uuid.Max for the first page.
func ListOrders(ctx context.Context, db DB, user, before uuid.UUID, limit int) ([]*Order, error) {
	return collect(ctx, db, "list orders", func(r pgx.CollectableRow) (*Order, error) { return scanOrder(r) },
		"order_list", user, before, limit)
}

// PurgeRejected deletes up to limit rejected orders created before the given time, oldest first, and returns how many
// it deleted. Their keys can then be used again. Other orders and their keys are kept forever.
func PurgeRejected(ctx context.Context, db DB, before time.Time, limit int) (int64, error) {
	return exec(ctx, db, "purge refused orders", "order_purge", before, limit)
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

// uuidParam returns id in a type that pgx sends directly. It would format a uuid.UUID as text and parse that.
func uuidParam(id uuid.UUID) pgtype.UUID { return pgtype.UUID{Bytes: id, Valid: true} }
