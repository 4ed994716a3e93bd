package sql_test

import (
	"context"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"posthaste/internal/lab/testenv"
	"posthaste/sql"
)

// log fills the table with settled rows and then with unsettled rows.
func log(t *testing.T, d *testenv.Database, settled, owed int) {
	t.Helper()
	if settled > 0 {
		testenv.Bulk(t, d, settled, 10)
		d.Exec(t, "INSERT INTO outbox_mark (part, epoch, settled, hi) SELECT -1, 1, pg_current_snapshot(), max(seq) "+
			"FROM outbox")
	}
	if owed > 0 {
		testenv.Bulk(t, d, owed, 10)
	}
}

// Every statement uses an index and reads only unsettled rows, however large the log, whatever the statistics, and
// whatever transactions are open.
func TestPlansUseTheIndex(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		settled, owed int
		old           bool // one transaction began before everything, and commits at the end
	}{
		"a few are owed": {settled: 50_000, owed: 30}, "a backlog": {settled: 20_000, owed: 30_000},
		"an old transaction": {settled: 20_000, owed: 30, old: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d := testenv.NewServer(t).Database(t) // without other transactions
			old := begin(t, d)
			if c.old {
				run(t, old, `
					INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload)
					SELECT gen_random_uuid(), 'order', 'bulk-' || i % 100, 'order.changed', '{}'
					FROM generate_series(1, 200) i`)
			}
			log(t, d, c.settled, c.owed)
			must(t, old.Commit(t.Context()))
			pool := relayPool(t, d.URL)
			seqs := testenv.Value[[]int64](t, d, `SELECT array_agg(seq) FROM (SELECT seq FROM outbox_rows WHERE part = 3
				ORDER BY seq DESC LIMIT 500) last`)
			owed := c.owed
			if c.old {
				owed += 200
			}
			snapshot := testenv.Value[string](t, d, "SELECT pg_current_snapshot()::text")
			cases := map[string]struct {
				args []any
				most int // buffers
			}{
				"sweep_claim":   {[]any{"test", 0, make([]byte, 16), "{3,4}"}, 100},
				"sweep_mark":    {[]any{3}, 100},
				"sweep_ahead":   {[]any{3, "{bad}", 20_000, nil}, 100 + owed},
				"sweep_parts":   {nil, 300},
				"sweep_begin":   {[]any{3, snapshot, 7, 20_000}, 100 + owed},
				"sweep_page":    {[]any{3, 4 << 20, seqs[499:], seqs[:1], snapshot, "3:3:"}, 500 * 7},
				"sweep_park":    {[]any{"test", 0, make([]byte, 16), 3, 3, "why", "x", 1, true}, 100},
				"sweep_settle":  {[]any{"test", 0, make([]byte, 16), 3, 9, snapshot, 1, snapshot, 1, 1, nil}, 100},
				"sweep_reached": {[]any{3, snapshot}, 100},
			}
			for _, statistics := range []string{"none", "fresh"} {
				if statistics == "fresh" {
					d.Exec(t, "ANALYZE outbox, outbox_mark, outbox_dead")
				}
				for name, q := range cases {
					plan := explain(t, pool, name, q.args...)
					if testing.Verbose() {
						t.Logf("%s with %s statistics:\n%s", name, statistics, plan)
					}
					// The sequence can only be read by a scan.
					scans := strings.Contains(strings.ReplaceAll(plan, "Seq Scan on outbox_seq_seq", ""), "Seq Scan")
					if scans || strings.Contains(plan, "Bitmap") || buffers(t, plan) > q.most {
						t.Errorf("%s with %s statistics reads %d buffers, want %d at most:\n%s", name, statistics,
							buffers(t, plan), q.most, plan)
					}
				}
			}
		})
	}
}

