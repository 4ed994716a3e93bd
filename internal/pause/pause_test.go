package pause_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"posthaste/internal/pause"
)

func TestFor(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		if err := pause.For(t.Context(), time.Hour); err != nil || time.Since(began) != time.Hour {
			t.Errorf("%v after %v", err, time.Since(began))
		}
		ctx, cancel := context.WithTimeoutCause(t.Context(), time.Minute, errors.New("why"))
		defer cancel()
		began = time.Now()
		if err := pause.For(ctx, time.Hour); !errors.Is(err, context.DeadlineExceeded) ||
			time.Since(began) != time.Minute {
			t.Errorf("cut short: %v after %v", err, time.Since(began))
		}
		began = time.Now()
		_ = pause.About(t.Context(), time.Hour)
		if d := time.Since(began); d < 45*time.Minute || d > 75*time.Minute {
			t.Errorf("about an hour is %v", d)
		}
	})
}
