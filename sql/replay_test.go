package sql_test

import (
	"context"
	"fmt"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"

	"posthaste/internal/testenv"
	"posthaste/sql"
)

func replayPool(tb testing.TB, d *testenv.Database) *pgxpool.Pool {
	tb.Helper()
	cfg, err := sql.ReplayConfig(d.URL, "public")
	must(tb, err)
	pool, err := pgxpool.NewWithConfig(context.Background(), cfg)
	must(tb, err)
	tb.Cleanup(pool.Close)
	return pool
}

var day1 = time.Date(2026, 3, 1, 0, 0, 0, 0, time.UTC)

// fillHistory writes n events of before there were marks, evenly over three days with a partition each, in the order of
// publishing. Every third is of one large aggregate.
func fillHistory(tb testing.TB, d *testenv.Database, n int) {
	tb.Helper()
	for _, day := range []int{1, 2, 3} {
		d.Exec(tb, fmt.Sprintf("CREATE TABLE outbox_history_2026030%d PARTITION OF outbox_history_old FOR VALUES FROM "+
			"('2026-03-%02d 00:00Z') TO ('2026-03-%02d 00:00Z')", day, day, day+1))
	}
	d.Exec(tb, `INSERT INTO outbox_history_old (seq, id, aggregate_type, aggregate_id, event_type, payload, created_at,
			published_at, stream, mode)
		SELECT g, gen_random_uuid(), 'order', CASE WHEN g % 3 = 0 THEN 'large' ELSE 'o-' || g % 1000 END, `+
		`'order.changed',
			jsonb_build_object('n', g), $2, $2::timestamptz + (g - 1) * (interval '72 hours' / $1::int), `+
		`'outbox.order', 'cdc'
		FROM generate_series(1, $1::int) g`, n, day1)
}

// A page is read by the index, wherever it is and whatever it selects, with statistics or without: it costs what a page
// costs, not what history has.
func TestReplayPageIsNoFullScan(t *testing.T) {
	t.Parallel()
	n := 150_000
	if os.Getenv("POSTHASTE_TEST_FULL") != "" {
		n = 1_000_000
	}
	d := testenv.Postgres(t)
	fillHistory(t, d, n)
	pool := replayPool(t, d)
	end := day1.Add(72 * time.Hour)
	id := testenv.Value[uuid.UUID](t, d, "SELECT id FROM outbox_history_old WHERE seq = $1", n/2)
	buffers := regexp.MustCompile(`Buffers: shared (?:hit=(\d+))?(?: ?read=(\d+))?`)
	for _, statistics := range []string{"none", "fresh"} {
		if statistics == "fresh" {
			d.Exec(t, "VACUUM ANALYZE outbox_history_old")
		}
		for name, c := range map[string]struct {
			part, query string
			args        []any
		}{
			"the first page": {
				"replay_all", "replay_page",
				[]any{nil, nil, day1.Add(-time.Hour), 0, end, "", "", 1000, 1000, 4 << 20},
			},
			"a late page": {"replay_all", "replay_page", []any{
				nil, nil, day1.Add(71 * time.Hour), n - n/72, end, "", "",
				1000, 1000, 4 << 20,
			}},
			"across midnight": {"replay_all", "replay_page", []any{
				nil, nil, day1.Add(24*time.Hour - time.Second), 0, end, "",
				"", 1000, 1000, 4 << 20,
			}},
			"the last page": {
				"replay_all", "replay_page",
				[]any{nil, nil, end.Add(-time.Second), 0, end, "", "", 1000, 1000, 4 << 20},
			},
			"none of a type": {"replay_all", "replay_page", []any{
				nil, nil, day1, 0, end, "other", "", 5000, 1000,
				4 << 20,
			}},
			"one event": {"replay_few", "replay_page", []any{id, nil, day1, 0, end, "", "", 1000, 1000, 4 << 20}},
			"one aggregate": {"replay_all", "replay_page", []any{
				nil, "o-7", day1, 0, end, "", "", 1000, 1000,
				4 << 20,
			}},
			// Of a large aggregate a page costs what it has, not what the aggregate has.
			"much of one": {"replay_all", "replay_page", []any{
				nil, "large", day1, 0, end, "", "", 1000, 1000,
				4 << 20,
			}},
			"late much of one": {"replay_all", "replay_page", []any{
				nil, "large", day1.Add(71 * time.Hour), 0, end, "", "", 1000,
				1000, 4 << 20,
			}},
			"count an event": {"replay_few", "replay_count", []any{id, nil, day1, end, "", ""}},
		} {
			rows, err := pool.Query(t.Context(), "EXPLAIN (ANALYZE, BUFFERS, COSTS OFF, TIMING OFF, SUMMARY OFF) "+
				queryText(t,
					c.part)+queryText(t, c.query), c.args...)
			must(t, err)
			var lines []string
			for rows.Next() {
				var line string
				must(t, rows.Scan(&line))
				lines = append(lines, line)
			}
			must(t, rows.Err())
			plan := strings.Join(lines, "\n")
			m := buffers.FindStringSubmatch(plan)
			var hit, read int
			_, _ = fmt.Sscan(m[1], &hit)
			_, _ = fmt.Sscan(m[2], &read)
			t.Logf("%s, statistics %s: %d blocks", name, statistics, hit+read)
			// 1,000 rows lie on about 20 blocks, a thousand of one aggregate on a block each.
			if strings.Contains(plan, "Seq Scan on outbox_history_2") || hit+read > 1500 {
				t.Errorf("%s, statistics %s: %d blocks\n%s", name, statistics, hit+read, plan)
			}
		}
	}
}

