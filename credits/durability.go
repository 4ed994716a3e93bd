package credits

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/redis/go-redis/v9"

	"posthaste/internal/redisurl"
)

// Durability is what an operation waits for before it is acknowledged. The zero value waits for nothing.
type Durability struct {
	// Replicas is how many replicas must have the operation.
	Replicas int
	// AOF requires that the operation is in the append-only file on the primary's disk. It needs WAITAOF (Redis 7.2).
	AOF bool
}

// The names of the levels in bodies and in the ledger.
const (
	durMemory     = "memory"
	durReplicated = "replicated"
	durFsynced    = "fsynced"
)

func (d Durability) name() string {
	switch {
	case d.AOF:
		return durFsynced
	case d.Replicas > 0:
		return durReplicated
	}
	return durMemory
}

// waitTimeout limits the wait for replicas or disk.
const waitTimeout = 500 * time.Millisecond

// wait queues the command that waits for the writes of the pipeline. It must be in the same pipeline and thus on the
// same connection: the server waits for the last write of the connection that sends the command.
func (d Durability) wait(ctx context.Context, p redis.Pipeliner) *redis.Cmd {
	ms := waitTimeout.Milliseconds()
	switch {
	case d.AOF:
		return p.Do(ctx, "WAITAOF", 1, d.Replicas, ms)
	case d.Replicas > 0:
		return p.Do(ctx, "WAIT", d.Replicas, ms)
	}
	return nil
}

var errNotDurable = errors.New("the operation is not on enough disks or replicas yet")

// reached checks the counts that the wait returned.
func (d Durability) reached(cmd *redis.Cmd) error {
	if cmd == nil {
		return nil
	}
	v, err := cmd.Result()
	if err != nil {
		return fmt.Errorf("wait for durability: %w", err)
	}
	var local, replicas int64
	switch v := v.(type) {
	case int64:
		replicas = v
	case []any:
		if len(v) == 2 {
			local, _ = v[0].(int64)
			replicas, _ = v[1].(int64)
		}
	}
	if replicas < int64(d.Replicas) || (d.AOF && local < 1) {
		return errNotDurable
	}
	return nil
}

// unsafeReason returns why the server must not hold balances, or "" if it may.
func (d Durability) unsafeReason(ctx context.Context, c *redis.Client) (string, error) {
	info, err := redisurl.Info(ctx, c, "memory", "persistence")
	switch {
	case redisurl.Refused(err):
		return "", nil // an operator must see to it
	case err != nil:
		return "", fmt.Errorf("read the eviction policy: %w", err)
	case info["maxmemory_policy"] != "noeviction":
		return "the eviction policy must be noeviction", nil
	case !d.AOF:
		return "", nil
	case info["aof_enabled"] != "1":
		return "durability aof needs appendonly yes", nil
	}
	// COMMAND INFO has a nil reply for a command that the server does not have.
	v, err := c.Do(ctx, "COMMAND", "INFO", "WAITAOF").Slice()
	if err != nil {
		return "", fmt.Errorf("look for WAITAOF: %w", err)
	}
	if len(v) != 1 || v[0] == nil {
		return "durability aof needs WAITAOF (Redis 7.2, Valkey 7.2)", nil
	}
	return "", nil
}
