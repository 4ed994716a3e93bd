package consumer

import (
	"context"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
)

// errorText bounds the error kept with a dead entry.
const errorText = 1000

// DeadStream returns the stream that events of the given one go to when a consumer group gives them up. On a single
// server (or with Sentinel) it is "dead." + stream. In a cluster both must live in the same slot, or the move could not
// be atomic; there it is "dead.{" + stream + "}", because a key's slot is that of the part in braces.
func DeadStream(client redis.UniversalClient, stream string) string {
	if _, ok := client.(*redis.ClusterClient); ok && !strings.Contains(stream, "{") {
		return deadPrefix + "{" + stream + "}"
	}
	return deadPrefix + stream
}

// die moves e to the dead stream and lets its queue go on. While Redis does not answer, e waits in its queue.
func (c *Consumer) die(ctx context.Context, e *entry, attempts int, cause error) {
	args := []any{
		c.opt.Group, c.opt.Consumer, e.id, "dead_stream", e.stream, "dead_entry", e.id, "dead_group", c.opt.Group,
		"dead_error", clip(cause.Error(), errorText), "dead_attempts", strconv.Itoa(attempts), "dead_at",
		time.Now().UTC().Format(timeFormat),
	}
	for k, v := range e.values {
		// A dead entry that dies again (a group may read a dead stream) says where it died last.
		if !strings.HasPrefix(k, "dead_") {
			args = append(args, k, v)
		}
	}
	result, err := deadScript.Run(ctx, c.client, []string{e.stream, DeadStream(c.client, e.stream)}, args...).Text()
	if err != nil {
		c.again(e, "dead", err)
		return
	}
	c.outages.note("dead", e.stream, nil)
	if result == "moved" {
		c.metrics.dead.Inc()
		id, _ := e.values["id"].(string)
		c.log.Error("event moved to the dead stream", "event_id", id, "stream", e.stream, "entry_id", e.id,
			"attempt", attempts, "err", clip(cause.Error(), errorText))
	}
	c.queues.done(e, false)
}

// clip shortens s to at most n bytes of valid UTF-8.
func clip(s string, n int) string {
	s = strings.ToValidUTF8(s, "\uFFFD")
	if len(s) <= n {
		return s
	}
	return strings.ToValidUTF8(s[:n], "") + "…"
}
