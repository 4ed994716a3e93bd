package api

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"posthaste/internal/lab/testenv"
	"posthaste/internal/pause"
)

// Addresses that clients write into X-Forwarded-For themselves are ignored, whatever proxies there are.
func TestTheAddressOfAClient(t *testing.T) {
	t.Parallel()
	proxies := []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("2001:db8:1::/64")}
	for name, c := range map[string]struct {
		remote string
		lines  []string
		want   string
	}{
		"direct":             {"192.0.2.1:9", nil, "192.0.2.1"},
		"spoofed":            {"192.0.2.1:9", []string{"198.51.100.1"}, "192.0.2.1"},
		"spoofed proxy":      {"192.0.2.1:9", []string{"198.51.100.1, 10.0.0.1"}, "192.0.2.1"},
		"proxy":              {"10.0.0.1:9", []string{"198.51.100.1"}, "198.51.100.1"},
		"proxies":            {"10.0.0.1:9", []string{"198.51.100.1, 10.0.0.2,10.0.0.3"}, "198.51.100.1"},
		"spoofed behind":     {"10.0.0.1:9", []string{"203.0.113.7, 198.51.100.1"}, "198.51.100.1"},
		"spoofed as a proxy": {"10.0.0.1:9", []string{"203.0.113.7, 10.0.0.9, 198.51.100.1, 10.0.0.2"}, "198.51.100.1"},
		"two lines":          {"10.0.0.1:9", []string{"203.0.113.7", "198.51.100.1"}, "198.51.100.1"},
		"no header":          {"10.0.0.1:9", nil, "10.0.0.1"},
		"empty":              {"10.0.0.1:9", []string{""}, "10.0.0.1"},
		"malformed":          {"10.0.0.1:9", []string{"198.51.100.1, unknown"}, "10.0.0.1"},
		"malformed behind":   {"10.0.0.1:9", []string{"203.0.113.7, x, 10.0.0.2"}, "10.0.0.2"},
		"proxies only":       {"10.0.0.1:9", []string{"10.0.0.3, 10.0.0.2"}, "10.0.0.3"},
		"with port":          {"10.0.0.1:9", []string{"198.51.100.1:4711"}, "198.51.100.1"},
		"IPv6":               {"[2001:db8:1::7]:9", []string{"2001:db8:2::1"}, "2001:db8:2::1"},
		"IPv6 with port":     {"[2001:db8:1::7]:9", []string{"[2001:db8:2::1]:80"}, "2001:db8:2::1"},
		"IPv6 in brackets":   {"[2001:db8:1::7]:9", []string{"[2001:db8:2::1]"}, "2001:db8:2::1"},
		"IPv4 as IPv6":       {"[::ffff:10.0.0.1]:9", []string{"::ffff:198.51.100.1"}, "198.51.100.1"},
		"no proxy in IPv6":   {"[2001:db8:9::7]:9", []string{"2001:db8:2::1"}, "2001:db8:9::7"},
	} {
		r := httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/", nil)
		r.RemoteAddr = c.remote
		r.Header["X-Forwarded-For"] = c.lines
		testenv.Equal(t, name, clientAddress(r, proxies).String(), c.want)
		testenv.Equal(t, name+", without proxies", clientAddress(r, nil), parseAddress(c.remote))
	}
	for a, want := range map[string]string{
		"192.0.2.1": "192.0.2.1/32", "2001:db8::1": "2001:db8::/64", "2001:db8:0:0:ffff::": "2001:db8::/64",
	} {
		testenv.Equal(t, "the limit of "+a, Network(netip.MustParseAddr(a)).String(), want)
	}
}

// The rate limit of an address runs before authentication, applies to every route, and cannot be evaded by a header.
func TestTheRateLimitOfAnAddress(t *testing.T) {
	t.Parallel()
	w := newWorld(t, func(o *Options) {
		o.Keys, o.AddressRateLimit = testKeys(t), 0.001
		o.TrustedProxies = []netip.Prefix{netip.MustParsePrefix("127.0.0.1/32")}
	})
	from := func(address, path string) reply {
		return w.do("GET", path, "", "X-Forwarded-For", "203.0.113.7, "+address, "Authorization", "Bearer nobody")
	}
	want(t, from("198.51.100.1", "/orders"), 401, "unauthorized")
	for n, path := range []string{"/orders", "/.well-known/idempotency", "/nowhere"} {
		r := w.do("GET", path, "", "X-Forwarded-For", fmt.Sprintf("203.0.113.%d, 198.51.100.1", n))
		want(t, r, 429, "rate_limited")
		if r.header.Get("Retry-After") == "" {
			t.Error("no Retry-After")
		}
	}
	want(t, from("198.51.100.2", "/orders"), 401, "unauthorized")
	v := w.sibling(func(o *Options) { o.AddressRateLimit = 0.001 })
	want(t, v.do("GET", "/openapi.yaml", "", "X-Forwarded-For", "198.51.100.3"), 200, "")
	want(t, v.do("GET", "/openapi.yaml", "", "X-Forwarded-For", "198.51.100.4"), 429, "rate_limited")
}

// Limits of any number of addresses take bounded memory. No address exceeds its limit while there are at most
// maxLimits.
func TestLimitsAreForgotten(t *testing.T) {
	t.Parallel()
	l := newLimits[int](0.001)
	for n := range maxLimits + maxLimits/2 {
		if l.spend(n) != 0 {
			t.Fatalf("the first request of %d was refused", n)
		}
		if l.recent.Len() > maxLimits {
			t.Fatalf("%d limits are kept", l.recent.Len())
		}
		if n >= 100 && l.spend(n-100) == 0 {
			t.Fatalf("the limit of %d was forgotten", n-100)
		}
	}
}

// A hundred clients of one key retry constantly. Refusals do not use up the limit: the key gets all of it.
func TestRefusalsCostNothing(t *testing.T) {
	t.Parallel()
	const perSecond, clients, last = 10, 100, 15 * time.Second
	synctest.Test(t, func(t *testing.T) {
		limit := newLimit(perSecond)
		end := time.Now().Add(last)
		var passed atomic.Int64
		var all sync.WaitGroup
		for range clients {
			all.Go(func() {
				for time.Now().Before(end) {
					wait := spend(limit)
					if wait == 0 {
						passed.Add(1)
						wait = time.Millisecond
					}
					_ = pause.For(t.Context(), wait)
				}
			})
		}
		all.Wait()
		want := int64(perSecond + perSecond*last/time.Second)
		if got := passed.Load(); got > want || got < want-perSecond/2 {
			t.Errorf("%d requests passed in %v, the limit allows %d", got, last, want)
		}
	})
}
