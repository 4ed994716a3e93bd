package sql_test

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"posthaste/internal/lab/testenv"
	"posthaste/outbox"
	"posthaste/sql"
)

// marked writes a mark of a part, or of all (-1), that settles everything visible now, with the time at.
func marked(tb testing.TB, d *testenv.Database, part int, at time.Time) {
	tb.Helper()
	d.Exec(tb, `INSERT INTO outbox_mark (part, epoch, settled, hi, at, mode, prefix, shards)
		SELECT $1, 1, pg_current_snapshot(), h.high, $2, 'cdc', l.prefix, l.shards
		FROM outbox_high h, outbox_layout l`, part, at)
}

// written writes n events of 40 aggregates in one transaction.
func written(tb testing.TB, db sql.DB, n int) {
	tb.Helper()
	writtenOf(tb, db, n, "o-")
}

func writtenOf(tb testing.TB, db sql.DB, n int, aggregates string) {
	tb.Helper()
	run(tb, db, `INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload)
		SELECT gen_random_uuid(), CASE WHEN g % 4 = 0 THEN 'invoice' ELSE 'order' END, $2 || g % 40, 'x' || g % 5,
			jsonb_build_object('n', g)
		FROM generate_series(1, $1::int) g`, n, aggregates)
}

// readAll reads a selection in pages, sometimes with a new reader, and returns the ids.
func readAll(tb testing.TB, db sql.DB, s sql.Selection, limit int) (ids []uuid.UUID) {
	tb.Helper()
	h, after := sql.NewHistory(db, s), sql.Place{}
	seen := map[uuid.UUID]bool{}
	last := map[string]int64{}
	for i := 1; ; i++ {
		if i%7 == 0 {
			h = sql.NewHistory(db, s)
		}
		page, end, all, err := h.Read(tb.Context(), after, limit, 1<<20)
		must(tb, err)
		if all {
			return ids
		}
		if end.Compare(after) < 0 || len(page) > limit {
			tb.Fatalf("a page of %d from %+v to %+v", len(page), after, end)
		}
		for _, e := range page {
			if seen[e.ID] || e.Place.Compare(after) <= 0 || e.Place.Compare(end) > 0 {
				tb.Fatalf("event %d at %+v is there again, or not between %+v and %+v", e.Seq, e.Place, after, end)
			}
			if seen[e.ID] = true; e.Seq <= last[e.AggregateID] {
				tb.Fatalf("event %d of %s after %d", e.Seq, e.AggregateID, last[e.AggregateID])
			}
			last[e.AggregateID] = e.Seq
			ids = append(ids, e.ID)
		}
		after = end
	}
}

func ids(tb testing.TB, d *testenv.Database, statement string, args ...any) []uuid.UUID {
	tb.Helper()
	rows, err := d.Pool.Query(tb.Context(), statement, args...)
	must(tb, err)
	list, err := pgx.CollectRows(rows, pgx.RowTo[uuid.UUID])
	must(tb, err)
	return list
}

// same compares ids as sets.
func same(a, b []uuid.UUID) bool {
	sorted := func(l []uuid.UUID) []uuid.UUID {
		return slices.SortedFunc(slices.Values(l), func(x, y uuid.UUID) int { return slices.Compare(x[:], y[:]) })
	}
	return slices.Equal(sorted(a), sorted(b))
}

// day1 is when the log of fillLog begins.
var day1 = time.Date(2026, 3, 1, 0, 0, 0, 0, time.UTC)

