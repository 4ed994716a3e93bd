package outbox

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
)

// Event holds the columns that a writer supplies; the table fills in the rest.
type Event struct {
	// ID must be unique. uuid.Nil: Insert makes a UUIDv7.
	ID uuid.UUID
	// AggregateType selects the stream: 1 to 64 of A-Z a-z 0-9 _ . : -
	AggregateType string
	// AggregateID is the subject of the stream entry, at most 1024 bytes. If the order of the aggregate's events
	// matters, lock the aggregate (its row) in the transaction before calling Insert.
	AggregateID string
	// Type names the event: 1 to 255 characters.
	Type string
	// Payload is JSON, at most MaxPayload bytes as Postgres prints it.
	Payload json.RawMessage
	// Headers may contain "traceparent" and any other names, at most MaxHeaders bytes as JSON; nil for none.
	Headers map[string]string
}

// MaxHeaders is the largest size of the headers that the outbox table accepts, in bytes of their JSON text.
const MaxHeaders = 64 << 10

// ErrInvalid means that Insert or InsertSQL has refused an event and has sent nothing: the transaction is intact.
var ErrInvalid = errors.New("invalid event")

// columns is how many parameters an event has, and most how many events a statement takes: Postgres numbers parameters
// with 16 bits.
const columns, most = 6, 10000

// Insert writes events into the outbox within tx, in their order, so that they exist if and only if tx commits. It
// finds the table through the connection's search path. It returns the ids of the events. Up to 10,000 events are one
// statement. Errors are ErrInvalid, after which tx can be used, or those of the statement, which end tx.
func Insert(ctx context.Context, tx pgx.Tx, events ...Event) ([]uuid.UUID, error) {
	return insert(events, func(text string, args []any) error {
		_, err := tx.Exec(ctx, text, args...)
		return err
	})
}

// InsertSQL is Insert for database/sql, with any driver for Postgres.
func InsertSQL(ctx context.Context, tx *sql.Tx, events ...Event) ([]uuid.UUID, error) {
	return insert(events, func(text string, args []any) error {
		_, err := tx.ExecContext(ctx, text, args...)
		return err
	})
}

func insert(events []Event, exec func(text string, args []any) error) ([]uuid.UUID, error) {
	ids := make([]uuid.UUID, len(events))
	args := make([]any, 0, columns*len(events))
	used := make(map[uuid.UUID]bool, len(events))
	for i, e := range events {
		row, err := e.row()
		if err == nil && used[e.ID] {
			err = errors.New("another event of the call has its id")
		}
		if err != nil {
			return nil, fmt.Errorf("event %d of %d: %w: %w", i+1, len(events), ErrInvalid, err)
		}
		ids[i], used[e.ID] = row.id, e.ID != uuid.Nil
		args = append(args, pgtype.UUID{Bytes: row.id, Valid: true}, e.AggregateType, e.AggregateID, e.Type,
			string(e.Payload), row.headers)
	}
	for len(args) > 0 {
		n := min(len(args), columns*most)
		if err := exec(statement(n/columns), args[:n]); err != nil {
			return nil, fmt.Errorf("insert %d events: %w", len(events), err)
		}
		args = args[n:]
	}
	return ids, nil
}

// statement returns an INSERT of n rows.
func statement(n int) string {
	var b strings.Builder
	b.WriteString("INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload, headers) VALUES ")
	for i := range n {
		if i > 0 {
			b.WriteString(", ")
		}
		for c, open := range [columns]string{"($", ", $", ", $", ", $", ", $", "::text::jsonb, $"} {
			b.WriteString(open)
			b.WriteString(strconv.Itoa(i*columns + c + 1))
		}
		b.WriteString("::text::jsonb)")
	}
	return b.String()
}

type row struct {
	id      uuid.UUID
	headers *string
}

var aggregateType = regexp.MustCompile(`^[a-zA-Z0-9_.:-]+$`)

// IsAggregateType reports whether the outbox accepts s as an aggregate type.
func IsAggregateType(s string) bool { return len(s) <= 64 && aggregateType.MatchString(s) }

// row checks the event against the limits of the table. Its errors contain no values.
func (e *Event) row() (r row, err error) {
	switch {
	case !IsAggregateType(e.AggregateType):
		return r, errors.New("the aggregate type must have 1 to 64 of A-Z a-z 0-9 _ . : -")
	case len(e.AggregateID) > 1024 || !storable(e.AggregateID):
		return r, errors.New("the aggregate id must have at most 1024 bytes of UTF-8, and no zero byte")
	case e.Type == "" || utf8.RuneCountInString(e.Type) > 255 || !storable(e.Type):
		return r, errors.New("the type must have 1 to 255 characters of UTF-8, and no zero byte")
	}
	if err := check(e.Payload, MaxPayload); err != nil {
		return r, fmt.Errorf("the payload %w", err)
	}
	for name, value := range e.Headers {
		if !storable(name) || !storable(value) {
			return r, errors.New("the headers must be UTF-8, and have no zero byte")
		}
	}
	if len(e.Headers) > 0 {
		b, _ := json.Marshal(e.Headers) // cannot fail
		if err := check(b, MaxHeaders); err != nil {
			return r, fmt.Errorf("the JSON of the headers %w", err)
		}
		text := string(b)
		r.headers = &text
	}
	if r.id = e.ID; r.id == uuid.Nil {
		if r.id, err = uuid.NewV7(); err != nil {
			return r, fmt.Errorf("cannot get an id: %w", err)
		}
	}
	return r, nil
}

func storable(s string) bool { return utf8.ValidString(s) && !strings.Contains(s, "\x00") }
