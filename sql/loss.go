package sql

import (
	"context"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"posthaste/outbox"
)

// lossTimeout bounds the counting of one loss: history may be long, and a number is not worth hours of the primary's
// time.
const lossTimeout = time.Minute

// suspicion is what an adoption has noted as perhaps lost.
type suspicion struct {
	ID      int64
	Stream  string
	After   string
	Since   *time.Time
	Events  *int64
	Noticed time.Time
	// Restored is the mark behind which everything was published again, nil if nothing was; but for Refused events.
	Restored *int64
	Refused  int64
}

// tailOf is the method Tail of outbox.Sink.
type tailOf = func(ctx context.Context, stream, after string) ([]outbox.Entry, error)

// CountLosses counts in history what an adoption has noted as perhaps lost. What was published and had no mark when the
// adoption came, has none now: it is owed, and not lost.
func (s *store) CountLosses(ctx context.Context, tail tailOf) ([]outbox.Loss, error) {
	ctx, cancel := context.WithTimeout(ctx, 2*lossTimeout)
	defer cancel()
	rows, err := s.pool.Query(ctx, query("loss_untold"))
	if err != nil {
		return nil, fmt.Errorf("read what may be lost: %w", err)
	}
	list, err := pgx.CollectRows(rows, pgx.RowToStructByPos[suspicion])
	if err != nil {
		return nil, fmt.Errorf("read what may be lost: %w", err)
	}
	var out []outbox.Loss
	for _, l := range list {
		loss := outbox.Loss{Stream: l.Stream, Noticed: l.Noticed}
		if l.Events != nil {
			loss.Events = *l.Events
		} else if err := s.countLoss(ctx, &loss, l, tail); err != nil {
			return out, fmt.Errorf("count what is lost of %q: %w", l.Stream, err)
		}
		if loss.Events == 0 {
			_, err = s.pool.Exec(ctx, query("loss_drop"), l.ID)
		} else {
			_, err = s.pool.Exec(ctx, query("loss_told"), l.ID, loss.Events, optionalTime(loss.First),
				optionalTime(loss.Last))
			out = append(out, loss)
		}
		if err != nil {
			return out, fmt.Errorf("note what is lost of %q: %w", l.Stream, err)
		}
	}
	for _, old := range []string{"loss_expire", "repair_expire"} {
		if _, err := s.pool.Exec(ctx, query(old), s.history); err != nil {
			return out, fmt.Errorf("delete old losses: %w", err)
		}
	}
	return out, nil
}

// countLoss counts the settled events of the log that are not in the stream. Those that an earlier loss has counted,
// and no replay has published again, are not counted twice. Where counting takes too long, the number is unknown, and
// may be all of the range.
func (s *store) countLoss(ctx context.Context, loss *outbox.Loss, l suspicion, tail tailOf) error {
	bounded, cancel := context.WithTimeout(ctx, lossTimeout)
	defer cancel()
	err := s.countLog(bounded, loss, l, tail)
	if err == nil && loss.Events > 0 {
		var known int64
		err = s.pool.QueryRow(bounded, query("loss_known"), l.ID, l.Stream, loss.First, loss.Last).Scan(&known)
		loss.Events = max(loss.Events-known, 0)
	}
	if err != nil && bounded.Err() != nil && ctx.Err() == nil {
		loss.Events = -1
		return nil
	}
	return err
}

// countLog adds what the log has of a loss.
func (s *store) countLog(ctx context.Context, loss *outbox.Loss, l suspicion, tail tailOf) error {
	r := span{part: -1}
	var first, last *time.Time
	err := s.pool.QueryRow(ctx, query("loss_range"), l.Stream, l.After, l.Since, l.Noticed).Scan(&r.from, &r.to, &first,
		&last)
	if err != nil || first == nil || last == nil {
		return err
	}
	if l.Restored != nil { // and has been trimmed since, for all one knows
		r.to = min(r.to, *l.Restored)
		if l.Refused > 0 {
			addLoss(loss, l.Refused, *first, *last)
		}
	}
	if r.to <= r.from {
		return nil
	}
	sel := Selection{Stream: l.Stream}
	counts, err := r.count(ctx, s.pool, sel)
	if err != nil || len(counts) == 0 {
		return err
	}
	have, err := tail(ctx, l.Stream, entryBefore(l.After, counts[0].Created))
	if err != nil {
		addLoss(loss, 0, *first, *last)
		return err
	}
	outbox.SortEntries(have)
	for at := behindMark(r.from); ; {
		items, reached, err := r.list(ctx, s.pool, sel, at)
		if err != nil {
			addLoss(loss, 0, *first, *last)
			return err
		}
		for _, e := range items {
			if _, there := outbox.FindEntry(have, e.id); !there {
				addLoss(loss, 1, e.at, e.at)
			}
		}
		if reached == at {
			return nil
		}
		at = reached
	}
}

