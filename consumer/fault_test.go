package consumer_test

import (
	"context"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/go-redis/v9"

	"posthaste/consumer"
	"posthaste/internal/lab/testenv"
)

func eventuallyRan(tb testing.TB, rec *record, within time.Duration, want int) {
	tb.Helper()
	testenv.Eventually(tb, within, func() error {
		got := len(rec.times())
		return testenv.FailIf(got != want, "%d of %d events ran", got, want)
	})
}

// Redis is gone at the start, comes, is killed in the middle of the work and comes back: nothing is lost.
func TestRedisGoneAndBack(t *testing.T) {
	t.Parallel()
	r := testenv.Redis(t, "appendfsync always")
	ids := fill(t, r.Client, "outbox.order", 2000, 50)
	must(t, r.Kill())
	var rec record
	logs := &syncBuffer{}
	c := start(t, consumer.Options{
		Client: r.Client, Prefix: "outbox.", ClaimIdle: time.Second, Handler: rec.handle, Logger: logTo(logs),
	})
	logs.wait(t, "redis call fails")
	must(t, r.Start(t.Context()))
	testenv.Eventually(t, 20*time.Second, func() error {
		return testenv.FailIf(len(rec.times()) == 0, "nothing ran")
	})
	must(t, r.Kill())
	must(t, r.Start(t.Context()))
	eventuallyRan(t, &rec, 20*time.Second, len(ids))
	settled(t, r.Client, 20*time.Second, "g", "outbox.order")
	must(t, c.stop())
}

// The way to Redis is cut while the window is full: of events that are done, whose acknowledgements hang. The reader
// waits for room. When the way is repaired a first acknowledgement makes too little of it, the others come all at
// once; it goes on.
func TestAPartitionIsSurvived(t *testing.T) {
	t.Parallel()
	r := testenv.Redis(t)
	h := testenv.NewLink(t, r.Addr())
	client := redis.NewClient(&redis.Options{Addr: h.Addr(), ReadTimeout: time.Minute, MaxRetries: -1})
	defer client.Close()
	const window, tick = 200, 1500 * time.Millisecond // the reader wants half the window at last
	ids := fill(t, r.Client, "outbox.order", window/2-1, 50)
	var rec record
	one, all := make(chan struct{}, 1), make(chan struct{})
	start(t, consumer.Options{
		Client: client, Window: window, ClaimIdle: 3 * tick,
		Handler: func(ctx context.Context, ev consumer.Event) error {
			select {
			case <-one:
			case <-all:
			}
			return rec.handle(ctx, ev)
		},
	})
	waitPending(t, r.Client, window/2-1) // there is room for one more read, of half the window
	_, err := r.Client.TxPipelined(t.Context(), func(p redis.Pipeliner) error {
		for i := range window / 2 {
			ids = append(ids, uuid.NewString())
			p.XAdd(t.Context(), &redis.XAddArgs{
				Stream: "outbox.order",
				Values: fields(event{ids[len(ids)-1], fmt.Sprintf("s%d", i%50), len(ids)}),
			})
		}
		return nil
	})
	must(t, err)
	waitPending(t, r.Client, window-1) // and now for none
	ids = append(ids, fill(t, r.Client, "outbox.order", 1000, 50)...)
	h.Hold(true)
	one <- struct{}{}
	since := time.Now()
	testenv.Eventually(t, 20*time.Second, func() error {
		return testenv.FailIf(len(rec.list()) == 0 || time.Since(since) < tick/5,
			"the first acknowledgement is not under way alone")
	})
	close(all)
	testenv.Eventually(t, 20*time.Second, func() error {
		n := len(rec.list())
		return testenv.FailIf(n < window-1, "%d events ran", n)
	})
	h.Release()
	eventuallyRan(t, &rec, 20*time.Second, len(ids))
	settled(t, r.Client, 20*time.Second, "g", "outbox.order")
}

// A consumer whose Redis never answered is reported as stalled, even if the streams are not known yet.
func TestARedisThatNeverAnsweredIsSaid(t *testing.T) {
	t.Parallel()
	client := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1"})
	defer client.Close()
	c := create(t, consumer.Options{Client: client, Prefix: "outbox.", Handler: (&record{}).handle})
	consumer.StallAfter(c, time.Second)
	run(t, c)
	testenv.Eventually(t, 20*time.Second, func() error {
		return testenv.FailIf(c.Stalled() == "", "all is well")
	})
}

