package sql

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"posthaste/outbox"
)

// Sweep is one sweep worker's connection. The session holds the advisory locks of the parts the worker has claimed; the
// server ends it when a transaction stands idle for 10 s, or the session for 15 s, so that a stopped worker does not
// hold its rows. It belongs to one goroutine.
type Sweep struct {
	conn    *pgx.Conn
	keys    [outbox.Parts]int64
	history bool
}

// OpenSweep connects. history tells whether delivered events are kept.
func OpenSweep(ctx context.Context, url, schema string, history bool) (*Sweep, error) {
	cfg, err := ConnConfig(url, schema, "sweep")
	if err != nil {
		return nil, err
	}
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

// Parts lists the parts that have rows.
func (s *Sweep) Parts(ctx context.Context) ([]int, error) {
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
	tx, err := s.conn.Begin(ctx)
	if err != nil {
		return nil, fmt.Errorf("begin a sweep: %w", err)
	}
	return tx, nil
}

// Take deletes, within tx, the first rows of the part, at most limit of them and about bytes of payload, and returns them
// in order.
func (s *Sweep) Take(ctx context.Context, tx pgx.Tx, part, limit, bytes int) ([]*outbox.Event, error) {
	rows, err := tx.Query(ctx, query("sweep_delete"), part, limit, bytes)
	if err != nil {
		return nil, wrapPart("sweep", part, err)
	}
	events, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (*outbox.Event, error) {
		e := &outbox.Event{}
		err := row.Scan(&e.Seq, &e.ID, &e.AggregateType, &e.AggregateID, &e.Type, &e.Payload, &e.Headers, &e.CreatedAt)
		e.Time = e.CreatedAt
		return e, err
	})
	if err != nil {
		return nil, wrapPart("sweep", part, err)
	}
	// RETURNING comes in any order.
	slices.SortFunc(events, func(a, b *outbox.Event) int { return int(max(-1, min(1, a.Seq-b.Seq))) })
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
	if !s.history || len(done) == 0 {
		return nil
	}
	n := len(done)
	seqs, ids, created := make([]int64, n), make([]uuid.UUID, n), make([]time.Time, n)
	types, aggregates, events, payloads := make([]string, n), make([]string, n), make([]string, n), make([]string, n)
	headers, streams, entries := make([]*string, n), make([]string, n), make([]string, n)
	for i, d := range done {
		e := d.Event
		seqs[i], ids[i], created[i] = e.Seq, e.ID, e.CreatedAt
		types[i], aggregates[i], events[i], payloads[i] = e.AggregateType, e.AggregateID, e.Type, string(e.Payload)
		streams[i], entries[i] = d.Stream, d.EntryID
		headers[i] = optional(e.Headers)
	}
	_, err := tx.Exec(ctx, query("sweep_history"), seqs, ids, types, aggregates, events, payloads, headers, created, streams, entries)
	if err != nil {
		return fmt.Errorf("keep history: %w", err)
	}
	return nil
}

// Park writes e to the parked events within tx, in which its row was deleted.
func (s *Sweep) Park(ctx context.Context, tx pgx.Tx, e *outbox.Event, reason, class string, attempts int) error {
	_, err := tx.Exec(ctx, query("sweep_park"), e.ID, e.Seq, e.AggregateType, e.AggregateID, e.Type, string(e.Payload), optional(e.Headers),
		e.CreatedAt, reason, class, attempts)
	if err != nil {
		return fmt.Errorf("park event %s: %w", e.ID, err)
	}
	return nil
}

// ParkUnread parks the part's first row without reading it, and returns its id and seq. pgx.ErrNoRows:
// there is no row.
func (s *Sweep) ParkUnread(ctx context.Context, part int, reason string) (id uuid.UUID, seq int64, err error) {
	err = s.conn.QueryRow(ctx, query("sweep_park_unread"), part, reason).Scan(&id, &seq)
	return id, seq, wrapPart("park the first row of", part, err)
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
	// 22: data exception; 54: a limit of the program; 53200: out of memory; XX001: data corrupted.
	return strings.HasPrefix(code, "22") || strings.HasPrefix(code, "54") || code == "53200" || code == "XX001"
}
