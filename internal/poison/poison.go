// Package poison decides what becomes of events that a sink refuses for their own sake: the same for the stream and the
// sweep.
package poison

import (
	"errors"
	"sync"

	"github.com/google/uuid"

	"posthaste/outbox"
)

// Attempts is how often an event is tried before it is parked.
const Attempts = 3

// ClassBlocked is the class of an event that is parked because of another one.
const ClassBlocked = "blocked"

// WaitsFor is the reason of such an event.
func WaitsFor(id string) string { return "waits for parked event " + id }

// Behind tells, when e is parked because it was refused, which events of its delivery have to be parked with it, and as
// what: all, if the stream takes none; with block-key those of its aggregate; else none (nil).
func Behind(refused *outbox.PoisonError, e *outbox.Event, blockKey bool) (
	also func(*outbox.Event) bool, class string, why error,
) {
	switch {
	case refused.All:
		return func(*outbox.Event) bool { return true }, refused.Class, refused.Err
	case blockKey:
		return func(o *outbox.Event) bool {
			return o.AggregateType == e.AggregateType && o.AggregateID == e.AggregateID
		}, ClassBlocked, errors.New(WaitsFor(e.ID.String()))
	}
	return nil, "", nil
}

// Refusals counts how often events were refused, and knows the streams that refuse every event. The zero value is
// ready, and safe for concurrent use.
type Refusals struct {
	mu sync.Mutex
	// streams has the streams that refused an event since their last batch without one.
	streams map[string]*refusal
}

type refusal struct {
	tries map[uuid.UUID]int
	// all is how often it took no event at all.
	all int
	// parked is set when an event was parked: the next ones need not be tried as often.
	parked bool
}

// Refused takes a refusal, and reports whether the event is to be parked now, and after how many attempts. They count
// on until [Refusals.Parked]: what is to be parked may still be rolled back.
func (r *Refusals) Refused(stream string, refused *outbox.PoisonError) (attempts int, park bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.streams == nil {
		r.streams = map[string]*refusal{}
	}
	s := r.streams[stream]
	if s == nil {
		s = &refusal{tries: map[uuid.UUID]int{}}
		r.streams[stream] = s
	}
	s.tries[refused.ID]++
	n := s.tries[refused.ID]
	if refused.All {
		s.all++
	}
	// A stream that has refused an event refuses the next one too, as a rule: nobody waits for it twice.
	if max(n, s.all) < Attempts && !s.parked {
		return n, false
	}
	s.parked = true
	return n, true
}

// Parked forgets the attempts of an event that is parked for good.
func (r *Refusals) Parked(stream string, id uuid.UUID) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if s := r.streams[stream]; s != nil {
		delete(s.tries, id)
	}
}

// Accepted forgets that a stream refused events: it took a batch with all in it.
func (r *Refusals) Accepted(stream string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.streams, stream)
}
