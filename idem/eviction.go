package idem

import (
	"context"
	"errors"
	"fmt"

	"github.com/redis/go-redis/v9"
)

// EvictionPolicy asks the server which keys it throws away when its memory is full. Anything but "noeviction" makes it
// forget guard records under pressure: harmless for the guard, because the database arbitrates, and not for data that
// lives in Redis alone. It reads INFO, which managed servers allow where CONFIG is refused.
func EvictionPolicy(ctx context.Context, c redis.UniversalClient) (string, error) {
	info, err := c.Info(ctx, "memory").Result()
	if err != nil {
		return "", fmt.Errorf("read the eviction policy: %w", err)
	}
	if policy, ok := parseInfo(info)["maxmemory_policy"]; ok {
		return policy, nil
	}
	return "", errors.New("read the eviction policy: the server does not report it")
}
