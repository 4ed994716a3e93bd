package api

import (
	"sync"
	"time"
)

// bucket is one API key's token bucket: rate requests a second, as many at once as a second brings.
type bucket struct {
	rate float64

	mu     sync.Mutex
	tokens float64
	last   time.Time
}

func newBucket(rate float64) *bucket {
	return &bucket{rate: rate, tokens: max(rate, 1), last: time.Now()}
}

// take spends a token and returns zero, or returns how long until there is one.
func (b *bucket) take() time.Duration {
	b.mu.Lock()
	defer b.mu.Unlock()
	now := time.Now()
	b.tokens = min(b.tokens+now.Sub(b.last).Seconds()*b.rate, max(b.rate, 1))
	b.last = now
	if b.tokens >= 1 {
		b.tokens--
		return 0
	}
	return max(time.Duration((1-b.tokens)/b.rate*float64(time.Second)), time.Millisecond)
}
