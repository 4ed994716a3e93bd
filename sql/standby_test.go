package sql_test

import (
	"context"
	"math"
	"testing"
	"time"

	"posthaste/internal/testenv"
	"posthaste/outbox"
	"posthaste/sql"
)

// A synchronous standby that is gone holds up every commit but the relay's own bookkeeping: it can still take over,
// claim, settle and fall back.
func TestBookkeepingDoesNotWaitForAStandby(t *testing.T) {
	t.Parallel()
	d := testenv.NewServer(t).Database(t)
	d.Exec(t, "ALTER SYSTEM SET synchronous_standby_names = 'gone'")
	d.Exec(t, "SELECT pg_reload_conf()")
	t.Cleanup(func() { // dropping the database would wait too
		_, err := d.Pool.Exec(context.Background(), "ALTER SYSTEM RESET synchronous_standby_names")
		_, rerr := d.Pool.Exec(context.Background(), "SELECT pg_reload_conf()")
		if err != nil || rerr != nil {
			t.Error(err, rerr)
		}
	})
	d.WaitHeld(t)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	if _, err := d.Pool.Exec(ctx,
		"INSERT INTO relay_state (name) SELECT $1 FROM set_config('synchronous_commit', 'local', true)",
		d.Relay); err != nil {
		t.Fatal(err)
	}
	s := sql.NewStore(d.Pool, d.Relay, 0)
	if ok, err := s.Adopt(ctx, outbox.Adoption{From: 0, To: outbox.Owner{Epoch: 1}, Holder: "me"}); err != nil || !ok {
		t.Errorf("adopt: %v, %v", ok, err)
	}
	if ok, err := s.SetActive(ctx, 1, outbox.ModePoll, 0, ""); err != nil || !ok {
		t.Errorf("set active: %v, %v", ok, err)
	}
	if err := sql.SetDesired(ctx, d.Pool, d.Relay, outbox.ModePoll); err != nil {
		t.Errorf("set desired: %v", err)
	}
	o := outbox.Owner{Epoch: 1}
	pass, err := s.BeginPass(ctx, o)
	if err != nil {
		t.Fatalf("begin a pass: %v", err)
	}
	if err := s.SettleAll(ctx, o, pass); err != nil {
		t.Errorf("settle: %v", err)
	}
	m, err := s.Marker(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	look, err := m.Look(ctx, pass.Settled, math.MaxInt64)
	if err != nil {
		t.Fatal(err)
	}
	if err := m.Move(ctx, o, look.Settled, outbox.Entries{"s": "1-1"}); err != nil {
		t.Errorf("move the mark: %v", err)
	}
	w, err := sql.OpenSweep(ctx, d.URL, "public", d.Relay)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	if _, ok, err := w.Claim(ctx, 3); err != nil || !ok {
		t.Errorf("claim: %v, %v", ok, err)
	}
}
