package sql

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"
)

// trimRows bounds one deletion from the default partition.
const trimRows = 10_000

// partitionsAhead is how many days beyond today have their history partition made.
const partitionsAhead = 2

// Housekeep forgets dead events whose retry was published, and returns how many events are parked. A failure of the one
// does not keep the other from being done.
func (s *store) Housekeep(ctx context.Context) (int64, error) {
	ctx, cancel := context.WithTimeout(ctx, batchTimeout)
	defer cancel()
	_, err := s.pool.Exec(ctx, query("dead_published"))
	dead, countErr := CountDead(ctx, s.pool)
	return dead, errors.Join(err, countErr)
}

// partitionName is the name of a day's partition, as a layout of time.Format. Other partitions are somebody else's.
const partitionName = "outbox_history_20060102"

// KeepHistory makes the history partitions of today and the next days and drops those past the retention, by the clock
// of the database. Without the right to create tables the default partition takes the rows, and the error says so. A
// failure with one partition does not keep the others from being done.
func (s *store) KeepHistory(ctx context.Context) error {
	return s.keepHistory(ctx, nil)
}

func (s *store) keepHistory(ctx context.Context, at *time.Time) error {
	ctx, cancel := context.WithTimeout(ctx, batchTimeout)
	defer cancel()
	var now time.Time
	var names []string
	if err := s.pool.QueryRow(ctx, query("history_partitions")).Scan(&now, &names); err != nil {
		return fmt.Errorf("list the history's partitions: %w", err)
	}
	if at != nil {
		now = *at
	}
	return errors.Join(s.makePartitions(ctx, now, names), s.dropPartitions(ctx, now, names))
}

func (s *store) makePartitions(ctx context.Context, now time.Time, have []string) error {
	if s.history == 0 {
		return nil
	}
	var errs []error
	day := now.UTC().Truncate(24 * time.Hour)
	for range partitionsAhead + 1 {
		if name := day.Format(partitionName); !slices.Contains(have, name) {
			if err := s.makePartition(ctx, name, day); err != nil {
				errs = append(errs, fmt.Errorf("make history partition %s (the default partition takes its rows): %w",
					name, err))
			}
		}
		day = day.AddDate(0, 0, 1)
	}
	return errors.Join(errs...)
}

// makePartition makes the partition of a day, unless rows of that day are in the default partition: they would have to
// move, and are in good hands there.
func (s *store) makePartition(ctx context.Context, name string, day time.Time) error {
	next := day.AddDate(0, 0, 1)
	var begun bool
	if err := s.pool.QueryRow(ctx, query("history_default_has"), day, next).Scan(&begun); err != nil || begun {
		return err
	}
	err := s.ddl(ctx, fmt.Sprintf(
		"CREATE TABLE IF NOT EXISTS %s PARTITION OF outbox_history FOR VALUES FROM ('%s') TO ('%s')",
		pgx.Identifier{name}.Sanitize(), day.Format(time.RFC3339), next.Format(time.RFC3339)))
	if SQLState(err) == pgerrcode.CheckViolation {
		return nil // a row came into the default partition meanwhile
	}
	return err
}

func (s *store) dropPartitions(ctx context.Context, now time.Time, have []string) error {
	var errs []error
	limit := now.Add(-s.history)
	for _, name := range have {
		day, err := time.Parse(partitionName, name)
		if err != nil || day.AddDate(0, 0, 1).After(limit) {
			continue
		}
		if err := s.ddl(ctx, "DROP TABLE IF EXISTS "+pgx.Identifier{name}.Sanitize()); err != nil {
			errs = append(errs, fmt.Errorf("drop history partition %s: %w", name, err))
		}
	}
	for {
		tag, err := s.pool.Exec(ctx, query("history_default_trim"), limit, trimRows)
		if err != nil {
			errs = append(errs, fmt.Errorf("trim the history's default partition: %w", err))
		}
		if err != nil || tag.RowsAffected() < trimRows {
			return errors.Join(errs...)
		}
	}
}

// ddl runs a statement that needs an exclusive lock, and bounds how long settling stands behind it: waiting for the
// lock, and, where the default partition is read for rows that belong into a new one, holding it.
func (s *store) ddl(ctx context.Context, stmt string) error {
	return pgx.BeginFunc(ctx, s.pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, "SET LOCAL lock_timeout = '500ms'; SET LOCAL statement_timeout = '5s'"); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, stmt)
		return err
	})
}
