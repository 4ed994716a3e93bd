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

func TestTick(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		for i := range 20 {
			after := time.Now()
			_ = pause.For(t.Context(), time.Duration(i)*73*time.Millisecond) // the duration of the work at each tick
			half := pause.NextTick(time.Now(), time.Second/2)
			second := pause.NextTick(time.Now(), time.Second)
			if d := second.Sub(half) % (time.Second / 2); d != 0 {
				t.Errorf("those who wait for a second are %v apart from those who wait for half of one", d)
			}
			began := time.Now()
			if err := pause.Tick(t.Context(), time.Second); err != nil || !time.Now().Equal(second) {
				t.Errorf("%v after %v, the tick is %v away", err, time.Since(began), second.Sub(began))
			}
			if d := time.Since(began); d < time.Second/2 || d >= 3*time.Second/2 {
				t.Errorf("%v", d)
			}
			if d := time.Since(after); i > 0 && i < 7 && d != time.Second {
				t.Errorf("%d: a tick is %v behind the last", i, d)
			}
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if err := pause.Tick(ctx, time.Hour); !errors.Is(err, context.Canceled) {
			t.Errorf("%v", err)
		}
	})
}

func TestLonger(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		longer, end := pause.Longer(ctx, time.Minute)
		defer end()
		time.AfterFunc(time.Hour, cancel)
		began := time.Now()
		<-longer.Done()
		if d := time.Since(began); d != time.Hour+time.Minute {
			t.Errorf("it ends after %v", d)
		}
		longer, end = pause.Longer(t.Context(), time.Minute)
		if end(); longer.Err() == nil {
			t.Error("it does not end at once")
		}
	})
}

func TestBackoff(t *testing.T) {
	t.Parallel()
	b := pause.Backoff{First: time.Second, Most: 5 * time.Second}
	for range 2 {
		if b.Waited() {
			t.Error("there was a wait")
		}
		for _, want := range []time.Duration{1, 2, 4, 5, 5} {
			if got := b.Next(); got != want*time.Second || !b.Waited() {
				t.Errorf("the wait is %v, want %v s", got, want)
			}
		}
		b.Reset()
	}
}
