// Package outboxtest helps the tests of services that write to an outbox or handle its events.
package outboxtest

import (
	"bytes"
	"context"
	"encoding/json"
	"reflect"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"posthaste/consumer"
	"posthaste/outbox"
)

// Querier is a pgx.Tx, a *pgx.Conn or a *pgxpool.Pool.
type Querier interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}

// Events returns the events of an aggregate that db sees in the outbox, in the order in which they were inserted. It
// sees those of its own transaction, too.
func Events(tb testing.TB, db Querier, aggregateType, aggregateID string) []outbox.Event {
	tb.Helper()
	rows, err := db.Query(tb.Context(), `SELECT id, aggregate_type, aggregate_id, event_type, payload, headers
		FROM outbox WHERE aggregate_type = $1 AND aggregate_id = $2 ORDER BY seq`, aggregateType, aggregateID)
	if err != nil {
		tb.Fatalf("read the outbox: %v", err)
	}
	events, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (e outbox.Event, err error) {
		var headers []byte
		err = row.Scan(&e.ID, &e.AggregateType, &e.AggregateID, &e.Type, &e.Payload, &headers)
		if err == nil && headers != nil {
			err = json.Unmarshal(headers, &e.Headers)
		}
		return e, err
	})
	if err != nil {
		tb.Fatalf("read the outbox: %v", err)
	}
	return events
}

// Inserted fails the test unless the outbox has exactly one event of want's aggregate and type with want's payload,
// compared as JSON. A nil payload matches every payload. It returns the event.
func Inserted(tb testing.TB, db Querier, want outbox.Event) outbox.Event {
	tb.Helper()
	var found []outbox.Event
	all := Events(tb, db, want.AggregateType, want.AggregateID)
	for _, e := range all {
		if e.Type == want.Type && (want.Payload == nil || sameJSON(e.Payload, want.Payload)) {
			found = append(found, e)
		}
	}
	if len(found) != 1 {
		tb.Fatalf("the outbox has %d events %s of %s %s with payload %s, want 1; all of the aggregate: %+v", len(found),
			want.Type, want.AggregateType, want.AggregateID, want.Payload, all)
	}
	return found[0]
}

func sameJSON(a, b []byte) bool {
	var x, y any
	if json.Unmarshal(a, &x) != nil || json.Unmarshal(b, &y) != nil {
		return bytes.Equal(a, b)
	}
	return reflect.DeepEqual(x, y)
}

// Deliver calls a handler with events as a consumer does, one after the other, without Redis. It stops at the first
// error and returns it. Call it twice with the same events to test that a repeated delivery changes nothing. An event
// without ID gets one, which Deliver stores in events.
func Deliver(ctx context.Context, handler consumer.Handler, events ...outbox.Event) error {
	for i := range events {
		e := &events[i]
		if e.ID == uuid.Nil {
			e.ID = uuid.New()
		}
		delivered := consumer.Event{
			ID: e.ID.String(), Type: e.Type, Source: "/posthaste/default", Subject: e.AggregateID,
			Time: time.Now().UTC(), Data: e.Payload, Stream: "outbox." + e.AggregateType, Attempt: 1,
		}
		for name, value := range e.Headers {
			if name == "traceparent" {
				delivered.TraceParent = value
				continue
			}
			if delivered.Headers == nil {
				delivered.Headers = map[string]string{}
			}
			delivered.Headers[name] = value
		}
		if err := handler(ctx, delivered); err != nil {
			return err
		}
	}
	return nil
}
