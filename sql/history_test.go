package sql_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"posthaste/internal/testenv"
	"posthaste/outbox"
	"posthaste/sql"
)

func partitions(tb testing.TB, d *testenv.Database) string {
	tb.Helper()
	return testenv.Value[string](tb, d,
		`SELECT coalesce(string_agg(replace(c.relname, 'outbox_history_', ''), ' ' ORDER BY c.relname), '')
		FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid WHERE i.inhparent = 'outbox_history'::regclass`)
}

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

func TestHistoryPartitionsComeAndGo(t *testing.T) {
	t.Parallel()
	d := testenv.Postgres(t)
	// Whatever the database's taste in dates and zones.
	d.Exec(t, "ALTER DATABASE "+d.Name+" SET datestyle = 'SQL, DMY'")
	pool := relayPool(t, d.URL+"&timezone=Asia/Kolkata")
	ctx := t.Context()
	s := sql.NewStore(pool, "test", 72*time.Hour)
	day := func(n, hour int) time.Time { return time.Date(2026, 3, n, hour, 30, 0, 0, time.UTC) }
	for _, c := range []struct {
		now  time.Time
		want string
	}{
		{day(1, 0), "20260301 20260302 20260303 default"},
		{day(1, 23), "20260301 20260302 20260303 default"},
		{day(2, 0).In(time.FixedZone("", -5*3600)), "20260301 20260302 20260303 20260304 default"},
		{day(4, 23), "20260301 20260302 20260303 20260304 20260305 20260306 default"},
		{day(5, 0), "20260302 20260303 20260304 20260305 20260306 20260307 default"},
		{day(3, 0), "20260302 20260303 20260304 20260305 20260306 20260307 default"}, // a clock that goes back
		{day(30, 12), "20260330 20260331 20260401 default"},
	} {
		must(t, sql.KeepHistoryAt(ctx, s, c.now))
		if got := partitions(t, d); got != c.want {
			t.Errorf("at %v: %s, want %s", c.now, got, c.want)
		}
	}
	// History is turned off: nothing new, and what is there goes by the day.
	off := sql.NewStore(pool, "test", 0)
	must(t, sql.KeepHistoryAt(ctx, off, day(31, 0)))
	if got := partitions(t, d); got != "20260331 20260401 default" {
		t.Errorf("turned off: %s", got)
	}
}

func TestHistoryBeginsInTheDefaultPartition(t *testing.T) {
	t.Parallel()
	d := testenv.Postgres(t)
	s := sql.NewStore(relayPool(t, d.URL), "test", 72*time.Hour)
	now := time.Date(2026, 3, 10, 12, 0, 0, 0, time.UTC)
	historyRow(t, d, "2026-03-10 11:00Z") // before the leader could make the day's partition
	historyRow(t, d, "2026-03-07 11:00Z") // past the retention
	historyRow(t, d, "2026-03-07 13:00Z")
	must(t, sql.KeepHistoryAt(t.Context(), s, now))
	if got := partitions(t, d); got != "20260311 20260312 default" {
		t.Errorf("partitions %s", got)
	}
	if n := testenv.Value[int](t, d, "SELECT count(*) FROM outbox_history"); n != 2 {
		t.Errorf("%d rows, want the 2 within the retention", n)
	}
	historyRow(t, d, "2026-03-11 01:00Z")
	if n := testenv.Value[int](t, d, "SELECT count(*) FROM outbox_history_20260311"); n != 1 {
		t.Error("the next day's row is not in its partition")
	}
}

