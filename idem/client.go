package idem

import (
	"context"
	"fmt"
	"time"

	"github.com/redis/go-redis/v9"

	"posthaste/internal/redisurl"
)

// Redis is a client of the guard's server: one server, Sentinel or Cluster.
type Redis = redis.UniversalClient

// NewClient returns a client for url, which names one server, a cluster or sentinels, in the forms of go-redis, with
// the guard's options: every call obeys its context, a reply is awaited for 250 ms, and a command is resent once at
// most. The scripts are safe to resend; others that use this client must be too. The caller closes it.
func NewClient(url string) (redis.UniversalClient, error) {
	o, err := redisurl.Parse(url)
	if err != nil {
		return nil, fmt.Errorf("redis URL: %w", err)
	}
	Configure(o)
	return redis.NewUniversalClient(o), nil
}

// Unreachable returns the addresses of a cluster's masters that do not answer; "" for one server, or all of a cluster.
func Unreachable(ctx context.Context, c Redis) []string {
	nodes, err := redisurl.Primaries(ctx, c)
	if err != nil {
		return []string{""}
	}
	silent, _ := redisurl.Gather(ctx, nodes, func(ctx context.Context, n redisurl.Node) (bool, error) {
		return n.Client.Ping(ctx).Err() != nil, nil
	})
	var list []string
	for i, n := range nodes {
		if silent[i] {
			list = append(list, n.Addr)
		}
	}
	return list
}

// Configure sets the guard's options, as NewClient describes them. Addresses, credentials and transport in o do not
// change.
func Configure(o *redis.UniversalOptions) {
	redisurl.Prompt(o)
	o.MaxRetries = 1
	o.MinRetryBackoff = 5 * time.Millisecond
	o.MaxRetryBackoff = 20 * time.Millisecond
	o.ReadTimeout = 250 * time.Millisecond
	o.PoolTimeout = 250 * time.Millisecond
}
