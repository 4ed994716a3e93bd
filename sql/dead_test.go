package sql_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"posthaste/internal/testenv"
	"posthaste/outbox"
	"posthaste/sql"
)

// The table was emptied and its numbers begin anew: an old insert is not the row that has its number now, and settling
// it deletes nothing.
func TestARowIsMoreThanItsNumber(t *testing.T) {
	t.Parallel()
	s, d := newStore(t)
	ctx := t.Context()
	old := insert(t, d, "a")
	d.Exec(t, "TRUNCATE outbox RESTART IDENTITY")
	row := insert(t, d, "a")
	if row.Seq != old.Seq {
		t.Fatalf("numbers %d and %d: not the case", old.Seq, row.Seq)
	}
	for name, call := range map[string]func(r *outbox.Row) (outbox.Found, error){
		"lookup": func(r *outbox.Row) (outbox.Found, error) { return s.Lookup(ctx, []*outbox.Row{r}) },
		"settle": func(r *outbox.Row) (outbox.Found, error) { return s.Settle(ctx, settlements(r)) },
		"hunt":   func(r *outbox.Row) (outbox.Found, error) { return s.DeleteAnywhere(ctx, settlements(r)) },
		"park": func(r *outbox.Row) (outbox.Found, error) {
			return s.Park(ctx, owner(t, s), r, "too_large", "why",
				3)
		},
	} {
		if f, err := call(old); err != nil || met(f) != 0 || !f.Snapshot.Visible(old.XID) {
			t.Errorf("%s of the old row: %+v, %v", name, f, err)
		}
	}
	if n := testenv.Value[int](t, d, "SELECT count(*) FROM outbox WHERE id = $1", row.ID); n != 1 {
		t.Error("the new row is gone")
	}
	if f, err := s.Settle(ctx, settlements(old, row)); err != nil || f.Rows[0] || !f.Rows[1] {
		t.Errorf("both settled: %+v, %v", f, err)
	}
}

// A retried event is published when its row is gone, whoever has its number now.
func TestARetryWhoseNumberIsUsedAgainIsPublished(t *testing.T) {
	t.Parallel()
	s, d := newStore(t)
	ctx := t.Context()
	row := insert(t, d, "a")
	if _, err := s.Park(ctx, owner(t, s), row, "too_large", "why", 3); err != nil {
		t.Fatal(err)
	}
	must(t, sql.RetryDead(ctx, d.Pool, row.ID))
	if n, err := s.Housekeep(ctx); err != nil || n != 1 {
		t.Fatalf("%d dead while it waits, %v", n, err)
	}
	seq := testenv.Value[int64](t, d, "DELETE FROM outbox RETURNING seq")
	d.Exec(t, fmt.Sprintf("ALTER TABLE outbox ALTER seq RESTART WITH %d", seq))
	insert(t, d, "a")
	if n, err := s.Housekeep(ctx); err != nil || n != 0 {
		t.Errorf("%d dead afterwards, %v", n, err)
	}
}

// A park is the owner's. It comes to nothing when another one has adopted before it arrives, and an adoption waits for
// one that is under way: what it finds in the table afterwards nobody parks any more.
func TestAParkIsFenced(t *testing.T) {
	t.Parallel()
	s, d := newStore(t)
	ctx := t.Context()
	row := insert(t, d, "a")
	first := succeed(t, s)
	succeed(t, s)
	if _, err := s.Park(ctx, first, row, "too_large", "why", 3); !errors.Is(err, outbox.ErrSuperseded) {
		t.Errorf("a late park: %v", err)
	}
	if n := testenv.Value[int](t, d, "SELECT count(*) FROM outbox"); n != 1 {
		t.Fatal("the row is gone")
	}
	now := owner(t, s)
	twin := now
	twin.Nonce = nonce()
	if _, err := s.Park(ctx, twin, row, "too_large", "why", 3); !errors.Is(err, outbox.ErrSuperseded) {
		t.Errorf("a park of another holder of the epoch: %v", err)
	}
	// Under way: it has looked who the owner is, and waits for the row.
	hold, err := d.Pool.Begin(ctx)
	must(t, err)
	defer func() { _ = hold.Rollback(context.Background()) }()
	_, err = hold.Exec(ctx, "SELECT FROM outbox FOR UPDATE")
	must(t, err)
	parked, adopted := make(chan error, 1), make(chan bool, 1)
	go func() {
		_, err := s.Park(ctx, now, row, "too_large", "why", 3)
		parked <- err
	}()
	waiting(t, d, 1)
	go func() {
		ok, _ := s.Adopt(ctx, outbox.Adoption{
			From: now.Epoch,
			To:   outbox.Owner{Source: now.Source, Epoch: now.Epoch + 1, Nonce: nonce()}, Holder: "me",
		})
		adopted <- ok
	}()
	waiting(t, d, 2)
	must(t, hold.Rollback(ctx))
	if err := <-parked; err != nil {
		t.Errorf("the park under way: %v", err)
	}
	if !<-adopted {
		t.Error("the adoption behind it failed")
	}
	if n := testenv.Value[int](t, d, "SELECT count(*) FROM outbox_dead"); n != 1 {
		t.Errorf("%d events are dead", n)
	}
}

