package consumer_test

import (
	"context"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"posthaste/consumer"
	"posthaste/internal/lab/testenv"
)

// database is what a handler needs: while it is down, all events fail, with ordinary errors. Bad events always fail.
type database struct {
	record
	down  atomic.Bool
	tries atomic.Int64
}

func (d *database) run(ctx context.Context, ev consumer.Event) error {
	d.tries.Add(1)
	if d.down.Load() || strings.HasPrefix(ev.ID, "poison") {
		return errBoom
	}
	return d.handle(ctx, ev)
}

// outage waits until n more runs have failed.
func (d *database) outage(tb testing.TB, n int64) {
	tb.Helper()
	n += d.tries.Load()
	testenv.Eventually(tb, 20*time.Second, func() error {
		got := d.tries.Load()
		return testenv.FailIf(got < n, "%d of %d runs", got, n)
	})
}

// The database of the handler is away for longer than the attempts of all events last, from the start or after events
// have succeeded, also while the consumer is restarted again and again. No event dies, and all are handled afterwards.
func TestAnOutageIsNotPoison(t *testing.T) {
	t.Parallel()
	const attempts, events, subjects = 3, 120, 40
	for name, c := range map[string]struct {
		before, restarts int
		ordered          bool
	}{
		"from the start": {}, "after successes": {before: 500}, "ordered": {before: 500, ordered: true},
		"with restarts": {restarts: 2 * attempts}, "with restarts, ordered": {restarts: 2 * attempts, ordered: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := testenv.Redis(t)
			var d database
			logs := &syncBuffer{}
			opt := consumer.Options{
				Client: r.Client, MaxAttempts: attempts, Ordered: c.ordered,
				Handler: d.run, Logger: logTo(logs), ClaimIdle: time.Second,
			}
			ids := fill(t, r.Client, "outbox.order", c.before, subjects)
			d.down.Store(c.before == 0)
			run := start(t, opt)
			if c.before > 0 {
				settled(t, r.Client, 20*time.Second, "g", "outbox.order")
				d.down.Store(true)
			}
			ids = append(ids, fill(t, r.Client, "outbox.order", events, subjects)...)
			for range c.restarts {
				d.outage(t, 2*subjects)
				must(t, run.stop())
				run = start(t, opt)
			}
			d.outage(t, 4*attempts*subjects)
			logs.wait(t, "nearly all events fail")
			d.down.Store(false)
			settled(t, r.Client, 20*time.Second, "g", "outbox.order")
			testenv.Equal(t, "dead events", len(dead(t, r.Client)), 0)
			allOnce(t, ids, d.times())
		})
	}
}

// Bad events among good ones die after their attempts: while the good ones are handled, when these are done, and after
// an outage of everything. So do bad events that come last.
func TestBadEventsAmongGoodOnesDie(t *testing.T) {
	t.Parallel()
	const attempts, good = 4, 40
	for _, bad := range []int{1, 5} {
		for _, when := range []string{"at once", "after an outage", "last"} {
			t.Run(fmt.Sprintf("%d bad, %s", bad, when), func(t *testing.T) {
				t.Parallel()
				r := testenv.Redis(t)
				var d database
				d.down.Store(when == "after an outage")
				addBad := func() {
					for i := range bad {
						add(t, r.Client, "outbox.order", event{fmt.Sprintf("poison-%d", i), fmt.Sprintf("b%d", i), i})
					}
				}
				if when != "last" {
					addBad()
				}
				ids := fill(t, r.Client, "outbox.order", good, good)
				start(t, consumer.Options{Client: r.Client, MaxAttempts: attempts, Handler: d.run})
				switch when {
				case "after an outage":
					d.outage(t, int64(2*attempts*(good+bad)))
					d.down.Store(false)
				case "last":
					settled(t, r.Client, 20*time.Second, "g", "outbox.order")
					addBad()
				}
				settled(t, r.Client, 20*time.Second, "g", "outbox.order")
				list := dead(t, r.Client)
				if len(list) != bad {
					t.Fatalf("%d events died, want %d", len(list), bad)
				}
				for _, e := range list {
					if !strings.HasPrefix(e.EventID, "poison") || e.Attempts != attempts {
						t.Errorf("%s died after %d attempts, want %d", e.EventID, e.Attempts, attempts)
					}
				}
				allOnce(t, ids, d.times())
			})
		}
	}
}
