package api

import (
	"net/http"
	"slices"
	"strings"
	"time"

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

// authenticate finds out who asks, and holds the rate limit and the key's scopes against it. All come before the guard:
// what they refuse stores nothing.
func (s *Server) authenticate(c *gin.Context) {
	x, hash := exchangeOf(c), keyHash{}
	if s.keys == nil {
		x.who = principal{any: true}
	} else {
		key := s.keys.find(bearer(c))
		if key == nil || !key.expires.IsZero() && !time.Now().Before(key.expires) {
			c.Header("WWW-Authenticate", `Bearer realm="posthaste"`)
			p := &problem{kind: kindUnauthorized}
			if key != nil {
				p.detail = "the key has expired"
			}
			writeProblem(c, p)
			return
		}
		x.who, x.key, hash = key.who, key.name, key.hash
	}
	if wait := s.limits.spend(hash); wait > 0 {
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