func TestReadHistory(t *testing.T) {
	t.Parallel()
	d := testenv.Postgres(t)
	fillHistory(t, d, 100)
	// Several at one instant, in the default partition too, one with a time of its own and headers.
	d.Exec(t, "UPDATE outbox_history_old SET published_at = $1 WHERE seq BETWEEN 40 AND 49", day1.Add(30*time.Hour))
	d.Exec(t, "UPDATE outbox_history_old SET published_at = $1 WHERE seq > 90", day1.Add(100*time.Hour))
	own := day1.Add(time.Minute)
	d.Exec(t, `UPDATE outbox_history_old SET event_time = $1, headers = '{"traceparent": "00-1"}' WHERE seq = 1`, own)
	pool := replayPool(t, d)
	sel := sql.Selection{Since: day1, Until: day1.Add(200 * time.Hour)}
	for _, limit := range []int{1, 3, 7, 1000} {
		after, seen := sql.Place{At: sel.Since}, map[int64]bool{}
		for {
			page, end, all, err := sql.NewHistory(pool, sel).Read(t.Context(), after, limit, 1<<20)
			must(t, err)
			if all {
				break
			}
			if len(page) > limit {
				t.Fatalf("%d events in a page of %d", len(page), limit)
			}
			for _, e := range page {
				if seen[e.Seq] || e.Place.Compare(after) <= 0 || end.Compare(e.Place) < 0 {
					t.Fatalf("event %d again, or out of order", e.Seq)
				}
				seen[e.Seq] = true
				if want := day1; e.Seq != 1 && !e.Time.Equal(want) ||
					e.Seq == 1 && (!e.Time.Equal(own) || e.TraceParent() != "00-1") {
					t.Errorf("event %d has time %v, headers %s", e.Seq, e.Time, e.Headers)
				}
			}
			after = end
		}
		if len(seen) != 100 {
			t.Errorf("%d events in pages of %d", len(seen), limit)
		}
	}
	// Of a type, or of an aggregate, and what lies between is passed.
	d.Exec(t, "UPDATE outbox_history_old SET event_type = 'rare', aggregate_id = 'rare' WHERE seq % 30 = 0")
	rare := "rare"
	for name, s := range map[string]sql.Selection{
		"type":    {Since: sel.Since, Until: sel.Until, Type: rare},
		"subject": {Since: sel.Since, Until: sel.Until, Subject: &rare},
	} {
		page, end, _, err := sql.NewHistory(pool, s).Read(t.Context(), sql.Place{At: day1}, 2, 1<<20)
		if must(t, err); len(page) != 2 || page[1].Seq != 60 {
			t.Errorf("%s: a page of %d events", name, len(page))
		}
		page, _, _, err = sql.NewHistory(pool, s).Read(t.Context(), end, 2, 1<<20)
		if must(t, err); len(page) != 1 || page[0].Seq != 90 {
			t.Errorf("%s: a second page of %d events", name, len(page))
		}
	}
	// Large payloads make small pages, never empty ones.
	d.Exec(t, "UPDATE outbox_history_old SET payload = jsonb_build_object('pad', repeat('x', 10000))")
	for bytes, want := range map[int]int{1: 1, 15_000: 2, 100_000: 10} {
		page, end, _, err := sql.NewHistory(pool, sel).Read(t.Context(), sql.Place{At: day1}, 50, bytes)
		if must(t, err); len(page) != want || end != page[want-1].Place {
			t.Errorf("%d events in a page of %d bytes, want %d", len(page), bytes, want)
		}
	}
}
