package sweep_test

import (
	"fmt"
	"maps"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"posthaste/internal/lab/testenv"
	"posthaste/outbox"
)

// A transaction that began early commits between two batches, and its aggregate has a younger event after the first
// batch. The pass leaves both out; the next pass publishes them in order.
func TestALateRowIsNotOvertaken(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	names := inPart(t, r, 2)
	late := names[0]
	tx := r.begin()
	first, err := insertIn(t.Context(), tx, "order", late, `{"n":1}`)
	r.must(err)
	var between []uuid.UUID
	for n := range 4 {
		between = append(between, r.insert("order", names[1], fmt.Sprintf(`{"n":%d}`, n)))
	}
	second := make(chan uuid.UUID, 1)
	var once sync.Once
	r.published = func([]*outbox.Record) {
		once.Do(func() {
			r.must(tx.Commit(t.Context()))
			second <- r.insert("order", late, `{"n":2}`)
		})
	}
	r.run(r.options(1, 1))
	r.oracle().WaitEmpty(t, 20*time.Second)
	r.eventually(20*time.Second, "six entries", func() bool { return len(r.entries("order")) == 6 })
	r.streamed("order", append(between, first, <-second)...)
}

// Rows may be updated or withdrawn until they are read. The version that was committed when they were read is
// published. The sweep does not wait for uncommitted changes.
func TestRowsThatAreWrittenMeanwhile(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	a := inPart(t, r, 1)[0]
	var ids []uuid.UUID
	for n := range 5 {
		ids = append(ids, r.insert("order", a, fmt.Sprintf(`{"n":%d}`, n)))
	}
	open := r.begin()
	_, err := open.Exec(t.Context(), `UPDATE outbox SET payload = '{"late": true}' WHERE id = $1`, ids[0])
	r.must(err)
	_, err = open.Exec(t.Context(), "DELETE FROM outbox WHERE id = $1", ids[4])
	r.must(err)
	var once sync.Once
	r.published = func([]*outbox.Record) {
		once.Do(func() {
			r.db.Exec(t, `UPDATE outbox SET payload = '{"redacted": true}' WHERE id = $1`, ids[2])
			r.db.Exec(t, "DELETE FROM outbox WHERE id = $1", ids[1])
		})
	}
	r.run(r.options(1, 1))
	r.oracle().WaitEmpty(t, 20*time.Second)
	r.streamed("order", ids[0], ids[2], ids[3], ids[4])
	var data []string
	for _, e := range r.oracle().Entries(t, "order") {
		data = append(data, e.Data)
	}
	if want := []string{`{"n": 0}`, `{"redacted": true}`, `{"n": 3}`, `{"n": 4}`}; !slices.Equal(data, want) {
		t.Errorf("published %v, want %v", data, want)
	}
	r.must(open.Commit(t.Context()))
	if n := r.owed(); n != 0 {
		t.Errorf("%d rows are owed again", n)
	}
}

// A pass that is longer than a turn does not keep the others waiting.
func TestPartsTakeTurns(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	long := inPart(t, r, 1)[0]
	r.db.Exec(t, `INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload)
		SELECT gen_random_uuid(), 'order', $1, 'order.changed', jsonb_build_object('n', n)
		FROM generate_series(1, 400) n`, long)
	other := r.insert("order", "elsewhere", `{"n": 1}`)
	r.run(r.options(1, 3)) // a turn is 150 rows
	r.oracle().WaitEmpty(t, 20*time.Second)
	r.eventually(20*time.Second, "all entries", func() bool { return len(r.entries("order")) == 401 })
	if at := slices.Index(r.entries("order"), other); at > 150 {
		t.Errorf("the other part had to wait for %d rows", at)
	}
	last := 0
	for _, e := range r.oracle().Entries(t, "order") {
		var n int
		if _, err := fmt.Sscanf(e.Data, `{"n": %d}`, &n); err != nil || e.Subject == long && n != last+1 {
			t.Fatalf("%s behind %d: %v", e.Data, last, err)
		}
		if e.Subject == long {
			last = n
		}
	}
	if n := testenv.Value[int](t, r.db, "SELECT count(DISTINCT pass::text) FROM outbox_mark WHERE part = 3"); n != 1 {
		t.Errorf("%d passes, want one over turns", n)
	}
}

// inPart returns n aggregates of one part.
func inPart(tb testing.TB, r *rig, n int) []string {
	tb.Helper()
	rows, err := r.db.Pool.Query(tb.Context(),
		"SELECT 'a-' || g FROM generate_series(1, 1000) g WHERE hashtextextended('a-' || g, 0) & 15 = 3 LIMIT $1", n)
	r.must(err)
	names, err := pgx.CollectRows(rows, pgx.RowTo[string])
	r.must(err)
	if len(names) != n {
		tb.Fatalf("%d names, want %d", len(names), n)
	}
	return names
}

// A mark tells the last entry of each stream that it adds.
func TestMarksTellTheirEntries(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	a := inPart(t, r, 1)[0]
	for range 11 { // of one millisecond, some of them: 9-10 is behind 9-9
		r.insert("order", a, `{}`)
	}
	r.insert("credits", a, `{}`)
	r.run(r.options(1, 100))
	r.oracle().WaitEmpty(t, 20*time.Second)
	want := map[string]string{}
	for _, e := range r.oracle().Entries(t, "order", "credits") {
		want[e.Stream] = e.EntryID
	}
	got := testenv.Value[map[string]string](t, r.db, "SELECT entries FROM outbox_mark ORDER BY id DESC LIMIT 1")
	if !maps.Equal(got, want) {
		t.Errorf("the mark tells of %v, want %v", got, want)
	}
}
