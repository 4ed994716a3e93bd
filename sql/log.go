package sql

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"posthaste/outbox"
)

// Bounds of one step of reading the log.
const (
	// logMarks and logRows bound one list: 1 MB of memory, and less than a second for the statement.
	logMarks = 64
	logRows  = 20_000
)

// History reads the events of a selection page by page. It keeps no transaction open between pages. It is not safe for
// concurrent use.
type History struct {
	db  DB
	sel Selection
	// span is the range of the log; nil until it is queried.
	span *span
	// items are the next events of the log after at. reached is the place that the reader has reached once they are
	// used up.
	items       []item
	at, reached Place
}

// item is an event of the log.
type item struct {
	place  Place
	id     uuid.UUID
	at     time.Time
	stream string // set only for a selection by id
	wanted bool   // set only for a selection by id
}

// NewHistory returns a reader of s. It does no I/O.
func NewHistory(db DB, s Selection) *History { return &History{db: db, sel: s} }

// Read returns the events after a place in the order of publishing: at most limit events and about bytes of payload.
// all means that no events are left; a page before that may be empty. The next page begins at end. A failed page can be
// read again, and another History can continue from any returned place.
func (h *History) Read(ctx context.Context, after Place, limit, bytes int) (
	list []Replayed, end Place, all bool, err error,
) {
	list, end, all, err = h.read(ctx, after, limit, bytes)
	if err != nil {
		return nil, after, false, fmt.Errorf("read history: %w", err)
	}
	return list, end, all, nil
}

// read returns events that are already listed, or lists the next ones.
func (h *History) read(ctx context.Context, after Place, limit, bytes int) ([]Replayed, Place, bool, error) {
	if h.span == nil {
		var err error
		if h.span, err = rangeOf(ctx, h.db, h.sel); err != nil {
			return nil, after, false, err
		}
	}
	if after.Mark == 0 { // the beginning; the first mark settles nothing
		return nil, behindMark(max(h.span.from, 1)), false, nil
	}
	if h.at != after {
		h.items, h.at = nil, after
	}
	if len(h.items) == 0 {
		all, err := h.fill(ctx)
		if err != nil {
			return nil, after, false, err
		}
		if len(h.items) == 0 {
			h.at = h.reached
			return nil, h.at, all, nil
		}
	}
	list, used, err := h.rows(ctx, limit, bytes)
	if err != nil {
		return nil, after, false, err
	}
	h.at = h.items[used-1].place
	if h.items = h.items[used:]; len(h.items) == 0 {
		h.at = h.reached
	}
	return list, h.at, false, nil
}

// rows reads the next events and returns how many items they used. Events deleted since they were listed are missing.
func (h *History) rows(ctx context.Context, limit, bytes int) ([]Replayed, int, error) {
	next := h.items[:min(limit, len(h.items))]
	parts, seqs, marks := make([]int16, len(next)), make([]int64, len(next)), make([]int64, len(next))
	for i, e := range next {
		parts[i], seqs[i], marks[i] = e.place.Part, e.place.Seq, e.place.Mark
	}
	rows, err := h.db.Query(ctx, query("log_rows"), parts, seqs, marks, limit, bytes)
	if err != nil {
		return nil, 0, err
	}
	defer rows.Close()
	var list []Replayed
	used, kept := len(next), 0
	for size := 0; size < bytes && rows.Next(); {
		var r Replayed
		var n int
		var created *time.Time
		err := rows.Scan(&n, &r.ID, &r.AggregateType, &r.AggregateID, &r.Type, &r.Payload, &r.Headers, &created,
			&r.Stream, &kept)
		if err != nil {
			return nil, 0, err
		}
		e := next[n-1]
		used, r.Place, r.Seq, r.Time = n, e.place, e.place.Seq, e.at
		if created != nil {
			r.Time = *created
		}
		list = append(list, r)
		size += len(r.AggregateID) + len(r.Payload) + len(r.Headers)
	}
	rows.Close()
	if len(list) == kept {
		used = len(next)
	}
	return list, used, rows.Err()
}

