package credits

import (
	"context"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"posthaste/internal/redisurl"
)

// evictedEvery is how often buckets are rebuilt while a server may evict keys. Its operations are refused then.
const evictedEvery = 5 * time.Second

// evictions are the processes of Redis that have evicted keys: by the address of the server, the id of the process and
// the number of keys. What was evicted may be the outcome of an operation: its repetition would not find it, although
// no operation is missing. So the buckets of such a server are rebuilt, and repetitions read the ledger.
type evictions struct {
	by map[string]string
	at time.Time
}

// read reads the numbers of all primaries. A server that does not tell, or that still evicts and was read a moment ago,
// keeps its number; all of them do if the primaries cannot be listed.
func (e *evictions) read(ctx context.Context, c redis.UniversalClient) {
	var mu sync.Mutex
	by, recent := map[string]string{}, time.Since(e.at) < evictedEvery
	err := eachPrimary(ctx, c, func(ctx context.Context, c *redis.Client) error {
		info, err := redisurl.Info(ctx, c, "server", "memory", "stats")
		mu.Lock()
		defer mu.Unlock()
		switch addr, n := c.Options().Addr, info["evicted_keys"]; {
		case err != nil || n == "" || recent && info["maxmemory_policy"] != "noeviction":
			by[addr] = e.by[addr]
		case n != "0":
			by[addr] = info["run_id"] + "|" + n
		}
		return nil
	})
	if err != nil {
		return
	}
	if !recent {
		e.at = time.Now()
	}
	e.by = by
}

// of returns what is known of the server of a bucket; "" if it has evicted nothing.
func (e *evictions) of(ctx context.Context, c redis.UniversalClient, bkt int16) string {
	if len(e.by) == 0 {
		return ""
	}
	node, err := primary(ctx, c, epochKey(bkt))
	if err != nil {
		return ""
	}
	return e.by[node.Options().Addr]
}
