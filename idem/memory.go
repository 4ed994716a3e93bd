package idem

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"posthaste/internal/redisurl"
)

// memoryShare is the share of its server's maxmemory above which finished records stay for a lease instead of
// TTL. Where streams live in the same server, a day of records would fill it, and then nothing is published;
// without a record, the database answers a repeated key.
const memoryShare = 0.75

// memoryEvery is the minimum interval between two checks of the server's memory.
const memoryEvery = time.Second

// memory is the last known state of the memory of the guard's server.
type memory struct {
	looked atomic.Int64 // in Unix nanoseconds
	short  atomic.Bool
}

// Short reports whether the server's memory was short at the last check: finished records then stay for a lease only.
// Check reads the memory, and so do writes of records, about once a second.
func (g *Guard) Short() bool { return g.memory.short.Load() }

// recordTTL is the TTL of a finished record that is written now.
func (g *Guard) recordTTL(ctx context.Context) time.Duration {
	now := time.Now().UnixNano()
	last := g.memory.looked.Load()
	due := now < last || now-last >= int64(memoryEvery) // the clock may have been set back
	if due && g.memory.looked.CompareAndSwap(last, now) {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), g.timeout)
		defer cancel()
		// Without an answer nothing is known, or written.
		_ = g.askMemory(ctx, func(ctx context.Context, n redisurl.Node) (map[string]string, error) {
			return call(ctx, g.node(n.Addr), g.timeout, func(ctx context.Context) (map[string]string, error) {
				return askInfo(ctx, n)
			})
		})
	}
	if !g.Short() {
		return TTL
	}
	return g.lease
}

// askMemory reads the memory of the guard's server; in a cluster, of the fullest master that answers.
func (g *Guard) askMemory(ctx context.Context, ask askNode) error {
	infos, err := memoryOf(ctx, g.client, ask)
	var used, limit float64
	answered := false
	for _, info := range infos {
		if info == nil {
			continue
		}
		answered = true
		u, uerr := strconv.ParseFloat(info["used_memory"], 64)
		l, lerr := strconv.ParseFloat(info["maxmemory"], 64)
		if uerr != nil || lerr != nil {
			return nil
		}
		if l > 0 && (limit == 0 || u/l > used/limit) {
			used, limit = u, l
		}
	}
	if answered {
		g.noteMemory(used, limit)
	}
	return err
}

// noteMemory updates short. A limit of 0 means that there is no limit.
func (g *Guard) noteMemory(used, limit float64) {
	short := limit > 0 && used > memoryShare*limit
	switch was := g.memory.short.Swap(short); {
	case short && !was:
		g.log.Warn("redis' memory is short: finished records stay for a lease only, and replays come from the database",
			"used_bytes", int64(used), "maxmemory_bytes", int64(limit), "stay", g.lease)
	case was && !short:
		g.log.Info("redis has memory again: finished records stay", "stay", TTL)
	}
}

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
	info, err := redisurl.Info(ctx, n.Client, "memory")
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
