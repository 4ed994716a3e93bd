package sql

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"time"

	"github.com/jackc/pgx/v5"
)

// partitionsAhead is how many days beyond today have their history partition made.
const partitionsAhead = 2

// Housekeep makes the history partitions of today and the next days, drops those past the retention, and removes dead
// events whose retry was published. It returns how many events are parked. A failure in one part does not keep the
// others from being done.
func (s *Store) Housekeep(ctx context.Context) (int64, error) {
	ctx, cancel := context.WithTimeout(ctx, batchTimeout)
	defer cancel()
	_, err := s.pool.Exec(ctx, query("dead_published"))
	dead, countErr := CountDead(ctx, s.pool)
	return dead, errors.Join(err, countErr)
}

// partitionBound finds the upper bound in a partition's definition.
var partitionBound = regexp.MustCompile(`TO \('([^']+)'\)`)

// KeepHistory makes the history partitions of today and the next days and drops those past the retention. Without the
// right to create tables the default partition takes the rows, and the error says so.
func (s *Store) KeepHistory(ctx context.Context, now time.Time) error {
	ctx, cancel := context.WithTimeout(ctx, batchTimeout)
	defer cancel()
	rows, err := s.pool.Query(ctx, query("history_partitions"))
	if err != nil {
		return fmt.Errorf("list the history's partitions: %w", err)
	}
	have := map[string]time.Time{}
	var name, bound string
	_, err = pgx.ForEachRow(rows, []any{&name, &bound}, func() error {
		have[name] = time.Time{}
		if m := partitionBound.FindStringSubmatch(bound); m != nil {
			if end, err := time.Parse("2006-01-02 15:04:05Z07", m[1]); err == nil {
				have[name] = end
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("list the history's partitions: %w", err)
	}
	return errors.Join(s.makePartitions(ctx, now, have), s.dropPartitions(ctx, now, have))
}

func (s *Store) makePartitions(ctx context.Context, now time.Time, have map[string]time.Time) error {
	if s.history == 0 {
		return nil
	}
	day := now.UTC().Truncate(24 * time.Hour)
	for range partitionsAhead + 1 {
		next := day.AddDate(0, 0, 1)
		name := "outbox_history_" + day.Format("20060102")
		if _, ok := have[name]; !ok {
			stmt := fmt.Sprintf("CREATE TABLE IF NOT EXISTS %s PARTITION OF outbox_history FOR VALUES FROM ('%s') TO ('%s')",
				pgx.Identifier{name}.Sanitize(), day.Format(time.RFC3339), next.Format(time.RFC3339))
			if err := s.ddl(ctx, stmt); err != nil {
				return fmt.Errorf("make history partition %s (the default partition takes its rows): %w", name, err)
			}
		}
		day = next
	}
	return nil
}

func (s *Store) dropPartitions(ctx context.Context, now time.Time, have map[string]time.Time) error {
	limit := now.Add(-s.history)
	for name, end := range have {
		if end.IsZero() || end.After(limit) {
			continue
		}
		if err := s.ddl(ctx, "DROP TABLE IF EXISTS "+pgx.Identifier{name}.Sanitize()); err != nil {
			return fmt.Errorf("drop history partition %s: %w", name, err)
		}
	}
	if _, err := s.pool.Exec(ctx, query("history_default_trim"), limit); err != nil {
		return fmt.Errorf("trim the history's default partition: %w", err)
	}
	return nil
}

// ddl runs a statement that needs a short exclusive lock and must not make settling queue behind a long wait for it.
func (s *Store) ddl(ctx context.Context, stmt string) error {
	return pgx.BeginFunc(ctx, s.pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, "SET LOCAL lock_timeout = '500ms'"); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, stmt)
		return err
	})
}
