package app

import (
	"net"
	"net/netip"
	"slices"
	"sync"

	"github.com/prometheus/client_golang/prometheus"

	"posthaste/api"
)

// adminConnections is the largest number of connections of the admin listener.
const adminConnections = 256

// Reasons of refused connections.
const (
	refusedTotal   = "total"
	refusedAddress = "address"
)

// newRefusals returns the metric of bounded listeners.
func newRefusals(reg prometheus.Registerer) *prometheus.CounterVec {
	m := prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "http_connections_refused_total",
		Help: "Connections closed at once because there were too many. A rise of total: raise --max-connections, or " +
			"add an instance. Of address: one client has a quarter of them.",
	}, []string{"listener", "reason"})
	reg.MustRegister(m)
	return m
}

// boundListener closes a connection at once if there are too many. It never waits for another connection to end:
// otherwise a client that holds connections could keep the others in a queue.
type boundListener struct {
	net.Listener
	name    string
	refused *prometheus.CounterVec
	// most is the largest number of connections, mostEach that of one address. mostEach does not apply to proxies:
	// all their clients share their address.
	most, mostEach int
	proxies        []netip.Prefix

	mu   sync.Mutex
	open int
	// each counts the open connections by network.
	each map[netip.Prefix]int
}

func boundPublic(l net.Listener, c Config, refused *prometheus.CounterVec) net.Listener {
	return bound(&boundListener{
		Listener: l, name: "public", refused: refused, most: c.MaxConnections, mostEach: max(c.MaxConnections/4, 1),
		proxies: c.TrustedProxies,
	})
}

// boundAdmin bounds an admin listener. One address must not keep the probes out, except loopback, which all programs
// of this machine share.
func boundAdmin(l net.Listener, refused *prometheus.CounterVec) net.Listener {
	return bound(&boundListener{
		Listener: l, name: "admin", refused: refused, most: adminConnections, mostEach: adminConnections / 4,
		proxies: []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8"), netip.MustParsePrefix("::1/128")},
	})
}

func bound(l *boundListener) net.Listener {
	l.each = make(map[netip.Prefix]int)
	for _, reason := range []string{refusedTotal, refusedAddress} {
		l.refused.WithLabelValues(l.name, reason)
	}
	return l
}

// Accept closes connections beyond the limits and returns the next one within them.
func (l *boundListener) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		from := remoteAddress(c)
		reason := l.take(from)
		if reason == "" {
			return &boundConn{Conn: c, free: sync.OnceFunc(func() { l.give(from) })}, nil
		}
		l.refused.WithLabelValues(l.name, reason).Inc()
		_ = c.Close()
	}
}

// take counts a connection, or returns why it is refused.
func (l *boundListener) take(from netip.Addr) string {
	l.mu.Lock()
	defer l.mu.Unlock()
	trusted := slices.ContainsFunc(l.proxies, func(p netip.Prefix) bool { return p.Contains(from) })
	switch {
	case l.open >= l.most:
		return refusedTotal
	case l.each[api.Network(from)] >= l.mostEach && !trusted:
		return refusedAddress
	}
	l.open++
	l.each[api.Network(from)]++
	return ""
}

// give undoes take.
func (l *boundListener) give(from netip.Addr) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.open--
	n := api.Network(from)
	if l.each[n]--; l.each[n] == 0 {
		delete(l.each, n)
	}
}

// remoteAddress returns the address of a connection's peer; zero if it has none.
func remoteAddress(c net.Conn) netip.Addr {
	if tcp, ok := c.RemoteAddr().(*net.TCPAddr); ok {
		return tcp.AddrPort().Addr().Unmap().WithZone("")
	}
	return netip.Addr{}
}

type boundConn struct {
	net.Conn
	free func()
}

// Close closes the connection and stops counting it.
func (c *boundConn) Close() error {
	defer c.free()
	return c.Conn.Close()
}
