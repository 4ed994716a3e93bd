package sql

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"

	"posthaste/outbox"
)

// sweepTimeout bounds every call of a Sweep. It is longer than the server's own timeouts, which give better errors, and
// cuts off a server that has vanished.
const sweepTimeout = 35 * time.Second

// Sweep is one sweep worker's connection. The session holds the advisory locks of the parts the worker has claimed; the
// server ends it when a transaction stands idle for 10 s, or the session for 15 s, so that a stopped worker does not
// hold its rows. It belongs to one goroutine.
type Sweep struct {
	conn    *pgx.Conn
	keys    [outbox.Partitions]int64
	history bool
}

// OpenSweep connects. history tells whether delivered events are kept.
func OpenSweep(ctx context.Context, url, schema string, history bool) (*Sweep, error) {
	cfg, err := ConnConfig(url, schema, "sweep")
	if err != nil {
		return nil, err
	}
	prepare(cfg)
	for name, value := range queueSettings {
		cfg.RuntimeParams[name] = value
	}
	cfg.RuntimeParams["idle_session_timeout"] = "15s"
	cfg.RuntimeParams["lock_timeout"] = "2s"
	cfg.RuntimeParams["statement_timeout"] = "30s"
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	conn, err := pgx.ConnectConfig(ctx, cfg)
	if err != nil {
		return nil, fmt.Errorf("open a sweep connection: %w", err)
	}
	s := &Sweep{conn: conn, history: history}
	for i := range s.keys {
		if err := conn.QueryRow(ctx, query("lock_key"), fmt.Sprintf("part %d", i)).Scan(&s.keys[i]); err != nil {
			s.Close()
			return nil, fmt.Errorf("open a sweep connection: %w", err)
		}
	}
	return s, nil
}

// Close ends the session and with it every lock it holds.
func (s *Sweep) Close() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	_ = s.conn.Close(ctx)
}

// Closed reports whether the connection is gone.
func (s *Sweep) Closed() bool { return s.conn.IsClosed() }

// Partitions lists the parts that have rows.
func (s *Sweep) Partitions(ctx context.Context) ([]int, error) {
	ctx, cancel := context.WithTimeout(ctx, sweepTimeout)
	defer cancel()
	rows, err := s.conn.Query(ctx, query("sweep_parts"))
	if err != nil {
		return nil, fmt.Errorf("look for rows: %w", err)
	}
	parts, err := pgx.CollectRows(rows, pgx.RowTo[int])
	if err != nil {
		return nil, fmt.Errorf("look for rows: %w", err)
	}
	return parts, nil
}

// Targets returns the highest seq of each part that has rows.
func (s *Sweep) Targets(ctx context.Context) (map[int]int64, error) {
	ctx, cancel := context.WithTimeout(ctx, sweepTimeout)
	defer cancel()
	rows, err := s.conn.Query(ctx, query("sweep_targets"))
	if err != nil {
		return nil, fmt.Errorf("look for the last rows: %w", err)
	}
	targets := map[int]int64{}
	var part int
	var seq int64
	_, err = pgx.ForEachRow(rows, []any{&part, &seq}, func() error {
		targets[part] = seq
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("look for the last rows: %w", err)
	}
	return targets, nil
}

// Claim takes the part's lock and raises its counter. ok is false when somebody else has the part.
func (s *Sweep) Claim(ctx context.Context, part int) (claim int64, ok bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, sweepTimeout)
	defer cancel()
	if err := s.conn.QueryRow(ctx, query("lock_try"), s.keys[part]).Scan(&ok); err != nil || !ok {
		return 0, false, wrapPart("lock", part, err)
	}
	err = s.conn.QueryRow(ctx, query("sweep_claim"), part).Scan(&claim)
	if errors.Is(err, pgx.ErrNoRows) {
		return 0, false, s.Release(ctx, part)
	}
	if err != nil {
		return 0, false, wrapPart("claim", part, err)
	}
	return claim, true, nil
}

// Release gives the part's lock back.
func (s *Sweep) Release(ctx context.Context, part int) error {
	ctx, cancel := context.WithTimeout(ctx, sweepTimeout)
	defer cancel()
	var ok bool
	return wrapPart("unlock", part, s.conn.QueryRow(ctx, query("lock_drop"), s.keys[part]).Scan(&ok))
}

func wrapPart(step string, part int, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s part %d: %w", step, part, err)
}

// Begin opens the transaction of one batch.
func (s *Sweep) Begin(ctx context.Context) (pgx.Tx, error) {
	ctx, cancel := context.WithTimeout(ctx, sweepTimeout)
	defer cancel()
	tx, err := s.conn.Begin(ctx)
	if err != nil {
		return nil, fmt.Errorf("begin a sweep: %w", err)
	}
	return tx, nil
}

// Take deletes, within tx, the first rows of the part, at most limit of them and about bytes of payload, and returns
// them in order.
func (s *Sweep) Take(ctx context.Context, tx pgx.Tx, part, limit, bytes int) ([]*outbox.Event, error) {
	ctx, cancel := context.WithTimeout(ctx, sweepTimeout)
	defer cancel()
	rows, err := tx.Query(ctx, query("sweep_delete"), part, limit, bytes)
	if err != nil {
		return nil, wrapPart("sweep", part, err)
	}
	events, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (*outbox.Event, error) {
		e := &outbox.Event{}
		err := row.Scan(&e.Seq, &e.ID, &e.AggregateType, &e.AggregateID, &e.Type, &e.Payload, &e.Headers, &e.Time)
		return e, err
	})
	if err != nil {
		return nil, wrapPart("sweep", part, err)
	}
	// RETURNING comes in any order.
	slices.SortFunc(events, func(a, b *outbox.Event) int { return cmp.Compare(a.Seq, b.Seq) })
	return events, nil
}

