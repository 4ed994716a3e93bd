package sql

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"posthaste/outbox"
)

// trimRows bounds one deletion.
const trimRows = 10_000

// trimTime is how long one call of KeepHistory deletes rows, at most.
const trimTime = 10 * time.Second

// Housekeep forgets dead events whose retry was published, and returns how many events are parked. A failure of the one
// does not keep the other from being done.
func (s *store) Housekeep(ctx context.Context) (int64, error) {
	ctx, cancel := context.WithTimeout(ctx, batchTimeout)
	defer cancel()
	// Looking which may be forgotten costs more than anything else that is asked once a second. Mostly there are none.
	var dead int64
	var ended bool
	err := s.pool.QueryRow(ctx, query("dead_look")).Scan(&dead, &ended)
	if err != nil || !ended {
		return dead, err
	}
	_, err = s.pool.Exec(ctx, query("dead_published"))
	dead, countErr := CountDead(ctx, s.pool)
	return dead, errors.Join(err, countErr)
}

// retention is how far the log was deleted.
type retention struct {
	mu sync.Mutex
	logRange
}

// logRange is where the rows of the log begin.
type logRange struct {
	// file is the table's file that the numbers are of.
	file int64
	// empty is, by part, the number up to which there are no rows and will be none.
	empty [outbox.Partitions]int64
	// seen is where the rows begin that were seen last. A transaction that was under way then may still bring one from
	// before; none that is from next on.
	seen [outbox.Partitions]int64
	next uint64
	// last and before are up to where the last two calls left nothing. What was deleted stays in the index as long as
	// an old transaction lasts, so not every call begins at empty: what comes late from before these is of a
	// transaction that was under way for both calls. Such are long, and running those of the last call; whole is set
	// when one of the long has ended, until a call has begun at empty.
	last, before  [outbox.Partitions]int64
	running, long []int64
	whole         bool
}

// begin is where a call begins, now that these transactions are under way.
func (r *logRange) begin(running []int64) (from [outbox.Partitions]int64) {
	ended := func(xid int64) bool { return !slices.Contains(running, xid) }
	r.whole = r.whole || slices.ContainsFunc(r.long, ended)
	r.long = slices.DeleteFunc(r.running, ended)
	r.running = running
	if r.whole {
		return r.empty
	}
	for p := range from {
		from[p] = min(r.last[p], r.before[p])
	}
	return from
}

// KeepHistory deletes, by the clock of the database, the rows that were settled longer ago than the retention, and the
// marks that are not needed for the others. It takes no longer than about trimTime; a later call continues.
func (s *store) KeepHistory(ctx context.Context) error {
	return s.keepHistory(ctx, nil)
}

func (s *store) keepHistory(ctx context.Context, at *time.Time) error {
	ctx, cancel := context.WithTimeout(ctx, batchTimeout+trimTime)
	defer cancel()
	s.kept.mu.Lock()
	defer s.kept.mu.Unlock()
	var now time.Time
	var file int64
	var oldest, next uint64
	var running []int64
	err := s.pool.QueryRow(ctx, query("history_begin")).Scan(&now, &file, &oldest, &next, &running)
	if err != nil {
		return fmt.Errorf("begin with the history: %w", err)
	}
	if at != nil {
		now = *at
	}
	limit := now.Add(-s.history)
	if file != s.kept.file { // the numbers have begun anew, or it is the first time
		s.kept.logRange = logRange{file: file}
	}
	return s.trimLog(ctx, limit, oldest, next, s.kept.begin(running))
}

// trimLog deletes rows settled before limit, part by part from the front, and then the marks that are not needed any
// more. oldest is the oldest transaction under way, next the one to come.
func (s *store) trimLog(ctx context.Context, limit time.Time, oldest, next uint64,
	from [outbox.Partitions]int64,
) error {
	var marks []int64
	if err := s.pool.QueryRow(ctx, query("history_marks"), limit).Scan(&marks); err != nil {
		return fmt.Errorf("look for old marks: %w", err)
	}
	clear, done, err := s.deleteRows(ctx, marks, from)
	s.kept.last, s.kept.before = clear, s.kept.last
	s.kept.whole = s.kept.whole && err != nil
	if oldest >= s.kept.next {
		// All that was under way when seen was noted has been seen by now.
		for p := range clear {
			s.kept.empty[p] = max(s.kept.empty[p], min(s.kept.seen[p], clear[p]))
		}
		s.kept.seen, s.kept.next = clear, next
	}
	if err != nil || !done {
		return err
	}
	for _, m := range marks {
		if m == 0 {
			return nil
		}
	}
	if _, err := s.pool.Exec(ctx, query("history_forget"), marks); err != nil {
		return fmt.Errorf("delete old marks: %w", err)
	}
	return nil
}

// deleteRows deletes what the marks of the parts hold, behind from, in turns, and returns the numbers up to which
// nothing is left that can be seen; done if it came to the end.
func (s *store) deleteRows(ctx context.Context, marks []int64, from [outbox.Partitions]int64) (
	clear [outbox.Partitions]int64, done bool, err error,
) {
	clear = from
	at := clear
	left := map[int]bool{}
	for p, m := range marks {
		left[p] = m != 0
	}
	for begun := time.Now(); !done && time.Since(begun) < trimTime; {
		done = true
		for p := range at {
			if !left[p] {
				continue
			}
			var rows int
			var last, gone int64
			err = s.pool.QueryRow(ctx, query("history_delete"), p, marks[p], at[p], trimRows).Scan(&rows, &last, &gone)
			if err != nil {
				return clear, false, fmt.Errorf("delete old rows of part %d: %w", p, err)
			}
			if clear[p] == at[p] {
				clear[p] = gone
			}
			at[p], left[p] = last, rows == trimRows
			done = done && !left[p]
		}
	}
	return clear, done, nil
}
