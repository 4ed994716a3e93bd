package sql_test

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"posthaste/internal/testenv"
	"posthaste/outbox"
	"posthaste/sql"
)

func partitions(tb testing.TB, d *testenv.Database) string {
	tb.Helper()
	return testenv.Value[string](tb, d,
		`SELECT coalesce(string_agg(replace(c.relname, 'outbox_history_', ''), ' ' ORDER BY c.relname), '')
		FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid WHERE i.inhparent = 'outbox_history_old'::regclass`)
}

// oldPartitions makes the partitions of days in March 2026, as versions before marks did.
func oldPartitions(tb testing.TB, d *testenv.Database, days ...int) {
	tb.Helper()
	for _, n := range days {
		day := time.Date(2026, 3, n, 0, 0, 0, 0, time.UTC)
		d.Exec(tb, fmt.Sprintf("CREATE TABLE outbox_history_%s PARTITION OF outbox_history_old "+
			"FOR VALUES FROM ('%s') TO ('%s')", day.Format("20060102"), day.Format(time.RFC3339),
			day.AddDate(0, 0, 1).Format(time.RFC3339)))
	}
}

// historyRow writes a row as an instance without marks does.
func historyRow(tb testing.TB, d *testenv.Database, at string) {
	tb.Helper()
	d.Exec(tb, `INSERT INTO outbox_history (seq, id, aggregate_type, aggregate_id, event_type, payload, created_at,
			published_at, stream, mode)
		VALUES (1, gen_random_uuid(), 'order', 'o', 'x', '{}', $1::text::timestamptz, $1::text::timestamptz,
			's', 'poll')`, at)
}

// keptAt keeps the history of a default partition with many rows. Autovacuum may be at work on them, which is not
// waited for: the next housekeeping has the lock.
func keptAt(tb testing.TB, s outbox.Store, now time.Time) {
	tb.Helper()
	testenv.Eventually(tb, 20*time.Second, func() error { return sql.KeepHistoryAt(tb.Context(), s, now) })
}

// What was delivered before there were marks goes by the day, by UTC.
func TestOldHistoryGoes(t *testing.T) {
	t.Parallel()
	d := testenv.Postgres(t)
	// Whatever the database's taste in dates and zones.
	d.Exec(t, "ALTER DATABASE "+d.Name+" SET datestyle = 'SQL, DMY'")
	pool := relayPool(t, d.URL+"&timezone=Asia/Kolkata")
	ctx := t.Context()
	oldPartitions(t, d, 1, 2, 3, 4, 5, 6, 7)
	const three = "20260302 20260303 20260304 20260305 20260306 20260307 default"
	day := func(n, hour, minute int) time.Time { return time.Date(2026, 3, n, hour, minute, 0, 0, time.UTC) }
	for _, c := range []struct {
		retention time.Duration
		now       time.Time
		want      string
	}{
		{72 * time.Hour, day(4, 23, 59), "20260301 " + three},
		{72 * time.Hour, day(5, 0, 0), three},
		{72 * time.Hour, day(3, 0, 0), three}, // a clock that goes back
		{time.Hour, day(3, 0, 59).In(time.FixedZone("", -5*3600)), three},
		{time.Hour, day(3, 1, 0), "20260303 20260304 20260305 20260306 20260307 default"},
		{0, day(5, 0, 0), "20260305 20260306 20260307 default"},
		{72 * time.Hour, day(30, 0, 0), "default"},
	} {
		must(t, sql.KeepHistoryAt(ctx, sql.NewStore(pool, "test", c.retention), c.now))
		if got := partitions(t, d); got != c.want {
			t.Errorf("at %v with a retention of %v: %s, want %s", c.now, c.retention, got, c.want)
		}
	}
}

// One partition that cannot be had does not keep the others from being dropped, nor rows from being deleted.
func TestHistoryGoesOnAroundALock(t *testing.T) {
	t.Parallel()
	s, d := newStore(t)
	succeed(t, s)
	insert(t, d, "a")
	settle(t, s)
	oldPartitions(t, d, 1, 2, 9)
	tx := begin(t, d)
	_, err := tx.Exec(t.Context(), "LOCK TABLE ONLY outbox_history_20260301")
	must(t, err)
	historyRow(t, d, "2026-02-01Z")
	later := time.Now().Add(48 * time.Hour)
	err = sql.KeepHistoryAt(t.Context(), s, later)
	if err == nil || !strings.Contains(err.Error(), "20260301") || strings.Contains(err.Error(), "20260302") {
		t.Errorf("got %v, want that 20260301 could not be dropped", err)
	}
	if got := partitions(t, d); got != "20260301 default" {
		t.Errorf("partitions %s", got)
	}
	if n := testenv.Value[int](t, d, "SELECT count(*) FROM outbox_history_default"); n != 0 {
		t.Errorf("%d rows in the default partition", n)
	}
	if n := testenv.Value[int](t, d, "SELECT count(*) FROM outbox"); n != 0 {
		t.Errorf("%d rows in the log", n)
	}
	must(t, tx.Rollback(t.Context()))
	keptAt(t, s, later)
}

// The clock is the database's; a relay whose own is wrong deletes nothing.
func TestHistoryGoesByTheDatabasesClock(t *testing.T) {
	t.Parallel()
	s, d := newStore(t)
	succeed(t, s)
	insert(t, d, "a")
	settle(t, s)
	d.Exec(t, "UPDATE outbox_mark SET at = clock_timestamp() - interval '23 h 59 min'")
	must(t, s.KeepHistory(t.Context()))
	if n := testenv.Value[int](t, d, "SELECT count(*) FROM outbox"); n != 1 {
		t.Error("the row is gone within the retention")
	}
	d.Exec(t, "UPDATE outbox_mark SET at = clock_timestamp() - interval '24 h 1 s'")
	must(t, s.KeepHistory(t.Context()))
	if n := testenv.Value[int](t, d, "SELECT count(*) FROM outbox"); n != 0 {
		t.Error("the row is there after the retention")
	}
}

