package api

import (
	"sync"
	"time"

	"golang.org/x/time/rate"
)

// newLimit is one limit: so many requests a second, as many at once as a second brings.
func newLimit(perSecond float64) *rate.Limiter {
	return rate.NewLimiter(rate.Limit(perSecond), max(int(perSecond), 1))
}

// spend takes a request from the limit and returns zero, or returns how long until there is one. A refusal takes
// nothing: a reservation that is given back would lose what others reserved meanwhile.
func spend(l *rate.Limiter) time.Duration {
	if l.Allow() {
		return 0
	}
	missing := (1 - l.Tokens()) / float64(l.Limit())
	return max(time.Duration(missing*float64(time.Second)), time.Millisecond)
}

// maxLimits is how many limits a generation has, at most; one takes about 200 bytes.
const maxLimits = 1 << 16

// limits are those of everybody who has asked lately. The zero value limits nothing.
//
// They are kept in two generations. A limit that is used moves to the young one. When that is full, or as old as it
// takes an unused limit to be as good as new, the old generation is forgotten. So nothing is lost that limits anybody,
// unless more than maxLimits ask within that time: then who comes back after so many others begins anew.
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

// refill is how long it takes until a limit that nobody uses is as good as new.
func refill(l *rate.Limiter) time.Duration {
	return time.Duration(float64(l.Burst()) / float64(l.Limit()) * float64(time.Second))
}