// addLoss adds events that were settled from one time to another.
func addLoss(l *outbox.Loss, events int64, first, last time.Time) {
	l.Events += events
	if l.First.IsZero() || first.Before(l.First) {
		l.First = first
	}
	if last.After(l.Last) {
		l.Last = last
	}
}

// entrySlack is how far the clocks of Postgres and Redis may be apart.
const entrySlack = 5 * time.Minute

// entryBefore returns an entry id that is safely before an entry, and before those of events created at a time.
func entryBefore(entry string, created time.Time) string {
	if entry == "" {
		return ""
	}
	return entryAt(earlier(created, time.UnixMilli(idMillis(entry))))
}

// entryAt returns an entry id that is safely before those of a time, "" for the beginning.
func entryAt(t time.Time) string {
	if ms := t.Add(-entrySlack).UnixMilli(); ms > 0 {
		return fmt.Sprintf("%d-0", ms)
	}
	return ""
}

// Lost implements outbox.Store.
func (s *store) Lost(ctx context.Context) (n int64, err error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	if err = s.pool.QueryRow(ctx, query("loss_sum")).Scan(&n); err != nil {
		err = fmt.Errorf("sum up what is lost: %w", err)
	}
	return n, err
}

// Losses lists what was lost and has not been published again, oldest first.
func Losses(ctx context.Context, db DB) ([]outbox.Loss, error) {
	rows, err := db.Query(ctx, query("loss_list"))
	if err != nil {
		return nil, fmt.Errorf("list what is lost: %w", err)
	}
	list, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (l outbox.Loss, err error) {
		var first, last *time.Time
		if err = row.Scan(&l.Stream, &l.Events, &first, &last, &l.Noticed); err == nil && first != nil && last != nil {
			l.First, l.Last = *first, *last
		}
		return l, err
	})
	if err != nil {
		return nil, fmt.Errorf("list what is lost: %w", err)
	}
	return list, nil
}

// BroughtBack notes that everything settled from one time to another was published again, of a stream or, with "", of
// all.
func BroughtBack(ctx context.Context, db DB, from, to time.Time, stream string) error {
	if _, err := db.Exec(ctx, query("loss_replayed"), from, to, stream); err != nil {
		return fmt.Errorf("note what was restored: %w", err)
	}
	return nil
}

// suspicions are what an adoption suspects, as columns.
type suspicions struct {
	streams, last []string
	ages, events  []*int64
	// lost and repair say what is noted: that something may be lost, and that it is to be repaired.
	lost, repair, recall, back []bool
}

// suspicionsOf turns what an adoption suspects into columns. Without history nothing can be counted or restored: what
// the gates tell is all.
func (s *store) suspicionsOf(a outbox.Adoption) suspicions {
	c := suspicions{
		streams: []string{}, last: []string{}, ages: []*int64{}, events: []*int64{}, lost: []bool{},
		repair: []bool{}, recall: []bool{}, back: []bool{},
	}
	for _, st := range a.Suspects {
		var age, n *int64
		if ms := st.Now.UnixMilli() - idMillis(st.Last); st.Last != "" && ms >= 0 {
			age = &ms
		}
		lost, recall := a.Delivered, !st.Intact() || st.Missing > 0
		if s.history == 0 {
			switch known := int64(-1); {
			case st.Missing > 0:
				n = &st.Missing
			case !st.Gate || st.Forgot:
				n = &known
			default:
				lost = false
			}
		}
		c.streams, c.last = append(c.streams, st.Stream), append(c.last, st.Last)
		c.ages, c.events, c.lost = append(c.ages, age), append(c.events, n), append(c.lost, lost)
		c.repair, c.recall = append(c.repair, recall || lost && s.history > 0), append(c.recall, recall)
		c.back = append(c.back, st.Unknown)
	}
	return c
}

// idMillis is the time in an entry id; one beyond all times is later than any.
func idMillis(id string) int64 {
	ms, _, _ := strings.Cut(id, "-")
	n, err := strconv.ParseInt(ms, 10, 64)
	if err != nil {
		return math.MaxInt64
	}
	return n
}

func optionalTime(t time.Time) *time.Time {
	if t.IsZero() {
		return nil
	}
	return &t
}
