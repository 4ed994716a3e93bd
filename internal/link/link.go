// Package link is a TCP proxy that simulates network faults: it cuts connections, stalls them, delays them, loses
// replies, and switches to another server. It does not parse the bytes.
//
// A Link is between clients and one server at a time. It is safe for concurrent use.
package link

import (
	"context"
	"fmt"
	"io"
	"net"
	"sync"
	"time"
)

// Trouble is the faults of a link. The zero value has none.
type Trouble struct {
	// Refuse cuts existing connections, and new ones as soon as they are accepted.
	Refuse bool
	// Stall stops both directions. Bytes sent during the stall are delivered when it ends.
	Stall bool
	// LoseReplies discards the bytes of the server. Connections that have lost bytes are cut when the trouble ends.
	LoseReplies bool
	// Delay is added to each direction.
	Delay time.Duration
	// BytesPerSecond limits each direction of each connection; 0: no limit.
	BytesPerSecond int
}

type Link struct {
	listener net.Listener
	ctx      context.Context // ends with Close
	stop     context.CancelFunc
	done     sync.WaitGroup

	mu       sync.Mutex
	upstream string
	trouble  Trouble
	changed  chan struct{} // closed when trouble changes
	pairs    map[*pair]bool
}

// pair is a connection of a client and the one to the server.
type pair struct {
	client, server net.Conn
	// lost: bytes of the server were discarded, so later ones make no sense. Link.mu guards it.
	lost bool
}

func (p *pair) close() { _, _ = p.client.Close(), p.server.Close() }

// New returns a link on a free port of loopback that leads to upstream, a "host:port".
func New(ctx context.Context, upstream string) (*Link, error) {
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return nil, fmt.Errorf("listen for a link: %w", err)
	}
	l := &Link{listener: listener, upstream: upstream, changed: make(chan struct{}), pairs: map[*pair]bool{}}
	l.ctx, l.stop = context.WithCancel(context.WithoutCancel(ctx))
	l.done.Go(l.accept)
	return l, nil
}

// Addr returns the address to connect to; it never changes.
func (l *Link) Addr() string { return l.listener.Addr().String() }

// To sends new connections to another server, and cuts those to the old one.
func (l *Link) To(upstream string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.upstream = upstream
	l.cut(func(*pair) bool { return true })
}

// Set replaces the trouble.
func (l *Link) Set(t Trouble) {
	l.mu.Lock()
	defer l.mu.Unlock()
	was := l.trouble
	l.trouble = t
	close(l.changed)
	l.changed = make(chan struct{})
	l.cut(func(p *pair) bool { return t.Refuse || was.LoseReplies && !t.LoseReplies && p.lost })
}

// Close cuts every connection and accepts no more.
func (l *Link) Close() {
	l.stop()
	_ = l.listener.Close()
	l.mu.Lock()
	l.cut(func(*pair) bool { return true })
	l.mu.Unlock()
	l.done.Wait()
}

// cut closes the selected connections. The caller holds mu.
func (l *Link) cut(which func(p *pair) bool) {
	for p := range l.pairs {
		if which(p) {
			p.close()
			delete(l.pairs, p)
		}
	}
}

func (l *Link) accept() {
	for {
		client, err := l.listener.Accept()
		if err != nil {
			return
		}
		l.done.Go(func() { l.serve(client) })
	}
}

// serve connects a client to the server, and copies in both directions until one side closes.
func (l *Link) serve(client net.Conn) {
	l.mu.Lock()
	upstream, refuse := l.upstream, l.trouble.Refuse
	l.mu.Unlock()
	if refuse {
		_ = client.Close()
		return
	}
	server, err := (&net.Dialer{Timeout: 5 * time.Second}).DialContext(l.ctx, "tcp", upstream)
	if err != nil {
		_ = client.Close()
		return
	}
	p := &pair{client: client, server: server}
	l.mu.Lock()
	stale := l.upstream != upstream || l.trouble.Refuse || l.ctx.Err() != nil
	if !stale {
		l.pairs[p] = true
	}
	l.mu.Unlock()
	if stale {
		p.close()
		return
	}
	var both sync.WaitGroup
	both.Go(func() { l.pump(p, server, client, false) })
	both.Go(func() { l.pump(p, client, server, true) })
	both.Wait()
	l.mu.Lock()
	delete(l.pairs, p)
	l.mu.Unlock()
}

// pump copies from src as the trouble allows. reply: src is the server.
func (l *Link) pump(p *pair, dst io.Writer, src io.Reader, reply bool) {
	defer p.close()
	buf := make([]byte, 16<<10)
	for {
		n, err := src.Read(buf)
		if n > 0 && l.passes(p, n, reply) {
			if _, err := dst.Write(buf[:n]); err != nil {
				return
			}
		}
		if err != nil {
			return
		}
	}
}

// passes waits while the current trouble delays n bytes, and reports whether they arrive at all.
func (l *Link) passes(p *pair, n int, reply bool) bool {
	var waited bool
	for {
		l.mu.Lock()
		t, changed := l.trouble, l.changed
		if t.LoseReplies && reply {
			p.lost = true
		}
		lost := reply && p.lost
		l.mu.Unlock()
		switch {
		case lost || l.ctx.Err() != nil:
			return false
		case t.Stall:
			l.wait(changed, 0)
		case waited:
			return true
		default:
			d := t.Delay
			if t.BytesPerSecond > 0 {
				d += time.Duration(n) * time.Second / time.Duration(t.BytesPerSecond)
			}
			if d == 0 {
				return true
			}
			l.wait(changed, d)
			waited = true
		}
	}
}

// wait waits for d, or until the trouble changes; with d = 0 only for the change.
func (l *Link) wait(changed <-chan struct{}, d time.Duration) {
	var over <-chan time.Time
	if d > 0 {
		t := time.NewTimer(d)
		defer t.Stop()
		over = t.C
	}
	select {
	case <-changed:
	case <-over:
	case <-l.ctx.Done():
	}
}