// Published is one swept event with its place in Redis.
type Published struct {
	Event   *outbox.Event
	Stream  string
	EntryID string
}

// Keep writes the history of published events within tx.
func (s *Sweep) Keep(ctx context.Context, tx pgx.Tx, done []Published) error {
	ctx, cancel := context.WithTimeout(ctx, sweepTimeout)
	defer cancel()
	if !s.history || len(done) == 0 {
		return nil
	}
	n := len(done)
	seqs, ids, created := make([]int64, n), make([]uuid.UUID, n), make([]time.Time, n)
	types, aggregates, events, payloads := make([]string, n), make([]string, n), make([]string, n), make([]string, n)
	headers, streams, entries := make([]*string, n), make([]string, n), make([]string, n)
	for i, d := range done {
		e := d.Event
		seqs[i], ids[i], created[i] = e.Seq, e.ID, e.Time
		types[i], aggregates[i], events[i], payloads[i] = e.AggregateType, e.AggregateID, e.Type, string(e.Payload)
		streams[i], entries[i] = d.Stream, d.EntryID
		headers[i] = optional(e.Headers)
	}
	_, err := tx.Exec(ctx, query("sweep_history"), seqs, ids, types, aggregates, events, payloads, headers, created,
		streams, entries)
	if err != nil {
		return fmt.Errorf("keep history: %w", err)
	}
	return nil
}

// Park writes e to the parked events within tx, in which its row was deleted.
func (s *Sweep) Park(ctx context.Context, tx pgx.Tx, e *outbox.Event, reason, class string, attempts int) error {
	ctx, cancel := context.WithTimeout(ctx, sweepTimeout)
	defer cancel()
	_, err := tx.Exec(ctx, query("sweep_park"), e.ID, e.Seq, e.AggregateType, e.AggregateID, e.Type, string(e.Payload),
		optional(e.Headers), e.Time, storable(reason), class, attempts)
	if err != nil {
		return fmt.Errorf("park event %s: %w", e.ID, err)
	}
	return nil
}

// Reached reports whether the part has no visible row up to seq.
func (s *Sweep) Reached(ctx context.Context, part int, seq int64) (ok bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, sweepTimeout)
	defer cancel()
	err = s.conn.QueryRow(ctx, query("sweep_reached"), part, seq).Scan(&ok)
	return ok, wrapPart("look for the first rows of", part, err)
}

// ParkFirst parks the part's first row on the server if it still cannot be read, and returns what identifies it, and
// why it cannot be read; nil if it can. The payload stays with the parked row as long as the server can copy it.
func (s *Sweep) ParkFirst(ctx context.Context, part int) (e *outbox.Event, cause, err error) {
	ctx, cancel := context.WithTimeout(ctx, sweepTimeout)
	defer cancel()
	err = pgx.BeginTxFunc(ctx, s.conn, pgx.TxOptions{IsoLevel: pgx.RepeatableRead}, func(tx pgx.Tx) error {
		// One snapshot for reading and parking: a row with a lower number that became visible between them would be
		// parked instead.
		cause = pgx.BeginFunc(ctx, tx, func(tx pgx.Tx) error {
			if _, err := s.Take(ctx, tx, part, 1, 1); err != nil {
				return err
			}
			return errReadable
		})
		if !Unreadable(cause) || OutOfMemory(cause) {
			if errors.Is(cause, errReadable) {
				return nil
			}
			return cause
		}
		if e, err = s.parkFirst(ctx, tx, part, cause, true); Unreadable(err) {
			e, err = s.parkFirst(ctx, tx, part, cause, false)
		}
		return err
	})
	if err != nil {
		return nil, nil, wrapPart("park the first row of", part, err)
	}
	return e, cause, nil
}

// errReadable rolls back the attempt to read.
var errReadable = errors.New("the row can be read")

func (s *Sweep) parkFirst(ctx context.Context, tx pgx.Tx, part int, cause error, payload bool) (*outbox.Event, error) {
	e := &outbox.Event{}
	err := pgx.BeginFunc(ctx, tx, func(tx pgx.Tx) error {
		return tx.QueryRow(ctx, query("sweep_park_first"), part, storable(cause.Error()), payload).
			Scan(&e.ID, &e.Seq, &e.AggregateType, &e.AggregateID)
	})
	return e, err
}

// storable makes a text that Postgres can store of an error that may quote anything.
func storable(text string) string {
	return strings.ReplaceAll(strings.ToValidUTF8(text, "\uFFFD"), "\x00", "\uFFFD")
}

func optional(b []byte) *string {
	if b == nil {
		return nil
	}
	t := string(b)
	return &t
}

// Unreadable reports whether err is about the data of a row: a smaller read may go around it.
func Unreadable(err error) bool {
	code := SQLState(err)
	// 22: data exception; 54: a limit of the program. By their class, because a later Postgres may know more of them.
	return strings.HasPrefix(code, "22") || strings.HasPrefix(code, "54") || code == pgerrcode.DataCorrupted ||
		OutOfMemory(err)
}

// OutOfMemory reports whether the server had no memory for a statement. A smaller read may need less.
func OutOfMemory(err error) bool { return SQLState(err) == pgerrcode.OutOfMemory }