// The default partition may hold any number of rows; it is emptied in bites.
func TestHistoryTrimsALargeDefaultPartition(t *testing.T) {
	t.Parallel()
	d := testenv.Postgres(t)
	d.Exec(t, `INSERT INTO outbox_history_old (seq, id, aggregate_type, aggregate_id, event_type, payload, created_at,
			published_at, stream, mode)
		SELECT g, gen_random_uuid(), 'order', 'o', 'x', '{}', now(), '2026-03-01Z', 's', 'poll'
		FROM generate_series(1, 25000) g`)
	historyRow(t, d, "2026-03-08Z")
	s := sql.NewStore(relayPool(t, d.URL), "test", 24*time.Hour)
	keptAt(t, s, time.Date(2026, 3, 8, 12, 0, 0, 0, time.UTC))
	if n := testenv.Value[int](t, d, "SELECT count(*) FROM outbox_history"); n != 1 {
		t.Errorf("%d rows, want the one within the retention", n)
	}
}

// The log is deleted behind what was settled before the retention began, whatever its rows say of when they were
// written; and the marks before the last that is needed. What is owed stays, and what comes late is found.
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
	_, err := long.Exec(ctx, `INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload)
		SELECT gen_random_uuid(), 'order', 'a-' || i, 'late', '{}' FROM generate_series(1, 40) i`)
	must(t, err)
	for hours := range 3 {
		d.Exec(t, `INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload, created_at)
			SELECT gen_random_uuid(), 'order', 'a-' || i % 40, $1, '{}',
				CASE i % 3 WHEN 0 THEN 'infinity' WHEN 1 THEN '-infinity' ELSE now() END
			FROM generate_series(1, 100) i`, fmt.Sprint(hours))
		settle(t, s)
		at(hours)
	}
	dead := insert(t, d, "dead")
	if _, err := s.Park(ctx, o, dead, "too_large", "why", 1); err != nil {
		t.Fatal(err)
	}
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
	if n := testenv.Value[int](t, d, "SELECT count(*) FROM outbox_mark"); n != 1 {
		t.Errorf("%d marks are left, want the last", n)
	}
	must(t, long.Commit(ctx))
	expect(100, "late:40 order.changed:2")
	if n := backlog(t, s, d); n != 41 {
		t.Errorf("%d rows are owed, want 41", n)
	}
	settle(t, s)
	at(4)
	expect(27.9, "late:40 order.changed:2")
	expect(28.1, "") // what is parked has a copy
}

// The table's numbers begin anew: what comes is deleted in its time, and not before.
func TestRetentionAfterATruncate(t *testing.T) {
	t.Parallel()
	d := testenv.Postgres(t)
	s := sql.NewStore(relayPool(t, d.URL), "test", 0)
	must(t, s.Register(t.Context()))
	succeed(t, s)
	for range 50 {
		insert(t, d, "a")
	}
	settle(t, s)
	expect := func(want int) {
		t.Helper()
		must(t, s.KeepHistory(t.Context()))
		if n := testenv.Value[int](t, d, "SELECT count(*) FROM outbox"); n != want {
			t.Errorf("%d rows, want %d", n, want)
		}
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

// Without history what is settled goes at once, beside writers whose transactions end in any order.
func TestRetentionBesideWriters(t *testing.T) {
	t.Parallel()
	d := testenv.Postgres(t)
	s := sql.NewStore(relayPool(t, d.URL), "test", 0)
	must(t, s.Register(t.Context()))
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
	if n := testenv.Value[int](t, d, "SELECT count(*) FROM outbox"); n != 0 {
		t.Errorf("%d rows are left", n)
	}
	if n := testenv.Value[int](t, d, "SELECT count(*) FROM outbox_mark"); n != 1 {
		t.Errorf("%d marks are left", n)
	}
}

// A role with the least rights: what the relay does every day works.
func TestLeastRights(t *testing.T) {
	t.Parallel()
	d := testenv.Postgres(t)
	role := "least_" + d.Name
	for _, stmt := range []string{
		"CREATE ROLE " + role + " " + testenv.Login(d.URL), // roles belong to the server, which ends with the tests
		"REVOKE ALL ON SCHEMA public FROM PUBLIC",
		"GRANT USAGE ON SCHEMA public TO " + role,
		"GRANT SELECT ON posthaste_migrations TO " + role,
		"GRANT SELECT, DELETE ON outbox TO " + role,
		"GRANT INSERT ON outbox TO " + role, // to retry parked events
		"GRANT SELECT ON outbox_seq_seq, outbox_settled TO " + role,
		"GRANT SELECT, INSERT, DELETE ON outbox_mark, outbox_layout TO " + role,
		"GRANT USAGE ON outbox_claim TO " + role,
		"GRANT SELECT, INSERT, UPDATE ON relay_state, outbox_stream TO " + role,
		"GRANT SELECT, INSERT, UPDATE, DELETE ON outbox_dead, outbox_loss, outbox_repair, outbox_phantom TO " + role,
		"GRANT SELECT ON outbox_history_old TO " + role,
		"GRANT SELECT, DELETE ON outbox_history_default TO " + role,
	} {
		d.Exec(t, stmt)
	}
	url := testenv.As(d.URL, role)
	s := sql.NewStore(relayPool(t, url), "test", 24*time.Hour)
	everything(t, s, d, url)
	must(t, s.KeepHistory(t.Context()))
	d.Exec(t, fmt.Sprintf("DROP OWNED BY %s", role))
}
