package app

import (
	"net"
	"net/netip"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
)

// dialed is a bounded listener with the connections that it accepted and those that clients opened.
type dialed struct {
	t        *testing.T
	listener net.Listener
	accepted chan net.Conn
	refused  *prometheus.CounterVec
}

func newDialed(t *testing.T, s APISettings) *dialed {
	t.Helper()
	l, err := Listen(t.Context(), "127.0.0.1:0")
	must(t, err)
	d := &dialed{t: t, accepted: make(chan net.Conn), refused: newRefusals(prometheus.NewRegistry())}
	d.listener = boundPublic(l, Config{Settings: Settings{APISettings: s}}, d.refused)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := d.listener.Accept()
			if err != nil {
				return
			}
			d.accepted <- c
		}
	}()
	t.Cleanup(func() { _ = l.Close(); <-done })
	return d
}

// dial connects from an address of loopback, and returns the server's side.
func (d *dialed) dial(from string) (client net.Conn) {
	d.t.Helper()
	dialer := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}
	c, err := dialer.DialContext(d.t.Context(), "tcp", d.listener.Addr().String())
	must(d.t, err)
	d.t.Cleanup(func() { _ = c.Close() })
	return c
}

// opens connects, and fails unless the connection is accepted.
func (d *dialed) opens(from string) (server net.Conn) {
	d.t.Helper()
	d.dial(from)
	server = <-d.accepted
	d.t.Cleanup(func() { _ = server.Close() })
	return server
}

// refuses connects, and fails unless the connection is closed.
func (d *dialed) refuses(from, reason string) {
	d.t.Helper()
	before := testutil.ToFloat64(d.refused.WithLabelValues("public", reason))
	if _, err := d.dial(from).Read(make([]byte, 1)); err == nil {
		d.t.Error("something was sent")
	}
	if got := testutil.ToFloat64(d.refused.WithLabelValues("public", reason)); got != before+1 {
		d.t.Errorf("%v were refused for %s, want %v", got, reason, before+1)
	}
}

// One address cannot take all connections; a connection that ends makes room, once.
func TestConnectionsAreBounded(t *testing.T) {
	t.Parallel()
	d := newDialed(t, APISettings{MaxConnections: 8})
	first := d.opens("127.0.0.1")
	d.opens("127.0.0.1")
	d.refuses("127.0.0.1", refusedAddress)
	for range 2 { // closing twice makes room for one
		_ = first.Close()
	}
	d.opens("127.0.0.1")
	d.refuses("127.0.0.1", refusedAddress)
	var last net.Conn
	for _, from := range []string{"127.0.0.2", "127.0.0.3", "127.0.0.4"} {
		d.opens(from)
		last = d.opens(from)
	}
	d.refuses("127.0.0.5", refusedTotal)
	_ = last.Close()
	d.opens("127.0.0.5")
	d.refuses("127.0.0.6", refusedTotal)
}

// mostEach does not apply to a proxy, which has the connections of all its clients.
func TestATrustedProxyMayHaveAllConnections(t *testing.T) {
	t.Parallel()
	proxies := []netip.Prefix{netip.MustParsePrefix("127.0.0.9/32")}
	d := newDialed(t, APISettings{MaxConnections: 4, TrustedProxies: proxies})
	d.opens("127.0.0.1")
	d.refuses("127.0.0.1", refusedAddress)
	for range 3 {
		d.opens("127.0.0.9")
	}
	d.refuses("127.0.0.9", refusedTotal)
}

// The counts are undone: addresses without connections take no memory.
func TestBoundListenersForget(t *testing.T) {
	t.Parallel()
	l := bound(&boundListener{
		name: "public", refused: newRefusals(prometheus.NewRegistry()), most: 2, mostEach: 1,
	}).(*boundListener)
	a := netip.MustParseAddr("2001:db8::1")
	for range 100_000 {
		a = netip.AddrFrom16(func(b [16]byte) [16]byte { b[3]++; b[2] += b[3] / 255; return b }(a.As16()))
		if reason := l.take(a); reason != "" {
			t.Fatal(reason)
		}
		if reason := l.take(a.Next()); reason != refusedAddress {
			t.Fatalf("the neighbour of %v: %q", a, reason)
		}
		l.give(a)
	}
	if l.open != 0 || len(l.each) != 0 {
		t.Errorf("%d open, %d addresses", l.open, len(l.each))
	}
}
