package main

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
)

// Observed from outside, posthaste's own relay loses, repeats and reorders nothing while it is killed. An entry that is
// added a second time is found.
func TestShadow(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	relay := w.relayIn("cdc")
	comparing := w.fork("", nil, "shadow", "--table=public.outbox", "--aggregate-id=aggregate_id",
		"--stream=outbox.order")
	comparing.waitLogged("reading public.outbox")
	for n := range 300 {
		w.db.Exec(t, fmt.Sprintf(`INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload)
			VALUES (gen_random_uuid(), 'order', '%d', 'x', '{}')`, n%7))
		if n == 100 {
			relay.kill()
			w.spawn("relay")
		}
	}
	w.waitLen("outbox.order", 300, 60*time.Second)
	again := w.redis.Client.XRangeN(t.Context(), "outbox.order", "-", "+", 1).Val()[0]
	must(t, w.redis.Client.XAdd(t.Context(), &redis.XAddArgs{Stream: "outbox.order", Values: again.Values}).Err())
	if code := comparing.stop(); code != 1 {
		t.Errorf("exit %d", code)
	}
	for _, line := range []string{
		"committed        300", "published        300", "lost             0", "repeated         1",
		"reordered        0", "commit to entry  p50 ", "repeated: event " + again.Values["id"].(string),
	} {
		comparing.waitLogged(line)
	}
	if comparing.logged("unknown") {
		t.Errorf("%s", comparing.output())
	}
	page := w.once("shadow", "--table=public.outbox", "--stream=outbox.order", "--for=1s", "--poll", "--order-by=seq")
	if page.code != 0 || !strings.Contains(page.out, "committed  0") {
		t.Errorf("exit %d: %s%s", page.code, page.out, page.errOut)
	}
	w.once("shadow", "--table=outbox", "--stream=outbox.order").oneLine(t, 2, "want SCHEMA.NAME")
	w.once("shadow", "--table=public.none", "--stream=outbox.order").oneLine(t, 1, "does not exist")
}
