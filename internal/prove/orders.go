package prove

import (
	"fmt"
	"sync"
	"time"

	"github.com/google/uuid"

	"posthaste/internal/lab/oracle"
)

// orders records the orders: the answers to clients, and the events in the stream. It is the book of the stream of
// orders. It is safe for concurrent use.
type orders struct {
	mu sync.Mutex
	// keys maps each key that was used to the order in the client's answer; to uuid.Nil without an answer.
	keys map[uuid.UUID]uuid.UUID
	// events maps the events in the stream to their orders, and inStream maps the orders to their events.
	events, inStream map[uuid.UUID]uuid.UUID
	// excused are orders whose events Redis has lost and that are too old to be restored.
	excused  map[uuid.UUID]bool
	repeated int
}

func newOrders() *orders {
	return &orders{
		keys: map[uuid.UUID]uuid.UUID{}, events: map[uuid.UUID]uuid.UUID{}, inStream: map[uuid.UUID]uuid.UUID{},
		excused: map[uuid.UUID]bool{},
	}
}

// use notes that a key is about to be used.
func (o *orders) use(key uuid.UUID) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.keys[key] = uuid.Nil
}

// answer records the order that a client got. Every answer to a key must have the same order.
func (o *orders) answer(key, order uuid.UUID) *oracle.Breach {
	o.mu.Lock()
	defer o.mu.Unlock()
	before := o.keys[key]
	o.keys[key] = order
	if before == uuid.Nil {
		return nil
	}
	o.repeated++
	if before != order {
		return &oracle.Breach{
			Promise: "orders", Subject: order.String(),
			What: fmt.Sprintf("a key that has order %s was answered with order %s", before, order),
		}
	}
	return nil
}

// See implements book.
func (o *orders) See(e oracle.Entry) *oracle.Breach {
	o.mu.Lock()
	defer o.mu.Unlock()
	b := &oracle.Breach{Event: e.ID.String(), Subject: e.Subject}
	order, err := uuid.Parse(e.Subject)
	if err != nil || e.Type != "order.created" {
		b.Promise, b.What = "phantom", "an event in the stream of orders that does not belong to an order"
		return b
	}
	if _, again := o.inStream[order]; again {
		b.Promise, b.What = "duplicated", "an order that has an event in the stream already"
		return b
	}
	o.events[e.ID], o.inStream[order] = order, e.ID
	delete(o.excused, order)
	return nil
}

// Unsee implements book.
func (o *orders) Unsee(event uuid.UUID) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.miss(event)
}

func (o *orders) miss(event uuid.UUID) {
	order := o.events[event]
	sec, nsec := order.Time().UnixTime()
	if order.Version() == 7 && time.Since(time.Unix(sec, nsec)) > oracle.ExcusedAfter {
		o.excused[order] = true
	}
	delete(o.inStream, order)
	delete(o.events, event)
}

// Forget implements book.
func (o *orders) Forget() {
	o.mu.Lock()
	defer o.mu.Unlock()
	for event := range o.events {
		o.miss(event)
	}
}

// counts returns the numbers of used keys, and of answers that repeated an earlier one.
func (o *orders) counts() (keys, repeated int) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return len(o.keys), o.repeated
}
