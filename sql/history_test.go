package sql_test

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"posthaste/internal/lab/testenv"
	"posthaste/sql"
)

// The retention uses the database's clock; a relay with a wrong clock deletes nothing.
func TestHistoryGoesByTheDatabasesClock(t *testing.T) {
	t.Parallel()
	s, d := newStore(t)
	succeed(t, s)
	insert(t, d, "a")
	settle(t, s)
	d.Exec(t, "UPDATE outbox_mark SET at = clock_timestamp() - interval '23 h 59 min'")
	must(t, s.KeepHistory(t.Context()))
	wantRows(t, d, 1, "outbox")
	d.Exec(t, "UPDATE outbox_mark SET at = clock_timestamp() - interval '24 h 1 s'")
	must(t, s.KeepHistory(t.Context()))
	wantRows(t, d, 0, "outbox")
}

// Rows settled before the retention are deleted, whatever creation times they have, and so are the marks that no row
// needs. Unsettled rows stay, and rows that become visible late are found.
func TestRetention(t *testing.T) {
	t.Parallel()
	s, d := newStore(t)
	ctx := t.Context()
	o := succeed(t, s)
	start := time.Now()
	at := func(hours int) { // the last mark's time
		d.Exec(t, "UPDATE outbox_mark SET at = $1 WHERE id = (SELECT max(id) FROM outbox_mark)",
			start.Add(time.Duration(hours)*time.Hour))
	}
	long := begin(t, d)
	run(t, long, `INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload)
		SELECT gen_random_uuid(), 'order', 'a-' || i, 'late', '{}' FROM generate_series(1, 40) i`)
	for hours := range 3 {
		d.Exec(t, `INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload, created_at)
			SELECT gen_random_uuid(), 'order', 'a-' || i % 40, $1, '{}',
				CASE i % 3 WHEN 0 THEN 'infinity' WHEN 1 THEN '-infinity' ELSE now() END
			FROM generate_series(1, 100) i`, fmt.Sprint(hours))
		settle(t, s)
		at(hours)
	}
	dead := insert(t, d, "dead")
	must(t, fails(s.Park(ctx, o, dead, "too_large", "why", 1)))
	insert(t, d, "owed")
	expect := func(hours float64, want string) {
		t.Helper()
		must(t, sql.KeepHistoryAt(ctx, s, start.Add(time.Duration(hours*float64(time.Hour)))))
		if got := testenv.Value[string](t, d, `SELECT coalesce(string_agg(t || ':' || n, ' ' ORDER BY t), '')
			FROM (SELECT event_type, count(*) FROM outbox GROUP BY 1) x(t, n)`); got != want {
			t.Errorf("after %v hours: %s, want %s", hours, got, want)
		}
	}
	expect(23.9, "0:100 1:100 2:100 order.changed:2")
	expect(24.1, "1:100 2:100 order.changed:2")
	expect(25.1, "2:100 order.changed:2")
	expect(100, "order.changed:2")
	wantRows(t, d, 1, "outbox_mark")
	must(t, long.Commit(ctx))
	expect(100, "late:40 order.changed:2")
	wantOwed(t, s, d, 41)
	settle(t, s)
	at(4)
	expect(27.9, "late:40 order.changed:2")
	expect(28.1, "") // a parked event has a copy
}

// The table's numbers restart: new rows are deleted in time, not earlier.
func TestRetentionAfterATruncate(t *testing.T) {
	t.Parallel()
	d := testenv.Postgres(t)
	s := registered(t, d, 0)
	succeed(t, s)
	for range 50 {
		insert(t, d, "a")
	}
	settle(t, s)
	expect := func(want int) {
		t.Helper()
		must(t, s.KeepHistory(t.Context()))
		wantRows(t, d, want, "outbox")
	}
	expect(0)
	expect(0)
	d.Exec(t, "TRUNCATE outbox RESTART IDENTITY")
	for range 5 {
		insert(t, d, "a")
	}
	expect(5)
	settle(t, s)
	expect(0)
}

// Without history, settled rows are deleted at once, even while transactions of writers end in any order.
func TestRetentionBesideWriters(t *testing.T) {
	t.Parallel()
	d := testenv.Postgres(t)
	s := registered(t, d, 0)
	succeed(t, s)
	var writers sync.WaitGroup
	for n := range 4 {
		writers.Go(func() {
			for i := range 60 {
				err := pgx.BeginFunc(context.Background(), d.Pool, func(tx pgx.Tx) error {
					_, err := tx.Exec(context.Background(), `INSERT INTO outbox
						(id, aggregate_type, aggregate_id, event_type, payload)
						SELECT gen_random_uuid(), 'order', 'a-' || i, 'x', '{}' FROM generate_series(1, 10) i`)
					if err == nil && i%10 == 0 {
						_, err = tx.Exec(context.Background(), "SELECT pg_sleep(0.1)")
					}
					return err
				})
				if err != nil {
					t.Errorf("writer %d: %v", n, err)
					return
				}
			}
		})
	}
	done := make(chan struct{})
	go func() { writers.Wait(); close(done) }()
	for more := true; more; {
		select {
		case <-done:
			more = false
		default:
		}
		before := testenv.Value[int](t, d, "SELECT count(*) FROM outbox_backlog")
		must(t, s.KeepHistory(t.Context()))
		if after := testenv.Value[int](t, d, "SELECT count(*) FROM outbox_backlog"); after < before {
			t.Fatalf("%d rows were owed, and %d are", before, after)
		}
		settle(t, s)
	}
	must(t, s.KeepHistory(t.Context()))
	must(t, s.KeepHistory(t.Context()))
	wantRows(t, d, 0, "outbox")
	wantRows(t, d, 1, "outbox_mark")
}

// The daily work of a relay succeeds with the minimal rights.
func TestLeastRights(t *testing.T) {
	t.Parallel()
	d := testenv.Postgres(t)
	d.Exec(t, "REVOKE ALL ON SCHEMA public FROM PUBLIC")
	_, url := role(t, d, "least", "SELECT ON posthaste_migrations", "SELECT, DELETE ON outbox",
		"EXECUTE ON FUNCTION outbox_retry", "SELECT ON outbox_high, outbox_settled, outbox_rows, outbox_live",
		"SELECT ON outbox_leader, outbox_place, outbox_layout, outbox_backlog",
		"SELECT, INSERT, DELETE ON outbox_mark", "USAGE ON outbox_claim", "SELECT, UPDATE ON outbox_part",
		"SELECT, INSERT, UPDATE ON relay_state, outbox_stream",
		"SELECT, INSERT, UPDATE, DELETE ON outbox_dead, outbox_reconcile, outbox_phantom")
	s := sql.NewStore(relayPool(t, url), "test", 24*time.Hour)
	everything(t, s, d, url)
	must(t, s.KeepHistory(t.Context()))
}
