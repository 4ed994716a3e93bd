package relay

import (
	"slices"
	"sync"

	"github.com/google/uuid"

	"posthaste/outbox"
)

// Poison is the policy for the later events of an aggregate when one of its events is parked.
type Poison string

const (
	// PoisonSkip publishes them.
	PoisonSkip Poison = "skip"
	// PoisonBlockKey also parks them, so that they can be retried in order.
	PoisonBlockKey Poison = "block-key"
)

// blocks holds the parked events, for block-key. A nil *blocks blocks nothing.
type blocks struct {
	// reading serializes refreshes: each one resets recent, which collects the events that are parked while it reads.
	reading callLock

	mu sync.Mutex
	// dead are the parked events by aggregate, and byID the same ones. Their Seq is the place in the aggregate's order
	// that an event had first; a retry gives its row a new number.
	dead map[[2]string][]*outbox.Dead
	byID map[uuid.UUID]*outbox.Dead
	// recent are the events parked since the last refresh began: the list it reads may not have them yet.
	recent []outbox.Dead
}

func newBlocks() *blocks {
	b := &blocks{reading: make(callLock, 1)}
	b.clear()
	return b
}

func (b *blocks) clear() {
	b.dead, b.byID = map[[2]string][]*outbox.Dead{}, map[uuid.UUID]*outbox.Dead{}
}

// callLock is a mutex that may be held during calls of a port, which can be slow: a goroutine that waits for a
// sync.Mutex would stop the clock of a synctest bubble. It has room for one.
type callLock chan struct{}

func (l callLock) Lock()   { l <- struct{}{} }
func (l callLock) Unlock() { <-l }

// refresh replaces the parked events by those that list reads from the table.
func (b *blocks) refresh(list func() ([]outbox.Dead, error)) error {
	b.reading.Lock()
	defer b.reading.Unlock()
	b.mu.Lock()
	b.recent = nil
	b.mu.Unlock()
	dead, err := list()
	if err != nil {
		return err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.clear()
	for _, d := range slices.Concat(dead, b.recent) {
		b.put(d)
	}
	return nil
}

// put adds an event. One that was known is parked again after a retry: its first place stays. The caller holds mu.
func (b *blocks) put(d outbox.Dead) {
	if known := b.byID[d.ID]; known != nil {
		known.RetrySeq = 0
		return
	}
	k := [2]string{d.AggregateType, d.AggregateID}
	b.dead[k] = append(b.dead[k], &d)
	b.byID[d.ID] = &d
}

// add notes an event that was just parked.
func (b *blocks) add(e *outbox.Record) {
	if b == nil {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	d := outbox.Dead{ID: e.ID, Seq: e.Seq, AggregateType: e.AggregateType, AggregateID: e.AggregateID}
	b.put(d)
	b.recent = append(b.recent, d)
}

// blocker returns the id of the parked event that e has to wait for, or "". A parked event that is back in the outbox
// for a retry blocks only events before its new row. Later events follow it anyway, unless it is parked again.
func (b *blocks) blocker(e *outbox.Record) string {
	if b == nil {
		return ""
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.find(e)
}

// blockers is blocker for events in their order. No refresh comes between them: the table does not know yet which of
// them are parked again.
func (b *blocks) blockers(events []*outbox.Record) []string {
	ids := make([]string, len(events))
	if b == nil {
		return ids
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	for i, e := range events {
		ids[i] = b.find(e)
	}
	return ids
}

func (b *blocks) find(e *outbox.Record) string {
	if len(b.dead) == 0 {
		return ""
	}
	place, known := e.Seq, b.byID[e.ID]
	if known != nil {
		place = known.Seq
	}
	for _, d := range b.dead[[2]string{e.AggregateType, e.AggregateID}] {
		passed := d.RetrySeq != 0 && d.RetrySeq < e.Seq
		if d.ID != e.ID && d.Seq < place && !passed {
			if known != nil {
				known.RetrySeq = 0 // it is parked again
			}
			return d.ID.String()
		}
	}
	if known != nil && e.Seq != known.Seq {
		known.RetrySeq = e.Seq // the table said so, or will
	}
	return ""
}
