package testenv

import (
	"io"
	"net"
	"sync"
	"testing"
)

// Switch is an address that leads to one server, and later to another: a failover as clients see it.
type Switch struct {
	tb       testing.TB
	listener net.Listener
	wg       sync.WaitGroup

	mu       sync.Mutex
	upstream string
	conns    map[net.Conn]bool
}

// NewSwitch starts an address that leads to upstream ("host:port").
func NewSwitch(tb testing.TB, upstream string) *Switch {
	tb.Helper()
	l, err := (&net.ListenConfig{}).Listen(tb.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		tb.Fatal(err)
	}
	s := &Switch{tb: tb, listener: l, upstream: upstream, conns: map[net.Conn]bool{}}
	s.wg.Go(s.accept)
	tb.Cleanup(func() {
		_ = l.Close()
		s.cut()
		s.wg.Wait()
	})
	return s
}

// Addr returns the address to connect to.
func (s *Switch) Addr() string { return s.listener.Addr().String() }

// To leads to another server from now on, and cuts the connections to the old one.
func (s *Switch) To(upstream string) {
	s.mu.Lock()
	s.upstream = upstream
	s.mu.Unlock()
	s.cut()
}

func (s *Switch) cut() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for c := range s.conns {
		_ = c.Close()
	}
	clear(s.conns)
}

func (s *Switch) accept() {
	for {
		client, err := s.listener.Accept()
		if err != nil {
			return
		}
		s.mu.Lock()
		upstream := s.upstream
		s.mu.Unlock()
		server, err := (&net.Dialer{}).DialContext(s.tb.Context(), "tcp", upstream)
		if err != nil {
			_ = client.Close()
			continue
		}
		s.mu.Lock()
		s.conns[client], s.conns[server] = true, true
		s.mu.Unlock()
		for _, pair := range [][2]net.Conn{{client, server}, {server, client}} {
			s.wg.Go(func() {
				_, _ = io.Copy(pair[0], pair[1])
				_, _ = pair[0].Close(), pair[1].Close()
			})
		}
	}
}