// A consumer reports that it is stalled, and that it progresses again, whatever the cause: here nothing that it sends
// arrives.
func TestAStandstillIsSaid(t *testing.T) {
	t.Parallel()
	r := testenv.Redis(t)
	h := testenv.NewLink(t, r.Addr())
	client := redis.NewClient(&redis.Options{Addr: h.Addr(), ReadTimeout: time.Second, MaxRetries: -1})
	defer client.Close()
	reg := prometheus.NewRegistry()
	logs := &syncBuffer{}
	var rec record
	c := create(t, consumer.Options{Client: client, Handler: rec.handle, Logger: logTo(logs), Registerer: reg})
	consumer.StallAfter(c, 2*time.Second)
	run(t, c)
	ids := fill(t, r.Client, "outbox.order", 100, 10)
	eventuallyRan(t, &rec, 20*time.Second, len(ids))
	stalled := func(want bool) {
		t.Helper()
		testenv.Eventually(t, 20*time.Second, func() error {
			gauge := sample(t, reg, "outbox_consumer_stalled")
			why := c.Stalled()
			return testenv.FailIf((why != "") != want || (gauge == 1) != want, "stalled: %q, gauge %v", why, gauge)
		})
	}
	stalled(false)
	h.Hold(true)
	ids = append(ids, fill(t, r.Client, "outbox.order", 100, 10)...)
	stalled(true)
	logs.wait(t, "the consumer makes no progress")
	h.Release()
	eventuallyRan(t, &rec, 20*time.Second, len(ids))
	stalled(false)
	logs.wait(t, "the consumer makes progress again")
}

// A flush deletes stream and group; entries added afterwards are read from the first one.
func TestFlush(t *testing.T) {
	t.Parallel()
	r := testenv.Redis(t)
	for _, ordered := range []bool{false, true} {
		group := fmt.Sprintf("g-%v", ordered)
		fill(t, r.Client, "outbox.order", 100, 10)
		var rec record
		c := start(t, consumer.Options{
			Client: r.Client, Group: group, Prefix: "outbox.", Ordered: ordered,
			ClaimIdle: 500 * time.Millisecond, Handler: rec.handle,
		})
		settled(t, r.Client, 20*time.Second, group, "outbox.order")
		must(t, r.Client.FlushAll(t.Context()).Err())
		before := len(rec.times())
		ids := fill(t, r.Client, "outbox.order", 100, 10)
		eventuallyRan(t, &rec, 20*time.Second, before+len(ids))
		settled(t, r.Client, 20*time.Second, group, "outbox.order")
		must(t, c.stop())
	}
}

// A handler that takes longer than the claim time keeps its event, as long as its process lives.
func TestSlowHandlerKeepsItsEvent(t *testing.T) {
	t.Parallel()
	r := testenv.Redis(t)
	add(t, r.Client, "outbox.order", event{"slow", "s", 1})
	add(t, r.Client, "outbox.order", event{"behind", "s", 2})
	var runs atomic.Int64
	begun := make(chan struct{}, 10)
	run := func(idle time.Duration) {
		start(t, consumer.Options{
			Client: r.Client, Prefix: "outbox.", ClaimIdle: idle,
			Handler: func(ctx context.Context, ev consumer.Event) error {
				runs.Add(1)
				if ev.ID == "slow" {
					begun <- struct{}{}
					select {
					case <-time.After(8 * time.Second): // the work
					case <-ctx.Done():
					}
				}
				return nil
			},
		})
	}
	// A process that is paused for the claim time loses its events, as intended, so the claim time is long. The pause
	// is shorter than the time after which the first one would claim its own entries, which renews them as well.
	run(6 * time.Second)
	<-begun
	run(5 * time.Second)
	run(5 * time.Second)
	settled(t, r.Client, 20*time.Second, "g", "outbox.order")
	testenv.Equal(t, "runs of 2 events", runs.Load(), 2)
}

