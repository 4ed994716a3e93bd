package sql_test

import (
	"strings"
	"testing"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"posthaste/internal/testenv"
	"posthaste/outbox"
	"posthaste/sql"
)

func TestInsertEventRefuses(t *testing.T) {
	t.Parallel()
	d := testenv.Postgres(t)
	good := sql.Event{
		AggregateType: "order", AggregateID: "o-1", Type: "order.created",
		Payload: []byte(`{"secret":1}`),
	}
	for name, change := range map[string]func(e *sql.Event){
		"no type":          func(e *sql.Event) { e.AggregateType = "" },
		"braces":           func(e *sql.Event) { e.AggregateType = "a{b}" },
		"a long type":      func(e *sql.Event) { e.AggregateType = strings.Repeat("x", 65) },
		"a long aggregate": func(e *sql.Event) { e.AggregateID = strings.Repeat("x", 1025) },
		"a zero byte":      func(e *sql.Event) { e.AggregateID = "a\x00" },
		"a long name":      func(e *sql.Event) { e.Type = strings.Repeat("x", 256) },
		"no payload":       func(e *sql.Event) { e.Payload = nil },
		"no JSON":          func(e *sql.Event) { e.Payload = []byte(`{"secret":`) },
		"a large payload": func(e *sql.Event) {
			e.Payload = []byte(`"` + strings.Repeat("x", outbox.MaxPayload) +
				`"`)
		},
		"payload that grows": func(e *sql.Event) { e.Payload = []byte("[" + strings.Repeat("1e5000,", 1700) + "1]") },
		"large headers":      func(e *sql.Event) { e.Headers = map[string]string{"x": strings.Repeat("x", 65536)} },
	} {
		e := good
		change(&e)
		err := pgx.BeginFunc(t.Context(), d.Pool, func(tx pgx.Tx) error {
			_, err := sql.InsertEvent(t.Context(), tx, e)
			return err
		})
		if err == nil || strings.Contains(err.Error(), "secret") || strings.Contains(err.Error(), "xxxxx") {
			t.Errorf("%s: %v", name, err)
		}
	}
	must(t, pgx.BeginFunc(t.Context(), d.Pool, func(tx pgx.Tx) error {
		id, err := sql.InsertEvent(t.Context(), tx, good)
		if id == uuid.Nil || id.Version() != 7 {
			t.Errorf("id %v", id)
		}
		return err
	}))
	if n := testenv.Value[int](t, d, "SELECT count(*) FROM outbox"); n != 1 {
		t.Errorf("%d rows, want 1", n)
	}
}
