package bench

import (
	"context"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"posthaste/internal/pause"
)

// load calls do with 0, 1, 2 … from several goroutines. With a rate every call has a due time, and its duration
// counts from then, even if earlier slow calls delayed its start: so a stall counts for every call that was due
// during it. Without a rate each goroutine calls again at once, and one of them continues until a call is counted: a
// machine that hangs for the whole duration also gets a rate.
type load struct {
	workers int
	rate    float64
	// warm precedes lasts; its calls are not counted.
	warm, lasts time.Duration
	do          func(ctx context.Context, n int, due time.Time) error
}

// loadWarm is enough time to open connections and prepare statements.
const loadWarm = 500 * time.Millisecond

// run returns the durations of the counted calls, and the number of all calls. It ends at the first error.
func (l load) run(ctx context.Context) (took []time.Duration, calls int, err error) {
	began := time.Now()
	counts, ends := began.Add(l.warm), began.Add(l.warm+l.lasts)
	each := make([][]time.Duration, l.workers)
	var next, made, counted atomic.Int64
	g, ctx := errgroup.WithContext(ctx)
	for w := range l.workers {
		g.Go(func() error {
			for {
				due := time.Now()
				n := int(next.Add(1)) - 1
				if l.rate > 0 {
					due = began.Add(time.Duration(float64(n) / l.rate * float64(time.Second)))
				}
				if !due.Before(ends) && (l.rate > 0 || w > 0 || counted.Load() > 0) {
					return nil
				}
				if err := pause.For(ctx, time.Until(due)); err != nil {
					return err
				}
				if err := l.do(ctx, n, due); err != nil {
					return err
				}
				made.Add(1)
				if !due.Before(counts) {
					counted.Add(1)
					each[w] = append(each[w], time.Since(due))
				}
			}
		})
	}
	err = g.Wait()
	for _, t := range each {
		took = append(took, t...)
	}
	return took, int(made.Load()), err
}
