package consumer_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/go-redis/v9"

	"posthaste/consumer"
	"posthaste/internal/lab/testenv"
)

// The lag is right where Redis' own is not: after a trim, after a deletion, and for a group on an already trimmed
// stream.
func TestInspectLag(t *testing.T) {
	t.Parallel()
	r := testenv.Redis(t)
	ctx := t.Context()
	inspect := func(want consumer.State) {
		t.Helper()
		got, err := consumer.Inspect(ctx, r.Client, "s", "g")
		got.OldestPending = 0
		if err != nil || got != want {
			t.Errorf("got %+v, %v; want %+v", got, err, want)
		}
	}
	read := func(n int64) {
		t.Helper()
		must(t, r.Client.XReadGroup(ctx, &redis.XReadGroupArgs{
			Group: "g", Consumer: "c", Streams: []string{"s", ">"}, Count: n, NoAck: true,
		}).Err())
	}
	fill(t, r.Client, "s", 100, 1)
	r.Client.XTrimMaxLen(ctx, "s", 60)
	var rec record
	reg := prometheus.NewRegistry()
	// makes the group
	c := start(t, consumer.Options{Client: r.Client, Streams: []string{"s"}, Handler: rec.handle, Registerer: reg})
	settled(t, r.Client, 20*time.Second, "g", "s")
	_ = c.stop()
	inspect(consumer.State{Length: 60})
	testenv.Equal(t, "lost before the group came into being", sample(t, reg, "outbox_trim_lost_total"), 0)
	fill(t, r.Client, "s", 100, 1)
	inspect(consumer.State{Length: 160, Lag: 100})
	read(40)
	inspect(consumer.State{Length: 160, Lag: 60})
	r.Client.XTrimMaxLen(ctx, "s", 25) // 35 of the 60 unread are gone
	testenv.Equal(t, "the lag of Redis, which is wrong", r.Client.XInfoGroups(ctx, "s").Val()[0].Lag, 60)
	inspect(consumer.State{Length: 25, Lag: 25, Lost: 35})
	inspect(consumer.State{Length: 25, Lag: 25, Lost: 35})
	read(15)
	inspect(consumer.State{Length: 25, Lag: 10, Lost: 35}) // found also behind the gap
	// A deletion among the unread makes Redis' lag unknown.
	last := r.Client.XRevRangeN(ctx, "s", "+", "-", 2).Val()[1].ID
	r.Client.XDel(ctx, "s", last)
	inspect(consumer.State{Length: 24, Lag: 9, Lost: 36})
	read(100)
	if got, err := consumer.Inspect(ctx, r.Client, "s", "g"); err != nil || got.Lag != 0 {
		t.Errorf("at the end: %+v, %v", got, err)
	}
}

// Entries that are trimmed before they are read, or after delivery and before acknowledgement, are counted exactly,
// once over all consumers of the group, and stop nothing.
func TestTrimmedEntriesAreCounted(t *testing.T) {
	t.Parallel()
	r := testenv.Redis(t)
	ctx := t.Context()
	fill(t, r.Client, "outbox.order", 10, 10)
	// A group that has read 4 of 10, and acknowledged none; its consumer is gone.
	must(t, r.Client.XGroupCreate(ctx, "outbox.order", "g", "0").Err())
	must(t, r.Client.XReadGroup(ctx, &redis.XReadGroupArgs{
		Group: "g", Consumer: "gone", Streams: []string{"outbox.order", ">"}, Count: 4,
	}).Err())
	must(t, r.Client.XTrimMaxLen(ctx, "outbox.order", 3).Err())
	regs := []*prometheus.Registry{prometheus.NewRegistry(), prometheus.NewRegistry()}
	var rec record
	for _, reg := range regs {
		start(t, consumer.Options{
			Client: r.Client, Prefix: "outbox.", ClaimIdle: 300 * time.Millisecond, Handler: rec.handle,
			Registerer: reg,
		})
	}
	for _, reg := range regs { // one of them may be slow to begin
		testenv.Eventually(t, 20*time.Second, func() error {
			_, found := find(t, reg, "outbox_trim_lost_total")
			return testenv.FailIf(!found, "the stream is not known yet")
		})
	}
	lost := func() float64 {
		return sample(t, regs[0], "outbox_trim_lost_total") + sample(t, regs[1], "outbox_trim_lost_total")
	}
	settled(t, r.Client, 20*time.Second, "g", "outbox.order")
	testenv.Becomes(t, "entries lost, 3 unread and 4 pending", 7, lost)
	testenv.Equal(t, "events that ran of those that are left", len(rec.times()), 3)
	// Trimming what is acknowledged is no loss, and the lag stays right.
	fill(t, r.Client, "outbox.order", 5, 5)
	settled(t, r.Client, 20*time.Second, "g", "outbox.order")
	must(t, r.Client.XTrimMaxLen(ctx, "outbox.order", 0).Err())
	fill(t, r.Client, "outbox.order", 5, 5)
	eventuallyRan(t, &rec, 20*time.Second, 13)
	settled(t, r.Client, 20*time.Second, "g", "outbox.order")
	testenv.Equal(t, "entries lost in the end", lost(), 7)
}

// Redis does not keep how much a group has read over a restart; that is no loss.
func TestARestartOfRedisIsNoLoss(t *testing.T) {
	t.Parallel()
	r := testenv.Redis(t, "appendfsync always")
	ctx := t.Context()
	var rec record
	reg := prometheus.NewRegistry()
	start(t, consumer.Options{
		Client: r.Client, Streams: []string{"s"}, ClaimIdle: 300 * time.Millisecond,
		Handler: rec.handle, Registerer: reg,
	})
	inspected := func(by string) string {
		t.Helper()
		testenv.Eventually(t, 20*time.Second, func() error {
			now, err := r.Client.Get(ctx, "{s}:counted:g").Result()
			if err != nil || now == by {
				return fmt.Errorf("not inspected on this server yet, %w", err)
			}
			by = now
			return nil
		})
		return by
	}
	fill(t, r.Client, "s", 100, 1)
	settled(t, r.Client, 20*time.Second, "g", "s")
	if err := r.Client.XTrimMaxLen(ctx, "s", 60).Err(); err != nil { // acknowledged, every one
		t.Fatal(err)
	}
	before := inspected("")
	must(t, r.Kill())
	must(t, r.Start(ctx))
	inspected(before)
	testenv.Equal(t, "entries lost", sample(t, reg, "outbox_trim_lost_total"), 0)
}