func TestDeadEvents(t *testing.T) {
	t.Parallel()
	s, d := newStore(t)
	ctx := t.Context()
	a, b := insert(t, d, "a"), insert(t, d, "b")
	d.Exec(t, "UPDATE outbox SET created_at = 'infinity' WHERE id = $1", b.ID)
	for _, r := range []*outbox.Row{b, a} {
		if f, err := s.Park(ctx, owner(t, s), r, "too_large", "a\x00b\xffc", 3); err != nil || met(f) != 1 {
			t.Fatalf("park: %+v, %v", f, err)
		}
	}
	if f, err := s.Park(ctx, owner(t, s), a, "too_large", "", 3); err != nil || met(f) != 0 {
		t.Errorf("parked again: %+v, %v", f, err)
	}
	dead, err := sql.ListDead(ctx, d.Pool, 10)
	must(t, err)
	if len(dead) != 2 || dead[0].ID != a.ID || dead[0].Attempts != 3 || dead[0].Class != "too_large" ||
		dead[0].Retrying ||
		dead[0].Error != "a\uFFFDb\uFFFDc" || dead[0].AggregateID != "a" ||
		time.Since(dead[1].CreatedAt).Abs() > time.Minute {
		t.Errorf("dead events %+v", dead)
	}
	if dead, err = sql.ListDead(ctx, d.Pool, 1); err != nil || len(dead) != 1 {
		t.Errorf("limited to one: %d, %v", len(dead), err)
	}
	if parked, err := s.Parked(ctx); err != nil || len(parked) != 2 || parked[0].Seq != a.Seq {
		t.Errorf("for block-key: %+v, %v", parked, err)
	}

	for range 2 { // twice is as good as once
		must(t, sql.RetryDead(ctx, d.Pool, a.ID))
	}
	if n := testenv.Value[int](t, d,
		"SELECT count(*) FROM outbox WHERE id = $1 AND payload = '{\"n\":1}' AND headers = '{\"h\":\"x\"}'",
		a.ID); n != 1 {
		t.Errorf("%d rows put back", n)
	}
	if n, err := s.Housekeep(ctx); err != nil || n != 2 {
		t.Errorf("while it is retried: %d, %v", n, err)
	}
	if ids, err := sql.DeadIDs(ctx, d.Pool); err != nil || len(ids) != 1 || ids[0] != b.ID {
		t.Errorf("not being retried: %v, %v", ids, err)
	}
	// Refused again: attempts add up, and it can be retried again.
	again := &outbox.Row{Event: outbox.Event{
		ID: a.ID, AggregateID: "a",
		Seq: testenv.Value[int64](t, d, "SELECT seq FROM outbox"),
	}}
	if _, err := s.Park(ctx, owner(t, s), again, "too_large", "why", 2); err != nil {
		t.Fatal(err)
	}
	if dead, err = sql.ListDead(ctx, d.Pool, 1); err != nil || dead[0].Attempts != 5 || dead[0].Retrying ||
		dead[0].Seq != a.Seq {
		t.Errorf("parked again: %+v, %v", dead, err)
	}
	must(t, sql.RetryDead(ctx, d.Pool, a.ID))
	d.Exec(t, "DELETE FROM outbox") // published
	if n, err := s.Housekeep(ctx); err != nil || n != 1 {
		t.Errorf("after the retry: %d, %v", n, err)
	}

	must(t, sql.DropDead(ctx, d.Pool, b.ID))
	for _, err := range []error{sql.DropDead(ctx, d.Pool, b.ID), sql.RetryDead(ctx, d.Pool, b.ID)} {
		if !errors.Is(err, sql.ErrNotParked) {
			t.Errorf("of no event: %v", err)
		}
	}
	if n, err := sql.CountDead(ctx, d.Pool); err != nil || n != 0 {
		t.Errorf("%d left, %v", n, err)
	}
}
