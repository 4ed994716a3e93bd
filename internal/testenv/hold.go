package testenv

import (
	"net"
	"strings"
	"sync"
	"testing"
)

// Hold is a proxy that can delay what clients send, even until after the client has disconnected. A network that
// recovers, or a slow proxy, does the same.
type Hold struct {
	tb       testing.TB
	upstream string
	listener net.Listener
	wg       sync.WaitGroup

	mu      sync.Mutex
	conns   map[*heldConn]bool
	holding bool // also for new connections
	// text, if not empty, is the text from which on the next connection that sends it is held.
	text string
}

// heldConn is one connection through the proxy.
type heldConn struct {
	client, server net.Conn
	// kept is what was sent and not delivered; nil while everything passes.
	kept []byte
	hold bool
	// gone is set when the client has closed its side.
	gone bool
}

// NewHold starts a proxy for upstream ("host:port").
func NewHold(tb testing.TB, upstream string) *Hold {
	tb.Helper()
	l, err := (&net.ListenConfig{}).Listen(tb.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		tb.Fatal(err)
	}
	h := &Hold{tb: tb, upstream: upstream, listener: l, conns: map[*heldConn]bool{}}
	h.wg.Go(h.accept)
	tb.Cleanup(h.close)
	return h
}

// Addr returns the address to connect to.
func (h *Hold) Addr() string { return h.listener.Addr().String() }

// Hold keeps what is sent from now on over the existing connections and, with all, over new ones. Answers pass.
func (h *Hold) Hold(all bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.holding = all
	for c := range h.conns {
		c.hold = true
	}
}

// HoldFrom keeps what is sent over the first connection that sends a message containing text, from that message on.
func (h *Hold) HoldFrom(text string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.text = text
}

// Held returns how many connections have kept data that contains text.
func (h *Hold) Held(text string) int {
	h.mu.Lock()
	defer h.mu.Unlock()
	n := 0
	for c := range h.conns {
		if strings.Contains(string(c.kept), text) {
			n++
		}
	}
	return n
}

// Late returns how many connections the client has left and the server has not closed: the server may still execute
// what was sent over them.
func (h *Hold) Late() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	n := 0
	for c := range h.conns {
		if c.gone {
			n++
		}
	}
	return n
}

// Release delivers everything kept, also for clients that have disconnected, and keeps no more.
func (h *Hold) Release() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.holding, h.text = false, ""
	for c := range h.conns {
		_, _ = c.server.Write(c.kept) // the server may have closed it
		c.kept, c.hold = nil, false
		if c.gone {
			c.halfClose()
		}
	}
}

func (c *heldConn) halfClose() {
	if t, ok := c.server.(*net.TCPConn); ok {
		_ = t.CloseWrite()
	}
}

func (h *Hold) accept() {
	for {
		client, err := h.listener.Accept()
		if err != nil {
			return
		}
		server, err := (&net.Dialer{}).DialContext(h.tb.Context(), "tcp", h.upstream)
		if err != nil {
			_ = client.Close()
			continue
		}
		h.mu.Lock()
		c := &heldConn{client: client, server: server, hold: h.holding}
		h.conns[c] = true
		h.mu.Unlock()
		h.wg.Go(func() { h.forward(c) })
		h.wg.Go(func() { h.answer(c) })
	}
}

// forward copies what the client sends to the server, or keeps it.
func (h *Hold) forward(c *heldConn) {
	buf := make([]byte, 64<<10)
	for {
		n, err := c.client.Read(buf)
		h.mu.Lock()
		if h.text != "" && strings.Contains(string(buf[:n]), h.text) {
			c.hold, h.text = true, ""
		}
		if c.hold {
			c.kept = append(c.kept, buf[:n]...)
		} else if n > 0 {
			_, _ = c.server.Write(buf[:n])
		}
		if err != nil {
			c.gone = true
			if !c.hold {
				c.halfClose()
			}
			h.mu.Unlock()
			return
		}
		h.mu.Unlock()
	}
}

// answer copies what the server sends to the client, while it is connected.
func (h *Hold) answer(c *heldConn) {
	buf := make([]byte, 64<<10)
	for {
		n, err := c.server.Read(buf)
		if err != nil {
			break
		}
		_, _ = c.client.Write(buf[:n])
	}
	_, _ = c.client.Close(), c.server.Close()
	h.mu.Lock()
	delete(h.conns, c)
	h.mu.Unlock()
}

func (h *Hold) close() {
	_ = h.listener.Close()
	h.mu.Lock()
	for c := range h.conns {
		_, _ = c.client.Close(), c.server.Close()
	}
	h.mu.Unlock()
	h.wg.Wait()
}
