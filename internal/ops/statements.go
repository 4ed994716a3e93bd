package ops

import (
	"context"
	"embed"
	"fmt"
	"time"

	"github.com/google/uuid"

	"posthaste/internal/statement"
	"posthaste/sql"
)

// Statements that only the doctor and the trace run.
//
//go:embed queries/*.sql
var queryFiles embed.FS

// query returns the text of queries/<name>.sql.
var query = statement.In(queryFiles)

// traceRow is one place in Postgres where an id was found.
type traceRow struct {
	At    time.Time
	Place string // order, waiting, settled, dead
	// ID is the order's or the event's id.
	ID, Detail  string
	TraceParent string
	// Stream is where the event was published. UpTo is an entry that the event's entry is not after, "" if unknown.
	Stream, UpTo string
	Created      time.Time
	// Restored is an entry that the event's restored entry is not after, "" if it was not restored. Since is when the
	// loss was noticed.
	Restored string
	Since    time.Time
	// Type is the event's type, "" for an order.
	Type string
}

// traceRowsOf finds an event id, an order id or any aggregate id in orders, outbox, history and parked events. It
// returns at most limit rows, the newest ones, in the order of time.
func traceRowsOf(ctx context.Context, db sql.DB, id string, limit int) ([]traceRow, error) {
	var event *uuid.UUID
	if parsed, err := uuid.Parse(id); err == nil {
		event = &parsed
	}
	found, err := statement.Structs[traceRow](ctx, db, "trace", query("trace"), id, event, limit)
	if err != nil {
		return nil, err
	}
	if event == nil {
		return found, nil
	}
	shop, err := sql.HasLine(ctx, db, sql.LineShop)
	switch {
	case err != nil:
		return nil, fmt.Errorf("trace: %w", err)
	case !shop:
		return found, nil
	}
	order, err := statement.Structs[traceRow](ctx, db, "trace", query("trace_order"), event)
	return append(order, found...), err
}
