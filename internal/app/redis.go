package app

import (
	"context"
	"net"
	"strings"
	"sync"

	"github.com/redis/go-redis/v9"

	"posthaste/credits"
	"posthaste/idem"
	"posthaste/internal/cli"
	"posthaste/internal/redisurl"
	"posthaste/sink"
)

// redisOptions returns the options that the settings give for the server or servers at a URL. It queries a single
// address for its mode. The caller adds timeouts and retries.
func (c Config) redisOptions(ctx context.Context, rawURL string) (*redis.UniversalOptions, error) {
	o, err := redisurl.Parse(rawURL)
	if err != nil {
		return nil, cli.Usage("the Redis URL: " + err.Error())
	}
	if o.TLSConfig != nil { // also for sentinels and for all nodes
		o.TLSConfig.InsecureSkipVerify = c.RedisSkipVerify.On()
		o.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
			return c.RedisTLS.Dial(ctx, network, addr, c.RedisSkipVerify.On())
		}
	}
	if err := redisurl.Resolve(o, c.modes.of(ctx, rawURL, o)); err != nil {
		return nil, cli.Usage("the Redis URL: " + err.Error())
	}
	return o, nil
}

// RedisAddr names the server or servers of the Redis URL for texts: host:port, separated by commas.
func (c Config) RedisAddr() string {
	o, err := redisurl.Parse(c.RedisURL)
	if err != nil {
		return "the Redis URL"
	}
	return strings.Join(o.Addrs, ",")
}

// modes caches the mode of each URL, so that all clients of a process agree, and an address that does not answer
// delays the start only once. nil caches nothing.
type modes struct {
	mu sync.Mutex
	by map[string]string
}

func (m *modes) of(ctx context.Context, rawURL string, o *redis.UniversalOptions) string {
	if m == nil {
		return redisurl.Mode(ctx, o)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	mode, known := m.by[rawURL]
	if !known {
		mode = redisurl.Mode(ctx, o)
		m.by[rawURL] = mode
	}
	return mode
}

// client returns a client for a URL with the options of configure.
func (c Config) client(ctx context.Context, rawURL string, configure func(o *redis.UniversalOptions)) (
	redis.UniversalClient, error,
) {
	o, err := c.redisOptions(ctx, rawURL)
	if err != nil {
		return nil, err
	}
	configure(o)
	redisurl.Name(o)
	return redis.NewUniversalClient(o), nil
}

// RedisClient returns a client for the relay and for operators' commands; see sink.Configure. The caller closes it.
func (c Config) RedisClient(ctx context.Context) (redis.UniversalClient, error) {
	return c.streams(ctx, sink.Configure)
}

// CreditsClient returns a client for credits, and its connections; see credits.Configure. The caller closes it.
func (c Config) CreditsClient(ctx context.Context) (
	client redis.UniversalClient, connections *credits.Connections, err error,
) {
	client, err = c.client(ctx, c.RedisURL, func(o *redis.UniversalOptions) { connections = credits.Configure(o) })
	return client, connections, err
}

// ReaderClient returns a client that reads streams. It blocks for entries, so it has the library's timeouts. The
// caller closes it.
func (c Config) ReaderClient(ctx context.Context) (redis.UniversalClient, error) {
	return c.streams(ctx, func(*redis.UniversalOptions) {})
}

// streams returns a client for the streams of the outbox.
func (c Config) streams(ctx context.Context, configure func(o *redis.UniversalOptions)) (
	redis.UniversalClient, error,
) {
	if c.SinkURL != "" {
		return nil, errNotRedis
	}
	return c.client(ctx, c.RedisURL, configure)
}

// GuardClient returns a client for the idempotency guard; see idem.Configure. The caller closes it.
func (c Config) GuardClient(ctx context.Context, rawURL string) (redis.UniversalClient, error) {
	return c.client(ctx, rawURL, idem.Configure)
}
