package api

import (
	"net/http"
	"net/netip"
	"slices"
	"strings"

	"github.com/gin-gonic/gin"
)

// limitAddress holds the limit of its address against a request, whatever it asks for. It comes before anything that
// costs more.
func (s *Server) limitAddress(c *gin.Context) {
	if s.addresses.perSecond <= 0 {
		return
	}
	if wait := s.addresses.spend(Network(clientAddress(c.Request, s.proxies))); wait > 0 {
		writeProblem(c, &problem{kind: kindRateLimited, retryAfter: wait})
	}
}

// Network is what shares a limit: an address, or with IPv6 the /64 that one customer gets at least.
func Network(a netip.Addr) netip.Prefix {
	bits := a.BitLen()
	if a.Is6() {
		bits = 64
	}
	p, _ := a.Prefix(bits) // zero for no address
	return p
}

// clientAddress is where a request comes from. X-Forwarded-For is believed as far as it was written by trusted
// proxies: each appends the address that it saw, so what counts is the last one that is not a proxy's. What is left of
// that may be anybody's invention.
func clientAddress(r *http.Request, proxies []netip.Prefix) netip.Addr {
	client := parseAddress(r.RemoteAddr)
	hops := strings.Split(strings.Join(r.Header.Values("X-Forwarded-For"), ","), ",")
	for _, hop := range slices.Backward(hops) {
		if !contains(proxies, client) {
			break
		}
		next := parseAddress(strings.TrimSpace(hop))
		if !next.IsValid() {
			break
		}
		client = next
	}
	return client
}

func contains(list []netip.Prefix, a netip.Addr) bool {
	return slices.ContainsFunc(list, func(p netip.Prefix) bool { return p.Contains(a) })
}

// parseAddress reads an address with or without a port; the zero value is none. An IPv4 address is one also when it is
// written as IPv6.
func parseAddress(text string) netip.Addr {
	a, err := netip.ParseAddr(strings.Trim(text, "[]"))
	if err != nil {
		ap, _ := netip.ParseAddrPort(text)
		a = ap.Addr()
	}
	return a.Unmap().WithZone("")
}
