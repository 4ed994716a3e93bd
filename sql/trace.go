package sql

import (
	"context"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
)

// TraceRow is one place in Postgres where an id was found.
type TraceRow struct {
	At    time.Time
	Place string // order, outbox, published, dead
	// ID is the order's or the event's id.
	ID, Detail  string
	TraceParent string
	// Stream and EntryID say where the event was published; EntryID is "" if it is not known.
	Stream, EntryID string
}

// Trace looks for an event id, an order id or any aggregate id in orders, outbox, history and parked events. It returns the
// newest of the places, at most limit, in the order of time.
func Trace(ctx context.Context, db DB, id string, limit int) ([]TraceRow, error) {
	var event *uuid.UUID
	if parsed, err := uuid.Parse(id); err == nil {
		event = &parsed
	}
	rows, err := db.Query(ctx, query("trace"), id, event, limit)
	if err != nil {
		return nil, fmt.Errorf("trace: %w", err)
	}
	found, err := pgx.CollectRows(rows, pgx.RowToStructByPos[TraceRow])
	if err != nil {
		return nil, fmt.Errorf("trace: %w", err)
	}
	return found, nil
}
