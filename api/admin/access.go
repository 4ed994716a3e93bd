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

// Access configures the tokens and host names of the listener. Health and metrics need no token.
type Access struct {
	// Token, if not empty, is required as bearer token, except for health, metrics and the console's page, which has no
	// data.
	Token string
	// ReadToken, if not empty, permits reads. It requires a Token.
	ReadToken string
	// Addr is the configured address, Bound the one that the listener has. If Bound is nil, every Host is accepted.
	Addr  string
	Bound net.Addr
	// Hosts are additional host names of the listener.
	Hosts []string
}

var open = []string{"/healthz", "/readyz", "/metrics"}

// knownHost refuses requests whose Host is not this process: DNS rebinding makes a foreign page same-origin for a
// browser. On a loopback listener it checks every request. On other addresses the process does not know all its names:
// there it does not check probes, scrapes, and requests that need a token, which such a page does not have.
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
			Problem(w, http.StatusMisdirectedRequest,
				"this listener does not answer under this name; use 127.0.0.1 or localhost, or name it in "+
					"--admin-hosts")
			return
		}
		next.ServeHTTP(w, r)
	})
}

// knows reports whether a Host header names this process.
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
	// DNS cannot rebind a literal address, and a name without a dot belongs to the local network.
	return !local && host != "" && (err == nil || !strings.Contains(host, "."))
}

// hostOf returns the host of a Host header, in lower case.
func hostOf(header string) string {
	if h, _, err := net.SplitHostPort(header); err == nil {
		header = h
	}
	return strings.ToLower(strings.Trim(header, "[]"))
}

// reads wraps a handler that needs read access, writes one that needs write access. Both refuse pages of other origins,
// which could not read the answers but could send the calls repeatedly.
func (a *Access) reads(next http.HandlerFunc) http.HandlerFunc  { return a.guard(next, false) }
func (a *Access) writes(next http.HandlerFunc) http.HandlerFunc { return a.guard(next, true) }

// console guards the console's API. Its page has no data and needs no token.
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

// sameOrigin applies the cross-origin rules for writes to reads.
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
			Problem(w, http.StatusForbidden, "this token may read only; changes need the admin token")
		default:
			audit.Because(r, role)
			w.Header().Set("WWW-Authenticate", "Bearer")
			Problem(w, http.StatusUnauthorized, "this call needs the admin token")
		}
	}
}

func foreign(w http.ResponseWriter, r *http.Request) {
	audit.Because(r, "foreign origin")
	Problem(w, http.StatusForbidden, "this is not for pages of other origins")
}

// The roles of callers, as the audit names them: by token, since callers have no other name.
const (
	anybody    = "anybody" // no token is configured
	adminToken = "admin token"
	readToken  = "read token"
	wrongToken = "wrong token"
	noToken    = "no token"
)

// role returns the caller's role.
func (a *Access) role(r *http.Request) string {
	given, ok := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
	switch {
	case a.Token == "":
		return anybody
	case !ok:
		return noToken
	case Same(given, a.Token):
		return adminToken
	case a.ReadToken != "" && Same(given, a.ReadToken):
		return readToken
	}
	return wrongToken
}

// Same compares secrets in constant time.
func Same(a, b string) bool { return subtle.ConstantTimeCompare([]byte(a), []byte(b)) == 1 }