// One partition that cannot be had does not keep the others from being made or dropped.
func TestHistoryGoesOnAroundALock(t *testing.T) {
	t.Parallel()
	d := testenv.Postgres(t)
	s := sql.NewStore(relayPool(t, d.URL), "test", 24*time.Hour)
	at := func(day int) time.Time { return time.Date(2026, 3, day, 0, 0, 0, 0, time.UTC) }
	must(t, sql.KeepHistoryAt(t.Context(), s, at(1)))
	tx := begin(t, d)
	_, err := tx.Exec(t.Context(), "LOCK TABLE ONLY outbox_history_20260301")
	must(t, err)
	historyRow(t, d, "2026-02-01Z")
	err = sql.KeepHistoryAt(t.Context(), s, at(9))
	if err == nil || !strings.Contains(err.Error(), "20260301") || strings.Contains(err.Error(), "20260302") {
		t.Errorf("got %v, want that 20260301 could not be dropped", err)
	}
	if got := partitions(t, d); got != "20260301 20260309 20260310 20260311 default" {
		t.Errorf("partitions %s", got)
	}
	if n := testenv.Value[int](t, d, "SELECT count(*) FROM outbox_history_default"); n != 0 {
		t.Errorf("%d rows in the default partition", n)
	}
	must(t, tx.Rollback(t.Context()))
	must(t, sql.KeepHistoryAt(t.Context(), s, at(9)))
}

// The clock is the database's; a relay whose own is wrong drops nothing.
func TestHistoryGoesByTheDatabasesClock(t *testing.T) {
	t.Parallel()
	d := testenv.Postgres(t)
	s := sql.NewStore(relayPool(t, d.URL), "test", time.Hour)
	must(t, s.KeepHistory(t.Context()))
	want := testenv.Value[string](t, d,
		`SELECT string_agg(to_char((clock_timestamp() AT TIME ZONE 'UTC') + i * interval '1 day', 'YYYYMMDD'), ' ')
			|| ' default'
		FROM generate_series(0, 2) i`)
	if got := partitions(t, d); got != want {
		t.Errorf("partitions %s, want %s", got, want)
	}
}

// A retention of an hour keeps a day until its last hour is over; history turned on and off in turn loses nothing
// within the retention, and keeps nothing beyond it.
func TestHistoryShortRetentionAndToggles(t *testing.T) {
	t.Parallel()
	d := testenv.Postgres(t)
	ctx := t.Context()
	pool := relayPool(t, d.URL)
	for _, c := range []struct {
		retention time.Duration
		at        string
		want      string
	}{
		{0, "2026-03-01T12:00:00Z", "default"},
		{72 * time.Hour, "2026-03-01T12:00:00Z", "20260301 20260302 20260303 default"},
		{time.Hour, "2026-03-02T00:59:59Z", "20260301 20260302 20260303 20260304 default"},
		{time.Hour, "2026-03-02T01:00:00Z", "20260302 20260303 20260304 default"},
		{0, "2026-03-02T12:00:00Z", "20260302 20260303 20260304 default"},
		{0, "2026-03-03T00:00:00Z", "20260303 20260304 default"},
		{72 * time.Hour, "2026-03-03T10:00:00Z", "20260303 20260304 20260305 default"},
		{0, "2026-03-09T00:00:00Z", "default"},
	} {
		at, err := time.Parse(time.RFC3339, c.at)
		must(t, err)
		must(t, sql.KeepHistoryAt(ctx, sql.NewStore(pool, "test", c.retention), at))
		if got := partitions(t, d); got != c.want {
			t.Errorf("at %s with a retention of %v: %s, want %s", c.at, c.retention, got, c.want)
		}
	}
}

