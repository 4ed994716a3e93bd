package consumer_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/go-redis/v9"

	"posthaste/consumer"
	"posthaste/internal/testenv"
)

func eventuallyRan(tb testing.TB, rec *record, within time.Duration, want int) {
	tb.Helper()
	testenv.Eventually(tb, within, func() error {
		if got := len(rec.times()); got != want {
			return fmt.Errorf("%d of %d events ran", got, want)
		}
		return nil
	})
}

// Redis is gone at the start, comes, is killed in the middle of the work and comes back: nothing is lost.
func TestRedisGoneAndBack(t *testing.T) {
	t.Parallel()
	r := testenv.Redis(t, "appendfsync always")
	ids := fill(t, r.Client, "outbox.order", 2000, 50)
	if err := r.Kill(); err != nil {
		t.Fatal(err)
	}
	var rec record
	logs := &syncBuffer{}
	c := start(t, consumer.Options{
		Client: r.Client, Prefix: "outbox.", ClaimIdle: time.Second, Handler: rec.handle,
		Logger: slog.New(slog.NewTextHandler(logs, nil)),
	})
	testenv.Eventually(t, 20*time.Second, func() error {
		if !strings.Contains(strings.Join(logs.lines(), "\n"), "redis call fails") {
			return errors.New("the outage is not noticed")
		}
		return nil
	})
	if err := r.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, 20*time.Second, func() error {
		if len(rec.times()) == 0 {
			return errors.New("nothing ran")
		}
		return nil
	})
	if err := r.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := r.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	eventuallyRan(t, &rec, 20*time.Second, len(ids))
	settled(t, r.Client, 20*time.Second, "g", "outbox.order")
	if err := c.stop(); err != nil {
		t.Errorf("Run: %v", err)
	}
}

