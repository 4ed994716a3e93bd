package inbox

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"posthaste/internal/pause"
	"posthaste/internal/statement"
)

const (
	// ahead is how many days have their partition in advance.
	ahead = 3
	// keepEvery is the pause between two rounds of Keep.
	keepEvery = 30 * time.Minute
)

// Keep does the housekeeping of the inbox now and every half hour until ctx ends: Maintain, with errors logged and
// tried again. One process is enough; several do no harm. log may be nil.
func Keep(ctx context.Context, db *pgxpool.Pool, retention time.Duration, log *slog.Logger) {
	log = cmp.Or(log, slog.New(slog.DiscardHandler))
	for ctx.Err() == nil {
		if err := Maintain(ctx, db, retention); err != nil && ctx.Err() == nil {
			log.Warn("inbox housekeeping failed, trying again later", "err", err)
		}
		pause.For(ctx, keepEvery)
	}
}

// Maintain creates the partitions of the next days and deletes notes older than retention: an event that is delivered
// again later than that has its effect again. retention counts from when the event was seen and should exceed the age
// of anything that may be delivered again, including replays of history; less than an hour is refused.
//
// It drops a partition only when no event in it was seen within the retention. If it would block transactions of
// handlers, it gives up after a moment and leaves the work to the next call.
func Maintain(ctx context.Context, db *pgxpool.Pool, retention time.Duration) error {
	if retention < time.Hour {
		return fmt.Errorf("inbox retention %v: at least an hour", retention)
	}
	today := dayOf(time.Now())
	var errs []error
	for i := range ahead + 1 {
		errs = append(errs, makePartition(ctx, db, today.AddDate(0, 0, i)))
	}
	old, err := oldPartitions(ctx, db, today, retention)
	errs = append(errs, err)
	for _, name := range old {
		errs = append(errs, dropPartition(ctx, db, name, retention))
	}
	for {
		tag, err := db.Exec(ctx, query("trim_default"), retention)
		if err != nil {
			errs = append(errs, fmt.Errorf("delete old notes of the default partition: %w", err))
		}
		if err != nil || tag.RowsAffected() == 0 {
			return errors.Join(errs...)
		}
	}
}

// locked runs f in a transaction that excludes other housekeeping. It does not wait long for any lock, because handlers
// would queue behind it. If another process holds the housekeeping lock, it does nothing.
func locked(ctx context.Context, db *pgxpool.Pool, f func(tx pgx.Tx) error) error {
	return pgx.BeginFunc(ctx, db, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, "SET LOCAL lock_timeout = '500ms'"); err != nil {
			return err
		}
		var alone bool
		if err := tx.QueryRow(ctx, query("lock")).Scan(&alone); err != nil || !alone {
			return err
		}
		return f(tx)
	})
}

func partitionName(day time.Time) string { return "inbox_p" + day.Format("20060102") }

// makePartition makes the partition of a day, unless it exists, or notes of that day are in the default partition
// already: they stay there, and the day with them.
func makePartition(ctx context.Context, db *pgxpool.Pool, day time.Time) error {
	name := partitionName(day)
	var exists bool
	err := db.QueryRow(ctx, "SELECT pg_catalog.to_regclass($1) IS NOT NULL", name).Scan(&exists)
	if err != nil || exists {
		return err
	}
	err = locked(ctx, db, func(tx pgx.Tx) error {
		var late bool
		if err := tx.QueryRow(ctx, query("default_has_day"), day).Scan(&late); err != nil || late {
			return err
		}
		const date = "2006-01-02"
		_, err := tx.Exec(ctx,
			fmt.Sprintf("CREATE TABLE IF NOT EXISTS %s PARTITION OF inbox FOR VALUES FROM ('%s') TO ('%s')",
				name, day.Format(date), day.AddDate(0, 0, 1).Format(date)))
		return err
	})
	if err != nil {
		return fmt.Errorf("make inbox partition %s: %w", name, err)
	}
	return nil
}

// oldPartitions returns the partitions whose day is over for longer than the retention.
func oldPartitions(ctx context.Context, db *pgxpool.Pool, today time.Time, retention time.Duration) ([]string, error) {
	type partition struct {
		Name string
		Day  time.Time
	}
	list, err := statement.Structs[partition](ctx, db, "list the inbox partitions", query("partitions"))
	var old []string
	for _, p := range list {
		if p.Day.AddDate(0, 0, 1).Add(retention).Before(today) {
			old = append(old, p.Name)
		}
	}
	return old, err
}

func dropPartition(ctx context.Context, db *pgxpool.Pool, name string, retention time.Duration) error {
	ident := pgx.Identifier{name}.Sanitize()
	// An event may have been seen long after its day.
	seen := "SELECT EXISTS (SELECT 1 FROM " + ident + " WHERE seen_at > clock_timestamp() - $1::interval)"
	var fresh bool
	err := db.QueryRow(ctx, seen, retention).Scan(&fresh)
	if err == nil && !fresh {
		err = locked(ctx, db, func(tx pgx.Tx) error {
			// Checked again under the lock: a handler may have inserted a note of that day since.
			if _, err := tx.Exec(ctx, "LOCK TABLE "+ident+" IN ACCESS EXCLUSIVE MODE"); err != nil {
				return err
			}
			if err := tx.QueryRow(ctx, seen, retention).Scan(&fresh); err != nil || fresh {
				return err
			}
			_, err := tx.Exec(ctx, "DROP TABLE "+ident)
			return err
		})
	}
	if gone, ok := errors.AsType[*pgconn.PgError](err); ok && gone.Code == pgerrcode.UndefinedTable {
		return nil // another process was quicker
	}
	if err != nil {
		return fmt.Errorf("drop inbox partition %s: %w", name, err)
	}
	return nil
}
