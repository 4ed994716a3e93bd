package sql_test

import (
	"context"
	"testing"
	"time"

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
