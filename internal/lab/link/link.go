// Package link is a TCP proxy that simulates network faults: it cuts connections, stalls them, delays them, loses
// replies, delivers requests late, and switches to another server. It does not parse the bytes.
//
// A Link is between clients and one server at a time. It is safe for concurrent use.
package link

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"sync"
	"syscall"
	"time"

	"posthaste/internal/lab/local"
	"posthaste/internal/pause"
)

// Trouble is the faults of a link. The zero value has none.
type Trouble struct {
	// Refuse cuts existing connections, and new ones as soon as they are accepted.
	Refuse bool
	// Stall stops both directions. Bytes sent during the stall are delivered when it ends.
	Stall bool
	// LoseReplies discards the bytes of the server, LoseRequests those of clients. Connections that have lost bytes are
	// cut when the trouble ends.
	LoseReplies, LoseRequests bool
	// CutReplies and CutRequests cut a connection after so many bytes of the server, or of the client; 0: never.
	CutReplies, CutRequests int
	// Delay is added to each direction.
	Delay time.Duration
	// BytesPerSecond limits each direction of each connection; 0: no limit.
	BytesPerSecond int
}

type Link struct {
	addr   string
	hold   *os.File        // of the port
	ctx    context.Context // ends with Close
	stop   context.CancelFunc
	done   sync.WaitGroup
	copies func(l *Link, p *pair)

	mu       sync.Mutex
	listener net.Listener
	down     bool
	upstream string
	trouble  Trouble
	changed  chan struct{} // closed when trouble changes
	pairs    map[*pair]bool
	// holding also holds new connections. text, if not empty, is that from which on the next connection that sends it
	// is held.
	holding bool
	text    string
	// shut are the addresses of clients that are refused.
	shut map[string]bool
}

// pair is a connection of a client and the one to the server.
type pair struct {
	client, server net.Conn
	source         string

	// lost: bytes of the server were discarded, so later ones make no sense; deaf is the same of the client. hold: kept
	// collects what the client sends. gone: the client has closed its side. replies and requests are how many bytes
	// were passed on under the current trouble. Link.mu guards them.
	lost, deaf, hold, gone bool
	kept                   []byte
	replies, requests      int
}

func (p *pair) close() { _, _ = p.client.Close(), p.server.Close() }

// New returns a link on a free port of loopback that leads to upstream, a "host:port".
func New(ctx context.Context, upstream string) (*Link, error) {
	return open(ctx, upstream, (*Link).pass)
}

// open is New with the function that copies between the two sides of a pair until one of them closes.
func open(ctx context.Context, upstream string, pass func(l *Link, p *pair)) (*Link, error) {
	port, hold, err := local.ReservePort()
	if err != nil {
		return nil, fmt.Errorf("listen for a link: %w", err)
	}
	l := &Link{
		addr: fmt.Sprintf("127.0.0.1:%d", port), hold: hold, upstream: upstream, changed: make(chan struct{}),
		pairs: map[*pair]bool{}, shut: map[string]bool{}, copies: pass,
	}
	l.ctx, l.stop = context.WithCancel(context.WithoutCancel(ctx))
	if err := l.listen(); err != nil {
		_ = hold.Close()
		return nil, err
	}
	return l, nil
}

// Addr returns the address to connect to; it never changes.
func (l *Link) Addr() string { return l.addr }

// Up accepts connections again after Down. The port is reserved, but a process that is being started has a copy of the
// closed socket until its program begins.
func (l *Link) Up() {
	began, err := time.Now(), l.listen()
	for errors.Is(err, syscall.EADDRINUSE) && time.Since(began) < 10*time.Second {
		_ = pause.For(l.ctx, time.Millisecond)
		err = l.listen()
	}
	if err != nil {
		panic(err)
	}
}

func (l *Link) listen() error {
	listener, err := (&net.ListenConfig{}).Listen(l.ctx, "tcp", l.addr)
	if err != nil {
		return fmt.Errorf("listen for a link: %w", err)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.listener, l.down = listener, false
	l.done.Go(func() { l.accept(listener) })
	return nil
}

// Down cuts every connection. New ones are refused by the system, as with a server that does not run.
func (l *Link) Down() {
	l.mu.Lock()
	defer l.mu.Unlock()
	_ = l.listener.Close()
	l.down = true
	l.cut(func(*pair) bool { return true })
}

// Port is the port of Addr.
func (l *Link) Port() (port int) {
	_, text, _ := net.SplitHostPort(l.addr)
	port, _ = strconv.Atoi(text)
	return port
}

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
	l.cut(func(p *pair) bool {
		return t.Refuse || was.LoseReplies && !t.LoseReplies && p.lost || was.LoseRequests && !t.LoseRequests && p.deaf
	})
	for p := range l.pairs {
		p.replies, p.requests = 0, 0
	}
}

// Shut cuts connections from an address, such as "127.0.0.2", and refuses new ones, until it is called with false.
func (l *Link) Shut(source string, shut bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.shut[source] = shut
	l.cut(func(p *pair) bool { return shut && p.source == source })
}

// Hold keeps what clients send from now on over the existing connections and, with all, over new ones. Replies pass.
func (l *Link) Hold(all bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.holding = all
	for p := range l.pairs {
		p.hold = true
	}
}

