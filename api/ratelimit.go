package api

import (
	"time"

	"golang.org/x/time/rate"
)

// newLimit is one API key's limit: so many requests a second, as many at once as a second brings.
func newLimit(perSecond float64) *rate.Limiter {
	return rate.NewLimiter(rate.Limit(perSecond), max(int(perSecond), 1))
}

// spend takes a request from the limit and returns zero, or returns how long until there is one.
func spend(l *rate.Limiter) time.Duration {
	r := l.Reserve()
	wait := r.Delay()
	if wait > 0 {
		r.Cancel()
	}
	return wait
}
