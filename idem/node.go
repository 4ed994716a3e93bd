package idem

import (
	"context"
	"errors"
	"fmt"
	"sync"
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

// nodes are the nodes by address; there are never more than a cluster has had. "" is the one server, and of a cluster
// the question where a key is.
type nodes struct {
	mu sync.Mutex
	m  map[string]*node
}

func (g *Guard) node(addr string) *node {
	g.nodes.mu.Lock()
	defer g.nodes.mu.Unlock()
	n := g.nodes.m[addr]
	if n == nil {
		if g.nodes.m == nil {
			g.nodes.m = map[string]*node{}
		}
		n = &node{breaker: g.newBreaker(addr)}
		n.publications.Send, n.publications.Flights = func(func()) { g.sendQueue(n) }, 1
		g.nodes.m[addr] = n
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
	v, err := g.node("").call(ctx, g.timeout, func(ctx context.Context) (any, error) {
		return cluster.MasterForKey(ctx, key.String())
	})
	if err != nil {
		return nil, fmt.Errorf("find the node of a key: %w", err)
	}
	return g.node(v.(*redis.Client).Options().Addr), nil //nolint:forcetypeassert // it is what MasterForKey returns
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
		IsSuccessful: func(err error) bool {
			return err == nil || errors.Is(err, redis.Nil) || isDataError(err)
		},
		OnStateChange: func(_ string, from, to gobreaker.State) {
			log.Warn("guard breaker changed state", "from", from.String(), "to", to.String())
		},
	})
}

// call is one bounded exchange with Redis under the node's breaker.
func (n *node) call(
	ctx context.Context, timeout time.Duration, f func(context.Context) (any, error),
) (any, error) {
	v, err := n.breaker.Execute(func() (any, error) {
		ctx, cancel := context.WithTimeout(ctx, timeout)
		defer cancel()
		return f(ctx)
	})
	if errors.Is(err, gobreaker.ErrOpenState) || errors.Is(err, gobreaker.ErrTooManyRequests) {
		return nil, errUnusable
	}
	return v, err
}
