// Package pause waits, and stops waiting when a context ends.
package pause

import (
	"context"
	"math/rand/v2"
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

// About is For with d spread by [Jitter].
func About(ctx context.Context, d time.Duration) error { return For(ctx, Jitter(d)) }

// Jitter spreads d by a quarter either way, so that instances do not act in step.
func Jitter(d time.Duration) time.Duration {
	return time.Duration(float64(d) * (0.75 + rand.Float64()/2)) //nolint:gosec // spreads pauses, no secret
}
