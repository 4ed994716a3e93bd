package shared_test

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"posthaste/internal/pause"
	"posthaste/internal/shared"
)

// counting returns a [shared.Look] whose Read takes took and returns its number of calls.
func counting(took time.Duration) *shared.Look[int64] {
	var n atomic.Int64
	return &shared.Look[int64]{Timeout: 5 * time.Second, Read: func(ctx context.Context) (int64, error) {
		return n.Add(1), pause.For(ctx, took)
	}}
}

func TestEverybodyWhoAsksAtOnceHasOneAnswer(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l := counting(100 * time.Millisecond)
		var all sync.WaitGroup
		for range 40 {
			all.Go(func() {
				if n, err := l.Get(t.Context()); n != 1 || err != nil {
					t.Errorf("look %d, %v", n, err)
				}
			})
		}
		all.Wait()
		for _, wait := range []time.Duration{0, 999 * time.Millisecond} {
			_ = pause.For(t.Context(), wait)
			if n, err := l.Get(t.Context()); n != 1 || err != nil {
				t.Errorf("%v later: look %d, %v", wait, n, err)
			}
		}
		_ = pause.For(t.Context(), 2*time.Millisecond)
		if n, err := l.Get(t.Context()); n != 2 || err != nil {
			t.Errorf("ten times as long as it took: look %d, %v", n, err)
		}
		l.Forget()
		if n, err := l.Get(t.Context()); n != 3 || err != nil {
			t.Errorf("after something was changed: look %d, %v", n, err)
		}
	})
}

// If the first caller gives up, the others still get their answer.
func TestAnAnswerOutlivesWhoAskedFirst(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l := counting(time.Second)
		gone, leave := context.WithCancelCause(t.Context())
		first := make(chan struct{})
		go func() { defer close(first); _, _ = l.Get(gone) }()
		synctest.Wait()
		impatient, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		defer cancel()
		if _, err := l.Get(impatient); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("who waits for another's answer: %v", err)
		}
		leave(errors.New("gone"))
		if n, err := l.Get(t.Context()); n != 1 || err != nil {
			t.Errorf("look %d, %v", n, err)
		}
		<-first
	})
}

func TestALookIsBoundedAndItsErrorShared(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l := counting(time.Hour)
		began := time.Now()
		if _, err := l.Get(t.Context()); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%v", err)
		}
		if n, err := l.Get(t.Context()); n != 1 || err == nil || time.Since(began) != 5*time.Second {
			t.Errorf("look %d, %v, after %v", n, err, time.Since(began))
		}
	})
}
