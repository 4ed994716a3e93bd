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
	infos, err := memoryOf(ctx, c)
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

// memoryOf asks every primary for its memory.
func memoryOf(ctx context.Context, c redis.UniversalClient) ([]map[string]string, error) {
	nodes, err := redisurl.Primaries(ctx, c)
	if err != nil {
		return nil, err
	}
	return redisurl.Gather(ctx, nodes, func(ctx context.Context, n redisurl.Node) (map[string]string, error) {
		text, err := n.Info(ctx, "memory").Result()
		return parseInfo(text), err
	})
}
