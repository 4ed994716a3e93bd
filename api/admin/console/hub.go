package console

import (
	"encoding/json"
	"fmt"
	"net/http"
	"sync"
	"time"

	"posthaste/api/admin"
)

const (
	// maxViewers bounds the pages that are open at once.
	maxViewers = 16
	// maxQueued is the maximum number of unsent messages of a viewer. Beyond it the viewer is disconnected, and its
	// page reconnects.
	maxQueued = 8
	// writeTimeout bounds one message to one viewer.
	writeTimeout = 5 * time.Second
)

// hub sends messages to viewers and never blocks on one.
type hub struct {
	mu      sync.Mutex
	viewers map[chan []byte]bool
	closed  bool
	// awake is closed while there are viewers, and replaced when the last one leaves.
	awake chan struct{}
}

func newHub() *hub { return &hub{viewers: map[chan []byte]bool{}, awake: make(chan struct{})} }

// join adds a viewer, unless there are too many. Its channel is closed when hub disconnects it.
func (h *hub) join() (ch chan []byte, ok bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed || len(h.viewers) >= maxViewers {
		return nil, false
	}
	if len(h.viewers) == 0 {
		close(h.awake)
	}
	ch = make(chan []byte, maxQueued)
	h.viewers[ch] = true
	return ch, true
}

// leave removes a viewer unless it was disconnected before.
func (h *hub) leave(ch chan []byte) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.remove(ch)
}

func (h *hub) remove(ch chan []byte) {
	if !h.viewers[ch] {
		return
	}
	delete(h.viewers, ch)
	close(ch)
	if len(h.viewers) == 0 {
		h.awake = make(chan struct{})
	}
}

// close disconnects all viewers and refuses new ones.
func (h *hub) close() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.closed = true
	for ch := range h.viewers {
		h.remove(ch)
	}
}

func (h *hub) watched() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.viewers) > 0
}

// waking returns a channel that is closed while there are viewers.
func (h *hub) waking() <-chan struct{} {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.awake
}

// send queues a message for every viewer and disconnects those whose queue is full.
func (h *hub) send(event string, v any) {
	b, err := json.Marshal(v)
	if err != nil {
		return // unreachable: a test encodes every type that is sent
	}
	msg := fmt.Appendf(nil, "event: %s\ndata: %s\n\n", event, b)
	h.mu.Lock()
	defer h.mu.Unlock()
	for ch := range h.viewers {
		select {
		case ch <- msg:
		default:
			h.remove(ch)
		}
	}
}

func (c *Console) stream(w http.ResponseWriter, r *http.Request) {
	ch, ok := c.hub.join()
	if !ok {
		w.Header().Set("Retry-After", "5")
		admin.Problem(w, http.StatusServiceUnavailable, "too many pages are open on this process")
		return
	}
	defer c.hub.leave(ch)
	rc := http.NewResponseController(w)
	w.Header().Set("Content-Type", "text/event-stream")
	write := func(b []byte) error {
		_ = rc.SetWriteDeadline(time.Now().Add(writeTimeout))
		if _, err := w.Write(b); err != nil {
			return err
		}
		if err := rc.Flush(); err != nil {
			return err
		}
		// HTTP/2 resets an idle stream when its write deadline passes; HTTP/1 does not.
		_ = rc.SetWriteDeadline(time.Time{})
		return nil
	}
	first, _ := json.Marshal(c.assemble(time.Now()))
	if write(fmt.Appendf(nil, "retry: 1000\nevent: state\ndata: %s\n\n", first)) != nil {
		return
	}
	for {
		select {
		case <-r.Context().Done():
			return
		case b, ok := <-ch:
			if !ok || write(b) != nil {
				return
			}
		}
	}
}
