package main

import (
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"posthaste/consumer"
	"posthaste/internal/testenv"
)

// A stream is deleted while no relay runs, its consumer creates the group again, and an operator retries a dead event.
// The retry is refused until the relay has restored the stream, and no event is lost.
func TestDeadRetryWaitsForALostStream(t *testing.T) {
	t.Parallel()
	inModes(t, func(t *testing.T, mode string) {
		w := newWorld(t)
		client := w.redis.Client
		r := w.relayIn(mode, "--stream-maxlen=0")
		load := testenv.StartLoad(t, w.db, testenv.LoadOptions{Rate: 500})
		w.waitSettled(200)
		w.ended(load)
		r.kill()
		first := client.XRangeN(t.Context(), "outbox.order", "-", "+", 1).Val()[0]
		values := []any{
			"dead_stream", "outbox.order", "dead_entry", first.ID, "dead_group", "mailer", "dead_error", "no",
		}
		for k, v := range first.Values {
			values = append(values, k, v)
		}
		err := client.XAdd(t.Context(), &redis.XAddArgs{Stream: "dead.outbox.order", Values: values}).Err()
		must(t, err)
		do(t, client, "del", "outbox.order")
		do(t, client, "xgroup", "create", "outbox.order", "mailer", "0", "mkstream")
		refused := w.once("dead", "retry", "--all")
		if refused.code == 0 || !strings.Contains(refused.out+refused.errOut, consumer.ErrUnrestored.Error()) {
			t.Errorf("dead retry on a stream that lacks events: exit %d: %s%s", refused.code, refused.out,
				refused.errOut)
		}
		w.spawn("relay", "--stream-maxlen=0")
		w.waitWhole()
		w.oracle.Check(t, load, 30*time.Second)
		w.once("dead", "retry", "--all").says(t, 0)
	})
}
