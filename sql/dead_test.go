package sql_test

import (
	"encoding/json"
	"fmt"
	"math"
	"testing"
	"time"

	"posthaste/internal/lab/testenv"
	"posthaste/outbox"
	"posthaste/sql"
)

// The table was truncated and its numbers restart: an old insert is not the row that has its number now, and that row
// is not settled because the old one was.
func TestARowIsMoreThanItsNumber(t *testing.T) {
	t.Parallel()
	s, d := newStore(t)
	ctx := t.Context()
	o := succeed(t, s)
	old := insert(t, d, "a")
	for range 10 {
		insert(t, d, "a")
	}
	mark := settle(t, s)
	d.Exec(t, "TRUNCATE outbox RESTART IDENTITY")
	row := insert(t, d, "a")
	if row.Seq != old.Seq {
		t.Fatalf("numbers %d and %d: not the case", old.Seq, row.Seq)
	}
	if !mark.Holds(old.XID, old.Seq) || mark.Holds(row.XID, row.Seq) || backlog(t, s, d) != 1 {
		t.Errorf("the mark %+v does not tell the two rows apart", mark)
	}
	is(t, true)(s.Park(ctx, o, old, "too_large", "why", 3))
	if n := backlog(t, s, d); n != 1 {
		t.Error("the new row is parked")
	}
	m := newMarker(t, s)
	look, err := m.Look(ctx, mark, math.MaxInt64)
	must(t, err)
	if len(look.Owed) != 1 || uint32(look.Owed[0].XID) != row.XID || !look.Holds(row.XID, row.Seq) {
		t.Errorf("look %+v, want row %d of transaction %d", look, row.Seq, row.XID)
	}
	must(t, m.Move(ctx, o, look.Settled, nil))
	wantOwed(t, s, d, 0)
}

// A retried event is published when its row is gone, whichever row has its number now.
func TestARetryWhoseNumberIsUsedAgainIsPublished(t *testing.T) {
	t.Parallel()
	s, d := newStore(t)
	ctx := t.Context()
	row := insert(t, d, "a")
	must(t, fails(s.Park(ctx, succeed(t, s), row, "too_large", "why", 3)))
	must(t, sql.RetryDead(ctx, d.Pool, row.ID))
	is[int64](t, 1)(s.Housekeep(ctx))
	seq := testenv.Value[int64](t, d, "DELETE FROM outbox RETURNING seq")
	d.Exec(t, fmt.Sprintf("ALTER TABLE outbox ALTER seq RESTART WITH %d", seq))
	insert(t, d, "a")
	is[int64](t, 0)(s.Housekeep(ctx))
}

// Only the owner can park. A park that arrives after another adoption does nothing, and an adoption waits for a running
// one, so rows that the new owner reads are not parked by the old one.
func TestAParkIsFenced(t *testing.T) {
	t.Parallel()
	s, d := newStore(t)
	ctx := t.Context()
	row := insert(t, d, "a")
	first := succeed(t, s)
	succeed(t, s)
	wantErr(t, fails(s.Park(ctx, first, row, "too_large", "why", 3)), outbox.ErrSuperseded)
	if n := backlog(t, s, d); n != 1 {
		t.Fatal("the row is parked")
	}
	now := owner(t, s)
	// This park has read the owner and waits for another session that parks the same event.
	hold := begin(t, d)
	run(t, hold, `INSERT INTO outbox_dead (id, seq, aggregate_type, aggregate_id, event_type, created_at,
		error, class, attempts) VALUES ($1, 1, 'order', 'a', 'x', now(), 'x', 'x', 1)`, row.ID)
	adoptsBehind(t, s, d, hold, func() error { return fails(s.Park(ctx, now, row, "too_large", "why", 3)) })
	wantRows(t, d, 1, "outbox_dead")
}

// A time that JSON cannot represent becomes the nearest one that it can.
func TestDeadEventsOfAnyTime(t *testing.T) {
	t.Parallel()
	s, d := newStore(t)
	succeed(t, s)
	times := []string{"infinity", "-infinity", "10000-01-01", "4713-01-01 BC"}
	for _, at := range times {
		r := insert(t, d, "a")
		d.Exec(t, "UPDATE outbox SET created_at = $1::text::timestamptz WHERE id = $2", at, r.ID)
		must(t, fails(s.Park(t.Context(), owner(t, s), r, "too_large", "why", 1)))
		d.Exec(t, "UPDATE outbox_dead SET created_at = $1::text::timestamptz WHERE id = $2", at, r.ID)
	}
	dead, err := sql.ListDead(t.Context(), d.Pool, 10)
	must(t, err)
	if text, err := json.Marshal(dead); err != nil || len(dead) != len(times) {
		t.Errorf("%d events: %s, %v", len(dead), text, err)
	}
}

