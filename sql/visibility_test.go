package sql_test

import (
	"context"
	"math"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"posthaste/internal/lab/testenv"
	"posthaste/outbox"
	"posthaste/sql"
)

func begin(tb testing.TB, d *testenv.Database) pgx.Tx {
	tb.Helper()
	tx, err := d.Pool.Begin(tb.Context())
	must(tb, err)
	tb.Cleanup(func() { _ = tx.Rollback(context.Background()) })
	return tx
}

// hold makes commits of d wait for a standby that does not exist until release is called, or the test ends: dropping
// the database would wait as well.
func hold(tb testing.TB, d *testenv.Database) (release func()) {
	tb.Helper()
	d.Standby(tb, "nobody")
	d.WaitHeld(tb)
	release = sync.OnceFunc(func() {
		for _, stmt := range []string{"ALTER SYSTEM RESET synchronous_standby_names", "SELECT pg_reload_conf()"} {
			if _, err := d.Pool.Exec(context.Background(), stmt); err != nil {
				tb.Errorf("%s: %v", stmt, err)
			}
		}
	})
	tb.Cleanup(release)
	return release
}

// held returns a server on which commits of sessions that request it are in the WAL but not visible, and a function
// that releases them.
func held(tb testing.TB) (*testenv.Database, func()) {
	tb.Helper()
	d := testenv.NewServer(tb).Database(tb)
	d.Exec(tb, "ALTER ROLE postgres SET synchronous_commit = local")
	d.Pool.Reset()
	return d, hold(tb, d)
}

// insertHeld commits an event whose commit is held back, and returns when its commit record is in the WAL.
func insertHeld(tb testing.TB, d *testenv.Database) *outbox.Row {
	tb.Helper()
	c, err := pgx.Connect(tb.Context(), d.URL)
	must(tb, err)
	var pid int
	must(tb, c.QueryRow(tb.Context(), "SELECT pg_backend_pid()").Scan(&pid))
	tx, err := c.Begin(tb.Context())
	must(tb, err)
	row := insertBy(tb, tx, "held")
	run(tb, tx, "SET LOCAL synchronous_commit = on")
	done := make(chan error, 1)
	go func() { done <- tx.Commit(context.Background()) }()
	tb.Cleanup(func() {
		if err := <-done; err != nil {
			tb.Errorf("the held commit: %v", err)
		}
		_ = c.Close(context.Background())
	})
	testenv.Eventually(tb, 20*time.Second, func() error {
		var waits bool
		err := d.Pool.QueryRow(tb.Context(),
			"SELECT coalesce(wait_event = 'SyncRep', false) FROM pg_stat_activity WHERE pid = $1", pid).Scan(&waits)
		return testenv.FailIf(err != nil || !waits, "the commit is not held: %w", err)
	})
	return row
}

// An older writing transaction keeps the horizon from being reached; a younger one does not.
func TestHorizonWaitsForOlderTransactions(t *testing.T) {
	t.Parallel()
	s, d := newStore(t)
	older := begin(t, d)
	run(t, older, "SELECT pg_current_xact_id()")
	before, err := s.InsertLSN(t.Context())
	must(t, err)
	lsn, xid, err := s.Horizon(t.Context())
	must(t, err)
	if lsn < before || xid == 0 {
		t.Errorf("horizon %v, %d", lsn, xid)
	}
	younger := begin(t, d)
	run(t, younger, "SELECT pg_current_xact_id()")
	is(t, false)(s.VisibleBelow(t.Context(), xid))
	must(t, older.Commit(t.Context()))
	// Other tests' transactions on this server must end as well; filling a history of a million rows takes a while.
	testenv.Eventually(t, 5*time.Minute, func() error { return notYet(s.VisibleBelow(t.Context(), xid)) })
}

// A commit is in the WAL but not visible yet: a reader of the WAL sees the row, the table does not show it, and every
// answer reports that this is not final.
func TestACommitHeldBackBySynchronousReplication(t *testing.T) {
	t.Parallel()
	d, release := held(t)
	s := registered(t, d, 24*time.Hour)
	ctx := t.Context()
	must(t, s.Sound(ctx))
	row := insertHeld(t, d)
	t.Cleanup(release)
	testenv.Eventually(t, 20*time.Second, func() error { // a relay reports it
		err := s.Sound(ctx)
		return testenv.FailIf(err == nil || !strings.Contains(err.Error(), sql.StandbyRemedy), "%v", err)
	})
	_, xid, err := s.Horizon(ctx)
	must(t, err)
	is(t, false)(s.VisibleBelow(ctx, xid))
	o := succeed(t, s)
	m := newMarker(t, s)
	pass := beginPass(t, s, o)
	look, _ := lookAt(t, m, outbox.Settled{}, math.MaxInt64)
	if pass.Holds(row.XID, row.Seq) || look.Holds(row.XID, row.Seq) || len(look.Owed) != 0 {
		t.Errorf("while it is held: the pass has %s, the look %+v", pass.Snapshot, look)
	}
	is(t, false)(s.Park(ctx, o, row, "too_large", "why", 3))
	must(t, s.SettleAll(ctx, o, pass))
	release()
	testenv.Eventually(t, 20*time.Second, func() error { return notYet(s.VisibleBelow(ctx, xid)) })
	wantOwed(t, s, d, 1)
	look, err = m.Look(ctx, pass.Settled, math.MaxInt64)
	must(t, err)
	if len(look.Owed) != 1 || !slices.Equal(look.Owed[0].Seqs, []int64{row.Seq}) || !look.Holds(row.XID, row.Seq) {
		t.Errorf("afterwards the look has %+v", look)
	}
	is(t, true)(s.Park(ctx, o, row, "too_large", "why", 3))
	wantOwed(t, s, d, 0)
}