// fillLog writes a log with all kinds of marks and rows: transactions that were open for a while, passes of several
// pages, marks of parts, dead rows, unsettled rows. Its times begin at day1, a minute apart.
func fillLog(tb testing.TB, d *testenv.Database) (end time.Time) {
	tb.Helper()
	at := day1
	tick := func() time.Time { at = at.Add(time.Minute); return at }
	written(tb, d.Pool, 100)
	marked(tb, d, -1, tick())
	open := begin(tb, d)
	writtenOf(tb, open, 50, "slow-")
	written(tb, d.Pool, 100)
	marked(tb, d, -1, tick())
	for part := range outbox.Partitions { // each mark sees rows that the last one did not
		written(tb, d.Pool, 20)
		marked(tb, d, part, tick())
	}
	must(tb, open.Commit(tb.Context()))
	marked(tb, d, -1, tick())
	written(tb, d.Pool, 300)
	d.Exec(tb, `INSERT INTO outbox_dead (id, seq, row_seq, aggregate_type, aggregate_id, event_type, created_at, error,
			class, attempts)
		SELECT id, seq, seq, aggregate_type, aggregate_id, event_type, created_at, 'x', 'x', 1 FROM outbox
		ORDER BY seq DESC LIMIT 3`)
	// A pass in pages of three over every part, unfinished in the last part.
	pass := testenv.Value[string](tb, d, "SELECT pg_current_snapshot()::text")
	high := testenv.Value[int64](tb, d, "SELECT last_value FROM outbox_seq_seq")
	written(tb, d.Pool, 40)
	for part := range outbox.Partitions {
		seqs := testenv.Value[[]int64](tb, d, `SELECT array_agg(seq ORDER BY seq) FROM outbox_backlog
			WHERE part = $1 AND pg_visible_in_snapshot(xid, $2::pg_snapshot)`, part, pass)
		for i := 2; i < len(seqs)-3; i += 3 {
			d.Exec(tb, `INSERT INTO outbox_mark (part, epoch, settled, hi, pass, pass_hi, cursor, at, mode)
				SELECT $1::smallint, 1, settled, hi, $2, $3, $4, $5, 'poll' FROM outbox_mark
				WHERE part IN (-1, $1::smallint) AND settled IS NOT NULL ORDER BY id DESC LIMIT 1`, part, pass,
				high, seqs[i], tick())
		}
		if part < outbox.Partitions-1 {
			d.Exec(tb, `INSERT INTO outbox_mark (part, epoch, settled, hi, at, mode)
				VALUES ($1, 1, $2, $3, $4, 'poll')`, part, pass, high, tick())
		}
	}
	d.Exec(tb, `INSERT INTO outbox_mark (part, epoch, pass, pass_hi, at)
		VALUES (-1, 1, pg_current_snapshot(), 1000000, $1)`, tick())
	return at
}

// The backlog counts the rows of the view, during passes as well, and never more than its limit.
func TestTheBacklogIsTheViews(t *testing.T) {
	t.Parallel()
	_, d := newStore(t)
	fillLog(t, d)
	const oldest = "SELECT extract(epoch FROM now() - min(created_at))::bigint FROM outbox_backlog"
	want := testenv.Value[int64](t, d, "SELECT count(*) FROM outbox_backlog")
	if want < 40 {
		t.Fatalf("%d events wait: not the case", want)
	}
	for _, most := range []int64{0, 1, 20, want, want + 1} {
		least := testenv.Value[int64](t, d, oldest)
		n, age, err := sql.Backlog(t.Context(), d.Pool, most)
		must(t, err)
		if most > 0 && n != min(want, most) || most == 0 && n != want {
			t.Errorf("at most %d: %d are counted, the view has %d", most, n, want)
		}
		if age < time.Duration(least-1)*time.Second || age > time.Hour {
			t.Errorf("at most %d: the oldest is %v old, the view's %d s", most, age, least)
		}
	}
}

// wantLog reads and counts a selection.
func wantLog(t *testing.T, db sql.DB, s sql.Selection, want []uuid.UUID) {
	t.Helper()
	if got := readAll(t, db, s, 50); !same(got, want) {
		t.Errorf("%+v: %d events, want %d", s, len(got), len(want))
	}
	counts, err := sql.CountHistory(t.Context(), db, s)
	must(t, err)
	n := 0
	for _, c := range counts {
		n += int(c.Events)
		if c.First.After(c.Last) || c.Last.After(s.Until) {
			t.Errorf("%+v: from %v to %v", s, c.First, c.Last)
		}
	}
	if n != len(want) {
		t.Errorf("%+v: %d events are counted, want %d", s, n, len(want))
	}
}

