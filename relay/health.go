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
	conditionRedis    = "redis"          // the sink does not answer, or has not the durability asked for
	conditionLead     = "lead"           // a leader does not come to its work
	conditionAdopt    = "adopt"          // the gates cannot be raised
	conditionRestore  = "restore"        // a stream is not whole yet: the sink or Postgres has forgotten something
	conditionForeign  = "foreign_stream" // a stream belongs to another database
	conditionTwin     = "copy"           // another database with this one's identity is led
	conditionPublish  = "publish"        // publishing fails and is repeated
	conditionStreams  = "streams"        // some streams stand still while others go on
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

// health collects conditions by name. Setting one again replaces its detail.
type health struct {
	mu       sync.Mutex
	bad      map[string]string // not ready
	degraded map[string]string
	// until is when a condition ends by itself.
	until map[string]time.Time
}

func newHealth() *health {
	return &health{bad: map[string]string{}, degraded: map[string]string{}, until: map[string]time.Time{}}
}

// fail and degrade report whether the condition is news.
func (h *health) fail(name, detail string) bool    { return h.put(h.bad, name, detail) }
func (h *health) degrade(name, detail string) bool { return h.put(h.degraded, name, detail) }

// lasts sets a condition that ends by itself: degraded if events flow.
func (h *health) lasts(name, detail string, flows bool, until time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	set, other := h.bad, h.degraded
	if flows {
		set, other = other, set
	}
	delete(other, name)
	set[name], h.until[name] = detail, until
}

// lasting reports whether a condition is set that ends by itself.
func (h *health) lasting(name string) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return time.Now().Before(h.until[name])
}

func (h *health) put(m map[string]string, name, detail string) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	_, known := m[name]
	m[name] = detail
	delete(h.until, name)
	return !known
}

// clear removes a condition of either kind and reports whether there was one.
func (h *health) clear(name string) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	_, a := h.bad[name]
	_, b := h.degraded[name]
	delete(h.bad, name)
	delete(h.degraded, name)
	delete(h.until, name)
	return a || b
}

func (h *health) lists() (bad, degraded []string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for name, end := range h.until {
		if time.Now().After(end) {
			delete(h.bad, name)
			delete(h.degraded, name)
			delete(h.until, name)
		}
	}
	return render(h.bad), render(h.degraded)
}

func render(m map[string]string) []string {
	out := make([]string, 0, len(m))
	for _, k := range slices.Sorted(maps.Keys(m)) {
		if m[k] != "" {
			k += ": " + m[k]
		}
		out = append(out, k)
	}
	return out
}
