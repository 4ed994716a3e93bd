package api

import (
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"posthaste/internal/pause"
)

// A hundred clients of one key retry constantly. Refusals do not use up the limit: the key gets all of it.
func TestRefusalsCostNothing(t *testing.T) {
	t.Parallel()
	const perSecond, clients, last = 10, 100, 15 * time.Second
	synctest.Test(t, func(t *testing.T) {
		limit := newLimit(perSecond)
		end := time.Now().Add(last)
		var passed atomic.Int64
		var all sync.WaitGroup
		for range clients {
			all.Go(func() {
				for time.Now().Before(end) {
					wait := spend(limit)
					if wait == 0 {
						passed.Add(1)
						wait = time.Millisecond
					}
					_ = pause.For(t.Context(), wait)
				}
			})
		}
		all.Wait()
		want := int64(perSecond + perSecond*last/time.Second)
		if got := passed.Load(); got > want || got < want-perSecond/2 {
			t.Errorf("%d requests passed in %v, the limit allows %d", got, last, want)
		}
	})
}