// A replay reads the rows of the view between any two times, with any page size: each event once, those of an aggregate
// in order. Another reader can continue from every place.
func TestReadLog(t *testing.T) {
	t.Parallel()
	_, d := newStore(t)
	end := fillLog(t, d)
	pool := replayPool(t, d)
	all := ids(t, d, "SELECT id FROM outbox_history")
	if len(all) < 800 || len(all) > 918 {
		t.Fatalf("%d events in history", len(all))
	}
	for _, limit := range []int{1, 7, 1000} {
		got := readAll(t, pool, sql.Selection{Since: day1.Add(-time.Hour), Until: end}, limit)
		if !same(got, all) {
			t.Errorf("%d events in pages of %d, want %d", len(got), limit, len(all))
		}
	}
	subject := "o-7"
	for since := day1.Add(-time.Hour); since.Before(end.Add(time.Hour)); since = since.Add(13 * time.Minute) {
		for _, s := range []sql.Selection{
			{Since: since, Until: since.Add(17 * time.Minute)},
			{Since: since, Until: end},
			{Since: since, Until: end, Type: "x3"},
			{Since: since, Until: end, Stream: "outbox.invoice"},
			{Since: since, Until: end, Subject: &subject},
			{Since: since, Until: end, ID: &all[len(all)/2]},
		} {
			want := ids(t, d, `SELECT id FROM outbox_history WHERE published_at BETWEEN $1 AND $2
				AND ($3 = '' OR event_type = $3) AND ($4 = '' OR stream = $4)
				AND ($5::text IS NULL OR aggregate_id = $5) AND ($6::uuid IS NULL OR id = $6)`, s.Since, s.Until,
				s.Type, s.Stream, s.Subject, s.ID)
			wantLog(t, pool, s, want)
		}
	}
}

// Rows that were settled on the server that the table was restored from have one transaction id and are ordered by
// number.
func TestReadARestoredLog(t *testing.T) {
	t.Parallel()
	_, d := newStore(t)
	end := fillLog(t, d)
	pool := replayPool(t, d)
	d.Exec(t, `SET posthaste.copy = on; UPDATE outbox SET xid = '3' WHERE id IN (SELECT id FROM outbox_history);
		RESET posthaste.copy`)
	d.Exec(t, `UPDATE outbox_mark SET settled = (SELECT format('%s:%s:', x, x) FROM
			(SELECT pg_snapshot_xmax(settled)::text::bigint + 1000000 AS x) n)::pg_snapshot
		WHERE id > 1 AND settled IS NOT NULL`)
	d.Exec(t, "UPDATE outbox_mark SET pass = '9000000:9000000:' WHERE pass IS NOT NULL")
	d.Exec(t, "DELETE FROM outbox WHERE xid <> '3'")
	d.Exec(t, `INSERT INTO outbox_mark (part, epoch, settled, hi, at)
		SELECT -1, 1, '4:4:', last_value, $1 FROM outbox_seq_seq`, end.Add(time.Minute))
	written(t, d.Pool, 100)
	marked(t, d, -1, end.Add(2*time.Minute))
	for since := day1.Add(-time.Hour); since.Before(end.Add(time.Hour)); since = since.Add(11 * time.Minute) {
		for _, until := range []time.Time{since.Add(17 * time.Minute), end.Add(time.Hour)} {
			s := sql.Selection{Since: since, Until: until}
			want := ids(t, d, "SELECT id FROM outbox_history WHERE published_at BETWEEN $1 AND $2", since, until)
			wantLog(t, pool, s, want)
		}
	}
}

