//go:build full

package idem

import (
	"fmt"
	"runtime"
	"sync"
	"testing"
	"time"

	"posthaste/internal/testenv"
)

func TestFullMemoryPerKey(t *testing.T) { memoryPerKey(t, 1_000_000) }

func TestFullThroughput(t *testing.T) {
	r := testenv.Redis(t, "appendonly no")
	g := guardOn(t, r.URL())
	const workers, d = 50, 3 * time.Second
	counts := make([]int, workers)
	var wg sync.WaitGroup
	start := time.Now()
	for i := range workers {
		wg.Go(func() {
			for time.Since(start) < d {
				req := request(fmt.Sprint(i, counts[i]), "a")
				if v := g.acquire(t.Context(), &req, "x"); v.Ticket == nil || v.Ticket.Degraded() {
					t.Error("degraded")
					return
				}
				counts[i]++
			}
		})
	}
	wg.Wait()
	n := 0
	for _, c := range counts {
		n += c
	}
	fmt.Printf("acquire: %.0f/s with %d connections, client and server on %d cores\n", float64(n)/time.Since(start).Seconds(), workers, runtime.NumCPU())
}
