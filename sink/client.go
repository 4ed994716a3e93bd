package sink

import (
	"errors"
	"fmt"
	"net/url"
	"time"

	"github.com/redis/go-redis/v9"
)

// NewClient returns a client for a publisher. url is redis://, rediss:// or unix://; no error mentions it, because it
// may hold a password. It does no I/O.
func NewClient(rawURL string) (*redis.Client, error) {
	o, err := clientOptions(rawURL)
	if err != nil {
		return nil, err
	}
	return redis.NewClient(o), nil
}

func clientOptions(rawURL string) (*redis.Options, error) {
	u, err := url.Parse(rawURL)
	if err != nil {
		return nil, errors.New("redis URL: not a URL (a password with special characters must be percent-encoded)")
	}
	switch u.Scheme {
	case "redis", "rediss", "unix":
	default:
		return nil, fmt.Errorf("redis URL: scheme %q is not one of redis, rediss, unix", u.Scheme)
	}
	o, err := redis.ParseURL(rawURL)
	if err != nil {
		return nil, errors.New("redis URL: expected redis://[user[:password]@]host[:port][/database] with known " +
			"options")
	}
	Configure(o)
	return o, nil
}

// Configure sets the options of a publisher's client. Where the server is, who asks, and how they are connected stay as
// they are in o.
func Configure(o *redis.Options) {
	// The gate makes repeats safe and the caller decides about them. The client's own would only hide errors.
	o.MaxRetries = -1
	o.DialerRetries = 1
	// By default a context's deadline is ignored once a command has been sent.
	o.ContextTimeoutEnabled = true
	o.DialTimeout = 2 * time.Second
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
