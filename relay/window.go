package relay

import (
	"context"
	"sync"
)

// window bounds what is published and not yet settled, by events and by bytes. One goroutine acquires, any may release.
type window struct {
	maxEvents, maxBytes int

	mu            sync.Mutex
	events, bytes int
	// freed and pressed have room for one signal: there is room again, and somebody waits for it.
	freed, pressed chan struct{}
}

func newWindow(events, bytes int) *window {
	return &window{
		maxEvents: events, maxBytes: bytes,
		freed: make(chan struct{}, 1), pressed: make(chan struct{}, 1),
	}
}

// acquire waits until the events fit. What exceeds the whole window fits when the window is empty, so that one event
// larger than it does not wait forever. Nobody waits in the middle of a transaction: nothing of it is settled before
// the rest is published.
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
	if w.events > 0 && !middle && (w.events+events > w.maxEvents || w.bytes+bytes > w.maxBytes) {
		return false
	}
	w.events += events
	w.bytes += bytes
	return true
}

func (w *window) release(events, bytes int) {
	w.mu.Lock()
	w.events -= events
	w.bytes -= bytes
	if w.events < 0 || w.bytes < 0 {
		w.mu.Unlock()
		panic("relay: window released more than it held")
	}
	w.mu.Unlock()
	signal(w.freed)
}

func signal(to chan<- struct{}) {
	select {
	case to <- struct{}{}:
	default:
	}
}

// reset forgets what is held, when nobody uses the window.
func (w *window) reset() {
	if n, b := w.held(); n > 0 {
		w.release(n, b)
	}
}

func (w *window) held() (events, bytes int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.events, w.bytes
}

// halfFull reports whether there may be no room for another piece.
func (w *window) halfFull() bool {
	events, bytes := w.held()
	return events >= (w.maxEvents+1)/2 || bytes >= w.maxBytes/2
}
