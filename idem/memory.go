package idem

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"sync/atomic"
	"time"
)

// memoryShare is the share of its server's maxmemory above which finished records stay for a lease instead of
// Options.TTL. Where streams live in the same server, a day of records would fill it, and then nothing is published;
// without a record, the database answers a repeated key.
const memoryShare = 0.75

// memoryEvery is how often the server's memory is looked at, at most.
const memoryEvery = time.Second

// memory is what is known of the memory of the guard's server.
type memory struct {
	looked atomic.Int64 // in Unix nanoseconds
	short  atomic.Bool
}

// Short reports whether the server's memory was short when it was last looked at: finished records stay for a lease
// only. It is looked at by Check, and about once a second while records are written.
func (g *Guard) Short() bool { return g.memory.short.Load() }

// recordTTL is how long a finished record that is written now stays.
func (g *Guard) recordTTL(ctx context.Context) time.Duration {
	now := time.Now().UnixNano()
	if last := g.memory.looked.Load(); now-last >= int64(memoryEvery) && g.memory.looked.CompareAndSwap(last, now) {
		if v, err := g.call(context.WithoutCancel(ctx), g.askMemory); err == nil { // else nothing is known, or written
			g.noteMemory(fmt.Sprint(v))
		}
	}
	if !g.Short() {
		return g.ttl
	}
	g.metrics.short.Inc()
	return min(g.ttl, g.lease)
}

func (g *Guard) askMemory(ctx context.Context) (any, error) {
	return g.client.Info(ctx, "memory").Result()
}

// noteMemory takes the answer of INFO.
func (g *Guard) noteMemory(text string) {
	info := parseInfo(text)
	used, uerr := strconv.ParseFloat(info["used_memory"], 64)
	limit, lerr := strconv.ParseFloat(info["maxmemory"], 64)
	if uerr != nil || lerr != nil {
		return
	}
	short := limit > 0 && used > memoryShare*limit
	switch was := g.memory.short.Swap(short); {
	case short && !was:
		g.log.Warn("redis' memory is short: finished records stay for a lease only, and replays come from the database",
			"used_bytes", int64(used), "maxmemory_bytes", int64(limit), "stay", g.lease)
	case was && !short:
		g.log.Info("redis has memory again: finished records stay", "stay", g.ttl)
	}
}

// parseInfo reads the answer of INFO.
func parseInfo(text string) map[string]string {
	info := map[string]string{}
	for line := range strings.Lines(text) {
		if name, value, ok := strings.Cut(line, ":"); ok {
			info[name] = strings.TrimSpace(value)
		}
	}
	return info
}
