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

// Selection selects events of history. A nil or empty field does not restrict it.
type Selection struct {
	// Since and Until bound the time of publishing, both inclusive.
	Since, Until time.Time
	ID           *uuid.UUID
	// Subject is the aggregate id.
	Subject *string
	// Type is the event's type, Stream where it was published.
	Type, Stream string
	// Whole extends Stream, if it is the name of a type's only stream, to all streams that the type has or had.
	Whole bool
}

// Place is a place in history in the order of publishing, which is the order of the marks that settled the events. It
// keeps the order of each aggregate. The zero Place is before all of history.
type Place struct {
	// Mark is the mark that settled the event; Part and Seq are its place in the log.
	Mark int64
	Part int16
	Seq  int64
}

// Compare returns -1, 0 or 1 if p is before, equal to or after q.
func (p Place) Compare(q Place) int {
	return cmp.Or(cmp.Compare(p.Mark, q.Mark), cmp.Compare(p.Part, q.Part), cmp.Compare(p.Seq, q.Seq))
}

// behindMark returns the place after all events that mark has settled.
func behindMark(mark int64) Place {
	return Place{Mark: mark, Part: outbox.Partitions - 1, Seq: math.MaxInt64}
}

// Replayed is an event of history.
type Replayed struct {
	outbox.Record
	Place  Place
	Stream string
}

// ReplayConfig is PoolConfig for reading history. Each statement is planned for its arguments, because they determine
// which index it needs.
func ReplayConfig(url, schema string) (*pgxpool.Config, error) {
	cfg, err := PoolConfig(url, schema, "replay", map[string]string{
		"plan_cache_mode": "force_custom_plan",
		// A recently filled table has no statistics, so the planner would sort the whole log for each page.
		"enable_seqscan": "off", "enable_bitmapscan": "off",
	})
	if err == nil {
		cfg.MaxConns = 2
	}
	return cfg, err
}

// errStandby means that the server is a standby, which may lack events that were just published.
var errStandby = errors.New(
	"this Postgres is a standby, which may lack what was just published: point --postgres-url at the primary")

// HistoryBounds returns the time by the database's clock and the publishing time of the oldest event in history, nil if
// history is empty. Errors: errStandby, or those of Postgres.
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

// settleTimeout bounds the wait for marks that settle what is visible. Streaming writes a mark about once a second.
// Events that a stopped relay has not settled are not in history.
const settleTimeout = 5 * time.Second

// AwaitHistory waits until every event published before the call is in history. First it waits, at most settleTimeout,
// for marks that settle the rows visible at the call, which may be published. Then it waits for the transactions that
// may have written marks, calling waiting with their number before each pause.
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

// awaitMarks waits until marks settle the rows visible now, at most settleTimeout.
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

// writersPause is the interval of the checks of AwaitHistory.
const writersPause = 20 * time.Millisecond

// historyWriters lists the transactions that may have written marks and are not visible yet.
func historyWriters(ctx context.Context, db DB) (writers []string, err error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	err = scan(ctx, db, "list the transactions that write history", "replay_writers", nil, &writers)
	return writers, err
}

// Selected counts the selected events of one stream. First and Last are approximately when the first and the last
// number were settled, Created is when the oldest was created.
type Selected struct {
	Stream  string    `json:"stream"`
	Events  int64     `json:"events"`
	First   time.Time `json:"first"`
	Last    time.Time `json:"last"`
	Created time.Time `json:"-"`
}

// CountHistory counts the selected events by stream. It reads all of them.
func CountHistory(ctx context.Context, db DB, s Selection) (list []Selected, err error) {
	r, err := rangeOf(ctx, db, s)
	if err != nil {
		return nil, err
	}
	if s.ID == nil {
		return r.count(ctx, db, s)
	}
	h := History{db: db, sel: s, span: r}
	if err := h.find(ctx); err != nil {
		return nil, fmt.Errorf("count history: %w", err)
	}
	for _, e := range h.items {
		list = append(list, Selected{Stream: e.stream, Events: 1, First: e.at, Last: e.at})
	}
	return list, nil
}
