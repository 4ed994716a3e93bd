package api

import (
	"crypto/sha256"
	"net/http"
	"slices"
	"strings"

	"github.com/gin-gonic/gin"
	"github.com/google/uuid"
)

// principal is who a request acts for, and what it may do.
type principal struct {
	// any: every user. The request names one.
	any  bool
	user uuid.UUID
	// scopes are what it may do; nil: everything.
	scopes []Scope
}

func (p principal) may(user uuid.UUID) bool { return p.any || p.user == user }

// has reports whether the key is for s. A user's own key may spend what the user has. Making credits is for keys that
// may act for anybody.
func (p principal) has(s Scope) bool {
	return (p.scopes == nil || slices.Contains(p.scopes, s)) && (s != ScopeMint || p.any)
}

// caller is who sends a request.
type caller struct {
	who principal
	// name is that of the key or of the client, for logs; it may be empty.
	name string
	// limit is whose rate limit a request counts for.
	limit [sha256.Size]byte
}

// authenticate finds out who asks, and holds the rate limit and the scopes against it. All come before the guard: what
// they refuse stores nothing.
func (s *Server) authenticate(c *gin.Context) {
	credential := bearer(c)
	from, p := s.identify(c, credential)
	if p != nil {
		if p.kind == kindUnauthorized {
			c.Header("WWW-Authenticate", challenge(credential))
		}
		writeProblem(c, p)
		return
	}
	x := exchangeOf(c)
	x.who, x.key = from.who, from.name
	if wait := s.limits.spend(from.limit); wait > 0 {
		writeProblem(c, &problem{kind: kindRateLimited, retryAfter: wait})
		return
	}
	if need := scopeOf(c); !x.who.has(need) {
		p := &problem{kind: kindForbiddenScope, detail: "it lacks the scope " + string(need)}
		if need == ScopeMint && !x.who.any {
			p = &problem{kind: kindForbidden}
		}
		writeProblem(c, p)
	}
}

// identify returns who sends a credential, or what is wrong with it.
func (s *Server) identify(c *gin.Context, credential string) (caller, *problem) {
	switch {
	case s.tokens != nil:
		return s.tokens.caller(c.Request.Context(), credential)
	case s.keys != nil:
		return s.keys.caller(credential)
	}
	return caller{who: principal{any: true}}, nil
}

// challenge is what 401 asks for (RFC 6750, 3).
func challenge(credential string) string {
	if credential == "" {
		return `Bearer realm="posthaste"`
	}
	return `Bearer realm="posthaste", error="invalid_token"`
}

// scopeOf is what a request needs; an order that credits pay for needs ScopeCredit, too.
func scopeOf(c *gin.Context) Scope {
	switch {
	case c.Request.Method == http.MethodGet:
		return ScopeRead
	case c.FullPath() == routeAdd:
		return ScopeMint
	case c.FullPath() == routeDeduct:
		return ScopeCredit
	}
	return ScopeOrder
}

// bearer returns the request's bearer token, "" if it has none or several.
func bearer(c *gin.Context) string {
	lines := c.Request.Header.Values("Authorization")
	if len(lines) != 1 {
		return ""
	}
	scheme, token, _ := strings.Cut(lines[0], " ")
	if !strings.EqualFold(scheme, "Bearer") {
		return ""
	}
	return strings.TrimSpace(token)
}
