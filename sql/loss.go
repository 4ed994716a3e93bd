package sql

import (
	"context"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"

	"posthaste/outbox"
)

// lossTimeout bounds the counting of one loss: history may be long, and a number is not worth hours of the primary's
// time.
const lossTimeout = time.Minute

// CountLosses counts in history what an adoption has noted as perhaps lost.
func (s *store) CountLosses(ctx context.Context) ([]outbox.Loss, error) {
	ctx, cancel := context.WithTimeout(ctx, 2*lossTimeout)
	defer cancel()
	type suspicion struct {
		ID      int64
		Stream  string
		After   string
		Until   int64
		Since   *time.Time
		Events  *int64
		Noticed time.Time
	}
	rows, err := s.pool.Query(ctx, query("loss_untold"))
	if err != nil {
		return nil, fmt.Errorf("read what may be lost: %w", err)
	}
	list, err := pgx.CollectRows(rows, pgx.RowToStructByPos[suspicion])
	if err != nil {
		return nil, fmt.Errorf("read what may be lost: %w", err)
	}
	if len(list) > 0 {
		if err := s.awaitSettling(ctx); err != nil {
			return nil, err
		}
	}
	var out []outbox.Loss
	for _, l := range list {
		loss := outbox.Loss{Stream: l.Stream, Noticed: l.Noticed}
		if l.Events != nil {
			loss.Events = *l.Events
		} else if err := s.countLoss(ctx, &loss, l.ID, l.Since, l.After, l.Until); err != nil {
			return out, err
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
	if _, err := s.pool.Exec(ctx, query("loss_expire"), s.history); err != nil {
		return out, fmt.Errorf("delete old losses: %w", err)
	}
	return out, nil
}

// writersTimeout bounds the wait for transactions that settle: an instance that sweeps along waits for its own commit
// as long.
const writersTimeout = 20 * time.Second

// awaitSettling waits for what is settled but not visible yet, because it may be lost, too; but no longer than
// writersTimeout.
func (s *store) awaitSettling(ctx context.Context) error {
	bounded, cancel := context.WithTimeout(ctx, writersTimeout)
	defer cancel()
	err := AwaitHistoryWriters(bounded, s.pool, func(int) {})
	if err != nil && bounded.Err() != nil {
		return ctx.Err()
	}
	return err
}

// countLoss fills in what history says of a loss.
func (s *store) countLoss(ctx context.Context, loss *outbox.Loss, id int64, since *time.Time, after string,
	until int64,
) error {
	var first, last *time.Time
	err := pgx.BeginFunc(ctx, s.pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, "SELECT pg_catalog.set_config('statement_timeout', $1, true)",
			fmt.Sprint(lossTimeout.Milliseconds())); err != nil {
			return err
		}
		return tx.QueryRow(ctx, query("loss_count"), loss.Stream, since, loss.Noticed, after, until,
			id).Scan(&loss.Events,
			&first, &last)
	})
	switch {
	case SQLState(err) == pgerrcode.QueryCanceled:
		loss.Events = -1
	case err != nil:
		return fmt.Errorf("count what is lost of %q: %w", loss.Stream, err)
	case loss.Events > 0:
		loss.First, loss.Last = *first, *last
	}
	return nil
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

// suspects turns what an adoption suspects into columns. Without history nothing can be counted: what the gates tell is
// all.
func (s *store) suspects(list []outbox.StreamState) (streams, last []string, now []int64, ages, events []*int64) {
	streams, last, now, ages, events = []string{}, []string{}, []int64{}, []*int64{}, []*int64{}
	for _, st := range list {
		var age, n *int64
		if ms := st.Now.UnixMilli() - idMillis(st.Last); st.Last != "" && ms >= 0 {
			age = &ms
		}
		if s.history == 0 {
			switch known := int64(-1); {
			case st.Missing > 0:
				n = &st.Missing
			case !st.Gate || st.Forgot:
				n = &known
			default:
				continue
			}
		}
		streams, last, now = append(streams, st.Stream), append(last, st.Last), append(now, st.Now.UnixMilli())
		ages, events = append(ages, age), append(events, n)
	}
	return streams, last, now, ages, events
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
