// Package outage keeps repeated failures from filling the log: it logs the first failure, then their number every
// half minute, and the end.
package outage

import (
	"math"
	"strings"
	"sync"
	"time"
	"unicode"
)

const (
	// every is how long failures are only counted after one was logged.
	every = 30 * time.Second
	// kindsMost bounds the kinds of failures that are logged at once: a text may differ each time.
	kindsMost = 10
)

// Run is a run of failures of one operation. The zero value has not begun. It is safe for concurrent use.
type Run struct {
	mu          sync.Mutex
	failures    int
	since, said time.Time
	// kinds are the kinds of failures that were logged since the run began.
	kinds map[string]bool
}

// Failed counts a failure. It reports whether to log it, with these attributes: the first one, a kind that was not
// logged before, or the first after half a minute.
func (r *Run) Failed(err error) (attrs []any, say bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := time.Now()
	if r.failures++; r.failures == 1 {
		r.since, r.kinds = now, map[string]bool{}
	}
	k := kind(err)
	news := !r.kinds[k] && len(r.kinds) < kindsMost
	if !news && now.Sub(r.said) < every {
		return nil, false
	}
	if news {
		r.kinds[k] = true
	}
	r.said = now
	if r.failures == 1 {
		return []any{"err", err}, true
	}
	return append(r.attrs(now), "err", err), true
}

// Over ends the run. It reports whether to log the end, with these attributes, which it does after a failure.
func (r *Run) Over() (attrs []any, say bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.failures == 0 {
		return nil, false
	}
	attrs = r.attrs(time.Now())
	r.failures, r.kinds = 0, nil
	return attrs, true
}

// attrs has the number and the duration of the failures. The caller holds mu.
func (r *Run) attrs(now time.Time) []any {
	return []any{"failures", r.failures, "seconds", math.Round(now.Sub(r.since).Seconds())}
}

// kind is an error's text without numbers: ports, positions and the like differ within a kind.
func kind(err error) string {
	return strings.Map(func(c rune) rune {
		if unicode.IsDigit(c) {
			return -1
		}
		return c
	}, err.Error())
}
