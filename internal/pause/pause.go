// Package pause waits, and stops waiting when a context ends.
package pause

import (
	"context"
	"math/rand/v2"
	"sync/atomic"
	"time"
)

// For waits for d, or until ctx ends; then it returns ctx's error. A caller that checks ctx may ignore it.
func For(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
	case <-t.C:
	}
	return ctx.Err() // also if both happen at once
}

// Longer returns a context that ends d after ctx, and a function that ends it at once.
func Longer(ctx context.Context, d time.Duration) (context.Context, context.CancelFunc) {
	longer, end := context.WithCancel(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, func() {
		_ = For(longer, d)
		end()
	})
	return longer, func() { stop(); end() }
}

// Tick waits until the next tick: see [NextTick].
func Tick(ctx context.Context, d time.Duration) error { return For(ctx, UntilTick(d)) }

// UntilTick returns the time until the next tick: see [NextTick].
func UntilTick(d time.Duration) time.Duration { return time.Until(NextTick(time.Now(), d)) }

// NextTick returns the tick about d after a moment: at least d/2, less than 3*d/2. Callers in this process with the
// same d, or a multiple of it, get the same moments, so that the process, and the servers that it queries, wake up
// once for all of them.
func NextTick(after time.Time, d time.Duration) time.Time {
	on := after.Add(time.Duration(phase.Load()))
	passed := on.Sub(on.Truncate(d))
	if passed > d/2 {
		passed -= d
	}
	return after.Add(d - passed)
}

// Spread shifts the ticks of this process by a random phase. Without it they are at whole seconds.
func Spread() { phase.CompareAndSwap(0, 1+int64(rand.N(time.Hour))) } //nolint:gosec // spreads ticks, no secret

var phase atomic.Int64

// About is For with d spread by [Jitter].
func About(ctx context.Context, d time.Duration) error { return For(ctx, Jitter(d)) }

// Jitter spreads d by a quarter either way, so that instances do not act in step.
func Jitter(d time.Duration) time.Duration {
	return time.Duration(float64(d) * (0.75 + rand.Float64()/2)) //nolint:gosec // spreads pauses, no secret
}

// Backoff is the wait between attempts that fail: it doubles from First to Most.
type Backoff struct {
	First, Most time.Duration
	next        time.Duration
}

// Next returns the wait before the next attempt.
func (b *Backoff) Next() time.Duration {
	b.next = min(max(b.next*2, b.First), b.Most)
	return b.next
}

// Wait waits for about that long, or until ctx ends.
func (b *Backoff) Wait(ctx context.Context) { _ = About(ctx, b.Next()) }

// Waited reports whether there was a wait since the last Reset.
func (b *Backoff) Waited() bool { return b.next > 0 }

// Reset lets the waits begin at First again.
func (b *Backoff) Reset() { b.next = 0 }
