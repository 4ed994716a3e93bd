package relay

import (
	"context"
	"sync"
)

// window bounds what was routed and is not settled, by events and by bytes. One goroutine acquires, any may release.
type window struct {
	maxEvents, maxBytes int

	mu sync.Mutex
	// held is not settled; of that, queued is not published.
	held, queued load
	// unsettled is how many events are published, and behind the mark. held also has events that are settled, but
	// behind one of their stream that is not.
	unsettled int
	// freed and pressed have room for one signal: there is room again, and the settler should make room.
	freed, pressed chan struct{}
}

type load struct{ events, bytes int }

func (l *load) add(events, bytes int) {
	l.events += events
	l.bytes += bytes
	if l.events < 0 || l.bytes < 0 {
		panic("relay: window released more than it held")
	}
}

func newWindow(events, bytes int) *window {
	return &window{
		maxEvents: events, maxBytes: bytes,
		freed: make(chan struct{}, 1), pressed: make(chan struct{}, 1),
	}
}

// acquire waits until the events fit. What exceeds the whole window fits when the window is empty. In the middle of a
// transaction only unpublished events count: nothing of it is settled before the rest is published.
func (w *window) acquire(ctx context.Context, events, bytes int, middle bool) error {
	for {
		if w.try(events, bytes, middle) {
			return nil
		}
		signal(w.pressed)
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-w.freed:
		}
	}
}

func (w *window) try(events, bytes int, middle bool) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	counted := w.held
	if middle {
		counted = w.queued
	}
	if counted.events > 0 && (counted.events+events > w.maxEvents || counted.bytes+bytes > w.maxBytes) {
		return false
	}
	w.held.add(events, bytes)
	w.queued.add(events, bytes)
	if w.half() {
		signal(w.pressed)
	}
	return true
}

// published notes that events are not queued any more: they were published, except those that were parked.
func (w *window) published(events, bytes, parked int) {
	w.mu.Lock()
	w.queued.add(-events, -bytes)
	w.unsettled += events - parked
	w.mu.Unlock()
	signal(w.freed)
}

// settled notes that published events are settled.
func (w *window) settled(count int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.unsettled -= count
}

func (w *window) release(events, bytes int) {
	w.mu.Lock()
	w.held.add(-events, -bytes)
	w.mu.Unlock()
	signal(w.freed)
}

func signal(to chan<- struct{}) {
	select {
	case to <- struct{}{}:
	default:
	}
}

// reset empties the window, when no goroutine uses it.
func (w *window) reset() {
	w.mu.Lock()
	w.held, w.queued, w.unsettled = load{}, load{}, 0
	w.mu.Unlock()
}

// inflight is what is not settled.
func (w *window) inflight() (events, bytes int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.held.events, w.held.bytes
}

// behind is how many events are published and not settled.
func (w *window) behind() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.unsettled
}

// halfFull reports whether there may be no room for another piece.
func (w *window) halfFull() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.half()
}

func (w *window) half() bool {
	return w.held.events >= (w.maxEvents+1)/2 || w.held.bytes >= w.maxBytes/2
}