// Every statement uses an index and reads only unsettled rows, however large the log and whatever the statistics.
func TestMarkPlansUseTheIndex(t *testing.T) {
	t.Parallel()
	s, d := newStoreAlone(t)
	o := succeed(t, s)
	long := begin(t, d)
	insertIn(t, long, 5)
	d.Exec(t, `INSERT INTO outbox_mark (part, epoch, settled, hi, pass, pass_hi, cursor)
		SELECT i % 17 - 1, 1, '3:3:', 0, '3:3:', 0, 0 FROM generate_series(1, 20000) i`)
	testenv.Bulk(t, d, 50_000, 10)
	mark := settle(t, s)
	must(t, long.Commit(t.Context()))
	testenv.Bulk(t, d, 30, 10)
	pool := relayPool(t, d.URL)
	id := testenv.Value[int64](t, d, "SELECT max(mark) FROM outbox_settled")
	for round := range 3 {
		if round == 2 { // after a long stream: no part has a mark of its own
			d.Exec(t, "DELETE FROM outbox_mark WHERE part >= 0")
			d.Exec(t, `INSERT INTO outbox_mark (part, epoch, settled, hi)
				SELECT -1, 1, $1::pg_snapshot, $2::bigint FROM generate_series(1, 20000)`, mark.Snapshot.String(),
				mark.High)
			d.Exec(t, "VACUUM ANALYZE outbox_mark")
		}
		for name, c := range map[string]struct {
			args []any
			most int // buffers
		}{
			"mark_look":      {[]any{mark.Snapshot.String(), mark.High, "0"}, 400},
			"mark_begin":     {[]any{"test", o.Epoch, o.Nonce[:]}, 200},
			"mark_move":      {[]any{"test", o.Epoch, o.Nonce[:], mark.Snapshot.String(), mark.High, "cdc", nil}, 200},
			"audit":          {nil, 400},
			"backlog":        {[]any{nil}, 800},
			"stream_known":   {nil, 400},
			"log_held":       {[]any{uuid.New(), 0, id}, 400},
			"log_count":      {[]any{id - 1, id, -1, nil, "", "", false}, 150_000},
			"log_list":       {[]any{[]int64{id}, []int16{3}, 0, nil, "", "", 10, false}, 8_000},
			"park":           {[]any{"test", o.Epoch, o.Nonce[:], "a", 1, uuid.New(), "", "", 1}, 100},
			"dead_published": {nil, 50},
			"history_marks":  {[]any{time.Now().Add(-time.Hour)}, 40_000},
			"history_delete": {[]any{3, id, 1 << 40, 1000}, 100},
			"history_forget": {[]any{make([]int64, 16)}, 100},
			"delivered":      {nil, 200},
			"state_moved":    {nil, 200},
			"history_begin":  {nil, 10},
		} {
			plan := planOf(t, pool, name, c.args...)
			if n := buffers(t, plan); n > c.most || strings.Contains(plan, "Seq Scan on outbox ") {
				t.Errorf("%s: %d buffers, at most %d were expected\n%s", name, n, c.most, plan)
			} else {
				t.Logf("%s: %d buffers, %s", name, n, plan[strings.LastIndex(plan, "Execution Time"):])
			}
		}
		d.Exec(t, "ANALYZE")
	}
	// ANALYZE does not evaluate the expression that checks the limits, which would produce the text of each sampled
	// payload.
	indexes := testenv.Value[[]string](t, d, `SELECT array_agg(DISTINCT tablename::text) FROM pg_stats
		WHERE tablename IN ('outbox_log', 'outbox_owed')`)
	if len(indexes) != 1 || indexes[0] != "outbox_log" {
		t.Errorf("statistics of %v, want those of outbox_log", indexes)
	}
}

