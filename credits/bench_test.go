package credits

import (
	"context"
	"fmt"
	"strconv"
	"sync"
	"testing"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"
)

// fill creates n accounts.
func (w *world) fill(n int) []uuid.UUID {
	w.tb.Helper()
	users := make([]uuid.UUID, n)
	var wg sync.WaitGroup
	for part := range 16 {
		wg.Go(func() {
			for i := part; i < n; i += 16 {
				users[i] = uuid.New()
				if _, err := w.bank.Apply(context.Background(), newOp(users[i], Add, MaxAmount)); err != nil {
					w.tb.Error(err)
				}
			}
		})
	}
	wg.Wait()
	return users
}

// write adds n deductions to the streams, in pipelines, as many processes would.
func (w *world) write(users []uuid.UUID, n int) {
	w.tb.Helper()
	const each = 500
	for from := 0; from < n; from += each {
		_, err := w.redis.Client.Pipelined(context.Background(), func(p redis.Pipeliner) error {
			for i := from; i < min(from+each, n); i++ {
				u := users[i%len(users)]
				op := newOp(u, Deduct, 1)
				bkt := Bucket(u)
				p.FCall(context.Background(), fnDeduct,
					[]string{accountKey(u), outcomeKey(u, op.ID), streamKey(bkt), epochKey(bkt)}, 1, op.fp(),
					u.String(),
					op.ID.String(), 1, 0, OutcomeTTL.Milliseconds(), maxStream, durMemory, "0", "")
			}
			return nil
		})
		must(w.tb, err)
	}
}

// BenchmarkSync measures the rate at which one sync writes operations of 2,000 users, with their events, to the ledger.
func BenchmarkSync(b *testing.B) {
	w := newWorld(b)
	users := w.fill(2000)
	w.settle()
	b.ResetTimer()
	for range b.N {
		b.StopTimer()
		w.write(users, 20_000)
		b.StartTimer()
		w.settle()
	}
	b.ReportMetric(20_000*float64(b.N)/b.Elapsed().Seconds(), "ops/s")
	if n := w.ledger(users[0]).LastSeq; n < 2 {
		b.Errorf("the ledger is at %d", n)
	}
}

// used returns the memory that the server's data needs, in bytes.
func (w *world) used() int64 {
	w.tb.Helper()
	n, err := strconv.ParseInt(w.redis.Client.InfoMap(w.tb.Context(), "memory").Item("Memory", "used_memory"), 10, 64)
	if err != nil {
		w.tb.Fatal(fmt.Errorf("used_memory: %w", err))
	}
	return n
}
