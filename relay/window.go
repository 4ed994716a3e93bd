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
	freed         chan struct{} // has room for one signal
}

func newWindow(events, bytes int) *window {
	return &window{maxEvents: events, maxBytes: bytes, freed: make(chan struct{}, 1)}
}

// acquire waits until the events fit. What exceeds the whole window fits when the window is empty, so that one event
// larger than it does not wait forever.
func (w *window) acquire(ctx context.Context, events, bytes int) error {
	for {
		if w.try(events, bytes) {
			return nil
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-w.freed:
		}
	}
}

func (w *window) try(events, bytes int) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.events > 0 && (w.events+events > w.maxEvents || w.bytes+bytes > w.maxBytes) {
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
	select {
	case w.freed <- struct{}{}:
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
