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

// ListDead lists dead events, oldest first, at most limit.
func ListDead(ctx context.Context, db DB, limit int) ([]outbox.Dead, error) {
	return collect(ctx, db, "list dead events", func(row pgx.CollectableRow) (d outbox.Dead, err error) {
		err = row.Scan(&d.ID, &d.Seq, &d.AggregateType, &d.AggregateID, &d.Type, &d.Error, &d.Class, &d.Attempts,
			&d.CreatedAt, &d.DeadAt, &d.Retrying)
		return d, err
	}, "dead_list", limit)
}

// DeadIDs returns the ids of all dead events that are not being retried, in their order.
func DeadIDs(ctx context.Context, db DB) ([]uuid.UUID, error) {
	return collect(ctx, db, "list dead events", pgx.RowTo[uuid.UUID], "dead_ids")
}

func CountDead(ctx context.Context, db DB) (n int64, err error) {
	err = scan(ctx, db, "count dead events", "dead_count", nil, &n)
	return n, err
}

// ErrNotParked means that no dead event has the id.
var ErrNotParked = errors.New("no dead event has this id: see posthaste dead list")

// ErrUnreadable means that a dead event has no payload to publish: its row could not be read.
var ErrUnreadable = errors.New("the event's row could not be read; it can only be dropped")

// RetryDead inserts a dead event into the outbox again, as its newest row, and deletes the old row. The dead event
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

// DropDead marks a dead event as dropped: no list shows it again, and the leader soon deletes it and its row in the
// outbox. An event that is being retried may still be published. Errors: ErrNotParked.
func DropDead(ctx context.Context, db DB, id uuid.UUID) error {
	rows, err := exec(ctx, db, fmt.Sprintf("drop event %s", id), "dead_drop", id)
	if err == nil && rows == 0 {
		return fmt.Errorf("drop event %s: %w", id, ErrNotParked)
	}
	return err
}
