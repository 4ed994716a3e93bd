package api

import (
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