// Consumers that are gone are removed from the group, but never one with entries pending.
func TestDeadConsumersAreRemoved(t *testing.T) {
	t.Parallel()
	r := testenv.Redis(t)
	ctx := t.Context()
	ids := fill(t, r.Client, "outbox.order", 5, 5)
	must(t, r.Client.XGroupCreate(ctx, "outbox.order", "g", "0").Err())
	for i, name := range []string{"holds", "empty"} {
		must(t, r.Client.XReadGroup(ctx,
			&redis.XReadGroupArgs{
				Group: "g", Consumer: name, Streams: []string{"outbox.order", ">"}, Count: 2, NoAck: i == 1,
			}).Err())
	}
	var rec record
	c := start(t, consumer.Options{
		Client: r.Client, Prefix: "outbox.", ClaimIdle: 100 * time.Millisecond, Handler: rec.handle,
	})
	testenv.Eventually(t, 15*time.Second, func() error {
		list := r.Client.XInfoConsumers(ctx, "outbox.order", "g").Val()
		return testenv.FailIf(len(list) != 1 || list[0].Name != c.Name(), "consumers %v", list)
	})
	settled(t, r.Client, 20*time.Second, "g", "outbox.order")
	got := rec.times()
	for i, id := range ids {
		if want := 1; (got[id] != want) != (i == 2 || i == 3) { // those two were read with NOACK
			t.Errorf("event %d ran %d times", i, got[id])
		}
	}
}

// A consumer cannot reach Redis for longer than the claim time, and another one has taken its events over and done
// them. Those that wait in its memory do not run again, however often it has tried to renew them.
func TestEventsTakenOverInAPartitionDoNotRunAgain(t *testing.T) {
	t.Parallel()
	r := testenv.Redis(t)
	h := testenv.NewLink(t, r.Addr())
	client := redis.NewClient(&redis.Options{Addr: h.Addr(), MaxRetries: -1})
	defer client.Close()
	const n = 20
	ids := fill(t, r.Client, "outbox.order", n, n)
	var first, second record
	begun, release := make(chan struct{}, n), make(chan struct{})
	logs := &syncBuffer{}
	start(t, consumer.Options{
		Client: client, Workers: 1, ClaimIdle: time.Second, Logger: logTo(logs),
		Handler: func(ctx context.Context, ev consumer.Event) error {
			begun <- struct{}{}
			<-release
			return first.handle(ctx, ev)
		},
	})
	<-begun
	waitPending(t, r.Client, n)
	h.Down()
	start(t, consumer.Options{Client: r.Client, ClaimIdle: time.Second, Handler: second.handle})
	eventuallyRan(t, &second, 20*time.Second, n)
	close(release)
	testenv.Eventually(t, 20*time.Second, func() error {
		checked := strings.Contains(strings.Join(logs.lines(), "\n"), "op=begin")
		return testenv.FailIf(!checked && len(first.list()) < 2, "no further event is about to run")
	})
	h.Up()
	settled(t, r.Client, 20*time.Second, "g", "outbox.order")
	testenv.Equal(t, "events that ran before they were checked", len(first.list()), 1)
	allOnce(t, ids, second.times())
}

// A consumer to which Redis answers, and refuses what it needs, is reported as stalled.
func TestARefusalIsSaid(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		refuse []any
		ended  []any
	}{
		"a primary that is demoted": {[]any{"REPLICAOF", "127.0.0.1", "1"}, []any{"REPLICAOF", "NO", "ONE"}},
		"a primary without replicas": {
			[]any{"CONFIG", "SET", "min-replicas-to-write", "1"}, []any{"CONFIG", "SET", "min-replicas-to-write", "0"},
		},
		"a user without groups": {
			[]any{"ACL", "SETUSER", "default", "-xgroup|create"}, []any{"ACL", "SETUSER", "default", "+xgroup|create"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := testenv.Redis(t)
			var rec record
			id := fill(t, r.Client, "outbox.order", 1, 1)[0]
			must(t, r.Client.Do(t.Context(), c.refuse...).Err())
			cons := create(t, consumer.Options{Client: r.Client, Prefix: "outbox.", Handler: rec.handle})
			consumer.StallAfter(cons, 6*time.Second)
			run(t, cons)
			testenv.Eventually(t, 20*time.Second, func() error {
				return testenv.FailIf(cons.Stalled() == "", "all is well")
			})
			t.Log(cons.Stalled())
			must(t, r.Client.Do(t.Context(), c.ended...).Err())
			testenv.Becomes(t, "runs", 1, func() int { return rec.times()[id] })
			testenv.Eventually(t, 20*time.Second, func() error {
				return testenv.FailIf(cons.Stalled() != "", "still %s", cons.Stalled())
			})
		})
	}
}

