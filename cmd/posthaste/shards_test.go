package main

import (
	"context"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"posthaste/consumer"
	"posthaste/internal/lab/testenv"
	"posthaste/outbox"
)

// reader is a consumer group that records the events that it handles, and their order.
type reader struct {
	t     *testing.T
	name  string
	delay time.Duration

	mu   sync.Mutex
	last map[string]int // by aggregate
	seen map[string]bool
}

// reads starts a group in this process. It reads every stream, or those of the named types.
func (w *world) reads(group string, delay time.Duration, streams ...string) *reader {
	w.t.Helper()
	r := &reader{t: w.t, name: group, delay: delay, last: map[string]int{}, seen: map[string]bool{}}
	o := consumer.Options{Client: w.oracle.Redis, Group: group, Streams: streams, Handler: r.handle}
	if len(streams) == 0 {
		o.Prefix = "outbox."
	}
	c, err := consumer.New(o)
	must(w.t, err)
	ctx, cancel := context.WithCancel(context.WithoutCancel(w.t.Context()))
	done := make(chan struct{})
	go func() { defer close(done); _ = c.Run(ctx) }()
	w.t.Cleanup(func() { cancel(); <-done })
	return r
}

func (r *reader) handle(_ context.Context, e consumer.Event) error {
	var body struct{ N int }
	if err := json.Unmarshal(e.Data, &body); err != nil {
		return err
	}
	time.Sleep(r.delay) // a slow handler: a newer event may overtake this one in another stream
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.seen[e.ID] && body.N <= r.last[e.Subject] {
		r.t.Errorf("group %s: event %d of %s comes behind %d, from %s", r.name, body.N, e.Subject, r.last[e.Subject],
			e.Stream)
	}
	r.seen[e.ID], r.last[e.Subject] = true, max(r.last[e.Subject], body.N)
	return nil
}

// all waits until the group has handled n events.
func (r *reader) all(n int) {
	r.t.Helper()
	testenv.Eventually(r.t, 60*time.Second, func() error {
		r.mu.Lock()
		defer r.mu.Unlock()
		return testenv.FailIf(len(r.seen) != n, "group %s has handled %d events, want %d", r.name, len(r.seen), n)
	})
}

// waitShards waits until a type has n streams.
func (w *world) waitShards(n int) {
	w.t.Helper()
	w.waitHas(n, "SELECT shards FROM outbox_layout")
}

// placed checks that Postgres has the right stream of every event, and returns the number of events in each stream.
func (w *world) placed(types ...string) map[string]int {
	w.t.Helper()
	in := map[string]string{}
	for _, e := range w.oracle.Entries(w.t, types...) {
		in[e.ID] = e.Stream
	}
	count := map[string]int{}
	wrong := 0
	for _, line := range testenv.Value[[]string](w.t, w.db,
		"SELECT array_agg(id || ' ' || stream) FROM outbox_history") {
		id, stream, _ := strings.Cut(line, " ")
		if in[id] != stream {
			if wrong++; wrong < 5 {
				w.t.Errorf("event %s is in %q, and history says %s", id, in[id], stream)
			}
		}
		count[stream]++
	}
	if wrong > 0 {
		w.t.Errorf("%d events are elsewhere than history says", wrong)
	}
	return count
}

func perType(n int) string { return "--per-type=" + strconv.Itoa(n) }

// spreads changes a type to n streams while no relay leads.
func (w *world) spreads(n int, extra ...string) {
	w.t.Helper()
	r := w.once(append([]string{"streams", "spread", perType(n)}, extra...)...)
	r.says(w.t, 0, "streams for each type: "+strconv.Itoa(n))
	w.waitShards(n)
}

// The number of streams of a type changes under load, in both modes, while relays are killed and frozen. Nothing is
// lost, duplicated or read in another order, by a group that discovers streams and by one that names them.
func TestStreamsPerTypeUnderLoad(t *testing.T) {
	t.Parallel()
	changes := scale([]int{4, 16, 1, 2, 1}, []int{4, 1})
	inMode(t, "cdc", func(t *testing.T, mode string) {
		w := newWorld(t)
		r := w.relayIn(mode)
		load := testenv.StartLoad(t, w.db, testenv.LoadOptions{Rate: 300, Types: []string{"order", "user"}})
		w.waitCommitted(load, 100)
		quick, slow := w.reads("quick", 0), w.reads("slow", 3*time.Millisecond, "outbox.order", "outbox.user")
		for i, n := range changes {
			w.waitCommitted(load, load.Committed()+200)
			if i%2 == 0 {
				r.kill()
			} else {
				r.signal(syscall.SIGSTOP) // continues after the layout has changed
				frozen := r
				defer func() { frozen.signal(syscall.SIGCONT) }()
			}
			p := w.start("streams", "spread", perType(n))
			// The command is killed while it waits. If no group is behind, it does not wait.
			testenv.Eventually(t, 20*time.Second, func() error {
				out := p.output()
				return testenv.FailIf(!strings.Contains(out, "waiting: ") && !strings.Contains(out, "streams for each"),
					"streams spread says %q", out)
			})
			p.kill()
			w.spreads(n)
			r = w.relayIn(mode)
		}
		w.waitCommitted(load, load.Committed()+200)
		w.ended(load)
		quick.all(load.Committed())
		slow.all(load.Committed())
		count := w.placed("order", "user")
		t.Logf("%v", count)
		used := 0
		for n := range 4 {
			if count[outbox.ShardName("outbox.order", n)] > 0 {
				used++
			}
		}
		if used < 3 { // the 10 aggregates spread over at least 3
			t.Errorf("%d of 4 streams were used", used)
		}
	})
}

