package relay

import (
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// The goroutine that has waited longest is next, and the bubble's clock advances while a goroutine waits.
func TestCallLock(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var l callLock
		var wg sync.WaitGroup
		var order []int
		for n := range 4 {
			wg.Go(func() {
				elapse(time.Duration(n) * time.Millisecond)
				l.Lock()
				defer l.Unlock()
				elapse(time.Second)
				order = append(order, n)
			})
		}
		wg.Wait()
		if !slices.Equal(order, []int{0, 1, 2, 3}) {
			t.Errorf("the order is %v", order)
		}
	})
}