// The default partition may hold any number of rows; it is emptied in bites.
func TestHistoryTrimsALargeDefaultPartition(t *testing.T) {
	t.Parallel()
	d := testenv.Postgres(t)
	d.Exec(t, `INSERT INTO outbox_history (seq, id, aggregate_type, aggregate_id, event_type, payload, created_at,
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

// Somebody reads a partition that is to go (a dump, a report): it stays until he is done, and settling goes on beside
// it.
func TestHistoryIsSettledWhileADropWaits(t *testing.T) {
	t.Parallel()
	d := testenv.Postgres(t)
	ctx := t.Context()
	s := sql.NewStore(relayPool(t, d.URL), "test", 24*time.Hour)
	at := func(day int) time.Time { return time.Date(2026, 3, day, 0, 0, 0, 0, time.UTC) }
	must(t, sql.KeepHistoryAt(ctx, s, at(1)))
	reader := begin(t, d)
	var n int
	must(t, reader.QueryRow(ctx, "SELECT count(*) FROM outbox_history").Scan(&n))
	kept := make(chan error)
	go func() { kept <- sql.KeepHistoryAt(ctx, s, at(9)) }()
	settled := 0
	for {
		row := insert(t, d, "a")
		if f, err := s.Settle(ctx, settlements(row)); err != nil || met(f) != 1 {
			t.Fatalf("settle: %v, %v", f.Rows, err)
		}
		settled++
		select {
		case err := <-kept:
			if err == nil || !strings.Contains(err.Error(), "20260301") {
				t.Errorf("got %v, want that a partition could not be dropped", err)
			}
			t.Logf("%d settlings meanwhile", settled)
			must(t, reader.Rollback(ctx))
			keptAt(t, s, at(9))
			if got := partitions(t, d); got != "20260309 20260310 20260311 default" {
				t.Errorf("partitions %s", got)
			}
			return
		default:
		}
	}
}

// A replay whose partition is dropped between two pages goes on with the next.
func TestHistoryDropsBesideAReplay(t *testing.T) {
	t.Parallel()
	d := testenv.Postgres(t)
	fillHistory(t, d, 300)
	pool := replayPool(t, d)
	sel := sql.Selection{Since: day1, Until: day1.Add(100 * time.Hour)}
	page, end, err := sql.ReadHistory(t.Context(), pool, sel, sql.Place{At: day1}, 50, 1<<20)
	if must(t, err); len(page) != 50 {
		t.Fatalf("%d events", len(page))
	}
	must(t, sql.KeepHistoryAt(t.Context(), sql.NewStore(relayPool(t, d.URL), "test", 24*time.Hour),
		day1.Add(48*time.Hour)))
	page, _, err = sql.ReadHistory(t.Context(), pool, sel, end, 1000, 1<<20)
	if must(t, err); len(page) != 200 || page[0].Seq != 101 {
		t.Errorf("%d events, the first is %d; want 200 from 101 on", len(page), page[0].Seq)
	}
}

// A role with the least rights: what the relay does every day works; making partitions says what is missing.
func TestLeastRights(t *testing.T) {
	t.Parallel()
	d := testenv.Postgres(t)
	role := "least_" + d.Name
	for _, stmt := range []string{
		"CREATE ROLE " + role + " LOGIN", // roles belong to the server, which ends with the tests
		"REVOKE ALL ON SCHEMA public FROM PUBLIC",
		"GRANT USAGE ON SCHEMA public TO " + role,
		"GRANT SELECT ON posthaste_migrations TO " + role,
		"GRANT SELECT, DELETE ON outbox TO " + role,
		"GRANT INSERT ON outbox TO " + role, // to retry parked events
		"GRANT SELECT, INSERT, UPDATE ON relay_state, outbox_stream TO " + role,
		"GRANT SELECT, UPDATE ON outbox_part TO " + role,
		"GRANT SELECT, INSERT, UPDATE, DELETE ON outbox_dead, outbox_loss TO " + role,
		"GRANT SELECT, INSERT ON outbox_history TO " + role,
		"GRANT SELECT, DELETE ON outbox_history_default TO " + role,
	} {
		d.Exec(t, stmt)
	}
	url := strings.Replace(d.URL, "postgres@", role+"@", 1)
	s := sql.NewStore(relayPool(t, url), "test", 24*time.Hour)
	everything(t, s, d, url)
	err := s.KeepHistory(t.Context())
	if err == nil || !strings.Contains(err.Error(), "default partition takes its rows") || sql.SQLState(err) == "" {
		t.Errorf("KeepHistory without the right to create: %v", err)
	}
	row := insert(t, d, "a")
	if f, err := s.Settle(t.Context(), settlements(row)); err != nil || met(f) != 1 {
		t.Errorf("settle without partitions: %v, %v", f.Rows, err)
	}
	if n := testenv.Value[int](t, d, "SELECT count(*) FROM outbox_history_default"); n == 0 {
		t.Error("nothing in the default partition")
	}
	d.Exec(t, fmt.Sprintf("DROP OWNED BY %s", role))
}
