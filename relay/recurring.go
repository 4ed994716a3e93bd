package relay

import (
	"sync"
	"time"
)

// steady is how long something may fail again and again before health shows it, and how long it must work until health
// forgets it.
const steady = 30 * time.Second

// recurring notices what fails again and again although it works in between: no single failure lasts, and still nothing
// gets better. It is safe for concurrent use.
type recurring struct {
	mu   sync.Mutex
	runs map[string]failures // by condition
}

// failures is a run of failures: since when, until when, and how much had moved when it began.
type failures struct {
	since, last time.Time
	moved       int64
}

// recurs notes a failure. Once such have come for steady, without a rest as long as that, the relay is not ready, or
// degraded where events flow all the same. It reports whether this failure begins a run.
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