func TestDeadEvents(t *testing.T) {
	t.Parallel()
	s, d := newStore(t)
	ctx := t.Context()
	succeed(t, s)
	a, b := insert(t, d, "a"), insert(t, d, "b")
	d.Exec(t, "UPDATE outbox SET created_at = 'infinity' WHERE id = $1", b.ID)
	for _, r := range []*outbox.Row{b, a, a} { // repeats have no effect
		is(t, true)(s.Park(ctx, owner(t, s), r, "too_large", "a\x00b\xffc\u2026", 3))
	}
	wantOwed(t, s, d, 0)
	dead, err := sql.ListDead(ctx, d.Pool, 10)
	must(t, err)
	if len(dead) != 2 || dead[0].ID != a.ID || dead[0].Attempts != 3 || dead[0].Class != "too_large" ||
		dead[0].Retrying ||
		dead[0].Error != "a?b?c?" || dead[0].AggregateID != "a" ||
		time.Since(dead[1].CreatedAt).Abs() > time.Minute {
		t.Errorf("dead events %+v", dead)
	}
	if dead, err = sql.ListDead(ctx, d.Pool, 1); err != nil || len(dead) != 1 {
		t.Errorf("limited to one: %d, %v", len(dead), err)
	}
	if parked, err := s.Parked(ctx); err != nil || len(parked) != 2 || parked[0].Seq != a.Seq {
		t.Errorf("for block-key: %+v, %v", parked, err)
	}

	for range 2 { // idempotent
		must(t, sql.RetryDead(ctx, d.Pool, a.ID))
	}
	if n := testenv.Value[int](t, d,
		"SELECT count(*) FROM outbox WHERE id = $1 AND payload = '{\"n\":1}' AND headers = '{\"h\":\"x\"}'",
		a.ID); n != 1 || backlog(t, s, d) != 1 {
		t.Errorf("%d rows of it, want one that is unsettled", n)
	}
	is[int64](t, 2)(s.Housekeep(ctx))
	if ids, err := sql.DeadIDs(ctx, d.Pool); err != nil || len(ids) != 1 || ids[0] != b.ID {
		t.Errorf("not being retried: %v, %v", ids, err)
	}
	// Parked again: attempts add up, and it can be retried again.
	again := &outbox.Row{Record: outbox.Record{
		ID: a.ID, AggregateID: "a",
		Seq: testenv.Value[int64](t, d, "SELECT max(seq) FROM outbox WHERE id = $1", a.ID),
	}}
	must(t, fails(s.Park(ctx, owner(t, s), again, "too_large", "why", 2)))
	if dead, err = sql.ListDead(ctx, d.Pool, 1); err != nil || dead[0].Attempts != 5 || dead[0].Retrying ||
		dead[0].Seq != a.Seq {
		t.Errorf("parked again: %+v, %v", dead, err)
	}
	wantRows(t, d, 1, "outbox WHERE id = $1", a.ID)
	must(t, sql.RetryDead(ctx, d.Pool, a.ID))
	succeed(t, s)
	settle(t, s)
	is[int64](t, 1)(s.Housekeep(ctx))
	wantRows(t, d, 1, "outbox_history")

	must(t, sql.DropDead(ctx, d.Pool, b.ID))
	for _, err := range []error{sql.DropDead(ctx, d.Pool, b.ID), sql.RetryDead(ctx, d.Pool, b.ID)} {
		wantErr(t, err, sql.ErrNotParked)
	}
	is[int64](t, 0)(sql.CountDead(ctx, d.Pool))
	if _, err := s.Housekeep(ctx); err != nil {
		t.Error(err)
	}
	wantRows(t, d, 1, "outbox")
}

// An event that is dropped before a mark settles its row is neither unsettled nor delivered, and its row is deleted.
func TestADroppedEventIsNotOwed(t *testing.T) {
	t.Parallel()
	s, d := newStore(t)
	row, other := insert(t, d, "a"), insert(t, d, "a")
	must(t, fails(s.Park(t.Context(), succeed(t, s), row, "too_large", "why", 3)))
	must(t, sql.DropDead(t.Context(), d.Pool, row.ID))
	for range 2 {
		if backlog(t, s, d) != 1 || testenv.Value[int](t, d, "SELECT count(*) FROM outbox_history") != 0 {
			t.Error("the event is owed, or delivered")
		}
		is[int64](t, 0)(s.Housekeep(t.Context()))
	}
	if n := testenv.Value[int64](t, d, "SELECT seq FROM outbox"); n != other.Seq {
		t.Errorf("row %d is left", n)
	}
}
