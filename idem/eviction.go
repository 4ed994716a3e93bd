package idem

import (
	"context"
	"errors"
	"fmt"

	"github.com/redis/go-redis/v9"

	"posthaste/internal/redisurl"
)

// EvictionPolicy asks the server which keys it throws away when its memory is full; in a cluster, that of a master that
// is not "noeviction", if there is one. Anything else makes it forget guard records under pressure: harmless for the
// guard, because the database arbitrates, and not for data that lives in Redis alone. It reads INFO, which managed
// servers allow where CONFIG is refused.
func EvictionPolicy(ctx context.Context, c redis.UniversalClient) (string, error) {
	infos, err := memoryOf(ctx, c, askInfo)
	if err != nil {
		return "", fmt.Errorf("read the eviction policy: %w", err)
	}
	policy := ""
	for _, info := range infos {
		p, ok := info["maxmemory_policy"]
		if !ok {
			return "", errors.New("read the eviction policy: the server does not report it")
		}
		if policy == "" || policy == safePolicy {
			policy = p
		}
	}
	return policy, nil
}

const safePolicy = "noeviction"

// askNode asks one node for its memory, and askInfo does no more than that.
type askNode func(ctx context.Context, n redisurl.Node) (string, error)

func askInfo(ctx context.Context, n redisurl.Node) (string, error) {
	return n.Info(ctx, "memory").Result()
}

// memoryOf asks every primary for its memory. One that does not answer has nil, beside the error.
func memoryOf(ctx context.Context, c redis.UniversalClient, ask askNode) ([]map[string]string, error) {
	nodes, err := redisurl.Primaries(ctx, c)
	if err != nil {
		return nil, err
	}
	return redisurl.Gather(ctx, nodes, func(ctx context.Context, n redisurl.Node) (map[string]string, error) {
		text, err := ask(ctx, n)
		if err != nil {
			return nil, err
		}
		return parseInfo(text), nil
	})
}