// Entries that Redis loses after a change of the layout are restored to the streams of the layout in which they were
// published.
func TestStreamsOfEveryLayoutAreRestored(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	r := w.relayIn("cdc")
	phase := func(tag string) *testenv.Load {
		t.Helper()
		load := w.wrote(testenv.LoadOptions{Total: 240, Tag: tag})
		w.oracle.WaitEmpty(t, 20*time.Second)
		return load
	}
	loads := []*testenv.Load{phase("a-")}
	r.stops()
	w.spreads(4)
	r = w.relayIn("cdc")
	loads = append(loads, phase("b-"))
	before := w.placed("order")
	for _, stream := range []string{"outbox.order", "outbox.order.0"} {
		id := testenv.Value[string](t, w.db, "SELECT id::text FROM outbox_history WHERE stream = $1 LIMIT 1", stream)
		w.once("trace", id).says(t, 0, stream+" 1")
	}
	do(t, w.redis.Client, "del", "outbox.order", "outbox.order.1", "outbox.order.2", w.gate("outbox.order.2"))
	testenv.Eventually(t, 60*time.Second, func() error {
		for _, load := range loads {
			if in, want := len(w.oracle.Entries(t, "order")), 2*load.Committed(); in != want {
				return fmt.Errorf("%d entries, want %d", in, want)
			}
		}
		n := w.unrepaired()
		return testenv.FailIf(n > 0, "%d repairs are not done", n)
	})
	loads = append(loads, phase("c-"))
	w.all(loads...)
	after := w.placed("order")
	if before["outbox.order"] != 240 || after["outbox.order"] != 240 || len(after) < 4 {
		t.Errorf("before %v, after %v", before, after)
	}
	w.lostNothing()
	r.waitReady("")

	// A replay treats the streams of a type as one.
	if res := w.once("replay", "--stream=outbox.order", "--since=1h", "--rate=0"); res.code != 0 ||
		!strings.Contains(res.out+res.errOut, "replayed 720 events") {
		t.Errorf("replay: exit %d: %s%s", res.code, res.out, res.errOut)
	}
}

// A group without consumers blocks a change. The command and posthaste status report it with a remedy, and nothing is
// published until the group is dropped. The change can be cancelled. While a relay leads, the command also waits for
// the relay.
func TestAChangeOfStreamsWaitsForGroups(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	r := w.relayIn("poll")
	w.delivers()
	do(t, w.redis.Client, "xgroup", "create", "outbox.order", "forgotten", "0")
	n := w.length("outbox.order")
	r.stops()
	p := w.start("streams", "spread", perType(4))
	p.waitLogged(`waiting: group "forgotten" of stream "outbox.order"`)
	load := w.wrote(testenv.LoadOptions{Total: 120, Tag: "held-"})
	testenv.Eventually(t, 30*time.Second, func() error {
		out := w.once("status").out
		return testenv.FailIf(!strings.Contains(out, "forgotten") || !strings.Contains(out, "groups drop"),
			"status: %s", out)
	})
	w.hasLen("outbox.order", n)
	// After the change is cancelled, nothing has changed.
	p.signal(syscall.SIGINT)
	p.ends(1, "interrupted")
	r = w.spawn("relay")
	w.oracle.Check(t, load, 30*time.Second)
	if in := w.oracle.Streams(t, "order"); len(in) != 1 {
		t.Errorf("streams %v", in)
	}
	w.oracle.Others = append(w.oracle.Others, load)
	p = w.start("streams", "spread", perType(2))
	p.waitLogged("waiting: a relay leads: ")
	do(t, w.redis.Client, "xgroup", "create", "outbox.order", "away", "$") // it has read everything
	r.kill()
	p.waitLogged(`waiting: group "forgotten"`)
	do(t, w.redis.Client, "xgroup", "destroy", "outbox.order", "forgotten")
	p.ends(0)
	w.waitShards(2)
	w.spawn("relay").waitReady("")
	w.delivers()
	in := w.oracle.Streams(t, "order")
	if len(in) != 3 {
		t.Errorf("streams %v", in)
	}
	// The new streams have a group whose consumers are disconnected, so none of their entries are trimmed.
	for _, stream := range in[1:] {
		groups := w.redis.Client.XInfoGroups(t.Context(), stream).Val()
		n := w.length(stream)
		if len(groups) != 1 || groups[0].Name != "away" || groups[0].Lag != n {
			t.Errorf("the groups of %s: %+v", stream, groups)
		}
	}
}

