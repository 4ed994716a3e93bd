package admin

import (
	"crypto/subtle"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"

	"posthaste/internal/audit"
)

// Access says who may read and change what the listener offers. Health and metrics are for everybody.
type Access struct {
	// Token, if not empty, is required as bearer token by everything but health, metrics and the console's empty page.
	Token string
	// ReadToken, if not empty, may read but not change; it needs a Token beside it.
	ReadToken string
	// Addr is the address as the operator wrote it, Bound what it became. nil Bound: any Host is answered.
	Addr  string
	Bound net.Addr
	// Hosts are further names that the listener is asked under.
	Hosts []string
}

// open are the paths that need no token.
var open = []string{"/healthz", "/readyz", "/metrics"}

// knownHost refuses requests that were not meant for this process: a page elsewhere whose name was made to resolve to
// its address counts as the same origin in a browser. A loopback listener answers them nothing. On other addresses a
// process does not know its names: probes and scrapes are answered under any, and the rest is where a token is asked
// for, which such a page has not.
func (a *Access) knownHost(next http.Handler) http.Handler {
	bound, ok := a.Bound.(*net.TCPAddr)
	if !ok {
		return next
	}
	local := bound.IP.IsLoopback()
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked := local || a.Token == "" && !slices.Contains(open, r.URL.Path)
		if asked && !a.knows(r.Host, local) {
			audit.Because(r, "unknown host")
			problem(w, http.StatusMisdirectedRequest,
				"this listener does not answer under this name; use 127.0.0.1 or localhost, or name it in "+
					"--admin-hosts")
			return
		}
		next.ServeHTTP(w, r)
	})
}

// knows reports whether a Host header names this process and nobody else.
func (a *Access) knows(header string, local bool) bool {
	host := hostOf(header)
	addr, err := netip.ParseAddr(host)
	if err == nil && addr.IsLoopback() || host == "localhost" || strings.HasSuffix(host, ".localhost") {
		return true
	}
	asked, _, _ := net.SplitHostPort(a.Addr)
	is := func(name string) bool { return host != "" && strings.EqualFold(host, name) }
	if is(asked) || slices.ContainsFunc(a.Hosts, is) {
		return true
	}
	// An address cannot be made to resolve to another, and a name without a dot is a neighbour's.
	return !local && host != "" && (err == nil || !strings.Contains(host, "."))
}

// hostOf is the name or address in a Host header.
func hostOf(header string) string {
	if h, _, err := net.SplitHostPort(header); err == nil {
		header = h
	}
	return strings.ToLower(strings.Trim(header, "[]"))
}

// reads lets through who may read, writes who may change something. Neither is for pages of other origins: they could
// not see the answer, but have it made again and again.
func (a *Access) reads(next http.HandlerFunc) http.HandlerFunc  { return a.guard(next, false) }
func (a *Access) writes(next http.HandlerFunc) http.HandlerFunc { return a.guard(next, true) }

// console is the page and what feeds it. The page itself says nothing; it asks for the token.
func (a *Access) console(next http.Handler) http.Handler {
	reads, writes := a.reads(next.ServeHTTP), a.writes(next.ServeHTTP)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case !strings.HasPrefix(r.URL.Path, "/console/api/"):
			next.ServeHTTP(w, r)
		case r.Method == http.MethodGet || r.Method == http.MethodHead:
			reads(w, r)
		default:
			writes(w, r)
		}
	})
}

// sameOrigin asks of a read what browsers are asked of what changes something.
var sameOrigin = http.NewCrossOriginProtection()

func (a *Access) guard(next http.HandlerFunc, write bool) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		as := &http.Request{Method: http.MethodPost, URL: r.URL, Host: r.Host, Header: r.Header}
		role := a.role(r)
		switch {
		case sameOrigin.Check(as) != nil:
			foreign(w, r)
		case role == anybody, role == adminToken, role == readToken && !write:
			next(w, r)
		case role == readToken:
			audit.Because(r, role)
			problem(w, http.StatusForbidden, "this token may read only; changes need the admin token")
		default:
			audit.Because(r, role)
			w.Header().Set("WWW-Authenticate", "Bearer")
			problem(w, http.StatusUnauthorized, "this call needs the admin token")
		}
	}
}

// foreign refuses a page of another origin.
func foreign(w http.ResponseWriter, r *http.Request) {
	audit.Because(r, "foreign origin")
	problem(w, http.StatusForbidden, "this is not for pages of other origins")
}

// Who asks, as entries of the audit call it: by the token, which has no other name.
const (
	anybody    = "anybody" // there is no token to ask for
	adminToken = "admin token"
	readToken  = "read token"
	wrongToken = "wrong token"
	noToken    = "no token"
)

// role says who asks.
func (a *Access) role(r *http.Request) string {
	given, ok := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
	switch {
	case a.Token == "":
		return anybody
	case !ok:
		return noToken
	case same(given, a.Token):
		return adminToken
	case a.ReadToken != "" && same(given, a.ReadToken):
		return readToken
	}
	return wrongToken
}

func same(a, b string) bool { return subtle.ConstantTimeCompare([]byte(a), []byte(b)) == 1 }
