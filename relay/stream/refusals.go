package stream

import (
	"sync"

	"github.com/google/uuid"

	"posthaste/outbox"
)

// Attempts is how often an event is tried before it is parked.
const Attempts = 3

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
