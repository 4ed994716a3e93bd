package idem

import (
	"context"
	"errors"
	"fmt"

	"github.com/redis/go-redis/v9"

	"posthaste/internal/redisurl"
)

// EvictionPolicy returns the server's maxmemory policy; in a cluster that of a master that is not "noeviction", if
// there is one. Under any other policy a full server deletes guard records, which is harmless because the database
// arbitrates, and data that exists in Redis alone. It reads INFO, which managed servers allow where CONFIG is refused.
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

// askNode reads the memory section of one node, which is empty if the node refuses INFO; askInfo does only that.
type askNode func(ctx context.Context, n redisurl.Node) (map[string]string, error)

func askInfo(ctx context.Context, n redisurl.Node) (map[string]string, error) {
	info, err := redisurl.Info(ctx, n, "memory")
	if redisurl.Refused(err) {
		err = nil
	}
	return info, err
}

// memoryOf reads the memory section of every primary. It is nil for one that does not answer, and the error is set.
func memoryOf(ctx context.Context, c redis.UniversalClient, ask askNode) ([]map[string]string, error) {
	nodes, err := redisurl.Primaries(ctx, c)
	if err != nil {
		return nil, err
	}
	return redisurl.Gather(ctx, nodes, ask)
}
