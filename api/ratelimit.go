package api

import (
	"sync"
	"time"

	"golang.org/x/time/rate"
)

// newLimit permits perSecond requests a second, with a burst of one second.
func newLimit(perSecond float64) *rate.Limiter {
	return rate.NewLimiter(rate.Limit(perSecond), max(int(perSecond), 1))
}

// spend takes a request from the limit and returns zero, or returns the time until one is available. A refusal reserves
// nothing, because cancelling a reservation loses concurrent ones.
func spend(l *rate.Limiter) time.Duration {
	if l.Allow() {
		return 0
	}
	missing := (1 - l.Tokens()) / float64(l.Limit())
	return max(time.Duration(missing*float64(time.Second)), time.Millisecond)
}

// maxLimits bounds the limits of a generation. A limit takes about 200 bytes.
const maxLimits = 1 << 16

// limits holds one limit per recent key. The zero value limits nothing.
//
// It keeps two generations. A limit that is used moves to the young one. When the young one is full, or older than an
// unused limit takes to refill, the old one is dropped. A limit is therefore lost early only if more than maxLimits
// keys are used within that time; it then starts full.
type limits[K comparable] struct {
	perSecond  float64
	mu         sync.Mutex
	young, old map[K]*rate.Limiter
	// born is when the young generation began.
	born time.Time
}

// spend takes a request from the limit of a key.
func (l *limits[K]) spend(key K) time.Duration {
	if l.perSecond <= 0 {
		return 0
	}
	return spend(l.of(key))
}

// check is spend, as the problem of a request that is refused.
func (l *limits[K]) check(key K) *problem {
	if wait := l.spend(key); wait > 0 {
		return &problem{kind: kindRateLimited, retryAfter: wait}
	}
	return nil
}

func (l *limits[K]) of(key K) *rate.Limiter {
	l.mu.Lock()
	defer l.mu.Unlock()
	if limit := l.young[key]; limit != nil {
		return limit
	}
	limit := l.old[key]
	if limit == nil {
		limit = newLimit(l.perSecond)
	}
	if now := time.Now(); l.young == nil || len(l.young) >= maxLimits || now.Sub(l.born) >= refill(limit) {
		l.old, l.young, l.born = l.young, make(map[K]*rate.Limiter), now
	}
	l.young[key] = limit
	return limit
}

// refill is how long an unused limit takes to become full.
func refill(l *rate.Limiter) time.Duration {
	return time.Duration(float64(l.Burst()) / float64(l.Limit()) * float64(time.Second))
}
