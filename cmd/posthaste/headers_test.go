package main

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	"posthaste/internal/testenv"
)

// An event's headers reach its stream on every way: as it is committed, from the table, after a retry of the dead
// event, and when Redis has lost it.
func TestHeadersOnEveryWay(t *testing.T) {
	t.Parallel()
	inModes(t, func(t *testing.T, mode string) {
		w := newWorld(t, "proto-max-bulk-len 1mb")
		var ids []string
		insert := func(payload string) {
			id := uuid.NewString()
			w.db.Exec(t, `INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload, headers)
				VALUES ($1::text::uuid, 'order', 'a', 'made', to_jsonb($2::text),
					jsonb_build_object('tenant', $1::text))`,
				id, payload)
			ids = append(ids, id)
		}
		complete := func() {
			t.Helper()
			testenv.Eventually(t, 60*time.Second, func() error {
				entries := w.redis.Client.XRange(t.Context(), "outbox.order", "-", "+").Val()
				if len(entries) != len(ids) {
					return fmt.Errorf("%d entries, want %d", len(entries), len(ids))
				}
				for _, e := range entries {
					if e.Values["headers"] != fmt.Sprintf(`{"tenant": "%v"}`, e.Values["id"]) {
						return fmt.Errorf("the headers of %v are %v", e.Values["id"], e.Values["headers"])
					}
				}
				return nil
			})
		}
		insert("waits in the table")
		w.relayIn(mode, "--stream-maxlen=0")
		insert("is committed")
		complete()
		insert(strings.Repeat("x", 1<<20+1))
		w.dead(1, 30*time.Second)
		do(t, w.redis.Client, "config", "set", "proto-max-bulk-len", "512mb")
		w.once("dead", "retry", ids[2]).says(t, 0)
		complete()
		w.waitMode(mode, 20*time.Second)
		do(t, w.redis.Client, "flushall")
		complete()
	})
}
