package app

import (
	"context"
	"net"

	"github.com/redis/go-redis/v9"

	"posthaste/credits"
	"posthaste/idem"
	"posthaste/internal/cli"
	"posthaste/sink"
)

// redisOptions is where every client of Redis begins: what the settings say of the server at a URL. Who makes the
// client adds how it waits and repeats.
func (c Config) redisOptions(rawURL string) (*redis.Options, error) {
	o, err := redis.ParseURL(rawURL)
	if err != nil { // which quotes the URL, and with it the password
		return nil, cli.Usage("the Redis URL cannot be parsed")
	}
	if o.TLSConfig != nil {
		o.TLSConfig.InsecureSkipVerify = c.RedisSkipVerify
		o.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
			return c.RedisTLS.Dial(ctx, network, addr, c.RedisSkipVerify)
		}
	}
	return o, nil
}

// client returns a client of the server at a URL, as configure has it.
func (c Config) client(rawURL string, configure func(o *redis.Options)) (*redis.Client, error) {
	o, err := c.redisOptions(rawURL)
	if err != nil {
		return nil, err
	}
	configure(o)
	return redis.NewClient(o), nil
}

// RedisClient returns a client for what publishes, looks and acts in Redis; see sink.Configure. The caller closes it.
func (c Config) RedisClient() (*redis.Client, error) { return c.client(c.RedisURL, sink.Configure) }

// CreditsClient returns a client for credits; see credits.Configure. The caller closes it.
func (c Config) CreditsClient() (*redis.Client, error) {
	return c.client(c.RedisURL, credits.Configure)
}

// ReaderClient returns a client that reads streams: it blocks for entries, so its timeouts are those of the library.
// The caller closes it.
func (c Config) ReaderClient() (*redis.Client, error) {
	return c.client(c.RedisURL, func(*redis.Options) {})
}

// GuardClient returns a client of the server at a URL for the idempotency guard; see idem.Configure. The caller closes
// it.
func (c Config) GuardClient(rawURL string) (*redis.Client, error) {
	return c.client(rawURL, idem.Configure)
}

// redisOrNil is redisOptions for whoever says himself what is wrong with the URL, or that there is none.
func (c Config) redisOrNil(rawURL string) *redis.Options {
	if rawURL == "" {
		return nil
	}
	o, err := c.redisOptions(rawURL)
	if err != nil {
		return nil
	}
	return o
}
