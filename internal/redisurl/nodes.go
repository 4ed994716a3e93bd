package redisurl

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/redis/go-redis/v9"
)

// Node is one server behind a client.
type Node struct {
	Client *redis.Client
	// Addr is the address of a cluster node; "" for a single server.
	Addr string
	// Replica is set for a replica in a cluster.
	Replica bool
}

// Named adds the node's address to err, if there are several nodes.
func (n Node) Named(err error) error {
	if err == nil || n.Addr == "" {
		return err
	}
	return &NodeError{Addr: n.Addr, Err: err}
}

// NodeError is an error of one of several nodes.
type NodeError struct {
	Addr string
	Err  error
}

func (e *NodeError) Error() string { return "node " + e.Addr + ": " + e.Err.Error() }

func (e *NodeError) Unwrap() error { return e.Err }

// Primaries returns the servers that take writes, by address: one, or the masters of a cluster according to its
// current state.
func Primaries(ctx context.Context, client redis.UniversalClient) ([]Node, error) {
	return nodes(ctx, client, false)
}

// Nodes returns Primaries, followed by the replicas of a cluster.
func Nodes(ctx context.Context, client redis.UniversalClient) ([]Node, error) {
	return nodes(ctx, client, true)
}

// Holder returns the server that holds key. WAIT, CONFIG and the like have no key by which a client could route them.
func Holder(ctx context.Context, client redis.UniversalClient, key string) (*redis.Client, error) {
	switch c := client.(type) {
	case *redis.Client:
		return c, nil
	case *redis.ClusterClient:
		return c.MasterForKey(ctx, key)
	}
	return nil, fmt.Errorf("a client of type %T has no node for a key", client)
}

func nodes(ctx context.Context, client redis.UniversalClient, replicas bool) ([]Node, error) {
	switch c := client.(type) {
	case *redis.Client:
		return []Node{{Client: c}}, nil
	case *redis.ClusterClient:
		var mu sync.Mutex
		var list []Node
		note := func(replica bool) func(context.Context, *redis.Client) error {
			return func(_ context.Context, n *redis.Client) error {
				mu.Lock()
				defer mu.Unlock()
				list = append(list, Node{Client: n, Addr: n.Options().Addr, Replica: replica})
				return nil
			}
		}
		err := c.ForEachMaster(ctx, note(false))
		if err == nil && replicas {
			err = c.ForEachSlave(ctx, note(true))
		}
		slices.SortFunc(list, func(a, b Node) int {
			if a.Replica != b.Replica {
				if b.Replica {
					return -1
				}
				return 1
			}
			return strings.Compare(a.Addr, b.Addr)
		})
		if err == nil && len(list) == 0 {
			err = errors.New("the cluster has no node with slots")
		}
		return list, err
	}
	return nil, fmt.Errorf("a client of type %T is of no known kind", client)
}

// Each calls do for all nodes at once, and joins their errors, which are Named.
func Each(ctx context.Context, nodes []Node, do func(ctx context.Context, n Node) error) error {
	_, err := Gather(ctx, nodes, func(ctx context.Context, n Node) (struct{}, error) { return struct{}{}, do(ctx, n) })
	return err
}

// Gather calls ask for all nodes at once, and returns the answers in the order of the nodes, and the joined errors,
// which are Named.
func Gather[T any](ctx context.Context, nodes []Node, ask func(ctx context.Context, n Node) (T, error)) ([]T, error) {
	answers, errs := make([]T, len(nodes)), make([]error, len(nodes))
	var wg sync.WaitGroup
	for i, n := range nodes {
		wg.Go(func() {
			var err error
			answers[i], err = ask(ctx, n)
			errs[i] = n.Named(err)
		})
	}
	wg.Wait()
	return answers, errors.Join(errs...)
}
