package api

import (
	"sync"
	"time"

	"golang.org/x/time/rate"
)

// newLimit is one API key's limit: so many requests a second, as many at once as a second brings.
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

// limits are those of every key that has asked. The zero value limits nothing.
type limits struct {
	perSecond float64
	mu        sync.Mutex
	of        map[keyHash]*rate.Limiter
}

// spend takes a request from the limit of a key.
func (l *limits) spend(key keyHash) time.Duration {
	if l.perSecond <= 0 {
		return 0
	}
	l.mu.Lock()
	limit := l.of[key]
	if limit == nil {
		if l.of == nil {
			l.of = make(map[keyHash]*rate.Limiter)
		}
		limit = newLimit(l.perSecond)
		l.of[key] = limit
	}
	l.mu.Unlock()
	return spend(limit)
}
