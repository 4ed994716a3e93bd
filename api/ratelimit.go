package api

import (
	"sync"
	"time"

	"github.com/hashicorp/golang-lru/v2/simplelru"
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

// maxLimits is how many keys have a limit at once. A limit takes about 200 bytes.
const maxLimits = 1 << 16

// limits holds the limits of the keys that were used last. A limit is lost if maxLimits other keys are used after it;
// the key then has a full one.
type limits[K comparable] struct {
	perSecond float64
	mu        sync.Mutex
	recent    *simplelru.LRU[K, *rate.Limiter]
}

// newLimits permits perSecond requests a second of each key; any number if perSecond is zero.
func newLimits[K comparable](perSecond float64) *limits[K] {
	recent, err := simplelru.NewLRU[K, *rate.Limiter](maxLimits, nil)
	if err != nil {
		panic(err) // the size is not positive
	}
	return &limits[K]{perSecond: perSecond, recent: recent}
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
	limit, ok := l.recent.Get(key)
	if !ok {
		limit = newLimit(l.perSecond)
		l.recent.Add(key, limit)
	}
	return limit
}
