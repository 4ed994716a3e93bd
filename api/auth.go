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
func (s *Server) authenticate(c *gin.Context) *problem {
	credential := bearer(c)
	from := caller{who: principal{any: true}}
	var p *problem
	switch {
	case s.o.Tokens != nil:
		from, p = s.o.Tokens.caller(c.Request.Context(), credential)
	case s.o.Keys != nil:
		from, p = s.o.Keys.caller(credential)
	}
	if p != nil {
		if p.kind == kindUnauthorized { // RFC 6750, 3
			challenge := `Bearer realm="posthaste"`
			if credential != "" {
				challenge += `, error="invalid_token"`
			}
			c.Header("WWW-Authenticate", challenge)
		}
		return p
	}
	x := exchangeOf(c)
	x.who, x.key = from.who, from.name
	if p := s.limits.check(from.limit); p != nil {
		return p
	}
	switch need := scopeOf(c); {
	case x.who.has(need):
		return nil
	case need == ScopeMint && !x.who.any:
		return &problem{kind: kindForbidden}
	default:
		return &problem{kind: kindForbiddenScope, detail: "it lacks the scope " + string(need)}
	}
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
