package sql

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"posthaste/internal/pause"
	"posthaste/outbox"
)

// callTimeout bounds every call of the store that is not a batch of rows.
const callTimeout = 5 * time.Second

// batchTimeout bounds calls that concern many rows.
const batchTimeout = 15 * time.Second

// Store is the relay's side of Postgres: posthaste/relay's Store, whose ports say what each method does. It is safe for
// concurrent use.
type Store struct {
	pool *pgxpool.Pool
	name string
	// history is how long settled events are kept; 0 keeps none.
	history time.Duration
	// registered is set once the schema has had this binary's version.
	registered atomic.Bool
	kept       retention
}

// NewStore returns the store of the relay called name, over a pool made from RelayPoolConfig. The caller closes the
// pool.
func NewStore(pool *pgxpool.Pool, name string, history time.Duration) *Store {
	return &Store{pool: pool, name: name, history: history}
}

// RelayPoolConfig is PoolConfig for the relay's own statements. They read the end of a log through an index, but the
// statistics never cover that end, and the planner would read and sort the whole log. So its other methods are
// disabled.
func RelayPoolConfig(url, schema string) (*pgxpool.Config, error) {
	cfg, err := PoolConfig(url, schema, "relay", queueSettings)
	if err == nil {
		cfg.MaxConns = 8
		cfg.PrepareConn = func(_ context.Context, c *pgx.Conn) (bool, error) { return unchanged(c.PgConn()), nil }
	}
	return cfg, err
}

// unchanged reports whether the session takes writes, or takes none, as before. A session of an old primary that runs
// on without writes fails no statement that only reads. The server reports the setting with its next answer.
func unchanged(c *pgconn.PgConn) bool {
	const setting = "default_transaction_read_only"
	before, known := c.CustomData()[setting]
	now := c.ParameterStatus(setting)
	c.CustomData()[setting] = now
	return !known || before == now
}

var queueSettings = map[string]string{
	"enable_seqscan": "off", "enable_bitmapscan": "off", "enable_sort": "off", "enable_incremental_sort": "off",
	"enable_hashjoin": "off", "enable_mergejoin": "off", "plan_cache_mode": "force_generic_plan",
	"idle_in_transaction_session_timeout": "10s",
}

// scan is scan within callTimeout.
func (s *Store) scan(ctx context.Context, what, name string, args []any, to ...any) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	return scan(ctx, s.pool, what, name, args, to...)
}

// exec is exec within callTimeout.
func (s *Store) exec(ctx context.Context, what, name string, args ...any) (rows int64, err error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	return exec(ctx, s.pool, what, name, args...)
}

// owned is owned within callTimeout.
func (s *Store) owned(ctx context.Context, what, name string, args []any, to ...any) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	return owned(ctx, s.pool, what, name, args, to...)
}

// replicated waits, if there is a synchronous standby, until it has what was committed.
func (s *Store) replicated(ctx context.Context, what string, standby bool) (err error) {
	if standby {
		_, err = s.exec(ctx, what, "mark_replicated")
	}
	return err
}

// Register makes sure that the relay's row exists and is the only one.
func (s *Store) Register(ctx context.Context) error {
	if err := s.register(ctx); err != nil {
		return err
	}
	if err := unsubscribed(ctx, s.pool); err != nil {
		return err
	}
	if err := Identify(ctx, s.pool); err != nil {
		return err
	}
	// A standby grants advisory locks as well, so a relay connected to one could become leader or stand by forever.
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	if err := writable(ctx, s.pool, "state_writable", "the relay's state"); err != nil {
		return err
	}
	s.registered.Store(true)
	return nil
}

func (s *Store) register(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	// A migration by a newer version leaves the schema usable for this version, which continues until it is replaced.
	if err := CheckSchema(ctx, s.pool); err != nil && (!s.registered.Load() || !errors.Is(err, ErrSchemaNewer)) {
		return err
	}
	if _, err := s.pool.Exec(ctx, query("state_sequences")); err != nil {
		return fmt.Errorf("see whether a sequence is behind its table: %w", err)
	}
	if err := CheckRelayName(ctx, s.pool, s.name); err != nil {
		return err
	}
	return Register(ctx, s.pool, s.name)
}

