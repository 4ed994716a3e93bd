package admin

import (
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/uuid"
	"github.com/prometheus/client_golang/prometheus"

	"posthaste/outbox"
)

// FuzzReadMode: only one of the three modes is accepted, in an object with that single member.
func FuzzReadMode(f *testing.F) {
	for _, seed := range []string{
		"", `{"mode":"poll"}`, `{"mode":"auto"}`, `{"mode":"cdc"}x`, `{"mode":1}`, `{"mode":"fast"}`, `{"more":1}`,
		"null", strings.Repeat(" ", 5000),
	} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, body string) {
		w := httptest.NewRecorder()
		r := httptest.NewRequestWithContext(t.Context(), http.MethodPut, "/relay/mode", strings.NewReader(body))
		mode, ok := readMode(w, r)
		if ok != (mode == outbox.ModeAuto || mode == outbox.ModeCDC || mode == outbox.ModePoll) {
			t.Fatalf("%q: %q, %v", body, mode, ok)
		}
		if !ok && w.Code != http.StatusBadRequest && w.Code != http.StatusUnprocessableEntity {
			t.Fatalf("%q: status %d", body, w.Code)
		}
	})
}

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

// FuzzDeadID: a text that is not a UUID is never accepted.
func FuzzDeadID(f *testing.F) {
	for _, seed := range []string{"", "x", uuid.NewString(), "{" + uuid.NewString() + "}", strings.Repeat("a", 64)} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, id string) {
		parsed, err := deadID(id)
		if err == nil && !strings.EqualFold(parsed.String(), id) {
			t.Fatalf("%q became %v", id, parsed)
		}
	})
}
