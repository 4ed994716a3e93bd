// Package batch lets concurrent calls share requests. A call that arrives alone is sent at once. Calls that arrive
// while the maximum number of requests is in flight share the next one.
package batch

import (
	"context"
	"slices"
	"sync"
)

// Queue has the calls that wait for their request. It is safe for concurrent use.
type Queue[C any] struct {
	// Send sends a batch, which it gets from Take. The batch may be empty, because its calls were sent by another Send
	// or gave up. Send may call next to end its flight before it returns.
	Send func(next func())
	// Flights is the maximum number of flights.
	Flights int
	// Most is the maximum number of calls in a batch; 0: no maximum.
	Most int
	// Apart reports whether two calls must not be in one batch; nil: any two may.
	Apart func(a, b *C) bool

	mu      sync.Mutex
	waiting []*C
	flying  int
}

// Do adds c and waits until done is closed or ctx ends. It reports whether c was taken; a call that was not taken is
// removed.
func (q *Queue[C]) Do(ctx context.Context, c *C, done <-chan struct{}) (taken bool) {
	q.mu.Lock()
	q.waiting = append(q.waiting, c)
	q.start()
	q.mu.Unlock()
	select {
	case <-done:
		return true
	case <-ctx.Done():
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	i := slices.Index(q.waiting, c)
	if i >= 0 {
		q.waiting = slices.Delete(q.waiting, i, i+1)
	}
	return i < 0
}

// start starts a flight if one may start. The caller holds mu.
func (q *Queue[C]) start() {
	if q.flying == q.Flights || len(q.waiting) == 0 {
		return
	}
	q.flying++
	next := sync.OnceFunc(func() {
		q.mu.Lock()
		defer q.mu.Unlock()
		q.flying--
		q.start()
	})
	go func() {
		defer next()
		q.Send(next)
	}()
}

// Take removes the oldest calls from the queue, as many as one batch may have.
func (q *Queue[C]) Take() []*C {
	q.mu.Lock()
	defer q.mu.Unlock()
	var batch []*C
	rest := q.waiting[:0]
	for _, c := range q.waiting {
		if q.Most > 0 && len(batch) == q.Most ||
			q.Apart != nil && slices.ContainsFunc(batch, func(b *C) bool { return q.Apart(b, c) }) {
			rest = append(rest, c)
		} else {
			batch = append(batch, c)
		}
	}
	clear(q.waiting[len(rest):])
	q.waiting = rest
	return batch
}

// State returns the numbers of flights and of waiting calls.
func (q *Queue[C]) State() (flying, waiting int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.flying, len(q.waiting)
}
