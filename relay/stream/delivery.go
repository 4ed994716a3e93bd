// Package stream publishes to one stream: it makes the attempts, and decides which events are given up because the sink
// refuses them. The workers of the slot reader and the claims of a sweep share it.
package stream

import (
	"context"
	"errors"
	"sync"

	"github.com/google/uuid"

	"posthaste/outbox"
)

// Delivery is one publication of events, in their order. It belongs to one goroutine.
type Delivery struct {
	// Events are those to publish, or that are published.
	Events   []*outbox.Record
	stream   string
	delivery outbox.Delivery
	refusals *Refusals
	blockKey bool
	// left are the indexes of the events that were given up.
	left map[int]bool
}

// Deliver begins a publication over a lane of stream. With blockKey, the events after a refused one of the same
// aggregate are given up with it.
func Deliver(lane outbox.LanePublisher, stream string, events []*outbox.Record, refusals *Refusals, blockKey bool,
) *Delivery {
	return &Delivery{
		Events: events, stream: stream, delivery: lane.Deliver(events), refusals: refusals, blockKey: blockKey,
	}
}

// Publish makes one attempt. It returns the events that are given up from now on: park them, and call it again. Without
// these and an error, the publication is complete. An event that is refused, and not given up yet, is an
// *outbox.PoisonError.
func (d *Delivery) Publish(ctx context.Context) (receipt outbox.Receipt, given []outbox.Refused, err error) {
	receipt, err = d.delivery.Publish(ctx)
	var refused *outbox.PoisonError
	switch {
	case err == nil && len(d.left) == 0:
		d.refusals.Accepted(d.stream)
		return receipt, nil, nil
	case !errors.As(err, &refused):
		return receipt, nil, err
	}
	attempts, park := d.refusals.Refused(d.stream, refused)
	if !park {
		return receipt, nil, err
	}
	e := d.Events[refused.Index]
	if d.left == nil {
		d.left = map[int]bool{}
	}
	d.left[refused.Index] = true
	given = []outbox.Refused{{Event: e, Err: refused.Err, Class: refused.Class, Attempts: attempts}}
	// The events to give up with it: all if the stream takes none, with block-key those of the aggregate.
	var also func(o *outbox.Record) bool
	other := outbox.Refused{Err: refused.Err, Class: refused.Class}
	switch {
	case refused.All:
		also = func(*outbox.Record) bool { return true }
	case d.blockKey:
		other = Waits(e, e.ID.String())
		also = func(o *outbox.Record) bool {
			return o.AggregateType == e.AggregateType && o.AggregateID == e.AggregateID
		}
	}
	for _, i := range d.delivery.Skip(also) {
		d.left[i] = true
		other.Event = d.Events[i]
		given = append(given, other)
	}
	return receipt, given, nil
}

// Sent returns the events that were not given up.
func (d *Delivery) Sent() []*outbox.Record {
	if len(d.left) == 0 {
		return d.Events
	}
	sent := make([]*outbox.Record, 0, len(d.Events))
	for i, e := range d.Events {
		if !d.left[i] {
			sent = append(sent, e)
		}
	}
	return sent
}

// Waits returns the refusal of an event that waits for the parked one with an id.
func Waits(e *outbox.Record, id string) outbox.Refused {
	return outbox.Refused{Event: e, Err: errors.New("waits for dead event " + id), Class: "blocked"}
}

// Taken returns the refusals of events whose stream is one of another type.
func Taken(events []*outbox.Record, why *outbox.TakenError) []outbox.Refused {
	refused := make([]outbox.Refused, len(events))
	for i, e := range events {
		refused[i] = outbox.Refused{Event: e, Err: why, Class: "taken", Attempts: 1}
	}
	return refused
}

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
