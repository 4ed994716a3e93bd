package sql_test

import (
	"regexp"
	"strings"
	"testing"

	"github.com/jackc/pgerrcode"

	"posthaste/internal/lab/testenv"
	"posthaste/sql"
)

// The table refuses bad events of writers that do not use this package, and names the limit. An id is unique as long as
// its row exists.
func TestWhatTheTableTakes(t *testing.T) {
	t.Parallel()
	d := testenv.Postgres(t)
	_, err := d.Pool.Exec(t.Context(), `INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload)
		VALUES ($1, 'order', 'b', 'e', '{}')`, insert(t, d, "a").ID)
	if sql.SQLState(err) != pgerrcode.UniqueViolation {
		t.Errorf("the id of another event: %v", err)
	}
	name := regexp.MustCompile(`^[a-zA-Z0-9_.:-]{1,64}$`)
	cases := []string{"", strings.Repeat("x", 64), strings.Repeat("x", 65), "a\n", "a b", "ä", "a{b}", "İ"}
	for c := rune(1); c < 256; c++ {
		cases = append(cases, string(c), "a"+string(c)+"z")
	}
	write := func(kind, payload string) error {
		_, err := d.Pool.Exec(t.Context(), `INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload)
			VALUES (gen_random_uuid(), $1, 'a', 'e', $2::text::jsonb)`, kind, payload)
		return err
	}
	for _, kind := range cases {
		if err := write(kind, "{}"); (err == nil) != name.MatchString(kind) {
			t.Errorf("aggregate type %q: %v", kind, err)
		}
	}
	for bytes, fits := range map[int]bool{8388608: true, 8388609: false} {
		if err := write("order", `"`+strings.Repeat("x", bytes-2)+`"`); (err == nil) != fits {
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
