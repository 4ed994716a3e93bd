package api

import (
	"net/http"
	"net/netip"
	"slices"
	"strings"
)

// Network is the range of addresses that shares a limit: one IPv4 address, or an IPv6 /64, the least that a customer
// gets.
func Network(a netip.Addr) netip.Prefix {
	bits := a.BitLen()
	if a.Is6() {
		bits = 64
	}
	p, _ := a.Prefix(bits) // an invalid address has the zero Prefix
	return p
}

// clientAddress is the address of the client. Each proxy appends to X-Forwarded-For the address that it saw, so the
// last address there that is not a trusted proxy's is the client's. Addresses to the left of it may be forged.
func clientAddress(r *http.Request, proxies []netip.Prefix) netip.Addr {
	trusted := func(a netip.Addr) bool {
		return slices.ContainsFunc(proxies, func(p netip.Prefix) bool { return p.Contains(a) })
	}
	client := parseAddress(r.RemoteAddr)
	hops := strings.Split(strings.Join(r.Header.Values("X-Forwarded-For"), ","), ",")
	for _, hop := range slices.Backward(hops) {
		if !trusted(client) {
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

// parseAddress reads an address with or without a port, and unmaps IPv4-mapped IPv6. It returns the zero Addr on
// failure.
func parseAddress(text string) netip.Addr {
	a, err := netip.ParseAddr(strings.Trim(text, "[]"))
	if err != nil {
		ap, _ := netip.ParseAddrPort(text)
		a = ap.Addr()
	}
	return a.Unmap().WithZone("")
}