// The way to Redis is cut while the window is full: of events that are done, whose acknowledgements hang. The reader
// waits for room, and behind it who takes over, who is content with less. When the way is repaired a first
// acknowledgement makes too little room for either, the others come all at once; both go on.
func TestAPartitionIsSurvived(t *testing.T) {
	t.Parallel()
	r := testenv.Redis(t)
	h := testenv.NewHold(t, r.Addr())
	client := redis.NewClient(&redis.Options{Addr: h.Addr(), ReadTimeout: time.Minute, MaxRetries: -1})
	defer client.Close()
	const window, tick = 200, 1500 * time.Millisecond // the reader wants half the window at last, who takes over 16
	ids := fill(t, r.Client, "outbox.order", window/2-1, 50)
	var rec record
	one, all := make(chan struct{}, 1), make(chan struct{})
	start(t, consumer.Options{
		Client: client, Streams: []string{"outbox.order"}, Window: window, ClaimIdle: 3 * tick,
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
	if err != nil {
		t.Fatal(err)
	}
	waitPending(t, r.Client, window-1) // and now for none
	ids = append(ids, fill(t, r.Client, "outbox.order", 1000, 50)...)
	looks, since := int64(-1), time.Now()
	// nor has who takes over: nobody looks for dead consumers behind it
	testenv.Eventually(t, 20*time.Second, func() error {
		if n := calls(t, r.Client, "xinfo|consumers"); n != looks {
			looks, since = n, time.Now()
		}
		if time.Since(since) < 2*tick {
			return errors.New("somebody still takes over")
		}
		return nil
	})
	h.Hold(true)
	one <- struct{}{}
	since = time.Now()
	testenv.Eventually(t, 20*time.Second, func() error {
		if len(rec.list()) == 0 || time.Since(since) < tick/5 {
			return errors.New("the first acknowledgement is not under way alone")
		}
		return nil
	})
	close(all)
	testenv.Eventually(t, 20*time.Second, func() error {
		if n := len(rec.list()); n < window-1 {
			return fmt.Errorf("%d events ran", n)
		}
		return nil
	})
	h.Release()
	eventuallyRan(t, &rec, 20*time.Second, len(ids))
	settled(t, r.Client, 20*time.Second, "g", "outbox.order")
}

// A Redis that never answered is no standstill that looks well, also where the streams are not known yet.
func TestARedisThatNeverAnsweredIsSaid(t *testing.T) {
	t.Parallel()
	client := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1"})
	defer client.Close()
	c, err := consumer.New(consumer.Options{
		Client: client, Group: "g", Prefix: "outbox.", Handler: (&record{}).handle,
		Logger: logTo(&syncBuffer{}),
	})
	if err != nil {
		t.Fatal(err)
	}
	consumer.StallAfter(c, time.Second)
	run(t, c)
	testenv.Eventually(t, 20*time.Second, func() error {
		if c.Stalled() == "" {
			return errors.New("all is well")
		}
		return nil
	})
}

// A consumer that stands still says so, and that it moves again, whatever held it up: here nothing that it sends
// arrives.
func TestAStandstillIsSaid(t *testing.T) {
	t.Parallel()
	r := testenv.Redis(t)
	h := testenv.NewHold(t, r.Addr())
	client := redis.NewClient(&redis.Options{Addr: h.Addr(), ReadTimeout: time.Second, MaxRetries: -1})
	defer client.Close()
	reg := prometheus.NewRegistry()
	logs := &syncBuffer{}
	var rec record
	c, err := consumer.New(consumer.Options{
		Client: client, Group: "g", Streams: []string{"outbox.order"},
		Handler: rec.handle, Logger: logTo(logs), Registerer: reg,
	})
	if err != nil {
		t.Fatal(err)
	}
	consumer.StallAfter(c, 2*time.Second)
	run(t, c)
	ids := fill(t, r.Client, "outbox.order", 100, 10)
	eventuallyRan(t, &rec, 20*time.Second, len(ids))
	stalled := func(want bool) {
		t.Helper()
		testenv.Eventually(t, 20*time.Second, func() error {
			gauge := sample(t, reg, "outbox_consumer_stalled")
			if why := c.Stalled(); (why != "") != want || (gauge == 1) != want {
				return fmt.Errorf("stalled: %q, gauge %v", why, gauge)
			}
			return nil
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

// calls returns how often the server has carried out a command.
func calls(tb testing.TB, client *redis.Client, command string) int64 {
	tb.Helper()
	var n int64
	for line := range strings.Lines(client.Info(tb.Context(), "commandstats").Val()) {
		if rest, ok := strings.CutPrefix(line, "cmdstat_"+command+":calls="); ok {
			_, _ = fmt.Sscanf(rest, "%d", &n)
		}
	}
	return n
}

// A flush takes stream and group away; what is added afterwards is read from its first entry.
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
		if err := r.Client.FlushAll(t.Context()).Err(); err != nil {
			t.Fatal(err)
		}
		before := len(rec.times())
		ids := fill(t, r.Client, "outbox.order", 100, 10)
		eventuallyRan(t, &rec, 20*time.Second, before+len(ids))
		settled(t, r.Client, 20*time.Second, group, "outbox.order")
		if err := c.stop(); err != nil {
			t.Errorf("Run: %v", err)
		}
	}
}

// Replies of Redis are lost: entries delivered in a lost reply run before anything newer of their subject.
func TestLostRepliesKeepOrder(t *testing.T) {
	t.Parallel()
	r := testenv.Redis(t)
	p := testenv.NewProxy(t, r.Addr())
	client := redis.NewClient(&redis.Options{Addr: p.Addr(), ReadTimeout: time.Second})
	defer client.Close()
	var rec record
	c := start(t, consumer.Options{Client: client, Streams: []string{"outbox.order"}, Handler: rec.handle})
	total := 0
	for round := range 4 {
		// The connection is cut in the middle of a reply, after a different number of bytes each time.
		p.Toxic(fmt.Sprintf(`{"name":"cut","type":"limit_data","stream":"downstream","attributes":{"bytes":%d}}`,
			900+3100*round))
		for i := range 100 {
			add(t, r.Client, "outbox.order", event{fmt.Sprint(total + i), fmt.Sprintf("s%d", i%3), total + i})
		}
		total += 100
		testenv.Eventually(t, 20*time.Second, func() error { // the cut has hit a read
			st, err := consumer.Inspect(t.Context(), r.Client, "outbox.order", "g")
			if err != nil || st.Lag == 100 {
				return fmt.Errorf("%+v, %w", st, err)
			}
			return nil
		})
		p.Remove("cut")
		eventuallyRan(t, &rec, 20*time.Second, total)
	}
	settled(t, r.Client, 20*time.Second, "g", "outbox.order")
	if err := c.stop(); err != nil {
		t.Errorf("Run: %v", err)
	}
	var lines []string
	for _, ev := range rec.list() {
		lines = append(lines, fmt.Sprintf("%s %d", ev.Subject, number(t, ev)))
	}
	ascending(t, firsts(t, lines), total)
}

// What is trimmed before it was read, or after it was delivered and before it was acknowledged, is counted exactly,
// once over all consumers of the group, and stops nothing.
func TestTrimmedEntriesAreCounted(t *testing.T) {
	t.Parallel()
	r := testenv.Redis(t)
	ctx := t.Context()
	fill(t, r.Client, "outbox.order", 10, 10)
	// A group that has read 4 of 10, and acknowledged none; its consumer is gone.
	if err := r.Client.XGroupCreate(ctx, "outbox.order", "g", "0").Err(); err != nil {
		t.Fatal(err)
	}
	if err := r.Client.XReadGroup(ctx, &redis.XReadGroupArgs{
		Group: "g", Consumer: "gone",
		Streams: []string{"outbox.order", ">"}, Count: 4,
	}).Err(); err != nil {
		t.Fatal(err)
	}
	if err := r.Client.XTrimMaxLen(ctx, "outbox.order", 3).Err(); err != nil {
		t.Fatal(err)
	}
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
			if _, found := find(t, reg, "outbox_trim_lost_total"); !found {
				return errors.New("the stream is not known yet")
			}
			return nil
		})
	}
	lost := func() float64 {
		return sample(t, regs[0], "outbox_trim_lost_total") + sample(t, regs[1], "outbox_trim_lost_total")
	}
	settled(t, r.Client, 20*time.Second, "g", "outbox.order")
	testenv.Eventually(t, 20*time.Second, func() error {
		if got := lost(); got != 7 {
			return fmt.Errorf("%v entries counted as lost, want 3 unread and 4 pending", got)
		}
		return nil
	})
	if got := len(rec.times()); got != 3 {
		t.Errorf("%d events ran, want the 3 that are left", got)
	}
	// Trimming what is acknowledged is no loss, and the lag stays right.
	fill(t, r.Client, "outbox.order", 5, 5)
	settled(t, r.Client, 20*time.Second, "g", "outbox.order")
	if err := r.Client.XTrimMaxLen(ctx, "outbox.order", 0).Err(); err != nil {
		t.Fatal(err)
	}
	fill(t, r.Client, "outbox.order", 5, 5)
	eventuallyRan(t, &rec, 20*time.Second, 13)
	settled(t, r.Client, 20*time.Second, "g", "outbox.order")
	if got := lost(); got != 7 {
		t.Errorf("%v lost in the end, want 7 as before", got)
	}
}

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
		if err := r.Client.XReadGroup(ctx, &redis.XReadGroupArgs{
			Group: "g", Consumer: "c", Streams: []string{"s", ">"},
			Count: n, NoAck: true,
		}).Err(); err != nil {
			t.Fatal(err)
		}
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
	if n := sample(t, reg, "outbox_trim_lost_total"); n != 0 {
		t.Errorf("%v entries counted as lost that were trimmed before the group came into being", n)
	}
	fill(t, r.Client, "s", 100, 1)
	inspect(consumer.State{Length: 160, Lag: 100})
	read(40)
	inspect(consumer.State{Length: 160, Lag: 60})
	r.Client.XTrimMaxLen(ctx, "s", 25) // 35 of the 60 unread are gone
	if v := r.Client.XInfoGroups(ctx, "s").Val()[0].Lag; v != 60 {
		t.Errorf("Redis reports lag %d; this test is about it being wrong", v)
	}
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
	// A process that stands still for as long as the others wait loses its events, as it should; so that is long. It is
	// less than after which the first one would claim what it has itself, which is a sign of life too.
	run(6 * time.Second)
	<-begun
	run(5 * time.Second)
	run(5 * time.Second)
	settled(t, r.Client, 20*time.Second, "g", "outbox.order")
	if n := runs.Load(); n != 2 {
		t.Errorf("%d runs of 2 events", n)
	}
}

