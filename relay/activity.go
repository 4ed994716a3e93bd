package relay

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"posthaste/outbox"
)

// Status is a view of this instance.
type Status struct {
	Mode     outbox.Mode
	Phase    string
	Leader   bool
	Epoch    int64
	Inflight int
	Since    time.Time
}

// activity holds the current phase of this instance and the owner under which it acts. It is safe for concurrent use.
type activity struct {
	*reporter
	store States

	// leading is set while this instance holds the leader lock.
	leading atomic.Bool

	mu    sync.Mutex
	phase phase
	owner outbox.Owner
	since time.Time // of the phase
}

// state reads the relay's state, and shows which mode is desired.
func (a *activity) state(ctx context.Context) (outbox.State, error) {
	st, err := a.store.State(ctx)
	if err == nil {
		a.metrics.setDesired(st.Desired)
		a.sessionWorks()
	}
	return st, err
}

// own records under which owner this instance acts.
func (a *activity) own(o outbox.Owner) {
	a.mu.Lock()
	a.owner = o
	a.mu.Unlock()
	a.metrics.epoch.Set(float64(o.Epoch))
}

// epoch is the one this instance acts under.
func (a *activity) epoch() int64 {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.owner.Epoch
}

// enter records a phase and logs and counts a change of mode once.
func (a *activity) enter(p phase, reason string) {
	a.mu.Lock()
	from := a.phase
	a.phase = p
	if from != p {
		a.since = time.Now()
	}
	a.mu.Unlock()
	if from == p {
		return
	}
	a.log.Debug("phase", "from", from, "to", p, "reason", reason)
	// Adopting is a moment between two modes, not a mode.
	if p == phaseAdopt {
		return
	}
	a.metrics.setMode(p.mode())
}

func (a *activity) current() phase {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.phase
}

// status returns the current view of this instance.
func (a *activity) status() Status {
	a.mu.Lock()
	defer a.mu.Unlock()
	return Status{
		Mode: a.phase.mode(), Phase: string(a.phase), Leader: a.leading.Load(), Epoch: a.owner.Epoch,
		Since: a.since,
	}
}
