// Package ginidem is the guard of package idem as a gin middleware.
package ginidem

import (
	"net/http"

	"github.com/gin-gonic/gin"

	"posthaste/idem"
)

// Middleware guards the handlers behind it, as idem.Guard.Handler guards one. It must come after the authentication.
// Handlers find the key with idem.KeyFrom(c.Request.Context()), and must use that context.
func Middleware(g *idem.Guard, o idem.HTTPOptions) gin.HandlerFunc {
	return func(c *gin.Context) {
		ran := false
		g.Handler(o, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			ran = true
			outer, request := c.Writer, c.Request
			buffer := &writer{ResponseWriter: outer, w: w, status: http.StatusOK, size: -1}
			c.Writer, c.Request = buffer, r
			defer func() { c.Writer, c.Request = outer, request }()
			c.Next()
			buffer.WriteHeaderNow()
		})).ServeHTTP(c.Writer, c.Request)
		if !ran {
			c.Abort()
		}
	}
}

// writer is gin's view of the guard's buffer. What it does not override (hijacking, server push) goes past the guard
// and is of no use behind it.
type writer struct {
	gin.ResponseWriter
	w      http.ResponseWriter
	status int
	size   int
}

func (w *writer) Header() http.Header { return w.w.Header() }

func (w *writer) WriteHeader(status int) {
	if status > 0 && !w.Written() {
		w.status = status
	}
}

func (w *writer) WriteHeaderNow() {
	if !w.Written() {
		w.size = 0
		w.w.WriteHeader(w.status)
	}
}

func (w *writer) Write(b []byte) (int, error) {
	w.WriteHeaderNow()
	n, err := w.w.Write(b)
	w.size += n
	return n, err
}

func (w *writer) WriteString(s string) (int, error) { return w.Write([]byte(s)) }

func (w *writer) Status() int { return w.status }

func (w *writer) Size() int { return w.size }

func (w *writer) Written() bool { return w.size >= 0 }

func (w *writer) Flush() { w.WriteHeaderNow() }
