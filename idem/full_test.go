//go:build full

package idem

import (
	"fmt"
	"testing"
	"time"
)

func TestFullMemoryPerKey(t *testing.T) { memoryPerKey(t, 1_000_000) }

// Five hundred requests wait for one operation of another process, and all get its result at once. Other work on the
// machine only makes a result worse.
func TestFullWaiters(t *testing.T) {
	least := time.Hour
	for n := 0; n < 10 && least > 250*time.Millisecond; n++ {
		least = min(least, manyWaiters(t, 500))
	}
	fmt.Printf("500 waiters: the last got its result %v after the publication\n", least)
	if least > 250*time.Millisecond {
		t.Errorf("a waiter was released after %v, want 250 ms at most", least)
	}
}
