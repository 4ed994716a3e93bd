package sql_test

import (
	"regexp"
	"strings"
	"testing"

	"github.com/google/uuid"
	"github.com/jackc/pgerrcode"
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

// An id is unique as long as its row exists.
func TestAnIDIsUsedOnce(t *testing.T) {
	t.Parallel()
	d := testenv.Postgres(t)
	e := insert(t, d, "a")
	_, err := d.Pool.Exec(t.Context(), `INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload)
		VALUES ($1, 'order', 'b', 'e', '{}')`, e.ID)
	if sql.SQLState(err) != pgerrcode.UniqueViolation {
		t.Errorf("the id of another event: %v", err)
	}
}

// The table refuses bad events of writers that do not use this package, and names the limit.
func TestWhatTheTableTakes(t *testing.T) {
	t.Parallel()
	d := testenv.Postgres(t)
	name := regexp.MustCompile(`^[a-zA-Z0-9_.:-]{1,64}$`)
	cases := []string{"", strings.Repeat("x", 64), strings.Repeat("x", 65), "a\n", "a b", "ä", "a{b}", "İ"}
	for c := rune(1); c < 256; c++ {
		cases = append(cases, string(c), "a"+string(c)+"z")
	}
	insert := func(kind, payload string) error {
		_, err := d.Pool.Exec(t.Context(), `INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload)
			VALUES (gen_random_uuid(), $1, 'a', 'e', $2::text::jsonb)`, kind, payload)
		return err
	}
	for _, kind := range cases {
		if err := insert(kind, "{}"); (err == nil) != name.MatchString(kind) {
			t.Errorf("aggregate type %q: %v", kind, err)
		}
	}
	for bytes, fits := range map[int]bool{8388608: true, 8388609: false} {
		if err := insert("order", `"`+strings.Repeat("x", bytes-2)+`"`); (err == nil) != fits {
			t.Errorf("a payload of %d bytes: %v", bytes, err)
		}
	}
	const numbers = "(SELECT jsonb_agg(1e131071::numeric) FROM generate_series(1, $N))"
	d.Exec(t, "CREATE TABLE compressed AS SELECT "+strings.ReplaceAll(numbers, "$N", "200")+" AS payload")
	for name, c := range map[string]struct{ columns, limit string }{
		"an id":                    {"repeat('x', 1025), '{}', NULL", "at most 1024 bytes"},
		"an id of several bytes":   {"repeat('ä', 513), '{}', NULL", "at most 1024 bytes"},
		"the longest id":           {"repeat('x', 1024), '{}', NULL", ""},
		"headers":                  {"'a', '{}', to_jsonb(repeat('x', 65535))", "at most 65536 bytes as text"},
		"headers with a number":    {"'a', '{}', '[1e131071]'", "at most 65536 bytes as text"},
		"the longest headers":      {"'a', '{}', to_jsonb(repeat('x', 65534))", ""},
		"numbers":                  {"'a', " + strings.ReplaceAll(numbers, "$N", "64") + ", NULL", "at most 8388608"},
		"the most numbers":         {"'a', " + strings.ReplaceAll(numbers, "$N", "63") + ", NULL", ""},
		"compressed in its source": {"'a', (SELECT payload FROM compressed), NULL", "at most 8388608 bytes as text"},
	} {
		_, err := d.Pool.Exec(t.Context(), `
			INSERT INTO outbox (aggregate_type, event_type, aggregate_id, payload, headers)
			SELECT 'order', 'e', `+c.columns)
		if c.limit == "" && err != nil || c.limit != "" && (err == nil || !strings.Contains(err.Error(), c.limit)) {
			t.Errorf("%s: %v, want %q", name, err, c.limit)
		}
	}
}