// tuples returns how many rows of the log were read by table scans and by index scans.
func tuples(tb testing.TB, d *testenv.Database, db sql.DB) (scans, rows int64) {
	tb.Helper()
	flush := "SELECT pg_stat_force_next_flush()"
	if testenv.Value[int](tb, d, "SELECT current_setting('server_version_num')::int") < 150000 {
		flush = "SELECT pg_sleep(1.5)" // sent at the end of a transaction, at most twice a second
	}
	for range 2 { // the collector of older versions writes what it had at the previous request
		run(tb, db, flush)
	}
	must(tb, d.Pool.QueryRow(tb.Context(), `SELECT seq_scan, coalesce(idx_tup_fetch, 0) FROM pg_stat_user_tables
		WHERE relname = 'outbox'`).Scan(&scans, &rows))
	return scans, rows
}

// The cost of a page depends on the page, not on the log, even where one mark or a pass has settled a large
// transaction.
func TestReadLogIsNoFullScan(t *testing.T) {
	t.Parallel()
	_, d := newStore(t)
	at := day1
	for range 100 {
		written(t, d.Pool, 400)
		at = at.Add(time.Second)
		marked(t, d, -1, at)
	}
	written(t, d.Pool, 40_000)
	large := at.Add(time.Second)
	marked(t, d, -1, large)
	d.Exec(t, "VACUUM ANALYZE outbox, outbox_mark")
	pool := replayPool(t, d)
	conn, err := pool.Acquire(t.Context())
	must(t, err)
	defer conn.Release()
	subject := "o-7"
	for name, c := range map[string]struct {
		s           sql.Selection
		pages, most int64
	}{
		"the first":    {sql.Selection{Since: day1, Until: large}, 3, 30_000},
		"ten seconds":  {sql.Selection{Since: day1.Add(time.Minute), Until: day1.Add(69 * time.Second)}, 99, 12_400},
		"the large":    {sql.Selection{Since: large, Until: large}, 99, 128_000},
		"no such type": {sql.Selection{Since: day1.Add(time.Minute), Until: at, Type: "y"}, 99, 20_000},
		"an aggregate": {sql.Selection{Since: day1, Until: large, Subject: &subject}, 99, 20_000},
	} {
		scans, before := tuples(t, d, conn)
		h, after, n := sql.NewHistory(conn, c.s), sql.Place{}, 0
		for range c.pages {
			page, end, all, err := h.Read(t.Context(), after, 1000, 4<<20)
			must(t, err)
			if n += len(page); all {
				break
			}
			after = end
		}
		scans2, rows := tuples(t, d, conn)
		t.Logf("%s: %d events, %d rows read", name, n, rows-before)
		if scans2 != scans || rows-before > c.most {
			t.Errorf("%s: %d scans of the table, and %d rows read for %d events", name, scans2-scans, rows-before, n)
		}
	}
	id := testenv.Value[uuid.UUID](t, d, "SELECT id FROM outbox WHERE seq = 60000")
	if got := readAll(t, pool, sql.Selection{Since: day1, Until: large, ID: &id}, 10); len(got) != 1 {
		t.Errorf("%d events by id", len(got))
	}
}