// Two databases share the streams of a cluster. One after the other, they spread their types over more streams while
// the other publishes. Each stream is on the master of its name, and so are its gates.
func TestSharedStreamsPerTypeOnACluster(t *testing.T) {
	t.Parallel()
	c := testenv.Cluster(t, 3, 0)
	w := []*world{newCluster(t, c).world, newCluster(t, c).world}
	relays, loads := make([]*child, 2), make([]*testenv.Load, 2)
	for i := range w {
		relays[i] = w[i].spawn("relay", sharedOn)
		w[i].waitMode("cdc")
		loads[i] = testenv.StartLoad(t, w[i].db, testenv.LoadOptions{Rate: 150, Tag: string(rune('a'+i)) + "-"})
	}
	group := w[0].reads("readers", 0, "outbox.order")
	for i := range w {
		w[i].waitCommitted(loads[i], loads[i].Committed()+100)
		relays[i].kill()
		w[i].spreads(4, sharedOn)
		relays[i] = w[i].spawn("relay", sharedOn)
		w[i].waitMode("cdc")
	}
	for n := range 4 {
		slot := c.Slot(t, outbox.ShardName("outbox.order", n))
		c.Move(t, slot, (c.Master(t, slot)+1)%3)
	}
	total := 0
	for i := range w {
		w[i].waitCommitted(loads[i], loads[i].Committed()+200)
		loads[i].Stop()
		w[1-i].oracle.Others = append(w[1-i].oracle.Others, loads[i])
		total += loads[i].Committed()
	}
	masters := map[int]bool{}
	for i := range w {
		w[i].oracle.Check(t, loads[i], 30*time.Second)
		count := w[i].placed("order")
		if len(count) != 5 {
			t.Errorf("database %d: %v", i, count)
		}
		source := testenv.Value[string](t, w[i].db, "SELECT source::text FROM relay_state")
		for stream := range count {
			master := c.Master(t, c.Slot(t, stream))
			masters[master] = true
			gate := "{" + stream + "}:gate:" + source
			if n, err := c.On(t, master).Exists(t.Context(), stream, gate).Result(); n != 2 {
				t.Errorf("%s and %s are not both at master %d: %d, %v", stream, gate, master, n, err)
			}
		}
	}
	group.all(total)
	if len(masters) < 2 {
		t.Errorf("all streams are at the masters %v", masters)
	}
}

// A spread that cannot begin reports why.
func TestASpreadReportsWhatItWaitsFor(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	must(t, w.redis.Kill())
	p := w.start("streams", "spread", perType(2))
	p.waitLogged("waiting: redis: ")
	must(t, w.redis.Start(t.Context()))
	p.ends(0)
	w.waitShards(2)
}

// A type has the name of a stream that another type would get. The change is refused, and events are published.
func TestAChangeOfStreamsIsRefused(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	r := w.relayIn("cdc")
	w.wrote(testenv.LoadOptions{Total: 60, Types: []string{"order", "order.3"}})
	w.oracle.WaitEmpty(t, 20*time.Second)
	r.kill()
	w.once("streams", "spread", perType(4)).oneLine(t, 1, "outbox.order.3 would be one of those of outbox.order")
	w.relayIn("cdc")
	late := w.wrote(testenv.LoadOptions{Total: 60, Tag: "late-", Types: []string{"late"}})
	w.oracle.Check(t, late, 30*time.Second)
	w.has(1, "SELECT shards FROM outbox_layout")
}

// A type with the name of another type's stream gets no stream of that type: its events are parked, and those of the
// other type are published.
func TestATypeThatIsCalledLikeAStream(t *testing.T) {
	t.Parallel()
	inModes(t, func(t *testing.T, mode string) {
		w := newWorld(t)
		w.relayIn(mode).kill()
		w.insert("user.1", "before", 1)
		r := w.spawn("relay")
		w.oracle.WaitEmpty(t, 20*time.Second)
		r.kill()
		w.spreads(4)
		w.spawn("relay")
		for i := range 40 { // a quarter of these would be in the stream of user.1
			w.insert("user", strconv.Itoa(i), 1)
			w.insert("order", strconv.Itoa(i), 1)
		}
		w.oracle.WaitEmpty(t, 60*time.Second)
		parked := 0
		for i := range 40 {
			if outbox.PartOf(strconv.Itoa(i))%4 == 1 {
				parked++
			}
		}
		n := testenv.Value[int](t, w.db, `SELECT count(*) FROM outbox_dead WHERE aggregate_type = 'user'
			AND class = 'taken' AND error LIKE '%is one of those of "outbox.user.1"%'`)
		if n != parked || parked == 0 {
			t.Errorf("%d events are parked, want %d", n, parked)
		}
		if n := len(w.oracle.Entries(t, "order")); n != 40 {
			t.Errorf("%d entries of the type beside it", n)
		}
		for _, e := range w.redis.Client.XRange(t.Context(), "outbox.user.1", "-", "+").Val() {
			if e.Values["type"] != "user.1.changed" {
				t.Errorf("an entry of type %v", e.Values["type"])
			}
		}
	})
}