// Identify gives a database that was copied (by dump and restore, logical replication, an upgrade by copying, or as a
// template on the same server) a source of its own: the original may still be running, and only an operator may give
// its streams to the copy. If the transaction ids of the rows mean nothing on this server, Identify rewrites the rows,
// without a time limit; writers wait while it rewrites unsettled rows. A promoted standby is the same database. A copy
// of the server's files cannot be distinguished from the original.
func Identify(ctx context.Context, pool *pgxpool.Pool) error {
	moved, err := copied(ctx, pool) // read first: see Register
	if err == nil && moved {
		err = settleCopied(ctx, pool)
	}
	for try := 1; err == nil && moved; try++ {
		err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error { return identify(ctx, tx) })
		if SQLState(err) != pgerrcode.LockNotAvailable {
			break
		}
		if try == identifyTries {
			return fmt.Errorf("give this copy an identity: a transaction that has written to outbox does not end: "+
				"end it (pg_stat_activity, pg_prepared_xacts), and start again: %w", err)
		}
		err = pause.For(ctx, time.Second)
	}
	if err != nil {
		return fmt.Errorf("see whether this database is a copy: %w", err)
	}
	return nil
}

// unsubscribed fails if a subscription writes marks into this database: the rows that it brings have transactions of
// another server, and a relay that leads here would not publish them.
func unsubscribed(ctx context.Context, db DB) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	names, err := collect(ctx, db, "look for a subscription to outbox_mark", pgx.RowTo[string], "copy_subscribed")
	if err == nil && len(names) > 0 {
		err = fmt.Errorf("a subscription copies the outbox of another database into this one. When services write "+
			"here, and it has caught up: DROP SUBSCRIPTION %s", pgx.Identifier{names[0]}.Sanitize())
	}
	return err
}

func copied(ctx context.Context, db DB) (moved bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	err = db.QueryRow(ctx, query("state_moved")).Scan(&moved)
	return moved, err
}

// identifyTries is how often Identify tries to get the lock of the table, a few seconds apart.
const identifyTries = 20

// copyRows is how many settled rows one transaction rewrites.
const copyRows = 10_000

// settleCopied rewrites the settled rows without blocking writers.
func settleCopied(ctx context.Context, pool *pgxpool.Pool) error {
	var continues bool
	if err := pool.QueryRow(ctx, query("copy_continues")).Scan(&continues); err != nil || continues {
		return err
	}
	for part := range outbox.Partitions {
		first := settledXID
		for last := &first; last != nil; {
			err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
				if err := run(ctx, tx, "copy_begin"); err != nil {
					return err
				}
				return tx.QueryRow(ctx, query("copy_settled"), part, *last, copyRows).Scan(&last)
			})
			if err != nil {
				return err
			}
		}
	}
	return nil
}

// settledXID is the transaction id that settled rows of a copy get.
const settledXID = "3"

func identify(ctx context.Context, tx pgx.Tx) error {
	if err := run(ctx, tx, "copy_begin", "copy_lock"); err != nil {
		return err
	}
	// Another process may have done it before this one got the lock.
	if moved, err := copied(ctx, tx); err != nil || !moved {
		return err
	}
	var continues bool
	if err := tx.QueryRow(ctx, query("copy_continues")).Scan(&continues); err != nil {
		return err
	}
	if continues {
		return run(ctx, tx, "state_identity")
	}
	for part := range outbox.Partitions {
		if _, err := tx.Exec(ctx, query("copy_settled"), part, settledXID, math.MaxInt64); err != nil {
			return err
		}
	}
	return run(ctx, tx, "copy_owed", "copy_mark", "state_identity")
}

// run executes statements without arguments.
func run(ctx context.Context, tx pgx.Tx, names ...string) error {
	for _, name := range names {
		if _, err := tx.Exec(ctx, query(name)); err != nil {
			return err
		}
	}
	return nil
}