// Queries about waiting events do not read the rows that a large pass has already settled.
func TestPlansInTheMiddleOfAPass(t *testing.T) {
	t.Parallel()
	s, d := newStoreAlone(t)
	o := succeed(t, s)
	log(t, d, 1000, 32_000)
	w := openSweep(t, d.URL)
	pool := relayPool(t, d.URL)
	snapshot := testenv.Value[string](t, d, "SELECT pg_current_snapshot()::text")
	for part := range 16 {
		claim(t, w, part, o)
		p := next(t, w, part, nil)
		for ; p.Listed(); claim(t, w, part, o) { // a turn's worth of rows, or all
			if n := page(t, w, p, 999); len(n) > 5 && len(n) < 999 {
				page(t, w, p, len(n)-5) // all but the last
				must(t, w.Settle(t.Context(), p, o, nil))
				break
			}
			must(t, w.Settle(t.Context(), p, o, nil))
		}
		must(t, w.Drop(t.Context()))
	}
	for _, statistics := range []string{"none", "fresh"} {
		if statistics == "fresh" {
			d.Exec(t, "ANALYZE outbox, outbox_mark, outbox_dead")
		}
		for name, args := range map[string][]any{"audit": nil, "backlog": {1000}, "sweep_reached": {3, snapshot}} {
			plan := explain(t, pool, name, args...)
			if n := buffers(t, plan); n > 800 || strings.Contains(plan, "Seq Scan on outbox ") {
				t.Errorf("%s with %s statistics reads %d buffers:\n%s", name, statistics, n, plan)
			}
		}
	}
	rows, _, err := sql.Backlog(t.Context(), pool, 0)
	must(t, err)
	if n := testenv.Value[int64](t, d, "SELECT count(*) FROM outbox_backlog"); rows != n {
		t.Errorf("%d rows are owed, the view has %d", rows, n)
	}
	m, err := s.Audit(t.Context())
	must(t, err)
	if len(m.First) < 10 {
		t.Errorf("rows are owed in parts %v only", m.First)
	}
	for part := range int16(16) {
		want := testenv.Value[int64](t, d, "SELECT coalesce(min(seq), 0) FROM outbox_backlog WHERE part = $1", part)
		if m.First[part] != want {
			t.Errorf("part %d begins at row %d, want %d", part, m.First[part], want)
		}
	}
}

// A session's plans are often made while the table is empty, and must suit a large table.
func TestPlansMadeForAnEmptyTable(t *testing.T) {
	t.Parallel()
	s, d := newStoreAlone(t)
	o := succeed(t, s)
	conn, err := relayPool(t, d.URL).Acquire(t.Context())
	must(t, err)
	defer conn.Release()
	now := testenv.Value[string](t, d, "SELECT pg_current_snapshot()::text")
	statements := map[string][]any{
		"sweep_parts": nil, "sweep_begin": {3, nil, 0, 20_000}, "sweep_reached": {3, now},
		"sweep_page": {3, 1 << 20, []int64{1, 10_000}, []int64{3, 10_000}, now, "3:3:"},
		"sweep_park": {"test", o.Epoch, o.Nonce[:], 3, 9_999, "why", "x", 1, true},
	}
	for name := range statements {
		run(t, conn, "PREPARE "+name+" AS "+queryText(t, name))
		executed(t, conn, name, statements[name]...)
	}
	log(t, d, 10_000, 0)
	for name, args := range statements {
		plan := executed(t, conn, name, args...)
		if n := buffers(t, plan); n > 200 {
			t.Errorf("%s reads %d buffers:\n%s", name, n, plan)
		}
	}
}

// An old transaction keeps dead row versions. A sweep creates none: its reads do not grow with the rows swept since.
func TestASweepBehindAnOldTransaction(t *testing.T) {
	t.Parallel()
	s, d := newStoreAlone(t)
	o := succeed(t, s)
	old, err := d.Pool.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: pgx.RepeatableRead})
	must(t, err)
	t.Cleanup(func() { _ = old.Rollback(context.Background()) })
	run(t, old, "SELECT pg_current_xact_id(), count(*) FROM outbox")
	pool := relayPool(t, d.URL)
	round := func() { insertAll(t, d, 20); sweep(t, d.URL, o) }
	read := func() (n int) {
		insertAll(t, d, 20)
		snapshot := testenv.Value[string](t, d, "SELECT pg_current_snapshot()::text")
		seqs := testenv.Value[[]int64](t, d, "SELECT array_agg(seq) FROM outbox_backlog")
		for name, args := range map[string][]any{
			"sweep_parts": nil, "sweep_begin": {3, snapshot, 7, 20_000}, "sweep_reached": {3, snapshot},
			"sweep_settle": {"test", o.Epoch, o.Nonce[:], 3, 1 << 30, snapshot, 1, nil, nil, nil, nil},
			"sweep_page":   {3, 4 << 20, seqs, seqs, nil, nil},
			"sweep_park":   {"test", o.Epoch, o.Nonce[:], 3, seqs[0], "why", "x", 1, true},
		} {
			n += buffers(t, explain(t, pool, name, args...))
		}
		return n
	}
	round()
	first := read()
	for range 40 {
		round()
	}
	last := read()
	if t.Logf("%d buffers, then %d", first, last); last > 2*first { // indexes get higher as well
		t.Errorf("the statements met %d buffers, and %d after 40 sweeps", first, last)
	}
}

