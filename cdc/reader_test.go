package cdc

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"posthaste/internal/lab/testenv"
)

func TestRowsArriveInCommitOrderWithTheirFields(t *testing.T) {
	t.Parallel()
	e := setup(t)
	c := e.run(t, false)
	before := time.Now().Add(-time.Second)
	e.db.Exec(t, `INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload, headers) VALUES
		('01890a5d-ac96-774b-bcce-b302099a8057', 'order', 'o-1', 'order.created', '{"ü": "☃\u0001 \"q\" \\ \\\\"}',
			'{"traceparent": "00-a"}'),
		('01890a5d-ac96-774b-bcce-b302099a8058', 'credits', '', 'x', 'null', NULL)`)
	rows := c.wait(t, 2)
	a, b := rows[0], rows[1]
	if a.ID.String() != "01890a5d-ac96-774b-bcce-b302099a8057" || a.AggregateType != "order" ||
		a.AggregateID != "o-1" || a.Type != "order.created" || a.Seq != 1 {
		t.Errorf("first row: %+v", a)
	}
	text := testenv.Value[string](t, e.db, "SELECT payload::text FROM outbox WHERE seq = 1")
	if string(a.Payload) != text {
		t.Errorf("payload %q, want %q", a.Payload, text)
	}
	if a.TraceParent() != "00-a" || b.Headers != nil || string(b.Payload) != "null" || b.AggregateID != "" {
		t.Errorf("headers %q, second row %+v", a.Headers, b)
	}
	if a.End != 0 || b.End <= b.Commit || a.Commit != b.Commit || a.XID != b.XID || a.XID == 0 {
		t.Errorf("positions: %s %s, %s %s", a.Commit, a.End, b.Commit, b.End)
	}
	created := testenv.Value[time.Time](t, e.db, "SELECT created_at FROM outbox WHERE seq = 1")
	if a.Time.Before(before) || time.Since(a.Time) > time.Minute || a.Time.Before(created) {
		t.Errorf("created %v, commit %v", created, a.Time)
	}
	// The order is that of commits.
	ctx := t.Context()
	first, err := e.db.Pool.Begin(ctx)
	must(t, err)
	second, err := e.db.Pool.Begin(ctx)
	must(t, err)
	for i := range 3 {
		for name, tx := range map[string]pgx.Tx{"first": first, "second": second} {
			_, err := tx.Exec(ctx, insertOne, fmt.Sprintf("%s-%d", name, i))
			must(t, err)
		}
	}
	must(t, errors.Join(second.Commit(ctx), first.Commit(ctx)))
	want := []string{"second-0", "second-1", "second-2", "first-0", "first-1", "first-2"}
	if got := subjects(c.wait(t, 8)[2:]); !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
	// A large payload, and the row behind it.
	e.insertOf(t, "'large'", "to_jsonb(repeat('0123456789', 500000))", 1)
	e.insert(t, "after")
	rows = c.wait(t, 10)[8:]
	if p := string(rows[0].Payload); p != `"`+strings.Repeat("0123456789", 500000)+`"` {
		t.Errorf("payload of %d bytes is not what was written", len(p))
	}
	if string(rows[1].Payload) != `{"n": 1}` || rows[1].AggregateID != "after" {
		t.Errorf("the row behind it: %+v", rows[1])
	}
	if err := c.stop(); !errors.Is(err, context.Canceled) {
		t.Errorf("run ended with %v", err)
	}
}

// Settled confirms what is contiguous, whatever the order of its calls. If it is called just before the end of Run, the
// server still gets the position, and the slot is free when Run returns.
func TestRestartResumesExactlyBehindWhatWasSettled(t *testing.T) {
	t.Parallel()
	e := setup(t)
	c := e.run(t, false)
	e.insertMany(t, "x", 10)
	rows := c.wait(t, 10)
	c.r.Settled(rows[2].End - 1) // not the end of the third: two are settled
	c.r.Settled(rows[0].End)     // late
	e.confirmed(t, rows[1].End)
	e.wantConfirmed(t, rows[1], rows[2])
	c.r.Settled(rows[4].End)
	if err := c.stop(); !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	if st := e.status(t); st.Active {
		t.Errorf("after the end: %+v", st)
	}
	e.insert(t, "y") // while nobody reads
	e.wantConfirmed(t, rows[4], rows[5])
	again := start(t, c.r, true)
	if got, want := subjects(again.wait(t, 6)), []string{"x6", "x7", "x8", "x9", "x10", "y"}; !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}