// Register makes sure that the only row of relay_state has the given name. It renames a row that no relay ever used.
// Errors: *outbox.SecondNameError.
func Register(ctx context.Context, db DB, name string) error {
	var existing string
	var epoch int64
	// Read first, so that a role that may only read does not fail.
	err := db.QueryRow(ctx, query("state_names")).Scan(&existing, &epoch)
	if errors.Is(err, pgx.ErrNoRows) {
		if _, err := db.Exec(ctx, query("state_register"), name); err != nil {
			return fmt.Errorf("register relay %q: %w", name, err)
		}
		err = db.QueryRow(ctx, query("state_names")).Scan(&existing, &epoch)
	}
	if err != nil {
		return fmt.Errorf("read the relay's name: %w", err)
	}
	if existing == name {
		return nil
	}
	rows, err := exec(ctx, db, fmt.Sprintf("rename relay %q", existing), "state_rename", name)
	if err == nil && rows == 0 {
		return &outbox.SecondNameError{Name: name, Existing: existing}
	}
	return err
}

// State reads the relay's row.
func (s *Store) State(ctx context.Context) (outbox.State, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	return ReadState(ctx, s.pool, s.name)
}

// errNoMark means that a part has no mark, so a relay could not tell which of its events are settled.
var errNoMark = errors.New("table outbox_mark has lost marks, so it is unknown which events were published: restore " +
	"it, or, to publish every event in outbox again, INSERT INTO outbox_mark (part, epoch, settled, hi) VALUES " +
	"(-1, 0, '3:3:', 0)")

// ReadState reads the row of the relay called name. It returns pgx.ErrNoRows if there is no such row.
func ReadState(ctx context.Context, db DB, name string) (outbox.State, error) {
	st := outbox.State{Name: name}
	var desired, active, lsn string
	var nonce []byte
	err := db.QueryRow(ctx, query("state_get"), name).Scan(&desired, &active, &st.Owner.Epoch, &nonce, &st.Owner.Source,
		&lsn, &st.Holder, &st.Degraded, &st.System, &st.Timeline, &st.Changed, &st.Barrier, &st.Sink, &st.Prefix,
		&st.Shards, &st.Server)
	if err == nil && st.Shards == 0 {
		err = errNoMark
	}
	if err != nil {
		return st, fmt.Errorf("read the state of relay %q: %w", name, err)
	}
	st.Desired, st.Active = outbox.Mode(desired), outbox.Mode(active)
	copy(st.Owner.Nonce[:], nonce)
	st.Handover, err = outbox.ParseLSN(lsn)
	return st, err
}

// SetDesired records the desired mode of the relay called name.
func SetDesired(ctx context.Context, db DB, name string, mode outbox.Mode) error {
	what := fmt.Sprintf("set the mode of relay %q", name)
	rows, err := exec(ctx, db, what, "state_desired", name, string(mode))
	if err == nil && rows == 0 {
		return errors.New(what + ": there is no such relay")
	}
	return err
}

// Adopt writes the new owner if the epoch is still a.From. The first one waits for the transactions that bring rows of
// another database; it returns false if Register has to see them.
func (s *Store) Adopt(ctx context.Context, a outbox.Adoption) (bool, error) {
	var n int
	err := s.scan(ctx, fmt.Sprintf("adopt epoch %d", a.To.Epoch), "state_adopt", []any{
		s.name, a.From, a.To.Epoch, a.To.Nonce[:], a.Holder, a.Sink, s.suspects(a), a.WentBack,
	}, &n)
	if a.From == 0 && errors.Is(err, context.DeadlineExceeded) {
		err = fmt.Errorf("%w: does a transaction bring rows of another database, such as a restore? It must end", err)
	}
	if err != nil || n == 0 {
		return false, err
	}
	moved, err := copied(ctx, s.pool)
	return !moved && err == nil, err
}

// SetActive records what the owner of epoch does now.
func (s *Store) SetActive(ctx context.Context, epoch int64, active outbox.Mode, handover outbox.LSN,
	degraded string,
) (bool, error) {
	rows, err := s.exec(ctx, "record mode "+string(active), "state_active", s.name, epoch, string(active),
		handover.String(), storable(degraded))
	return rows == 1, err
}

