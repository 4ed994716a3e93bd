package prove

import (
	"fmt"
	"sync"
	"time"

	"github.com/google/uuid"
)

// orders is what is known of the orders: what clients were answered, and what the stream has. It is the book of the
// stream of orders. It is safe for concurrent use.
type orders struct {
	mu sync.Mutex
	// answered are the orders that clients were told of, by their key.
	answered map[uuid.UUID]uuid.UUID
	// keys are all that were used, answered or not.
	keys map[uuid.UUID]bool
	// events are those in the stream with their order, inStream the other way round.
	events, inStream map[uuid.UUID]uuid.UUID
	// excused are orders whose events Redis has forgotten, and that are too old to have to come back.
	excused  map[uuid.UUID]bool
	repeated int
}

func newOrders() *orders {
	return &orders{
		answered: map[uuid.UUID]uuid.UUID{}, keys: map[uuid.UUID]bool{}, events: map[uuid.UUID]uuid.UUID{},
		inStream: map[uuid.UUID]uuid.UUID{}, excused: map[uuid.UUID]bool{},
	}
}

// use notes that a key is about to be used.
func (o *orders) use(key uuid.UUID) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.keys[key] = true
}

// answer notes the order that a client was told of. A key that was answered before has to get the same.
func (o *orders) answer(key, order uuid.UUID) *breach {
	o.mu.Lock()
	defer o.mu.Unlock()
	before, known := o.answered[key]
	if known {
		o.repeated++
	}
	if known && before != order {
		return &breach{
			Promise: "orders", Subject: order.String(),
			What: fmt.Sprintf("a key that has order %s was answered with order %s", before, order),
		}
	}
	o.answered[key] = order
	return nil
}

// see implements book.
func (o *orders) see(e entry) (uint32, *breach) {
	o.mu.Lock()
	defer o.mu.Unlock()
	b := &breach{Event: e.id.String(), Subject: e.subject}
	order, err := uuid.Parse(e.subject)
	if err != nil || e.typ != "order.created" {
		b.Promise, b.What = "phantom", "an event in the stream of orders that is none of an order"
		return 0, b
	}
	if _, again := o.inStream[order]; again {
		b.Promise, b.What = "duplicated", "an order that has an event in the stream already"
		return 0, b
	}
	o.events[e.id], o.inStream[order] = order, e.id
	delete(o.excused, order)
	return 0, nil
}

// unsee implements book.
func (o *orders) unsee(s sight) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.miss(s.id)
}

// miss takes back an event.
func (o *orders) miss(event uuid.UUID) {
	order := o.events[event]
	if sec, nsec := order.Time().UnixTime(); order.Version() == 7 && time.Since(time.Unix(sec, nsec)) > excusedAfter {
		o.excused[order] = true
	}
	delete(o.inStream, order)
	delete(o.events, event)
}

// forget implements book.
func (o *orders) forget() {
	o.mu.Lock()
	defer o.mu.Unlock()
	for event := range o.events {
		o.miss(event)
	}
}

// counts are how many keys were used, how many orders answered, and how many answers repeated an earlier one.
func (o *orders) counts() (keys, answered, repeated int) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return len(o.keys), len(o.answered), o.repeated
}
