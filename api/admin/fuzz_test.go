package admin

import (
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
)

// FuzzLoopbackHost: a loopback listener answers only for names and addresses that always mean this machine.
func FuzzLoopbackHost(f *testing.F) {
	for _, seed := range []string{
		"127.0.0.1:9091", "localhost", "[::1]:9091", "a.localhost:1", "evil.example", "127.0.0.1.evil.example", "::1",
		"[::ffff:127.0.0.1]", "localhost.", "", ":", "[", "]:1", "127.1",
	} {
		f.Add(seed)
	}
	h := Handler(Options{
		Ready: http.NotFoundHandler(), Gatherer: prometheus.NewRegistry(),
		Access: Access{Addr: "127.0.0.1:9091", Bound: &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 9091}},
	})
	f.Fuzz(func(t *testing.T, host string) {
		r := httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/healthz", nil)
		r.Host = host
		w := httptest.NewRecorder()
		h.ServeHTTP(w, r)
		if w.Code != http.StatusOK {
			return
		}
		name := strings.ToLower(host)
		if n, _, err := net.SplitHostPort(name); err == nil {
			name = n
		}
		addr, err := netip.ParseAddr(strings.Trim(name, "[]"))
		if (err != nil || !addr.IsLoopback()) && name != "localhost" && !strings.HasSuffix(name, ".localhost") {
			t.Fatalf("it answers for %q", host)
		}
	})
}
