package outbox

import (
	"sync"

	"github.com/google/uuid"
)

// Poison is what happens to the later events of an aggregate when one of its events is parked.
type Poison string

const (
	// PoisonSkip publishes them.
	PoisonSkip Poison = "skip"
	// PoisonBlockKey parks them too, so that they can be retried in order.
	PoisonBlockKey Poison = "block-key"
)

// blocks knows the parked events, for block-key. A nil *blocks blocks nothing.
type blocks struct {
	mu   sync.RWMutex
	dead map[[2]string][]Dead
	// orig is the place in its aggregate's order that a parked event had first; a retry gives it a new seq.
	orig map[uuid.UUID]int64
	// recent are the events parked since the last refresh began: the list it reads may not have them yet.
	recent []Dead
}

// refresh replaces what is known by what list reads from the table.
func (b *blocks) refresh(list func() ([]Dead, error)) error {
	b.mu.Lock()
	b.recent = nil
	b.mu.Unlock()
	dead, err := list()
	if err != nil {
		return err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.dead, b.orig = map[[2]string][]Dead{}, map[uuid.UUID]int64{}
	for _, d := range dead {
		b.put(d)
	}
	for _, d := range b.recent {
		b.put(d)
	}
	return nil
}

// put adds an event that is not known yet. The caller holds mu.
func (b *blocks) put(d Dead) {
	if _, known := b.orig[d.ID]; known {
		return
	}
	k := [2]string{d.AggregateType, d.AggregateID}
	b.dead[k] = append(b.dead[k], d)
	b.orig[d.ID] = d.Seq
}

// add notes an event that was just parked.
func (b *blocks) add(e *Event) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.dead == nil {
		b.dead, b.orig = map[[2]string][]Dead{}, map[uuid.UUID]int64{}
	}
	d := Dead{ID: e.ID, Seq: e.Seq, AggregateType: e.AggregateType, AggregateID: e.AggregateID}
	b.put(d)
	b.recent = append(b.recent, d)
}

// blocker returns the id of the parked event that e has to wait for, or "".
func (b *blocks) blocker(e *Event) string {
	if b == nil {
		return ""
	}
	b.mu.RLock()
	defer b.mu.RUnlock()
	if len(b.dead) == 0 {
		return ""
	}
	place := e.Seq
	if seq, parked := b.orig[e.ID]; parked {
		place = seq
	}
	for _, d := range b.dead[[2]string{e.AggregateType, e.AggregateID}] {
		if d.ID != e.ID && d.Seq < place {
			return d.ID.String()
		}
	}
	return ""
}
