package sql

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"posthaste/internal/pause"
	"posthaste/outbox"
)

// Selection says which events of history are meant. What is nil or empty does not restrict.
type Selection struct {
	// Since and Until bound the time of publishing, both inclusive.
	Since, Until time.Time
	ID           *uuid.UUID
	// Subject is the aggregate id.
	Subject *string
	// Type is the event's type, Stream where it was published.
	Type, Stream string
}

// query returns the text of queries/<name>.sql over the part of history to look at, whose parameters come first.
func (s Selection) query(name string) string {
	if s.ID != nil {
		return query("replay_few") + query(name)
	}
	return query("replay_all") + query(name)
}

// Place is a place in history, in the order of publishing. The clock of the database server gives it: if that was set
// back, events published before and after are out of order within the step. Numbers begin at 1: a place without one is
// before the first event published at or after its time.
type Place struct {
	At  time.Time
	Seq int64
}

// Replayed is an event out of history.
type Replayed struct {
	outbox.Event
	Place  Place
	Stream string
}

// ReplayConfig is PoolConfig for reading history. Every statement is planned for its values: which partitions and which
// index it needs depends on them.
func ReplayConfig(url, schema string) (*pgxpool.Config, error) {
	cfg, err := PoolConfig(url, schema, "replay")
	if err != nil {
		return nil, err
	}
	cfg.MaxConns = 2
	for name, value := range map[string]string{
		"plan_cache_mode": "force_custom_plan", "jit": "off",
		// Young partitions have no statistics: by them a page would be read by sorting the day.
		"enable_seqscan": "off", "enable_bitmapscan": "off",
	} {
		cfg.ConnConfig.RuntimeParams[name] = value
	}
	return cfg, nil
}

// errStandby means that the server is a standby: what was just published may not be there yet, and nobody can tell.
var errStandby = errors.New(
	"this Postgres is a standby, which may lack what was just published: point --postgres-url at the primary")

// HistoryBounds returns the time by the database's clock, and when the oldest event in history was published, nil if
// there is none. Errors: errStandby, or those of Postgres.
func HistoryBounds(ctx context.Context, db DB) (now time.Time, oldest *time.Time, err error) {
	var standby bool
	err = db.QueryRow(ctx, query("replay_bounds")).Scan(&now, &oldest, &standby)
	switch {
	case err != nil:
		err = fmt.Errorf("read the bounds of history: %w", err)
	case standby:
		err = errStandby
	}
	return now, oldest, err
}

// AwaitHistoryWriters waits until every event published before the call is visible in history: it notes which
// transactions may have written history and waits for them to end. It calls waiting with how many are left each time it
// has to wait.
func AwaitHistoryWriters(ctx context.Context, db DB, waiting func(n int)) error {
	left, err := historyWriters(ctx, db)
	for err == nil && len(left) > 0 {
		waiting(len(left))
		if err := pause.For(ctx, writersPause); err != nil {
			return err
		}
		var now []string
		now, err = historyWriters(ctx, db)
		left = slices.DeleteFunc(left, func(w string) bool { return !slices.Contains(now, w) })
	}
	return err
}

// writersPause is the time between two looks at who writes history.
const writersPause = 20 * time.Millisecond

// historyWriters names the transactions that may have written history and are not visible yet.
func historyWriters(ctx context.Context, db DB) (writers []string, err error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	if err = db.QueryRow(ctx, query("replay_writers")).Scan(&writers); err != nil {
		err = fmt.Errorf("list the transactions that write history: %w", err)
	}
	return writers, err
}

// Selected is what a selection has of one stream.
type Selected struct {
	Stream string    `json:"stream"`
	Events int64     `json:"events"`
	First  time.Time `json:"first"`
	Last   time.Time `json:"last"`
}

// CountHistory counts what a selection has, by stream. It reads all of it.
func CountHistory(ctx context.Context, db DB, s Selection) ([]Selected, error) {
	rows, err := db.Query(ctx, s.query("replay_count"), s.ID, s.Subject, s.Since, s.Until, s.Type, s.Stream)
	if err != nil {
		return nil, fmt.Errorf("count history: %w", err)
	}
	list, err := pgx.CollectRows(rows, pgx.RowToStructByPos[Selected])
	if err != nil {
		return nil, fmt.Errorf("count history: %w", err)
	}
	return list, nil
}

// scanRows is how many events a page looks at in search of those of a type or a stream.
const scanRows = 5000

// ReadHistory returns the events of the selection behind a place, in the order of publishing: at most limit of them and
// about as many bytes of payload. Nothing stays open between two calls. The next page is that behind the returned
// place; the end is reached when that is the place asked for.
func ReadHistory(ctx context.Context, db DB, s Selection, after Place, limit, bytes int) ([]Replayed, Place, error) {
	scan := limit
	if s.Type != "" || s.Stream != "" {
		scan = max(limit, scanRows)
	}
	rows, err := db.Query(ctx, s.query("replay_page"), s.ID, s.Subject, after.At, after.Seq, s.Until, s.Type, s.Stream,
		scan, limit, bytes)
	if err != nil {
		return nil, after, fmt.Errorf("read history: %w", err)
	}
	defer rows.Close()
	var list []Replayed
	end := after
	for rows.Next() {
		var r Replayed
		var wanted bool
		err := rows.Scan(&r.Place.At, &r.Place.Seq, &r.ID, &r.AggregateType, &r.AggregateID, &r.Type, &r.Payload,
			&r.Headers,
			&r.Time, &r.Stream, &wanted)
		if err != nil {
			return nil, after, fmt.Errorf("read history: %w", err)
		}
		end = r.Place
		if wanted {
			r.Seq = r.Place.Seq
			list = append(list, r)
		}
	}
	if err := rows.Err(); err != nil {
		return nil, after, fmt.Errorf("read history: %w", err)
	}
	return list, end, nil
}