// fill lists the events after h.at up to h.reached. all means that no events are left.
func (h *History) fill(ctx context.Context) (all bool, err error) {
	h.reached = h.at
	if h.sel.ID == nil {
		h.items, h.reached, err = h.span.list(ctx, h.db, h.sel, h.at)
		return h.reached == h.at, err
	}
	end := behindMark(max(h.span.to, 1))
	if h.at.Compare(end) >= 0 {
		return true, nil
	}
	if err = h.find(ctx); err == nil {
		h.reached = end
	}
	return false, err
}

// find looks up the event of a selection by id.
func (h *History) find(ctx context.Context) error {
	rows, err := h.db.Query(ctx, query("log_held"), *h.sel.ID, h.span.from, h.span.to)
	if err != nil {
		return err
	}
	list, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (e item, err error) {
		var subject, kind, base string
		err = row.Scan(&e.place.Mark, &e.at, &e.place.Part, &e.place.Seq, &e.id, &subject, &kind, &e.stream, &base)
		e.wanted = (h.sel.Subject == nil || *h.sel.Subject == subject) && (h.sel.Type == "" || h.sel.Type == kind) &&
			(h.sel.Stream == "" || h.sel.Stream == e.stream || h.sel.Whole && h.sel.Stream == base)
		return e, err
	})
	h.items = slices.DeleteFunc(list, func(e item) bool { return !e.wanted || e.place.Compare(h.at) <= 0 })
	return err
}

// span is the range of the log that the marks after from up to to have settled. part is the only part to read, -1 for
// all.
type span struct {
	from, to int64
	part     int16
}

func rangeOf(ctx context.Context, db DB, s Selection) (*span, error) {
	var r span
	err := scan(ctx, db, "find the range of history", "log_range", []any{s.Since, s.Until, s.Subject}, &r.from, &r.to,
		&r.part)
	return &r, err
}

// count returns what the log holds of each stream.
func (r *span) count(ctx context.Context, db DB, s Selection) ([]Selected, error) {
	return structs[Selected](ctx, db, "count history", "log_count", r.from, r.to, r.part, s.Subject, s.Type, s.Stream,
		s.Whole)
}

// list returns the next events of a selection after a place: at most logRows events of at most logMarks marks. It also
// returns the place that it reached, which is after itself at the end.
func (r *span) list(ctx context.Context, db DB, s Selection, after Place) ([]item, Place, error) {
	rows, err := db.Query(ctx, query("log_marks"), after.Mark, r.to, logMarks)
	if err != nil {
		return nil, after, err
	}
	var marks []int64
	var parts []int16
	var times []time.Time
	reached := after
	var mark int64
	var only int16
	var at time.Time
	_, err = pgx.ForEachRow(rows, []any{&mark, &only, &at}, func() error {
		for part := int16(0); part < outbox.Partitions; part++ {
			wanted := (only < 0 || only == part) && (r.part < 0 || r.part == part)
			if wanted && (mark > after.Mark || part >= after.Part) {
				marks, parts, times = append(marks, mark), append(parts, part), append(times, at)
			}
		}
		reached = behindMark(mark)
		return nil
	})
	if err != nil || len(marks) == 0 {
		return nil, reached, err
	}
	behind := int64(0)
	if marks[0] == after.Mark && parts[0] == after.Part {
		behind = after.Seq
	}
	rows, err = db.Query(ctx, query("log_list"), marks, parts, behind, s.Subject, s.Type, s.Stream, logRows,
		s.Whole)
	if err != nil {
		return nil, after, err
	}
	items, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (e item, err error) {
		var n int
		if err = row.Scan(&n, &e.place.Seq, &e.id); err == nil {
			e.place.Mark, e.place.Part, e.at = marks[n-1], parts[n-1], times[n-1]
		}
		return e, err
	})
	if len(items) == logRows {
		reached = items[logRows-1].place
	}
	return items, reached, err
}