// RaiseBarrier records the transaction that the next stream must wait for.
func (s *Store) RaiseBarrier(ctx context.Context, epoch int64, xid uint64, known bool) error {
	at := int64(xid) //nolint:gosec // at most outbox.BarrierUnknown
	return s.barrier(ctx, "slot_barrier_raise", s.name, epoch, at, known)
}

// LowerBarrier clears the barrier.
func (s *Store) LowerBarrier(ctx context.Context, epoch int64, xid uint64) error {
	err := s.barrier(ctx, "slot_barrier_lower", s.name, epoch, int64(xid)) //nolint:gosec // at most BarrierUnknown
	if errors.Is(err, outbox.ErrSuperseded) {
		return nil // or there was no barrier
	}
	return err
}

func (s *Store) barrier(ctx context.Context, statement string, args ...any) error {
	rows, err := s.exec(ctx, "note what the slot waits for", statement, args...)
	if err == nil && rows == 0 {
		return outbox.ErrSuperseded
	}
	return err
}

// Streams lists every stream ever published to.
func (s *Store) Streams(ctx context.Context) ([]outbox.Stream, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	return ListStreams(ctx, s.pool)
}

// Streams lists every stream ever published to.
func Streams(ctx context.Context, db DB) ([]string, error) {
	list, err := ListStreams(ctx, db)
	return outbox.StreamNames(list), err
}

func (s *Store) Newest(ctx context.Context) (map[string]string, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	return pairs[string, string](ctx, s.pool, "list the newest entries", "stream_newest")
}

func (s *Store) Delivered(ctx context.Context) (some bool, err error) {
	err = s.scan(ctx, "look whether anything was delivered", "delivered", nil, &some)
	return some, err
}

// NoteStream records a stream before its first publish.
func (s *Store) NoteStream(ctx context.Context, stream, base string, epoch int64) (gated bool, err error) {
	what := fmt.Sprintf("note stream %q", stream)
	var standby bool
	var of string
	err = s.owned(ctx, what, "stream_note", []any{stream, epoch, s.name, base}, &gated, &standby, &of)
	switch {
	case err != nil:
	case of != base:
		err = &outbox.TakenError{Stream: stream, Base: of}
	default:
		err = s.replicated(ctx, what, standby)
	}
	return gated && err == nil, err
}

func (s *Store) Ungated(ctx context.Context) ([]string, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	return collect(ctx, s.pool, "list streams without a gate", pgx.RowTo[string], "stream_ungated")
}

func (s *Store) NoteGroups(ctx context.Context, epoch int64, groups map[string][]string) error {
	_, err := s.exec(ctx, "note the groups of streams", "stream_groups", groups, s.name, epoch)
	return err
}

func (s *Store) Gated(ctx context.Context, streams []string) error {
	_, err := s.exec(ctx, "note that streams have gates", "stream_gated", streams)
	return err
}

func (s *Store) InsertLSN(ctx context.Context) (outbox.LSN, error) {
	var lsn string
	if err := s.scan(ctx, "read the WAL position", "insert_lsn", nil, &lsn); err != nil {
		return 0, err
	}
	return outbox.ParseLSN(lsn)
}

// Horizon reads an LSN and then takes a transaction id.
func (s *Store) Horizon(ctx context.Context) (outbox.LSN, uint64, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	lsn, err := s.InsertLSN(ctx)
	if err != nil && !Withheld(err) {
		return 0, 0, err
	}
	var text string
	err = pgx.BeginFunc(ctx, s.pool, func(tx pgx.Tx) error {
		// It must commit at once: with synchronous replication and an unreachable standby it would wait forever.
		if _, err := tx.Exec(ctx, "SET LOCAL synchronous_commit = local"); err != nil {
			return err
		}
		return tx.QueryRow(ctx, query("horizon")).Scan(&text)
	})
	var xid uint64
	if err == nil {
		xid, err = strconv.ParseUint(text, 10, 64)
	}
	if err != nil {
		return 0, 0, fmt.Errorf("take a transaction id: %w", err)
	}
	return lsn, xid, nil
}

