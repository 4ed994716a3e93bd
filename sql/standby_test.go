package sql_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"posthaste/internal/testenv"
	"posthaste/outbox"
	"posthaste/sql"
)

// An unreachable synchronous standby blocks every commit except the relay's own bookkeeping, so a relay can still take
// over, claim and fall back.
func TestBookkeepingDoesNotWaitForAStandby(t *testing.T) {
	t.Parallel()
	d := testenv.NewServer(t).Database(t)
	d.Exec(t, "ALTER SYSTEM SET synchronous_standby_names = 'gone'")
	d.Exec(t, "SELECT pg_reload_conf()")
	t.Cleanup(func() { // dropping the database would wait as well
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
	ok, err := s.Adopt(ctx, outbox.Adoption{From: 0, To: outbox.Owner{Epoch: 1}, Holder: "me"})
	if err != nil || !ok {
		t.Errorf("adopt: %v, %v", ok, err)
	}
	is(t, true)(s.SetActive(ctx, 1, outbox.ModePoll, 0, ""))
	if err := sql.SetDesired(ctx, d.Pool, d.Relay, outbox.ModePoll); err != nil {
		t.Errorf("set desired: %v", err)
	}
	o := outbox.Owner{Epoch: 1}
	if _, err := s.BeginPass(ctx, o); err != nil {
		t.Errorf("begin a pass: %v", err)
	}
	w, err := sql.OpenSweep(ctx, d.URL, "public", d.Relay)
	must(t, err)
	defer w.Close()
	if _, _, ok, err := w.Claim(ctx, []int{3}, o); err != nil || !ok {
		t.Errorf("claim: %v, %v", ok, err)
	}
}

// heldStore returns a store whose commits are held: see held.
func heldStore(t *testing.T) (s *sql.Store, d *testenv.Database, release func()) {
	t.Helper()
	d, release = held(t)
	cfg, err := pgxpool.ParseConfig(d.URL)
	must(t, err)
	cfg.ConnConfig.RuntimeParams["synchronous_commit"] = "on"
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	must(t, err)
	t.Cleanup(pool.Close)
	d.Exec(t, "INSERT INTO relay_state (name) VALUES ($1)", d.Relay)
	return sql.NewStore(pool, d.Relay, 0), d, release
}

// If commits wait for a synchronous standby, a mark is not acted on until the standby has it. Otherwise Redis would
// drop ids that a promoted standby does not consider settled. An adoption does not wait.
func TestAMarkIsReplicatedBeforeItIsTold(t *testing.T) {
	t.Parallel()
	s, d, release := heldStore(t)
	ctx := t.Context()
	o := succeed(t, s)
	insert(t, d, "a")
	m := newMarker(t, s)
	look, _ := lookAt(t, m, outbox.Settled{}, math.MaxInt64)
	moved := make(chan error, 1)
	go func() { moved <- m.Move(ctx, o, look.Settled, nil) }()
	testenv.Eventually(t, 20*time.Second, func() error {
		if n := testenv.Value[int](t, d, "SELECT count(*) FROM outbox_backlog"); n != 0 {
			return fmt.Errorf("%d rows are owed", n)
		}
		return nil
	})
	testenv.Eventually(t, 20*time.Second, func() error {
		if !testenv.Value[bool](t, d, "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE wait_event = 'SyncRep' AND "+
			"query LIKE '%pg_logical_emit_message%')") {
			return errors.New("the mark does not wait for the standby")
		}
		return nil
	})
	select {
	case err := <-moved:
		t.Fatalf("the mark did not wait for the standby: %v", err)
	default:
	}
	succeed(t, s)
	release()
	must(t, <-moved)
}

// An adoption after a change of the layout waits until a synchronous standby has the change; otherwise it does not
// wait.
func TestAChangeOfTheLayoutIsReplicated(t *testing.T) {
	t.Parallel()
	s, d, release := heldStore(t)
	ctx := t.Context()
	// No event was settled under the first layout.
	d.Exec(t, `INSERT INTO outbox_mark (part, epoch, settled, hi, prefix)
		VALUES (-1, 1, '3:3:', 0, 'own.'), (-1, 1, '3:3:', 5, 'own.')`)
	must(t, s.AwaitLayout(ctx))
	d.Exec(t, "INSERT INTO outbox_mark (part, epoch, settled, hi, prefix, shards) VALUES (-1, 1, '3:3:', 5, 'own.', 4)")
	if err := s.AwaitLayout(ctx); err == nil {
		t.Error("it did not wait for the standby")
	}
	release()
	must(t, s.AwaitLayout(ctx))
}

// The check of the table, which a relay reports, names commits that wait for a synchronous standby.
func TestHungCommitsAreReported(t *testing.T) {
	t.Parallel()
	d, release := held(t)
	must(t, sql.NewStore(d.Pool, d.Relay, 0).Sound(t.Context()))
	committed := make(chan error, 1)
	go func() {
		_, err := d.Pool.Exec(t.Context(), "SET synchronous_commit = on; INSERT INTO relay_state (name) VALUES ('x')")
		committed <- err
	}()
	testenv.Eventually(t, 20*time.Second, func() error {
		err := sql.NewStore(d.Pool, d.Relay, 0).Sound(t.Context())
		return testenv.FailIf(err == nil || !strings.Contains(err.Error(), sql.StandbyRemedy), "%v", err)
	})
	release()
	must(t, <-committed)
}
