package sql

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
)

// Event holds the columns that a writer supplies; the table fills in the rest.
type Event struct {
	// ID must be unique. uuid.Nil: a new UUIDv7 is made.
	ID uuid.UUID
	// AggregateType selects the stream: 1–64 of [a-zA-Z0-9_.:-].
	AggregateType string
	// AggregateID is the aggregate's identity, at most 1024 bytes. If the order of the aggregate's events matters, take
	// a lock on the aggregate (its row) in tx before calling InsertEvent.
	AggregateID string
	// Type names the event, at most 255 characters.
	Type string
	// Payload is JSON, at most 8 MiB as Postgres prints it.
	Payload json.RawMessage
	// Headers may contain "traceparent" and any other names; nil means none.
	Headers map[string]string
}

// InsertEvent writes e into the outbox within tx, so that the event exists if and only if tx commits. It returns the
// event's id.
func InsertEvent(ctx context.Context, tx pgx.Tx, e Event) (uuid.UUID, error) {
	if e.ID == uuid.Nil {
		id, err := uuid.NewV7()
		if err != nil {
			return uuid.Nil, fmt.Errorf("make an event id: %w", err)
		}
		e.ID = id
	}
	var headers *string
	if len(e.Headers) > 0 {
		b, err := json.Marshal(e.Headers)
		if err != nil {
			return uuid.Nil, fmt.Errorf("encode the headers of event %s: %w", e.ID, err)
		}
		s := string(b)
		headers = &s
	}
	_, err := tx.Exec(ctx, query("insert_event"), uuidParam(e.ID), e.AggregateType, e.AggregateID, e.Type,
		string(e.Payload), headers)
	if err != nil {
		return uuid.Nil, fmt.Errorf("insert event %s: %w", e.ID, err)
	}
	return e.ID, nil
}

// uuidParam returns id in a type that pgx sends directly. It would format a uuid.UUID as text and parse that.
func uuidParam(id uuid.UUID) pgtype.UUID { return pgtype.UUID{Bytes: id, Valid: true} }
