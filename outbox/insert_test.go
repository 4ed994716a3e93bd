package outbox_test

import (
	"context"
	stdsql "database/sql"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	_ "github.com/jackc/pgx/v5/stdlib"

	"posthaste/internal/lab/testenv"
	"posthaste/outbox"
)

func TestMain(m *testing.M) { os.Exit(testenv.Main(m)) }

func event(change func(e *outbox.Event)) outbox.Event {
	e := outbox.Event{
		AggregateType: "order", AggregateID: "o-1", Type: "order.created", Payload: []byte(`{"secret":1}`),
		Headers: map[string]string{"tenant": "<a>"},
	}
	change(&e)
	return e
}

// inserts calls do with both functions, each in a transaction that then commits.
func inserts(
	t *testing.T, d *testenv.Database, do func(name string, insert func(...outbox.Event) ([]uuid.UUID, error)),
) {
	t.Helper()
	ctx := t.Context()
	must(t, pgx.BeginFunc(ctx, d.Pool, func(tx pgx.Tx) error {
		do("pgx", func(events ...outbox.Event) ([]uuid.UUID, error) { return outbox.Insert(ctx, tx, events...) })
		return nil
	}))
	db, err := stdsql.Open("pgx", d.URL)
	must(t, err)
	defer func() { must(t, db.Close()) }()
	tx, err := db.BeginTx(ctx, nil)
	must(t, err)
	do("database/sql", func(events ...outbox.Event) ([]uuid.UUID, error) {
		return outbox.InsertSQL(context.WithoutCancel(ctx), tx, events...)
	})
	must(t, tx.Commit())
}

func TestInsert(t *testing.T) {
	t.Parallel()
	d := testenv.Postgres(t)
	own := uuid.New()
	inserts(t, d, func(name string, insert func(...outbox.Event) ([]uuid.UUID, error)) {
		if ids, err := insert(); err != nil || len(ids) != 0 {
			t.Errorf("%s: nothing: %v, %v", name, ids, err)
		}
		events := make([]outbox.Event, 10001) // two statements
		for i := range events {
			events[i] = event(func(e *outbox.Event) { e.Payload = json.RawMessage(`1`) })
		}
		events[1].ID, events[1].Headers = own, nil
		ids, err := insert(events...)
		if err != nil || len(ids) != len(events) || ids[1] != own || ids[0].Version() != 7 {
			t.Fatalf("%s: %d ids, %v", name, len(ids), err)
		}
		own = uuid.New()
	})
	n := testenv.Value[int](t, d, `SELECT count(*) FROM outbox
		WHERE aggregate_type = 'order' AND aggregate_id = 'o-1'
		AND event_type = 'order.created' AND payload = '1' AND headers = '{"tenant": "<a>"}'`)
	testenv.Equal(t, "rows", n, 20000)
	n = testenv.Value[int](t, d, "SELECT count(*) FROM outbox WHERE headers IS NULL")
	testenv.Equal(t, "rows without headers", n, 2)
}

func TestInsertKeepsTheOrder(t *testing.T) {
	t.Parallel()
	d := testenv.Postgres(t)
	want := map[string][]uuid.UUID{}
	inserts(t, d, func(name string, insert func(...outbox.Event) ([]uuid.UUID, error)) {
		events := slices.Repeat([]outbox.Event{event(func(e *outbox.Event) { e.AggregateID = name })}, 100)
		var err error
		want[name], err = insert(events...)
		must(t, err)
	})
	for name, ids := range want {
		stored := testenv.Value[[]uuid.UUID](t, d,
			"SELECT array_agg(id ORDER BY seq) FROM outbox WHERE aggregate_id = '"+name+"'")
		if !slices.Equal(stored, ids) {
			t.Errorf("%s: the rows have another order than the events", name)
		}
	}
}

// refused are events that Postgres would refuse, and the transaction with them.
var refused = map[string]func(e *outbox.Event){
	"no aggregate type":       func(e *outbox.Event) { e.AggregateType = "" },
	"braces":                  func(e *outbox.Event) { e.AggregateType = "a{b}" },
	"a line break":            func(e *outbox.Event) { e.AggregateType = "a\n" },
	"a long aggregate type":   func(e *outbox.Event) { e.AggregateType = strings.Repeat("x", 65) },
	"a long aggregate":        func(e *outbox.Event) { e.AggregateID = strings.Repeat("x", 1025) },
	"a zero byte":             func(e *outbox.Event) { e.AggregateID = "a\x00" },
	"no UTF-8":                func(e *outbox.Event) { e.AggregateID = "a\xff" },
	"no type":                 func(e *outbox.Event) { e.Type = "" },
	"a long type":             func(e *outbox.Event) { e.Type = strings.Repeat("ä", 256) },
	"a zero byte in the type": func(e *outbox.Event) { e.Type = "a\x00" },
	"no payload":              func(e *outbox.Event) { e.Payload = nil },
	"no JSON":                 func(e *outbox.Event) { e.Payload = []byte(`{"secret":`) },
	"JSON without UTF-8":      func(e *outbox.Event) { e.Payload = []byte("\"secret\xff\"") },
	"a zero character":        func(e *outbox.Event) { e.Payload = []byte(`{"secret\u0000": 1}`) },
	"half a pair":             func(e *outbox.Event) { e.Payload = []byte(`"secret\ud800"`) },
	"two halves":              func(e *outbox.Event) { e.Payload = []byte(`"\ude00\ud83d"`) },
	"a large number":          func(e *outbox.Event) { e.Payload = []byte("1e131072") },
	"a small number":          func(e *outbox.Event) { e.Payload = []byte("-1E-16384") },
	"an unlikely number":      func(e *outbox.Event) { e.Payload = []byte("1e99999999999999999999") },
	"a large payload":         func(e *outbox.Event) { e.Payload = long(outbox.MaxPayload + 1) },
	"a payload that grows":    func(e *outbox.Event) { e.Payload = numbers("1e5000", 1700) },
	"a payload of commas":     func(e *outbox.Event) { e.Payload = numbers("1", outbox.MaxPayload/3+1) },
	"large headers":           func(e *outbox.Event) { e.Headers["x"] = strings.Repeat("x", outbox.MaxHeaders-20) },
	"a zero byte in a header": func(e *outbox.Event) { e.Headers["x"] = "a\x00" },
}

