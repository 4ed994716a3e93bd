package sql_test

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"posthaste/internal/testenv"
	"posthaste/outbox"
	"posthaste/sql"
)

// BenchmarkSettle measures the settling of one event in batches of 1,000, and what history and the index that replay
// reads it by add to that.
func BenchmarkSettle(b *testing.B) {
	for _, c := range []struct {
		name    string
		history time.Duration
		ddl     string
	}{
		{"delete only", 0, ""},
		{"history without the index of replay", 24 * time.Hour, "DROP INDEX outbox_history_published"},
		{"history", 24 * time.Hour, ""},
	} {
		b.Run(c.name, func(b *testing.B) {
			d := testenv.Postgres(b)
			if c.ddl != "" {
				d.Exec(b, c.ddl)
			}
			s := sql.NewStore(relayPool(b, d.URL), "bench", c.history)
			must(b, s.KeepHistory(b.Context()))
			testenv.Bulk(b, d, b.N, 200)
			rows, err := d.Pool.Query(b.Context(), "SELECT seq, aggregate_id, now() FROM outbox ORDER BY seq")
			must(b, err)
			items, err := pgx.CollectRows(rows, func(r pgx.CollectableRow) (outbox.Settlement, error) {
				it := outbox.Settlement{Stream: "outbox.order", EntryID: "1795230833965-0"}
				return it, r.Scan(&it.Seq, &it.AggregateID, &it.Time)
			})
			must(b, err)
			d.Exec(b, "CHECKPOINT")
			b.ResetTimer()
			for len(items) > 0 {
				n := min(1000, len(items))
				f, err := s.Settle(b.Context(), items[:n])
				if err != nil || met(f) != n {
					b.Fatalf("%d of %d settled: %v", met(f), n, err)
				}
				items = items[n:]
			}
		})
	}
}
