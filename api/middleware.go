package api

import (
	"net/http"
	"runtime/debug"
	"strconv"
	"time"

	"github.com/gin-gonic/gin"
	"github.com/google/uuid"

	"posthaste/internal/exemplar"
)

// exchange is the state of one request.
type exchange struct {
	// id names the request in logs and problems.
	id    string
	start time.Time
	// end is when the reply was sent; bookkeeping may follow it.
	end time.Time
	who principal
	// key is the name of the API key; it may be empty.
	key string
}

const exchangeKey = "posthaste.exchange"

func exchangeOf(c *gin.Context) *exchange {
	return c.MustGet(exchangeKey).(*exchange)
}

// observe measures the request and gives it an id.
func (s *Server) observe(c *gin.Context) {
	x := &exchange{id: uuid.NewString(), start: time.Now()}
	c.Set(exchangeKey, x)
	c.Header("X-Request-Id", x.id)
	route := c.FullPath()
	if route == "" {
		route = "other"
	}
	if s.o.Trace != nil {
		traced, end := s.o.Trace(c.Request)
		c.Request = traced
		defer func() { end(methodLabel(traced.Method), route, c.Writer.Status()) }() // also if a handler panics
	}
	c.Next()
	if x.end.IsZero() {
		x.end = time.Now()
	}
	// The header is the client's or, with tracing, that of this request's span. Both have the same trace id.
	exemplar.Observe(s.metrics.requests.WithLabelValues(route, methodLabel(c.Request.Method),
		strconv.Itoa(c.Writer.Status())),
		x.end.Sub(x.start).Seconds(), c.Request.Header.Get("Traceparent"))
	s.log.Debug("request", "request_id", x.id, "route", route, "method", methodLabel(c.Request.Method),
		"status", c.Writer.Status(), "duration", x.end.Sub(x.start), "key", x.key)
}

// methodLabel bounds the values of the label, because clients may send any method.
func methodLabel(m string) string {
	switch m {
	case http.MethodGet, http.MethodHead, http.MethodPost, http.MethodPut, http.MethodPatch, http.MethodDelete,
		http.MethodOptions:
		return m
	}
	return "other"
}

// recover turns a panic into a 500 if nothing was sent yet. http.ErrAbortHandler keeps its meaning.
func (s *Server) recover(c *gin.Context) {
	defer func() {
		v := recover()
		if v == nil {
			return
		}
		if v == http.ErrAbortHandler { //nolint:errorlint // a sentinel that is never wrapped
			panic(v)
		}
		s.log.Error("handler panicked", "request_id", exchangeOf(c).id, "panic", v, "stack", string(debug.Stack()))
		if c.Writer.Written() {
			panic(http.ErrAbortHandler)
		}
		writeProblem(c, &problem{kind: kindInternal})
	}()
	c.Next()
}

// secure sets the security headers of every response. The API serves data to programs, so framing, sniffing and scripts
// are forbidden.
func secure(c *gin.Context) {
	h := c.Writer.Header()
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("X-Frame-Options", "DENY")
	h.Set("Referrer-Policy", "no-referrer")
	h.Set("Content-Security-Policy", "default-src 'none'; frame-ancestors 'none'")
	h.Set("Cross-Origin-Resource-Policy", "same-origin")
	h.Set("Access-Control-Expose-Headers", exposedHeaders)
}

// exposedHeaders are the headers that a script of another origin may read, if a proxy adds the other CORS headers.
const exposedHeaders = "Idempotency-Key, Idempotent-Replayed, Idempotency-Expires, Idempotency-Guard, Original-Date, " +
	"Preference-Applied, Location, ETag, Retry-After, X-Request-Id"
