package relay

import (
	"sync"
	"time"
)

// steady is how long something must fail repeatedly before health reports it, and how long it must work before health
// clears it.
const steady = 30 * time.Second

// recurring detects failures that repeat although each attempt works in between. No single failure lasts long, but the
// problem does. It is safe for concurrent use.
type recurring struct {
	mu   sync.Mutex
	runs map[string]failures // by condition
}

// failures is a run of failures: since when, until when, and how much had moved when it began.
type failures struct {
	since, last time.Time
	moved       int64
}

// recurs records a failure. When failures have repeated for the time of steady, with no pause of that length, the relay
// is not ready, or degraded if events still flow. It reports whether this failure begins a run.
func (r *reporter) recurs(condition string, err error, flows bool) (first bool) {
	r.recurring.mu.Lock()
	defer r.recurring.mu.Unlock()
	now := time.Now()
	run := r.recurring.runs[condition]
	if now.Sub(run.last) > steady {
		run, first = failures{since: now, moved: r.moved.Load()}, true
	}
	run.last = now
	r.recurring.runs[condition] = run
	if now.Sub(run.since) >= steady {
		r.health.lasts(condition, err.Error(), flows || r.moved.Load() != run.moved, now.Add(steady))
	}
	return first
}

// recovered ends a run of failures.
func (r *reporter) recovered(condition string) {
	r.recurring.mu.Lock()
	defer r.recurring.mu.Unlock()
	if _, ok := r.recurring.runs[condition]; ok {
		delete(r.recurring.runs, condition)
		r.health.clear(condition)
	}
}
