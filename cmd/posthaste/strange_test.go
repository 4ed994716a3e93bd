package main

import (
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"posthaste/internal/link"
	"posthaste/internal/testenv"
)

// Every process and command works on services that only resemble Redis: they refuse what is not needed, limit the
// arguments of a call, give each connection another identity, refuse undeclared keys, and have Lua 5.4.
func TestOnAStrangeRedis(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		odd link.Oddities
		// unknown is what doctor and status report once.
		unknown string
	}{
		"refusals":   {link.Oddities{Refuse: link.Refusals, MaxArgs: 3999, Strict: true}, "Redis refuses INFO"},
		"identities": {link.Oddities{Identities: true, MaxArgs: 3999, Strict: true}, "another run id"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			inModes(t, func(t *testing.T, mode string) {
				w := newWorld(t)
				p := testenv.Strange(t, w.redis, c.odd)
				w.rdURL = "redis://" + p.Addr()
				w.desire(mode)
				w.worksWith()
				w.db.Exec(t, `INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload, headers)
					SELECT 'traced', 'a', 'x.changed', '{}',
						'{"traceparent":"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}'
					FROM pg_catalog.generate_series(1, 995)`)
				w.waitLen("outbox.traced", 995, 20*time.Second)
				w.retryTrimmed()
				if n := p.Most(); n > 3900 {
					t.Errorf("a call had %d arguments", n)
				}
				for _, command := range []string{"status", "doctor"} {
					r := w.once(command)
					if n := strings.Count(r.out, c.unknown); r.code != 0 || n != 1 {
						t.Errorf("%s: exit %d, %q %d times: %s%s", command, r.code, c.unknown, n, r.out, r.errOut)
					}
				}
			})
		})
	}
}

// retryTrimmed retries a dead event whose entry has left its stream.
func (w *world) retryTrimmed() {
	w.t.Helper()
	ctx, client := w.t.Context(), w.redis.Client
	first := client.XRangeN(ctx, "outbox.traced", "-", "+", 1).Val()[0]
	values := []any{"dead_stream", "outbox.traced", "dead_entry", first.ID, "dead_group", "mailer", "dead_error", "no"}
	for k, v := range first.Values {
		values = append(values, k, v)
	}
	must(w.t, client.XAdd(ctx, &redis.XAddArgs{Stream: "dead.outbox.traced", Values: values}).Err())
	do(w.t, client, "xgroup", "create", "outbox.traced", "mailer", "0")
	do(w.t, client, "xdel", "outbox.traced", first.ID)
	w.once("dead", "retry", "--all").says(w.t, 0)
	testenv.Eventually(w.t, 10*time.Second, func() error {
		last, err := client.XRevRangeN(ctx, "outbox.traced", "+", "-", 1).Result()
		return testenv.FailIf(err != nil || last[0].Values["for_group"] != "mailer", "the last entry is %v, %w", last,
			err)
	})
}