// planOf runs a statement with the plan for its arguments and returns the plan.
func planOf(tb testing.TB, pool *pgxpool.Pool, name string, args ...any) string {
	tb.Helper()
	tx, err := pool.Begin(tb.Context())
	must(tb, err)
	defer func() { _ = tx.Rollback(context.Background()) }()
	return again(tb, tx, func() string {
		rows, err := tx.Query(tb.Context(), "EXPLAIN (ANALYZE, BUFFERS, COSTS OFF) "+queryText(tb, name), args...)
		must(tb, err)
		lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
		must(tb, err)
		return strings.Join(lines, "\n")
	})
}

// again runs a statement, takes back what it wrote, and returns its plan the second time. The first statements of a
// session also read the system catalogs, and count those buffers as theirs.
func again(tb testing.TB, tx pgx.Tx, statement func() string) string {
	tb.Helper()
	first, err := tx.Begin(tb.Context())
	must(tb, err)
	statement()
	must(tb, first.Rollback(tb.Context()))
	return statement()
}

var bufferCounts = regexp.MustCompile(`(?:hit|read)=(\d+)`)

// words are the functions in the statements.
var words = []string{"outbox_holds(", "outbox_stream_name(", "outbox_owned(", "outbox_mark_until", "outbox_settling"}

// buffers returns how many pages a statement has read, without those of planning. Its functions must be inlined: the
// planner finds no index for a condition inside a function.
func buffers(t *testing.T, plan string) (n int) {
	t.Helper()
	for _, word := range words {
		if strings.Contains(plan, word) {
			t.Errorf("%s is not inlined:\n%s", word, plan)
		}
	}
	plan, _, _ = strings.Cut(plan, "\nPlanning:")
	line, _, _ := strings.Cut(plan[max(strings.Index(plan, "Buffers:"), 0):], "\n")
	for _, m := range bufferCounts.FindAllStringSubmatch(line, -1) {
		k, err := strconv.Atoi(m[1])
		must(t, err)
		n += k
	}
	return n
}

// explain runs a statement with its generic plan and returns the plan.
func explain(t *testing.T, pool *pgxpool.Pool, name string, args ...any) string {
	t.Helper()
	tx, err := pool.Begin(t.Context())
	must(t, err)
	defer func() { _ = tx.Rollback(context.Background()) }()
	run(t, tx, "PREPARE "+name+" AS "+queryText(t, name))
	plan := again(t, tx, func() string { return executed(t, tx, name, args...) })
	run(t, tx, "DEALLOCATE "+name)
	return plan
}

// executed runs a statement prepared under its name and returns its plan.
func executed(t *testing.T, db sql.DB, name string, args ...any) string {
	t.Helper()
	literals := make([]string, len(args))
	for i, arg := range args {
		switch arg := arg.(type) {
		case nil:
			literals[i] = "NULL"
		case []byte:
			literals[i] = fmt.Sprintf("'\\x%x'", arg)
		case []int64:
			literals[i] = "'{" + strings.Trim(strings.ReplaceAll(fmt.Sprint(arg), " ", ","), "[]") + "}'"
		default:
			literals[i] = fmt.Sprintf("'%v'", arg)
		}
	}
	call := "EXECUTE " + name
	if len(args) > 0 {
		call += "(" + strings.Join(literals, ", ") + ")"
	}
	rows, err := db.Query(t.Context(), "EXPLAIN (ANALYZE, BUFFERS, COSTS OFF, TIMING OFF) "+call,
		pgx.QueryExecModeSimpleProtocol)
	must(t, err)
	lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		t.Fatalf("explain %s: %v", name, err)
	}
	return strings.Join(lines, "\n")
}
