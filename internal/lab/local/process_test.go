package local

import (
	"errors"
	"fmt"
	"net"
	"syscall"
	"testing"
)

// A server that is down keeps its port: a bind to any free port does not get it, connections are refused, and the
// server can bind it again.
func TestAReservedPortIsKept(t *testing.T) {
	t.Parallel()
	port, hold, err := ReservePort()
	if err != nil {
		t.Fatal(err)
	}
	defer hold.Close()
	addr := fmt.Sprintf("127.0.0.1:%d", port)
	for range 2 { // at its start, and at a restart
		for range 10_000 {
			other, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			if other.Addr().String() == addr {
				t.Error("somebody else got the port")
			}
			_ = other.Close()
		}
		if c, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", addr); !errors.Is(err, syscall.ECONNREFUSED) {
			t.Fatalf("nobody listens, and a client gets %v, %v", c, err)
		}
		server, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", addr)
		if err != nil {
			t.Fatalf("the server does not get its port: %v", err)
		}
		c, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		if err := server.Close(); err != nil { // with a client: its connection lingers
			t.Error(err)
		}
		defer c.Close()
	}
}

// A reserved port is not free, although no socket listens on it yet.
func TestAReservedPortIsNotReservedTwice(t *testing.T) {
	t.Parallel()
	port, hold, err := ReservePort()
	if err != nil {
		t.Fatal(err)
	}
	defer hold.Close()
	if _, second, err := reserve(port); !errors.Is(err, syscall.EADDRINUSE) {
		_ = second.Close()
		t.Errorf("got %v, want EADDRINUSE", err)
	}
}