// VisibleBelow reports whether every transaction older than xid has ended.
func (s *Store) VisibleBelow(ctx context.Context, xid uint64) (bool, error) {
	var ok bool
	below := int64(xid) //nolint:gosec // Postgres' xid8, far below 1<<63
	err := s.scan(ctx, "wait for older transactions", "visible_below", []any{below}, &ok)
	return ok, err
}

func (s *Store) Park(ctx context.Context, o outbox.Owner, row *outbox.Row, class, reason string, attempts int) (
	bool, error,
) {
	ctx, cancel := context.WithTimeout(ctx, batchTimeout)
	defer cancel()
	what := fmt.Sprintf("move event %s to outbox_dead", row.ID)
	var seen string
	var there bool
	err := owned(ctx, s.pool, what, "park", []any{
		s.name, o.Epoch, o.Nonce[:], row.AggregateID, row.Seq, row.ID, storable(reason), class, attempts,
	}, &seen, &there)
	if err != nil {
		return false, err
	}
	snapshot, err := outbox.ParseSnapshot(seen)
	if err != nil {
		return false, fmt.Errorf("%s: %w", what, err)
	}
	return there || snapshot.Visible(row.XID), nil
}

// Audit returns, by part, one of the oldest unsettled rows.
func (s *Store) Audit(ctx context.Context) (outbox.AuditMark, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	var parts []int16
	var seqs []int64
	if err := scan(ctx, s.pool, "audit", "audit", nil, &parts, &seqs); err != nil {
		return outbox.AuditMark{}, err
	}
	m := outbox.AuditMark{First: make(map[int16]int64, len(parts))}
	for i, p := range parts {
		m.First[p] = seqs[i]
	}
	// After the rows, so that the position is after the commit of each of them.
	var lsn, flushed string
	err := scan(ctx, s.pool, "audit", "audit_position", nil, &lsn, &flushed)
	if Withheld(err) {
		return m, nil
	}
	if err != nil {
		return m, err
	}
	var ferr error
	m.LSN, err = outbox.ParseLSN(lsn)
	m.Flushed, ferr = outbox.ParseLSN(flushed)
	return m, errors.Join(err, ferr)
}

func (s *Store) Backlog(ctx context.Context) (int64, time.Duration, error) {
	ctx, cancel := context.WithTimeout(ctx, batchTimeout)
	defer cancel()
	return Backlog(ctx, s.pool, 0)
}

// Backlog returns the number of undelivered events, most at most (0: all are counted), and the age of the oldest. If it
// stops at most, the age is that of the oldest among the counted events and the next event of each part.
func Backlog(ctx context.Context, db DB, most int64) (int64, time.Duration, error) {
	var limit *int64
	if most > 0 {
		limit = &most
	}
	var rows int64
	var seconds float64
	err := scan(ctx, db, "count the backlog", "backlog", []any{limit}, &rows, &seconds)
	return rows, time.Duration(max(seconds, 0) * float64(time.Second)), err
}

// Parked lists the dead events with the columns that block-key needs.
func (s *Store) Parked(ctx context.Context) ([]outbox.Dead, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	return collect(ctx, s.pool, "list dead events", func(row pgx.CollectableRow) (d outbox.Dead, err error) {
		err = row.Scan(&d.ID, &d.Seq, &d.AggregateType, &d.AggregateID, &d.RetrySeq)
		return d, err
	}, "dead_blocking")
}

// SQLState returns the SQLSTATE in err's chain, or "".
func SQLState(err error) string {
	if pe, ok := errors.AsType[*pgconn.PgError](err); ok {
		return pe.Code
	}
	return ""
}

// Withheld reports whether the server refuses a function, as managed servers may: because of a missing right, because
// it lacks the function, or because of its wal_level. A standby refuses the functions of the WAL, too.
func Withheld(err error) bool {
	switch SQLState(err) {
	case pgerrcode.InsufficientPrivilege, pgerrcode.FeatureNotSupported, pgerrcode.ObjectNotInPrerequisiteState:
		return true
	}
	return false
}
