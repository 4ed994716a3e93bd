// Package outage keeps what fails again and again from filling the log: its first failure is said, then how many there
// were every half minute, and its end.
package outage

import (
	"math"
	"strings"
	"sync"
	"time"
	"unicode"
)

const (
	// every is how long failures are only counted after something was said.
	every = 30 * time.Second
	// kindsMost bounds the kinds of failures that are said at once: a text may be another one each time.
	kindsMost = 10
)

// Run is a run of failures of one thing; the zero value is one that has not begun. It is safe for concurrent use.
type Run struct {
	mu          sync.Mutex
	failures    int
	since, said time.Time
	// kinds are the kinds of failures that were said since the run began.
	kinds map[string]bool
}

// Failed counts a failure. It returns what to log of it, as attributes, if that is to be logged: the first one, one of
// a kind that was not said before, or the first after half a minute.
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

// Over ends the run. It returns what to log of its end, as attributes, if there was a failure.
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

// attrs are how many failures there were, and for how long. The caller holds mu.
func (r *Run) attrs(now time.Time) []any {
	return []any{"failures", r.failures, "seconds", math.Round(now.Sub(r.since).Seconds())}
}

// kind is an error's text without its numbers: ports, positions and the like, in which failures of one kind differ.
func kind(err error) string {
	return strings.Map(func(c rune) rune {
		if unicode.IsDigit(c) {
			return -1
		}
		return c
	}, err.Error())
}