// HoldFrom keeps what is sent over the first connection that sends a message containing text, from that message on.
func (l *Link) HoldFrom(text string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.text = text
}

// Held returns how many connections have kept data that contains text.
func (l *Link) Held(text string) int {
	return l.count(func(p *pair) bool { return bytes.Contains(p.kept, []byte(text)) })
}

// Late returns how many connections the client has left and the server has not closed: the server may still execute
// what was sent over them.
func (l *Link) Late() int { return l.count(func(p *pair) bool { return p.gone }) }

func (l *Link) count(which func(p *pair) bool) (n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for p := range l.pairs {
		if which(p) {
			n++
		}
	}
	return n
}

// Release delivers everything kept, also for clients that have disconnected, and keeps no more.
func (l *Link) Release() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.holding, l.text = false, ""
	for p := range l.pairs {
		_, _ = p.server.Write(p.kept) // the server may have closed it
		p.kept, p.hold = nil, false
		if p.gone {
			p.halfClose()
		}
	}
}

// Close cuts every connection and accepts no more.
func (l *Link) Close() {
	l.stop()
	l.Down()
	l.done.Wait()
	_ = l.hold.Close()
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

func (l *Link) accept(listener net.Listener) {
	for {
		client, err := listener.Accept()
		if err != nil {
			return
		}
		l.done.Go(func() { l.serve(client) })
	}
}

// serve connects a client to the server, and copies in both directions until one side closes.
func (l *Link) serve(client net.Conn) {
	source, _, _ := net.SplitHostPort(client.RemoteAddr().String())
	l.mu.Lock()
	upstream, refuse := l.upstream, l.trouble.Refuse || l.shut[source]
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
	p := &pair{client: client, server: server, source: source}
	l.mu.Lock()
	stale := l.upstream != upstream || l.trouble.Refuse || l.shut[source] || l.down
	if !stale {
		p.hold = l.holding
		l.pairs[p] = true
	}
	l.mu.Unlock()
	if stale {
		p.close()
		return
	}
	l.copies(l, p)
	l.mu.Lock()
	delete(l.pairs, p)
	l.mu.Unlock()
}

// pass copies bytes as the trouble allows.
func (l *Link) pass(p *pair) {
	var both sync.WaitGroup
	both.Go(func() { l.requests(p) })
	both.Go(func() { l.replies(p) })
	both.Wait()
}

// requests copies what the client sends, as the trouble allows, or keeps it. When the client has closed its side, the
// server may still have something to do, and ends the connection itself.
func (l *Link) requests(p *pair) {
	buf := make([]byte, 64<<10)
	for {
		n, err := p.client.Read(buf)
		if n > 0 && !l.keeps(p, buf[:n]) && l.passes(p, n, false) {
			part, cut := l.within(p, buf[:n], false)
			if _, err := p.server.Write(part); err != nil || cut {
				p.close()
				return
			}
		}
		switch {
		case errors.Is(err, net.ErrClosed): // it was cut
			return
		case err != nil:
			l.mu.Lock()
			if p.gone = true; !p.hold {
				p.halfClose()
			}
			l.mu.Unlock()
			return
		}
	}
}

// keeps reports whether what the client has sent is kept, and keeps it.
func (l *Link) keeps(p *pair, sent []byte) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.text != "" && bytes.Contains(sent, []byte(l.text)) {
		p.hold, l.text = true, ""
	}
	if p.hold {
		p.kept = append(p.kept, sent...)
	}
	return p.hold
}

func (p *pair) halfClose() {
	if t, ok := p.server.(*net.TCPConn); ok {
		_ = t.CloseWrite()
	}
}

// replies copies what the server sends, as the trouble allows, until it closes the connection.
func (l *Link) replies(p *pair) {
	defer p.close()
	buf := make([]byte, 16<<10)
	for {
		n, err := p.server.Read(buf)
		cut := false
		if n > 0 && l.passes(p, n, true) {
			var part []byte
			part, cut = l.within(p, buf[:n], true)
			_, _ = p.client.Write(part) // the client may have left
		}
		if err != nil || cut {
			return
		}
	}
}

// within returns how much of b may pass before the connection is cut, and whether it is.
func (l *Link) within(p *pair, b []byte, reply bool) (part []byte, cut bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	passed, most := &p.requests, l.trouble.CutRequests
	if reply {
		passed, most = &p.replies, l.trouble.CutReplies
	}
	if most > 0 && *passed+len(b) >= most {
		b, cut = b[:max(0, most-*passed)], true
	}
	*passed += len(b)
	return b, cut
}

// passes waits while the current trouble delays n bytes, and reports whether they arrive at all.
func (l *Link) passes(p *pair, n int, reply bool) bool {
	var waited bool
	for {
		l.mu.Lock()
		t, changed := l.trouble, l.changed
		p.lost = p.lost || t.LoseReplies && reply
		p.deaf = p.deaf || t.LoseRequests && !reply
		lost := reply && p.lost || !reply && p.deaf
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
		over = time.After(d)
	}
	select {
	case <-changed:
	case <-over:
	case <-l.ctx.Done():
	}
}
