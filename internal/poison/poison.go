// Package poison decides what happens to events that a sink refuses because of the event itself. The stream and the
// sweep share it.
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

// WaitsFor is the reason of an event with ClassBlocked.
func WaitsFor(id string) string { return "waits for parked event " + id }

// Behind returns, when e is parked because it was refused, a filter for the events of its delivery to park with it,
// and the class and reason of those: all events if the stream takes none; with block-key those of the aggregate; else
// none (nil).
func Behind(refused *outbox.PoisonError, e *outbox.Record, blockKey bool) (
	also func(*outbox.Record) bool, class string, why error,
) {
	switch {
	case refused.All:
		return func(*outbox.Record) bool { return true }, refused.Class, refused.Err
	case blockKey:
		return func(o *outbox.Record) bool {
			return o.AggregateType == e.AggregateType && o.AggregateID == e.AggregateID
		}, ClassBlocked, errors.New(WaitsFor(e.ID.String()))
	}
	return nil, "", nil
}

// Refusals counts refusals by event, and records the streams that refuse every event. The zero value is ready to use.
// It is safe for concurrent use.
type Refusals struct {
	mu sync.Mutex
	// streams has the streams that refused an event since the last batch that they took completely.
	streams map[string]*refusal
}

type refusal struct {
	tries map[uuid.UUID]int
	// all is how often the stream took no event at all.
	all int
	// parked is set after an event was parked: the next events then need fewer attempts.
	parked bool
}

// Refused counts a refusal, and reports the number of attempts and whether to park the event now. The count continues
// until [Refusals.Parked], because the parking may be rolled back.
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
	// A stream whose event was parked usually refuses the next one, too: that is parked at once. A guess needs all
	// attempts, because the reply may have been a fault of the moment.
	if max(n, s.all) < Attempts && (!s.parked || refused.Guessed) {
		return n, false
	}
	s.parked = s.parked || !refused.Guessed
	return n, true
}

// Parked drops the count of an event whose parking is committed.
func (r *Refusals) Parked(stream string, id uuid.UUID) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if s := r.streams[stream]; s != nil {
		delete(s.tries, id)
	}
}

// Accepted drops the counts of a stream that took a whole batch.
func (r *Refusals) Accepted(stream string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.streams, stream)
}
