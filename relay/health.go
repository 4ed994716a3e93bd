package relay

import (
	"maps"
	"slices"
	"sync"
	"time"
)

// Health is the content of a readiness response.
type Health struct {
	// Role is "leader" or "standby".
	Role string `json:"role"`
	// Ready is false when events do not flow, or may not.
	Ready bool `json:"-"`
	// Reasons lists why the instance is not ready; each begins with a name from a closed set.
	Reasons []string `json:"reasons,omitempty"`
	// Degraded lists problems that do not keep events from flowing.
	Degraded []string `json:"degraded,omitempty"`
}

// The conditions, each the first word of a reason. The set is closed.
const (
	conditionPostgres = "postgres"       // there is no session with it
	conditionSchema   = "schema"         // it is missing, or newer than the binary
	conditionState    = "postgres_state" // it keeps the lock session and answers nothing else
	conditionRedis    = "redis"          // the sink, or "nats", does not answer, or lacks the configured durability
	conditionLead     = "lead"           // a leader does not come to its work
	conditionAdopt    = "adopt"          // the gates cannot be raised
	conditionRestore  = "restore"        // a stream is not whole yet: the sink or Postgres has forgotten something
	conditionForeign  = "foreign_stream" // a stream belongs to another database
	conditionTwin     = "copy"           // another database with this one's identity is led
	conditionPublish  = "publish"        // publishing fails and is repeated
	conditionStreams  = "streams"        // publishing to some streams is blocked
	conditionSettle   = "settle"         // what is published cannot be settled
	conditionPark     = "park"           // a refused event cannot be parked
	conditionAudit    = "audit"          // the table cannot be audited
	conditionSlot     = "slot"           // the slot cannot be streamed
	conditionWAL      = "wal"            // the slot holds back more than it may, and cannot be moved or dropped
	conditionStalled  = "stalled"        // nothing moves
	conditionLayout   = "layout"         // the names of streams are being changed
	conditionPhase    = "phase"          // what the leader does fails again and again
	conditionLeader   = "leader"         // who holds the leader's lock makes no progress
	conditionTable    = "table"          // somebody has changed the table so that a promise does not hold
	conditionHistory  = "history"        // what is past the retention cannot be deleted
	conditionTrim     = "trim"           // a stream cannot be trimmed
)

// health collects conditions by name. Setting one again replaces it.
type health struct {
	sink       string // the sink's condition
	mu         sync.Mutex
	conditions map[string]trouble
	runs       map[string]failures // by condition
}

// trouble is what is wrong with a condition. It ends by itself at until, unless that is zero.
type trouble struct {
	detail   string
	degraded bool
	until    time.Time
}

func newHealth(sink string) *health {
	return &health{sink: sink, conditions: map[string]trouble{}, runs: map[string]failures{}}
}

// fail reports whether the condition is news, as degrade does.
func (h *health) fail(name, detail string) bool {
	return h.put(name, trouble{detail: detail})
}

func (h *health) degrade(name, detail string) bool {
	return h.put(name, trouble{detail, true, time.Time{}})
}

// lasts sets a condition that ends by itself: degraded if events flow.
func (h *health) lasts(name, detail string, flows bool, until time.Time) {
	h.put(name, trouble{detail, flows, until})
}

func (h *health) put(name string, c trouble) (news bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	before, known := h.conditions[name]
	h.conditions[name] = c
	return !known || before.degraded != c.degraded
}

// failing reports whether a condition is set that keeps events from flowing.
func (h *health) failing(name string) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	c, known := h.conditions[name]
	return known && !c.degraded
}

// lasting reports whether a condition is set that ends by itself.
func (h *health) lasting(name string) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return time.Now().Before(h.conditions[name].until)
}

// clear removes a condition and reports whether there was one.
func (h *health) clear(name string) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	_, known := h.conditions[name]
	delete(h.conditions, name)
	return known
}

func (h *health) lists() (bad, degraded []string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, name := range slices.Sorted(maps.Keys(h.conditions)) {
		c, text := h.conditions[name], name
		if c.detail != "" {
			text += ": " + c.detail
		}
		switch {
		case !c.until.IsZero() && time.Now().After(c.until):
			delete(h.conditions, name)
		case c.degraded:
			degraded = append(degraded, text)
		default:
			bad = append(bad, text)
		}
	}
	return bad, degraded
}

// steady is how long something must fail repeatedly before health reports it, and how long it must work before health
// clears it.
const steady = 30 * time.Second

// failures is a run of failures: since when, until when, and how much had moved when it began.
type failures struct {
	since, last time.Time
	moved       int64
}

// recurs records a failure, and detects failures that repeat although each attempt works in between. When they have
// repeated for the time of steady, with no pause of that length, the relay is not ready, or degraded if events still
// flow. It reports whether this failure begins a run.
func (r *reporter) recurs(condition string, err error, flows bool) (first bool) {
	h := r.health
	h.mu.Lock()
	defer h.mu.Unlock()
	now := time.Now()
	run := h.runs[condition]
	if now.Sub(run.last) > steady {
		run, first = failures{since: now, moved: r.moved.Load()}, true
	}
	run.last = now
	h.runs[condition] = run
	if now.Sub(run.since) >= steady {
		h.conditions[condition] = trouble{err.Error(), flows || r.moved.Load() != run.moved, now.Add(steady)}
	}
	return first
}

// recovered ends a run of failures.
func (h *health) recovered(condition string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if _, ok := h.runs[condition]; ok {
		delete(h.runs, condition)
		delete(h.conditions, condition)
	}
}
