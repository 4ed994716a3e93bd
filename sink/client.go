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
// Errors do not quote it, because it may contain a password. NewClient does no I/O.
func NewClient(rawURL string) (redis.UniversalClient, error) {
	o, err := redisurl.Parse(rawURL)
	if err != nil {
		return nil, fmt.Errorf("redis URL: %w", err)
	}
	Configure(o)
	return redis.NewUniversalClient(o), nil
}

// Configure sets the options of a publisher's client. It leaves addresses, credentials and TLS in o unchanged.
func Configure(o *redis.UniversalOptions) {
	// The gate makes repeats safe, and the caller decides about them. Retries of the client would only hide errors.
	o.MaxRetries = -1
	o.DialerRetries = 1
	// By default a context's deadline is ignored once a command has been sent.
	o.ContextTimeoutEnabled = true
	o.DialTimeout = 2 * time.Second
	if o.Dialer == nil {
		o.Dialer = dialer(o)
	}
	// The default depends on the number of CPUs, of which a relay may have only one. Several connections wait for
	// replicas at once.
	o.PoolSize = max(o.PoolSize, 64)
	o.ReadTimeout = 3 * time.Second
	o.WriteTimeout = 3 * time.Second
	// A batch has megabytes; the default buffer would need a system call for every 32 KiB.
	o.WriteBufferSize = 256 << 10
	// RESP2: the replies are strings and arrays, and RESP3 would let the server push frames into a publisher's
	// connection. Without CLIENT SETINFO each new connection saves a round trip.
	o.Protocol = 2
	o.DisableIdentity = true
	if o.ClientName == "" {
		o.ClientName = "posthaste"
	}
	redisurl.Name(o)
}

// dialer returns go-redis' dialer, with socket.Quiet connections if TLS is off.
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