// A node of a cluster is gone when an event of its stream is done. The other nodes' events are acknowledged, and run.
func TestANodeThatIsGoneStopsNoOtherStream(t *testing.T) {
	t.Parallel()
	nodes := testenv.Cluster(t, 3, 0, "cluster-require-full-coverage no")
	others := []string{nodes.Nodes[1].Addr(), nodes.Nodes[2].Addr()}
	client := redis.NewClusterClient(&redis.ClusterOptions{Addrs: others})
	defer client.Close()
	var lost, other string // streams of node 0 and of node 1
	for i := 0; lost == "" || other == ""; i++ {
		name := fmt.Sprintf("outbox.t%d", i)
		switch nodes.Master(t, nodes.Slot(t, name)) {
		case 0:
			lost = name
		case 1:
			other = name
		}
	}
	add(t, client, lost, event{"lost", "s", 1})
	var rec record
	begun, down := make(chan struct{}), make(chan struct{})
	start(t, consumer.Options{
		Client: client, Streams: []string{lost, other}, Window: 50,
		Handler: func(ctx context.Context, ev consumer.Event) error {
			if ev.ID == "lost" {
				close(begun)
				<-down
			}
			return rec.handle(ctx, ev)
		},
	})
	<-begun
	must(t, nodes.Nodes[0].Kill())
	close(down)
	eventuallyRan(t, &rec, 20*time.Second, 1)
	const n = 500
	for i := range n {
		add(t, client, other, event{fmt.Sprintf("e%d", i), fmt.Sprintf("s%d", i%50), i})
	}
	eventuallyRan(t, &rec, 20*time.Second, 1+n)
	settled(t, client, 20*time.Second, "g", other)
	must(t, nodes.Nodes[0].Start(t.Context()))
	settled(t, client, 30*time.Second, "g", lost, other)
	testenv.Equal(t, "runs of the event of the node that was gone", rec.times()["lost"], 1)
}

// A node of a cluster does not answer, and has events in work. The renewal of other nodes' events does not wait for it.
func TestASilentNodeDelaysNoRenewal(t *testing.T) {
	t.Parallel()
	nodes := testenv.Cluster(t, 3, 0, "cluster-require-full-coverage no")
	client := redis.NewClusterClient(&redis.ClusterOptions{Addrs: []string{nodes.Nodes[1].Addr()}})
	defer client.Close()
	var names []string // several streams of node 0, and one of node 1 at the end
	other := ""
	for i := 0; len(names) < 6 || other == ""; i++ {
		name := fmt.Sprintf("outbox.t%d", i)
		switch nodes.Master(t, nodes.Slot(t, name)) {
		case 0:
			names = append(names, name)
		case 1:
			other = name
		}
	}
	names = append(names, other)
	for i, name := range names {
		add(t, client, name, event{name, "s", i})
	}
	const idle = 3 * time.Second
	var second record
	begun, end := make(chan struct{}, len(names)), make(chan struct{})
	start(t, consumer.Options{
		Client: client, Streams: names, Workers: len(names), ClaimIdle: idle,
		Handler: func(context.Context, consumer.Event) error {
			begun <- struct{}{}
			<-end
			return nil
		},
	})
	defer close(end)
	for range names {
		<-begun
	}
	must(t, nodes.On(t, 0).Do(t.Context(), "CLIENT", "PAUSE", (4*idle).Milliseconds(), "ALL").Err())
	since := time.Now()
	start(t, consumer.Options{Client: client, Streams: []string{other}, ClaimIdle: idle, Handler: second.handle})
	testenv.Eventually(t, 20*time.Second, func() error {
		return testenv.FailIf(time.Since(since) < 4*idle && len(second.list()) == 0, "not long enough")
	})
	testenv.Equal(t, "events in work that were taken over", len(second.list()), 0)
}