// AwaitHistory waits until running writers of marks are visible, and for a while for visible rows that are not settled.
func TestAwaitHistory(t *testing.T) {
	t.Parallel()
	d := testenv.Postgres(t)
	pool := replayPool(t, d)
	none := func(n int) { t.Errorf("waits for %d writers, though nobody writes", n) }
	must(t, sql.AwaitHistory(t.Context(), pool, none))
	reading := begin(t, d)
	var n int
	must(t, reading.QueryRow(t.Context(), "SELECT count(*) FROM outbox_history").Scan(&n))
	written(t, d.Pool, 10)
	settling := begin(t, d)
	run(t, settling, `INSERT INTO outbox_mark (part, epoch, settled, hi)
		SELECT -1, 1, pg_current_snapshot(), last_value FROM outbox_seq_seq`)
	go func() {
		_ = pool.QueryRow(context.Background(), "SELECT 1 FROM pg_sleep(0.3)").Scan(&n)
		_ = settling.Commit(context.Background())
	}()
	// The transaction has ended, or its commit is visible and it holds its locks for another moment.
	must(t, sql.AwaitHistory(t.Context(), pool, func(n int) {
		if n != 1 {
			none(n)
		}
	}))
	wantRows(t, d, 10, "outbox_history")
	late := begin(t, d)
	run(t, late, "INSERT INTO outbox_mark (part, epoch) VALUES (-1, 1)")
	seen := 0
	must(t, sql.AwaitHistory(t.Context(), pool, func(n int) {
		if seen++; n != 1 {
			t.Errorf("waits for %d writers, want 1", n)
		}
		if seen == 3 {
			must(t, late.Commit(t.Context()))
		}
	}))
	if seen < 3 {
		t.Errorf("gone on after %d looks, before the mark was written", seen)
	}
	must(t, reading.Rollback(t.Context()))
	// No session settles these rows.
	written(t, d.Pool, 1)
	began := time.Now()
	must(t, sql.AwaitHistory(t.Context(), pool, none))
	if took := time.Since(began); took < 4*time.Second || took > 20*time.Second {
		t.Errorf("it has waited %v for what nobody settles", took)
	}
}

// Rows that retention deletes between two pages are missing, whether they were listed or not; the others are read.
func TestTheLogIsDeletedBesideAReplay(t *testing.T) {
	t.Parallel()
	_, d := newStore(t)
	for i := range 3 {
		written(t, d.Pool, 100)
		marked(t, d, -1, day1.Add(time.Duration(i)*time.Minute))
	}
	h := sql.NewHistory(replayPool(t, d), sql.Selection{Since: day1, Until: day1.Add(time.Hour)})
	after, n := sql.Place{}, 0
	for all := false; !all; {
		page, end, last, err := h.Read(t.Context(), after, 10, 1<<20)
		must(t, err)
		if n += len(page); n == 10 {
			d.Exec(t, "DELETE FROM outbox WHERE seq <= 200")
			d.Exec(t, "DELETE FROM outbox_mark WHERE id < (SELECT max(id) - 1 FROM outbox_mark)")
		}
		after, all = end, last
	}
	if n != 110 {
		t.Errorf("%d events, want the 10 before and the 100 that are left", n)
	}
}

func replayPool(tb testing.TB, d *testenv.Database) *pgxpool.Pool {
	tb.Helper()
	cfg, err := sql.ReplayConfig(d.URL, "public")
	must(tb, err)
	pool, err := pgxpool.NewWithConfig(context.Background(), cfg)
	must(tb, err)
	tb.Cleanup(pool.Close)
	return pool
}

// Large payloads make small pages, but never empty ones.
func TestPagesOfHistoryAreBoundedByBytes(t *testing.T) {
	t.Parallel()
	_, d := newStore(t)
	begun := time.Now().Add(-time.Minute)
	d.Exec(t, `INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload)
		SELECT 'order', 'a', 'x', jsonb_build_object('pad', repeat('x', 10000)) FROM generate_series(1, 50)`)
	marked(t, d, -1, time.Now())
	sel := sql.Selection{Since: begun, Until: time.Now().Add(time.Minute)}
	for bytes, want := range map[int]int{1: 1, 15_000: 2, 100_000: 10} {
		page, end, _, err := sql.NewHistory(replayPool(t, d), sel).Read(t.Context(), sql.Place{Mark: 1}, 50, bytes)
		if must(t, err); len(page) != want || end != page[want-1].Place {
			t.Errorf("%d events in a page of %d bytes, want %d", len(page), bytes, want)
		}
	}
}