// An orderly stop lets the running event end and acknowledges it; what waits is taken by another consumer at once, not
// after the claim time.
func TestOrderlyStop(t *testing.T) {
	t.Parallel()
	r := testenv.Redis(t)
	ids := fill(t, r.Client, "outbox.order", 50, 1)
	var rec record
	begun, end := make(chan struct{}, 1), make(chan struct{})
	logs := &syncBuffer{}
	c := start(t, consumer.Options{
		Client: r.Client, Prefix: "outbox.", Logger: slog.New(slog.NewTextHandler(logs, nil)),
		Handler: func(ctx context.Context, ev consumer.Event) error {
			begun <- struct{}{}
			<-end
			return rec.handle(ctx, ev)
		},
	})
	<-begun
	c.cancel()
	testenv.Eventually(t, 20*time.Second, func() error {
		if !strings.Contains(strings.Join(logs.lines(), "\n"), "consumer stopping") {
			return errors.New("not stopping")
		}
		return nil
	})
	close(end)
	if err := c.stop(); err != nil {
		t.Fatalf("Run: %v", err)
	}
	if n := len(rec.list()); n != 1 {
		t.Errorf("%d events ran, want the running one", n)
	}
	if st, err := consumer.Inspect(t.Context(), r.Client, "outbox.order", "g"); err != nil || st.Pending+st.Lag != 49 ||
		st.Pending == 0 {
		t.Errorf("after the stop: %+v, %v; want 49 pending or unread", st, err)
	}
	start(t, consumer.Options{Client: r.Client, Prefix: "outbox.", ClaimIdle: time.Hour, Handler: rec.handle})
	settled(t, r.Client, 20*time.Second, "g", "outbox.order")
	allOnce(t, ids, rec.times())
	evs := rec.list()
	for i, ev := range evs {
		if number(t, ev) != i {
			t.Fatalf("event %d ran in place %d", number(t, ev), i)
		}
	}
}

