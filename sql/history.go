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

// trimTime limits how long one call of KeepHistory deletes rows.
const trimTime = 10 * time.Second

// Housekeep deletes dead events whose retry was published, and returns how many events are parked. It counts them even
// if the deletion fails.
func (s *Store) Housekeep(ctx context.Context) (int64, error) {
	ctx, cancel := context.WithTimeout(ctx, batchTimeout)
	defer cancel()
	// Deciding which events can be deleted is the most expensive query that runs once a second. Usually there are no
	// such events.
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

// retention records how far the log was deleted.
type retention struct {
	mu sync.Mutex
	logRange
}

// logRange records where the rows of the log begin.
type logRange struct {
	// file is the file node of the table that the numbers belong to.
	file int64
	// empty is, by part, the number up to which there are no rows and will be none.
	empty [outbox.Partitions]int64
	// seen is where rows began at an earlier call. A transaction that was in progress then may still insert a row
	// before it; transactions from next on cannot.
	seen [outbox.Partitions]int64
	next uint64
	// last and before are the numbers up to which the last two calls left no rows. Index entries of deleted rows remain
	// while an old transaction runs, so only some calls begin at empty. A row that appears before both numbers belongs
	// to a transaction that was in progress during both calls. long are these transactions, running those in progress
	// at the last call. whole is set when a long one has ended, until a call that began at empty succeeds.
	last, before  [outbox.Partitions]int64
	running, long []int64
	whole         bool
}

// begin returns where a call begins. running are the transactions in progress now.
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

// KeepHistory deletes the rows that were settled longer ago than the retention, by the clock of the database, and the
// marks that the remaining rows do not need. It stops after about trimTime; a later call continues.
func (s *Store) KeepHistory(ctx context.Context) error {
	return s.keepHistory(ctx, nil)
}

func (s *Store) keepHistory(ctx context.Context, at *time.Time) error {
	ctx, cancel := context.WithTimeout(ctx, batchTimeout+trimTime)
	defer cancel()
	s.kept.mu.Lock()
	defer s.kept.mu.Unlock()
	var now time.Time
	var file int64
	var oldest, next uint64
	var running []int64
	err := scan(ctx, s.pool, "begin with the history", "history_begin", nil, &now, &file, &oldest, &next, &running)
	if err != nil {
		return err
	}
	if at != nil {
		now = *at
	}
	limit := now.Add(-s.history)
	if file != s.kept.file { // the table was truncated, or this is the first call
		s.kept.logRange = logRange{file: file}
	}
	return s.trimLog(ctx, limit, oldest, next, s.kept.begin(running))
}

// trimLog deletes rows settled before limit, part by part from the oldest, and then the marks that are no longer
// needed. oldest is the oldest transaction in progress, next the next transaction id.
func (s *Store) trimLog(ctx context.Context, limit time.Time, oldest, next uint64,
	from [outbox.Partitions]int64,
) error {
	var marks []int64
	if err := scan(ctx, s.pool, "look for old marks", "history_marks", []any{limit}, &marks); err != nil {
		return err
	}
	clear, done, err := s.deleteRows(ctx, marks, from)
	s.kept.last, s.kept.before = clear, s.kept.last
	s.kept.whole = s.kept.whole && err != nil
	if oldest >= s.kept.next {
		// All transactions that were in progress when seen was recorded have ended.
		for p := range clear {
			s.kept.empty[p] = max(s.kept.empty[p], min(s.kept.seen[p], clear[p]))
		}
		s.kept.seen, s.kept.next = clear, next
	}
	if err != nil || !done || slices.Contains(marks, 0) {
		return err
	}
	_, err = exec(ctx, s.pool, "delete old marks", "history_forget", marks)
	return err
}

// deleteRows deletes the rows after from that marks settle, taking turns between the parts. It returns, by part, the
// number up to which no visible row is left. done means that it reached the end of each part.
func (s *Store) deleteRows(ctx context.Context, marks []int64, from [outbox.Partitions]int64) (
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
