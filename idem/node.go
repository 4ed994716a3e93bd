package idem

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/sony/gobreaker/v2"

	"posthaste/internal/batch"
)

// node is the guard's state for one server. Each node has its own breaker and publication queue, so that a cluster's
// master that is down does not affect the keys of the others.
type node struct {
	breaker      *gobreaker.CircuitBreaker[any]
	publications batch.Queue[publication]
}

func (g *Guard) node(addr string) *node {
	g.nodesMu.Lock()
	defer g.nodesMu.Unlock()
	n := g.nodes[addr]
	if n == nil {
		n = &node{breaker: g.newBreaker(addr)}
		n.publications.Send, n.publications.Flights = func(func()) { g.sendBatch(n) }, 1
		g.nodes[addr] = n
	}
	return n
}

// nodeOf returns the node that has a key, as far as the client knows: it follows a slot that has moved by itself.
func (g *Guard) nodeOf(ctx context.Context, key Key) (*node, error) {
	if g.client == nil {
		return nil, errUnusable
	}
	cluster, many := g.client.(*redis.ClusterClient)
	if !many {
		return g.node(""), nil
	}
	// Only the first call for a cluster needs the network.
	master, err := call(ctx, g.node(""), g.timeout, func(ctx context.Context) (*redis.Client, error) {
		return cluster.MasterForKey(ctx, key.String())
	})
	if err != nil {
		return nil, fmt.Errorf("find the node of a key: %w", err)
	}
	return g.node(master.Options().Addr), nil
}

// newBreaker opens after three failures in a row and lets one call try again every second, so that a hanging server
// costs one request per second its time, and the others nothing.
func (g *Guard) newBreaker(addr string) *gobreaker.CircuitBreaker[any] {
	log := g.log
	if addr != "" {
		log = log.With("node", addr)
	}
	return gobreaker.NewCircuitBreaker[any](gobreaker.Settings{
		Name:        "idem",
		MaxRequests: 1,
		Timeout:     time.Second,
		ReadyToTrip: func(c gobreaker.Counts) bool { return c.ConsecutiveFailures >= 3 },
		// A client that disconnected does not count as a failure of Redis.
		IsExcluded: func(err error) bool { return errors.Is(err, context.Canceled) },
		// A key of another type concerns that key only, and not the server.
		IsSuccessful: func(err error) bool {
			return err == nil || errors.Is(err, redis.Nil) || redis.HasErrorPrefix(err, "WRONGTYPE")
		},
		OnStateChange: func(_ string, from, to gobreaker.State) {
			log.Warn("guard breaker changed state", "from", from.String(), "to", to.String())
		},
	})
}

// call is one bounded exchange with Redis under the node's breaker.
func call[T any](
	ctx context.Context, n *node, timeout time.Duration, f func(context.Context) (T, error),
) (v T, err error) {
	_, err = n.breaker.Execute(func() (any, error) {
		ctx, cancel := context.WithTimeout(ctx, timeout)
		defer cancel()
		v, err = f(ctx)
		return nil, err
	})
	if errors.Is(err, gobreaker.ErrOpenState) || errors.Is(err, gobreaker.ErrTooManyRequests) {
		err = errUnusable
	}
	return v, err
}