// A handler that does not end in time is left behind, and its event is not acknowledged.
func TestDrainTimeout(t *testing.T) {
	t.Parallel()
	r := testenv.Redis(t)
	add(t, r.Client, "outbox.order", event{"a", "s", 1})
	begun := make(chan struct{})
	c := start(t, consumer.Options{
		Client: r.Client, Prefix: "outbox.", DrainTimeout: 50 * time.Millisecond,
		Handler: func(ctx context.Context, _ consumer.Event) error {
			close(begun)
			<-ctx.Done()
			return nil // wrongly: but it has ended, and says that it is done
		},
	})
	<-begun
	if err := c.stop(); !errors.Is(err, consumer.ErrDrain) {
		t.Errorf("Run: %v, want ErrDrain", err)
	}
}

// Consumers that are gone are removed from the group, but never one with entries pending.
func TestDeadConsumersAreRemoved(t *testing.T) {
	t.Parallel()
	r := testenv.Redis(t)
	ctx := t.Context()
	ids := fill(t, r.Client, "outbox.order", 5, 5)
	if err := r.Client.XGroupCreate(ctx, "outbox.order", "g", "0").Err(); err != nil {
		t.Fatal(err)
	}
	for i, name := range []string{"holds", "empty"} {
		if err := r.Client.XReadGroup(ctx,
			&redis.XReadGroupArgs{
				Group: "g", Consumer: name, Streams: []string{"outbox.order", ">"}, Count: 2,
				NoAck: i == 1,
			}).Err(); err != nil {
			t.Fatal(err)
		}
	}
	var rec record
	c := start(t, consumer.Options{
		Client: r.Client, Prefix: "outbox.", ClaimIdle: 100 * time.Millisecond,
		Handler: rec.handle,
	})
	testenv.Eventually(t, 15*time.Second, func() error {
		list := r.Client.XInfoConsumers(ctx, "outbox.order", "g").Val()
		if len(list) != 1 || list[0].Name != c.Name() {
			return fmt.Errorf("consumers %v", list)
		}
		return nil
	})
	settled(t, r.Client, 20*time.Second, "g", "outbox.order")
	got := rec.times()
	for i, id := range ids {
		if want := 1; (got[id] != want) != (i == 2 || i == 3) { // those two were read with NOACK
			t.Errorf("event %d ran %d times", i, got[id])
		}
	}
}

func TestMetricsAtStart(t *testing.T) {
	t.Parallel()
	reg := prometheus.NewRegistry()
	client := redis.NewClient(&redis.Options{})
	defer client.Close()
	for _, group := range []string{"a", "b"} { // two in one process share the collectors
		_, err := consumer.New(consumer.Options{
			Client: client, Group: group, Streams: []string{"s"},
			Handler: (&record{}).handle, Registerer: reg,
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{
		"outbox_consumer_attempts_total", "outbox_consumer_dead_total", "outbox_consumer_claimed_total",
		"outbox_consumer_inflight_events", "outbox_consumer_redis_errors_total", "outbox_consumer_handle_seconds",
	} {
		if v := sample(t, reg, name); v != 0 {
			t.Errorf("%s = %v at the start", name, v)
		}
	}
}

func TestOptionsAreChecked(t *testing.T) {
	t.Parallel()
	_, err := consumer.New(consumer.Options{Streams: []string{"a"}, Prefix: "b", Workers: -1})
	for _, want := range []string{
		"no Redis client", "no group", "no handler", "either streams or a prefix",
		"negative",
	} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v does not say %q", err, want)
		}
	}
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
	if err := r.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := r.Start(ctx); err != nil {
		t.Fatal(err)
	}
	inspected(before)
	if n := sample(t, reg, "outbox_trim_lost_total"); n != 0 {
		t.Errorf("%v entries counted as lost, and none was", n)
	}
}
