package sink

import (
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"time"

	"github.com/redis/go-redis/v9"

	"posthaste/internal/redisurl"
	"posthaste/internal/socket"
)

// NewClient returns a client for a publisher. url names one server, a cluster or sentinels, in the forms of go-redis.
// No error mentions it, because it may hold a password. It does no I/O.
func NewClient(rawURL string) (redis.UniversalClient, error) {
	o, err := redisurl.Parse(rawURL)
	if err != nil {
		return nil, fmt.Errorf("redis URL: %w", err)
	}
	Configure(o)
	return redis.NewUniversalClient(o), nil
}

// Configure sets the options of a publisher's client. Where the server is, who asks, and how they are connected stay as
// they are in o.
func Configure(o *redis.UniversalOptions) {
	// The gate makes repeats safe and the caller decides about them. The client's own would only hide errors.
	o.MaxRetries = -1
	o.DialerRetries = 1
	// By default a context's deadline is ignored once a command has been sent.
	o.ContextTimeoutEnabled = true
	o.DialTimeout = 2 * time.Second
	if o.Dialer == nil {
		o.Dialer = dialer(o)
	}
	// By default it depends on the number of processors, of which a relay has one. Several wait for replicas at a time.
	o.PoolSize = max(o.PoolSize, 64)
	o.ReadTimeout = 3 * time.Second
	o.WriteTimeout = 3 * time.Second
	// A batch is megabytes; the default buffer makes a system call of every 32 KiB of it.
	o.WriteBufferSize = 256 << 10
	// RESP2: the replies are strings and arrays, and RESP3 would let the server push frames into a publisher's
	// connection. No CLIENT SETINFO either: each new connection is one round trip quicker.
	o.Protocol = 2
	o.DisableIdentity = true
	if o.ClientName == "" {
		o.ClientName = "posthaste"
	}
}

// dialer is that of go-redis, with quiet connections where there is no TLS.
func dialer(o *redis.UniversalOptions) socket.Dial {
	d := &net.Dialer{Timeout: o.DialTimeout, KeepAliveConfig: net.KeepAliveConfig{
		Enable: true, Idle: 30 * time.Second, Interval: 5 * time.Second, Count: 3,
	}}
	plain := socket.Quiet(d.DialContext)
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		if o.TLSConfig != nil {
			return (&tls.Dialer{NetDialer: d, Config: o.TLSConfig}).DialContext(ctx, network, addr)
		}
		return plain(ctx, network, addr)
	}
}
