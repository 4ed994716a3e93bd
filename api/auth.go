package api

import (
	"crypto/sha256"
	"net/http"
	"slices"
	"strings"

	"github.com/gin-gonic/gin"
	"github.com/google/uuid"
)

// principal is the user that a request acts for, and its permissions.
type principal struct {
	// any permits every user. The request names one.
	any  bool
	user uuid.UUID
	// scopes are the permissions. nil permits everything.
	scopes []Scope
}

func (p principal) may(user uuid.UUID) bool { return p.any || p.user == user }

// has reports whether the principal has a scope. A user's own key may spend credits; creating them needs a key for any
// user.
func (p principal) has(s Scope) bool {
	return (p.scopes == nil || slices.Contains(p.scopes, s)) && (s != ScopeMint || p.any)
}

// caller is the sender of a request.
type caller struct {
	who principal
	// name is that of the key or client, for logs. It may be empty.
	name string
	// limit identifies the rate limit that a request counts against.
	limit [sha256.Size]byte
}

// authenticate identifies the caller and checks its rate limit and scopes. It runs before the guard, so refusals store
// nothing.
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

// identify returns the caller with a credential, or the problem with the credential.
func (s *Server) identify(c *gin.Context, credential string) (caller, *problem) {
	switch {
	case s.tokens != nil:
		return s.tokens.caller(c.Request.Context(), credential)
	case s.keys != nil:
		return s.keys.caller(credential)
	}
	return caller{who: principal{any: true}}, nil
}

// challenge is the WWW-Authenticate header of a 401 (RFC 6750, 3).
func challenge(credential string) string {
	if credential == "" {
		return `Bearer realm="posthaste"`
	}
	return `Bearer realm="posthaste", error="invalid_token"`
}

// scopeOf is the scope that a request needs. An order paid with credits needs ScopeCredit in addition.
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

// bearer returns the bearer token, or "" if there is not exactly one.
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