// taken are events at the limits.
var taken = map[string]func(e *outbox.Event){
	"names":     func(e *outbox.Event) { e.AggregateType, e.Type = strings.Repeat("x", 64), strings.Repeat("ä", 255) },
	"aggregate": func(e *outbox.Event) { e.AggregateID = strings.Repeat("x", 1024) },
	"numbers":   func(e *outbox.Event) { e.Payload = []byte("[1e131071, -1E-16383, -0, 0.10e2, 1.5e-3]") },
	"escapes":   func(e *outbox.Event) { e.Payload = []byte(`" \ud83d\ude00 \u00e9 \u0001 \/ \" \\u0000 \n\t"`) },
	"payload":   func(e *outbox.Event) { e.Payload = long(outbox.MaxPayload) },
	"commas":    func(e *outbox.Event) { e.Payload = numbers("1", outbox.MaxPayload/3) },
	"headers":   func(e *outbox.Event) { e.Headers = map[string]string{"x": strings.Repeat("<", outbox.MaxHeaders-9)} },
	"depth":     func(e *outbox.Event) { e.Payload = []byte(strings.Repeat("[", 1000) + strings.Repeat("]", 1000)) },
}

func long(bytes int) []byte { return []byte(`"` + strings.Repeat("x", bytes-2) + `"`) }

func numbers(each string, n int) []byte {
	return []byte("[" + strings.Repeat(each+",", n-1) + each + "]")
}

// A bad event sends nothing, so the transaction can continue. Postgres agrees with every verdict.
func TestInsertRefusesBeforeTheStatement(t *testing.T) {
	t.Parallel()
	d := testenv.Postgres(t)
	inserts(t, d, func(driver string, insert func(...outbox.Event) ([]uuid.UUID, error)) {
		for name, change := range refused {
			_, err := insert(event(func(*outbox.Event) {}), event(change))
			if !errors.Is(err, outbox.ErrInvalid) || strings.Contains(err.Error(), "secret") ||
				strings.Contains(err.Error(), "xxxxx") {
				t.Errorf("%s, %s: %v", driver, name, err)
			}
		}
		for _, h := range []map[string]string{{"x": "a\xff"}, {"x\xff": "a"}} { // encoding/json would replace the byte
			if _, err := insert(event(func(e *outbox.Event) { e.Headers = h })); !errors.Is(err, outbox.ErrInvalid) {
				t.Errorf("%s, a header without UTF-8: %v", driver, err)
			}
		}
		id := uuid.New()
		twin := event(func(e *outbox.Event) { e.ID = id })
		if _, err := insert(twin, twin); !errors.Is(err, outbox.ErrInvalid) {
			t.Errorf("%s, an id twice: %v", driver, err)
		}
		for name, change := range taken {
			if _, err := insert(event(change)); err != nil {
				t.Fatalf("%s, %s: %v", driver, name, err)
			}
		}
	})
	testenv.Equal(t, "rows", testenv.Value[int](t, d, "SELECT count(*) FROM outbox"), 2*len(taken))
	for name, change := range refused {
		e := event(change)
		headers, _ := json.Marshal(e.Headers)
		_, err := d.Pool.Exec(t.Context(), `INSERT INTO outbox
			(aggregate_type, aggregate_id, event_type, payload, headers)
			VALUES ($1, $2, $3, $4::text::jsonb, $5::text::jsonb)`, e.AggregateType, e.AggregateID, e.Type,
			string(e.Payload), string(headers))
		if err == nil && e.Type != "" {
			t.Errorf("%s: Postgres takes it", name)
		}
	}
}

// A program that only writes compiles this package, pgx, uuid, and what these two need.
func TestAWriterNeedsOnlyPgxAndUUID(t *testing.T) {
	t.Parallel()
	deps := func(packages ...string) []string {
		args := append([]string{"list", "-deps", "-f", "{{if not .Standard}}{{.ImportPath}}{{end}}"}, packages...)
		out, err := exec.CommandContext(t.Context(), "go", args...).Output()
		must(t, err)
		return strings.Fields(string(out))
	}
	allowed := append(deps("github.com/jackc/pgx/v5", "github.com/google/uuid"), "posthaste/outbox")
	for _, p := range deps("posthaste/outbox") {
		if !slices.Contains(allowed, p) {
			t.Errorf("posthaste/outbox imports %s", p)
		}
	}
}

var must = testenv.Must
