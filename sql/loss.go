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

// lossTimeout bounds the counting of one loss, because a long history would load the primary for hours.
const lossTimeout = time.Minute

// suspicion is a possible loss that an adoption has noted.
type suspicion struct {
	ID      int64
	Stream  string
	After   string
	Since   *time.Time
	Events  *int64
	Noticed time.Time
	// Restored is the mark after which everything except Refused events was republished; nil if no repair ran.
	Restored *int64
	Refused  int64
}

// tailOf is the method Tail of outbox.Sink.
type tailOf = func(ctx context.Context, stream, after string) ([]outbox.Entry, error)

// CountLosses counts the events in history that an adoption has noted as perhaps lost. Events published but not settled
// before the adoption are still unsettled and are not counted as lost.
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

// countLoss counts the settled events of the log that are not in the stream. It omits those that an earlier loss
// counted and no replay has republished. If counting takes longer than lossTimeout, the number is unknown (-1), and the
// loss may cover the whole range.
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

// countLog adds the events of the log that are missing from the stream to loss.
func (s *store) countLog(ctx context.Context, loss *outbox.Loss, l suspicion, tail tailOf) error {
	r := span{part: -1}
	var first, last *time.Time
	err := s.pool.QueryRow(ctx, query("loss_range"), l.Stream, l.After, l.Since, l.Noticed).Scan(&r.from, &r.to, &first,
		&last)
	if err != nil || first == nil || last == nil {
		return err
	}
	if l.Restored != nil { // a restored event that is missing again may have been trimmed
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

// addLoss adds events that were settled between first and last.
func addLoss(l *outbox.Loss, events int64, first, last time.Time) {
	l.Events += events
	if l.First.IsZero() || first.Before(l.First) {
		l.First = first
	}
	if last.After(l.Last) {
		l.Last = last
	}
}

// entrySlack is the largest assumed difference between the clocks of Postgres and Redis.
const entrySlack = 5 * time.Minute

// entryBefore returns an entry id that is before entry and before the entries of events created at a time, whatever the
// clocks' difference.
func entryBefore(entry string, created time.Time) string {
	if entry == "" {
		return ""
	}
	return entryAt(earlier(created, time.UnixMilli(idMillis(entry))))
}

// entryAt returns an entry id that is before all entries of a time, whatever the clocks' difference; "" for the
// beginning.
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

// Losses lists losses that were not republished, oldest first.
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

// BroughtBack notes that every event of a stream that was settled between from and to was republished; stream "" means
// all streams.
func BroughtBack(ctx context.Context, db DB, from, to time.Time, stream string) error {
	if _, err := db.Exec(ctx, query("loss_replayed"), from, to, stream); err != nil {
		return fmt.Errorf("note what was restored: %w", err)
	}
	return nil
}

// suspicions are the suspicions of an adoption, as columns.
type suspicions struct {
	streams, last []string
	ages, events  []*int64
	// lost notes a possible loss to count, repair that the stream must be repaired. recall and back are columns of
	// outbox_repair.
	lost, repair, recall, back []bool
}

// suspicionsOf turns the suspicions of an adoption into columns. Without history nothing can be counted or restored, so
// only the gates' own counts are noted.
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

// idMillis returns the time in an entry id in milliseconds, math.MaxInt64 if it is out of range.
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
