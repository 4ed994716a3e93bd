package sql

import (
	"context"
	"errors"
	"fmt"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"posthaste/outbox"
)

// ListDead lists parked events, oldest first, at most limit.
func ListDead(ctx context.Context, db DB, limit int) ([]outbox.Dead, error) {
	rows, err := db.Query(ctx, query("dead_list"), limit)
	if err != nil {
		return nil, fmt.Errorf("list parked events: %w", err)
	}
	dead, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (d outbox.Dead, err error) {
		err = row.Scan(&d.ID, &d.Seq, &d.AggregateType, &d.AggregateID, &d.Type, &d.Error, &d.Class, &d.Attempts,
			&d.CreatedAt, &d.DeadAt, &d.Retrying)
		return d, err
	})
	if err != nil {
		return nil, fmt.Errorf("list parked events: %w", err)
	}
	return dead, nil
}

// DeadIDs returns the ids of all parked events that are not being retried, in their order.
func DeadIDs(ctx context.Context, db DB) ([]uuid.UUID, error) {
	rows, err := db.Query(ctx, query("dead_ids"))
	if err != nil {
		return nil, fmt.Errorf("list parked events: %w", err)
	}
	ids, err := pgx.CollectRows(rows, pgx.RowTo[uuid.UUID])
	if err != nil {
		return nil, fmt.Errorf("list parked events: %w", err)
	}
	return ids, nil
}

// CountDead counts parked events.
func CountDead(ctx context.Context, db DB) (int64, error) {
	var n int64
	if err := db.QueryRow(ctx, query("dead_count")).Scan(&n); err != nil {
		return 0, fmt.Errorf("count parked events: %w", err)
	}
	return n, nil
}

// ErrNotParked means that no parked event has the id.
var ErrNotParked = errors.New("no parked event has this id")

// ErrUnreadable means that a parked event has no payload to publish: its row could not be read.
var ErrUnreadable = errors.New("the event's row could not be read; it can only be dropped")

// RetryDead inserts a parked event into the outbox again, as its newest row, and deletes the old row. The parked event
// is removed when the new row is published. Retrying an event that is being retried changes nothing. Errors:
// ErrNotParked, ErrUnreadable.
func RetryDead(ctx context.Context, pool *pgxpool.Pool, id uuid.UUID) error {
	err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		var unreadable, retrying bool
		err := tx.QueryRow(ctx, query("dead_lock"), id).Scan(&unreadable, &retrying)
		switch {
		case errors.Is(err, pgx.ErrNoRows):
			return ErrNotParked
		case err != nil || retrying:
			return err
		case unreadable:
			return ErrUnreadable
		}
		_, err = tx.Exec(ctx, query("dead_retry"), id)
		return err
	})
	if err != nil {
		return fmt.Errorf("retry event %s: %w", id, err)
	}
	return nil
}

// DropDead marks a parked event as dropped: no list shows it again, and the leader soon deletes it and its row in the
// outbox. An event that is being retried may still be published. Errors: ErrNotParked.
func DropDead(ctx context.Context, db DB, id uuid.UUID) error {
	tag, err := db.Exec(ctx, query("dead_drop"), id)
	if err != nil {
		return fmt.Errorf("drop event %s: %w", id, err)
	}
	if tag.RowsAffected() == 0 {
		return fmt.Errorf("drop event %s: %w", id, ErrNotParked)
	}
	return nil
}
