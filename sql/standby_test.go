package sql_test

import (
	"context"
	"errors"
	"math"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"posthaste/internal/lab/testenv"
	"posthaste/outbox"
	"posthaste/sql"
)

// An unreachable synchronous standby blocks every commit except the relay's own bookkeeping, so a relay can still take
// over, claim and fall back.
func TestBookkeepingDoesNotWaitForAStandby(t *testing.T) {
	t.Parallel()
	d := testenv.NewServer(t).Database(t)
	hold(t, d)
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
	must(t, sql.SetDesired(ctx, d.Pool, d.Relay, outbox.ModePoll))
	o := outbox.Owner{Epoch: 1}
	must(t, fails(s.BeginPass(ctx, o)))
	w, err := sql.OpenSweep(ctx, d.URL, "public", d.Relay)
	must(t, err)
	defer w.Close()
	claim(t, w, 3, o)
}

// If commits wait for a synchronous standby, a mark is not acted on until the standby has it. Otherwise Redis would
// drop ids that a promoted standby does not consider settled. An adoption does not wait, unless the layout has changed.
func TestAMarkIsReplicatedBeforeItIsTold(t *testing.T) {
	t.Parallel()
	d, release := held(t)
	ctx := t.Context()
	cfg, err := pgxpool.ParseConfig(d.URL)
	must(t, err)
	cfg.ConnConfig.RuntimeParams["synchronous_commit"] = "on"
	pool, err := pgxpool.NewWithConfig(ctx, cfg)
	must(t, err)
	t.Cleanup(pool.Close)
	d.Exec(t, "INSERT INTO relay_state (name) VALUES ($1)", d.Relay)
	s := sql.NewStore(pool, d.Relay, 0)
	// No event was settled under the first layout.
	d.Exec(t, `INSERT INTO outbox_mark (part, epoch, settled, hi, prefix)
		VALUES (-1, 1, '3:3:', 0, 'own.'), (-1, 1, '3:3:', 5, 'own.')`)
	must(t, s.AwaitLayout(ctx))
	d.Exec(t, "INSERT INTO outbox_mark (part, epoch, settled, hi, prefix, shards) VALUES (-1, 1, '3:3:', 5, 'own.', 4)")
	if err := s.AwaitLayout(ctx); err == nil {
		t.Error("it did not wait for the standby")
	}
	o := succeed(t, s)
	insert(t, d, "a")
	m := newMarker(t, s)
	look, _ := lookAt(t, m, outbox.Settled{}, math.MaxInt64)
	moved := make(chan error, 1)
	go func() { moved <- m.Move(ctx, o, look.Settled, nil) }()
	testenv.Eventually(t, 20*time.Second, func() error {
		n := testenv.Value[int](t, d, "SELECT count(*) FROM outbox_backlog")
		return testenv.FailIf(n != 0, "%d rows are owed", n)
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
	must(t, s.AwaitLayout(ctx))
}
