package sql

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/google/uuid"
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
	// Whole: and if Stream is what a type's only stream is called, all that the type has, or had.
	Whole bool
}

// Place is a place in history, in the order of publishing: that of the marks that settled the events. The order of one
// aggregate is kept everywhere. The zero Place is before all of history.
type Place struct {
	// Mark is the mark that settled the event; Part and Seq are its place in the log.
	Mark int64
	Part int16
	Seq  int64
}

// Compare returns -1, 0 or 1, as p is before q, the same, or after it.
func (p Place) Compare(q Place) int {
	return cmp.Or(cmp.Compare(p.Mark, q.Mark), cmp.Compare(p.Part, q.Part), cmp.Compare(p.Seq, q.Seq))
}

// behindMark is the place behind everything that a mark has settled.
func behindMark(mark int64) Place {
	return Place{Mark: mark, Part: outbox.Partitions - 1, Seq: math.MaxInt64}
}

// Replayed is an event out of history.
type Replayed struct {
	outbox.Event
	Place  Place
	Stream string
}

// ReplayConfig is PoolConfig for reading history. Every statement is planned for its values: which index it needs
// depends on them.
func ReplayConfig(url, schema string) (*pgxpool.Config, error) {
	cfg, err := PoolConfig(url, schema, "replay")
	if err != nil {
		return nil, err
	}
	cfg.MaxConns = 2
	for name, value := range map[string]string{
		"plan_cache_mode": "force_custom_plan",
		// A table that was filled recently has no statistics: by them a page would be read by sorting the log.
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

// settleTimeout bounds the wait for marks to hold what is visible: behind a stream they move about once a second, and
// what a relay that is down has not settled is not history.
const settleTimeout = 5 * time.Second

// AwaitHistory waits until every event published before the call is in history. What is visible at the call, and not
// settled yet, may be published: it is waited for, but no longer than settleTimeout. Then it lists the transactions
// that may have written marks and waits for them to end. It calls waiting with how many are left each time it waits for
// those.
func AwaitHistory(ctx context.Context, db DB, waiting func(n int)) error {
	if err := awaitMarks(ctx, db); err != nil {
		return err
	}
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

// awaitMarks waits until the marks hold what is visible now, but no longer than settleTimeout.
func awaitMarks(ctx context.Context, db DB) error {
	bounded, cancel := context.WithTimeout(ctx, settleTimeout)
	defer cancel()
	var now string
	err := db.QueryRow(bounded, query("snapshot")).Scan(&now)
	for owed := true; err == nil && owed; {
		if err = db.QueryRow(bounded, query("replay_owed"), now).Scan(&owed); err == nil && owed {
			err = pause.For(bounded, writersPause)
		}
	}
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case err != nil && bounded.Err() == nil:
		return fmt.Errorf("look for what is not settled yet: %w", err)
	}
	return nil
}

// writersPause is the time between two checks of which transactions write marks.
const writersPause = 20 * time.Millisecond

// historyWriters names the transactions that may have written marks and are not visible yet.
func historyWriters(ctx context.Context, db DB) (writers []string, err error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	if err = db.QueryRow(ctx, query("replay_writers")).Scan(&writers); err != nil {
		err = fmt.Errorf("list the transactions that write history: %w", err)
	}
	return writers, err
}

// Selected is what a selection has of one stream. Of the log First and Last are when the first and the last number were
// settled, about.
type Selected struct {
	Stream string    `json:"stream"`
	Events int64     `json:"events"`
	First  time.Time `json:"first"`
	Last   time.Time `json:"last"`
}

// CountHistory counts what a selection has, by stream. It reads all of it.
func CountHistory(ctx context.Context, db DB, s Selection) ([]Selected, error) {
	list, err := countHistory(ctx, db, s)
	if err != nil {
		return nil, fmt.Errorf("count history: %w", err)
	}
	return list, nil
}

func countHistory(ctx context.Context, db DB, s Selection) (list []Selected, err error) {
	r, err := rangeOf(ctx, db, s)
	if err != nil {
		return nil, err
	}
	if s.ID != nil {
		h := History{db: db, sel: s, span: r}
		err = h.find(ctx)
		for _, e := range h.items {
			list = append(list, Selected{Stream: e.stream, Events: 1, First: e.at, Last: e.at})
		}
		return list, err
	}
	counts, err := r.count(ctx, db, s)
	for _, c := range counts {
		list = append(list, c.Selected)
	}
	return list, err
}
