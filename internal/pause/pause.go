// Package pause waits, and stops waiting when a context ends.
package pause

import (
	"context"
	"math/rand/v2"
	"sync/atomic"
	"time"
)

// For waits for d, or until ctx ends; then it returns ctx's error. Whoever asks ctx anyway need not look at it.
func For(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
	case <-t.C:
	}
	return ctx.Err() // also when both came at once
}

// Tick waits until the next tick: see [NextTick].
func Tick(ctx context.Context, d time.Duration) error { return For(ctx, UntilTick(d)) }

// UntilTick returns how far away the next tick is: see [NextTick].
func UntilTick(d time.Duration) time.Duration { return time.Until(NextTick(time.Now(), d)) }

// NextTick returns the tick that is about d behind a moment: d/2 at least, less than 3*d/2. Whoever in this process
// asks for ticks of d, or of a multiple of it, has them at the same moments, so that the process, and the servers that
// it asks, wake up once for all of them.
func NextTick(after time.Time, d time.Duration) time.Time {
	on := after.Add(time.Duration(phase.Load()))
	passed := on.Sub(on.Truncate(d))
	if passed > d/2 {
		passed -= d
	}
	return after.Add(d - passed)
}

// Spread gives this process ticks at moments of its own. Without it they are where the clock's seconds begin.
func Spread() { phase.CompareAndSwap(0, 1+int64(rand.N(time.Hour))) } //nolint:gosec // spreads ticks, no secret

var phase atomic.Int64

// About is For with d spread by [Jitter].
func About(ctx context.Context, d time.Duration) error { return For(ctx, Jitter(d)) }

// Jitter spreads d by a quarter either way, so that instances do not act in step.
func Jitter(d time.Duration) time.Duration {
	return time.Duration(float64(d) * (0.75 + rand.Float64()/2)) //nolint:gosec // spreads pauses, no secret
}
