package api

import (
	"net/http"
	"time"

	"posthaste/idem"
)

// Limits of the public listener.
const (
	// HeaderTimeout is how long a client may take to send the header.
	HeaderTimeout = 5 * time.Second
	// BodyTimeout is how long it may then take to send the body.
	BodyTimeout = 15 * time.Second
	// MaxBody is the longest body, in bytes.
	MaxBody = 64 << 10
	// MaxHeader is the longest header, in bytes.
	MaxHeader = 16 << 10
)

// Limits of one guarded request.
const (
	// workTimeout bounds the time between acquisition and reply. It is shorter than the guard's lease.
	workTimeout = 10 * time.Second
	// resolveTimeout bounds finding the outcome of an order that was sent and not answered.
	resolveTimeout = 2 * time.Second
)

// writeTimeout covers the body, the wait, the work and a slow reader of the reply.
const writeTimeout = BodyTimeout + idem.MaxWait + workTimeout + 10*time.Second

// NewHTTPServer returns a server for the public listener with the contract's limits against slow and greedy clients.
// The caller sets Addr (or serves a listener), BaseContext and ErrorLog.
func NewHTTPServer(h http.Handler) *http.Server {
	return &http.Server{
		Handler:           h,
		ReadHeaderTimeout: HeaderTimeout,
		ReadTimeout:       HeaderTimeout + BodyTimeout,
		WriteTimeout:      writeTimeout,
		IdleTimeout:       60 * time.Second,
		MaxHeaderBytes:    MaxHeader,
		HTTP2:             FrameLimits(),
	}
}

// FrameLimits bounds the memory of an HTTP/2 connection, which TLS enables. A frame is allocated when its header
// arrives, before authentication: by default a megabyte.
func FrameLimits() *http.HTTP2Config {
	return &http.HTTP2Config{
		MaxReadFrameSize: 16 << 10, MaxReceiveBufferPerConnection: 256 << 10, MaxReceiveBufferPerStream: MaxBody,
		MaxConcurrentStreams: 100,
	}
}
