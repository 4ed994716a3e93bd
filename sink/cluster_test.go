package sink_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"posthaste/internal/lab/testenv"
	"posthaste/outbox"
	"posthaste/sink"
)

// clustered is a fixture whose client stays with the masters of a cluster.
type clustered struct {
	*fixture
	cluster *testenv.RedisCluster
	// streams has one of each master, by its number.
	streams []string
}

func onCluster(t *testing.T, c *testenv.RedisCluster, masters int, o sink.Options) *clustered {
	t.Helper()
	f := &clustered{fixture: boundTo(t, c.URL(), o), cluster: c, streams: make([]string, masters)}
	for i := 0; slices.Contains(f.streams, ""); i++ {
		name := fmt.Sprintf("outbox.t%d", i)
		if m := c.Master(t, c.Slot(t, name)); f.streams[m] == "" {
			f.streams[m] = name
		}
	}
	return f
}

// owned raises the gates of all streams.
func (f *clustered) owned(epoch int64) outbox.Owner {
	f.Helper()
	o := f.Owner(epoch)
	for _, name := range f.streams {
		testenv.Eventually(f, 20*time.Second, func() error { return f.sink.Adopt(f.Context(), name, o, false) })
	}
	return o
}

// lanes opens the stream lanes of all streams.
func (f *clustered) lanes(o outbox.Owner) []outbox.LanePublisher {
	out := make([]outbox.LanePublisher, len(f.streams))
	for i, name := range f.streams {
		out[i] = f.sink.Lane(name, o, streamLane(o))
	}
	return out
}

// bring publishes an event, retrying until it succeeds.
func (f *clustered) bring(l outbox.LanePublisher) {
	f.Helper()
	d := l.Deliver(makeEvents(1))
	testenv.Eventually(f, 20*time.Second, func() error {
		_, err := d.Publish(f.Context())
		if errors.Is(err, outbox.ErrGap) {
			f.Fatal(err)
		}
		return err
	})
}

// wantDown checks that a node is said to be unreachable.
func (f *clustered) wantDown(err error, node int) {
	f.Helper()
	wantNotReady(f, err, "unreachable")
	if !strings.Contains(err.Error(), "node "+f.cluster.Nodes[node].Addr()) {
		f.Errorf("it is not said which node is down: %v", err)
	}
}

// promoted waits until a node reports a new master of the stream, and returns it.
func (f *clustered) promoted(by int, stream string, old int) (master int) {
	f.Helper()
	testenv.Eventually(f, 30*time.Second, func() (err error) {
		master, err = f.cluster.MasterBy(f.Context(), f.cluster.On(f, by), f.cluster.Slot(f, stream))
		if err == nil && master == old {
			err = errors.New("no replica was promoted")
		}
		return err
	})
	return master
}

// A replica may lack entries that its master has acknowledged. After its promotion no connection, not even one opened
// while it was a replica, publishes to it before the next Bind. Publishing to the other nodes continues.
func TestNothingIsPublishedToAPromotedReplica(t *testing.T) {
	t.Parallel()
	c := testenv.Cluster(t, 3, 1)
	f := onCluster(t, c, 3, sink.Options{})
	each := f.client.(*redis.ClusterClient).ForEachShard
	f.Must(each(t.Context(), func(ctx context.Context, node *redis.Client) error {
		return node.Ping(ctx).Err() // while nothing is bound
	}))
	first := f.bind()
	if len(first) > 64 || !strings.HasPrefix(first, "cluster/") {
		t.Errorf("the cluster is called %q", first)
	}
	if again := f.bind(); again != first {
		t.Errorf("the cluster is called %q and %q", first, again)
	}
	lanes := f.lanes(f.owned(1))
	for _, l := range lanes {
		f.bring(l)
	}
	// Entries that no replica has received are lost.
	f.Must(c.Nodes[3].Kill())
	f.Must(c.Nodes[3].Start(t.Context()))
	f.Must(c.Wait(t.Context()))
	f.Must(c.Nodes[0].Kill())
	d := lanes[0].Deliver(makeEvents(1))
	if f.promoted(1, f.streams[0], 0) != 3 {
		t.Error("the replica was not promoted")
	}
	testenv.Eventually(t, 15*time.Second, func() error { // by itself the client asks after a minute
		_, err := d.Publish(t.Context())
		if err == nil {
			t.Fatal("published to a replica that was promoted")
		}
		if !errors.Is(err, outbox.ErrMoved) {
			return err
		}
		return nil
	})
	f.bring(lanes[1])
	f.bring(lanes[2])
	if second := f.bind(); second == first || second == "" {
		t.Errorf("the cluster is %q, and was %q before", second, first)
	}
	states, err := f.sink.Look(t.Context(), f.Source, f.streams, nil)
	if err != nil || !states[0].Gate {
		t.Errorf("looked at %+v, %v", states, err)
	}
	lanes = f.lanes(f.owned(2))
	f.bring(lanes[0]) // also where the scripts are missing
	if n, err := c.On(t, 3).XLen(t.Context(), f.streams[0]).Result(); n != 2 {
		t.Errorf("%d entries, want 2; %v", n, err)
	}
}

// calm is for clusters in which no replica should be promoted: a busy machine may stop a node for seconds.
const calm = "cluster-node-timeout 15000"

// While a slot moves between known masters, its events are published, confirmed and settled, with at most the delay
// that the move of its two keys takes.
func TestASlotMovesUnderTheSink(t *testing.T) {
	t.Parallel()
	c := testenv.Cluster(t, 3, 1, calm)
	o1 := sink.Options{Durability: sink.Durability{Replicas: 1}}
	f := onCluster(t, c, 3, o1)
	name := f.bind()
	o := f.owned(1)
	l := f.lanes(o)[0]
	number := int64(0)
	all := func(phase string) {
		t.Helper()
		f.bring(l)
		number++
		marks := []outbox.Mark{{Stream: f.streams[0], Lane: streamLane(o), Number: number}}
		testenv.Eventually(t, 20*time.Second, func() error { return f.sink.Confirm(t.Context(), o, marks) })
		t.Log(phase)
		f.Must(f.sink.Check(t.Context(), o, f.streams))
		f.Must(f.sink.Settled(t.Context(), o, marks))
		l.Settled(number)
	}
	all("before")
	// These clients have loaded the cluster's state now, and do not publish, so they do not learn that it is outdated.
	late := []*clustered{onCluster(t, c, 3, o1), onCluster(t, c, 3, o1)}
	for _, l := range late {
		l.bind()
	}
	// confirmed at the first call: by a node that another one has named.
	confirmed := func(by *clustered) {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		err := by.sink.Confirm(ctx, o, []outbox.Mark{{Stream: f.streams[0], Lane: streamLane(o), Number: number}})
		if err != nil {
			t.Errorf("confirm: %v", err)
		}
	}
	// refused by a node, for a client that does not follow redirections.
	refused := func(node int, reply string) {
		t.Helper()
		alone, _ := newSink(t, c.On(t, node), sink.Options{})
		_, err := alone.Lane(f.streams[0], o, streamLane(o)).Deliver(makeEvents(1)).Publish(t.Context())
		if sink.Class(err) != "moved" || !strings.Contains(err.Error(), reply) {
			t.Errorf("node %d: class %q of %v, want moved by %s", node, sink.Class(err), err, reply)
		}
	}
	slot := c.Slot(t, f.streams[0])
	refused(1, "MOVED")
	from := c.BeginMove(t, slot, 1)
	all("begun")
	c.MoveKeys(t, slot, from, 1, 1)
	d := l.Deliver(makeEvents(1))
	_, err := d.Publish(t.Context())
	if sink.Class(err) != "tryagain" || !strings.Contains(err.Error(), "node "+c.Nodes[0].Addr()) {
		t.Errorf("one of two keys has moved: %v", err)
	}
	c.MoveKeys(t, slot, from, 1, 10)
	refused(from, "ASK")
	_, err = d.Publish(t.Context())
	f.Must(err)
	number++
	all("moved, and not said to have")
	confirmed(late[0]) // ASK
	for _, i := range []int{1, 0, 2} {
		f.Must(c.Do(t.Context(), i, "CLUSTER", "SETSLOT", slot, "NODE", c.IDs[1]))
		all(fmt.Sprintf("node %d knows", i))
	}
	confirmed(late[1]) // MOVED
	if n := c.On(t, 1).XLen(t.Context(), f.streams[0]).Val(); n != number {
		t.Errorf("%d entries, want %d", n, number)
	}
	f.Must(f.sink.Ready(t.Context()))
	all("after") // no adoption is needed
	if again := f.bind(); again != name {
		t.Errorf("the cluster was %q and is %q", name, again)
	}
}

// While the keys of a shared stream move one after the other, an adoption waits. It must not consider a gate lost that
// is still, or already, at the other master: its unsettled events would be published again.
func TestASharedStreamsGateMovesAfterTheStream(t *testing.T) {
	t.Parallel()
	c := testenv.Cluster(t, 3, 0, calm)
	f := onCluster(t, c, 3, sink.Options{Shared: true, Source: "/posthaste/a"})
	f.bind()
	alone, _ := newSink(t, f.client, sink.Options{Source: "/posthaste/a"})
	stream, events := f.streams[0], makeEvents(1)
	o := f.owned(1)
	f.Publish(f.sink.Lane(stream, o, streamLane(o)), events...)
	slot := c.Slot(t, stream)
	from := c.BeginMove(t, slot, 2)
	epoch := int64(1)
	for moved := 0; ; moved++ {
		epoch++
		err := f.sink.Adopt(t.Context(), stream, f.Owner(epoch), false)
		some := moved > 0 && moved < 3
		if some != (err != nil) || some && sink.Class(err) != "tryagain" {
			t.Errorf("adopted when %d keys have moved: %v", moved, err)
		}
		if some { // nor as one that is not shared any more
			epoch++
			wantClass(t, alone.Adopt(t.Context(), stream, f.Owner(epoch), false), "tryagain")
		}
		_, err = f.sink.Look(t.Context(), f.Source, []string{stream}, nil)
		if some != (err != nil) {
			t.Errorf("looked at when %d keys have moved: %v", moved, err)
		}
		if c.MoveKeys(t, slot, from, 2, 1) == 0 {
			break
		}
	}
	c.EndMove(t, slot, 2)
	o = f.Owner(epoch + 1)
	testenv.Eventually(t, 20*time.Second, func() error { return f.sink.Adopt(t.Context(), stream, o, false) })
	d := f.sink.Lane(stream, o, streamLane(o)).Deliver(events)
	testenv.Eventually(t, 20*time.Second, func() error { return second(d.Publish(t.Context())) })
	if n := f.client.XLen(t.Context(), stream).Val(); n != 1 {
		t.Errorf("the event is %d times in the stream", n)
	}
}

// The next Bind accepts a master that has joined the cluster. Before that nothing is published to its slots, afterwards
// everything is. A master that has got its first slot, or lost its last one, is noticed. The keys of a new stream in a
// moving slot are created once the slot has moved.
func TestAMasterComes(t *testing.T) {
	t.Parallel()
	c := testenv.Cluster(t, 3, 0, calm)
	f := onCluster(t, c, 3, sink.Options{})
	f.bind()
	first := c.Slot(t, f.streams[0])
	c.BeginMove(t, first, 2)
	wantClass(t, f.sink.Adopt(t.Context(), f.streams[0], f.Owner(1), false), "tryagain")
	c.EndMove(t, first, 2)
	lanes := f.lanes(f.owned(1))
	f.bring(lanes[0])
	added, err := c.Add(t.Context())
	f.Must(err)
	c.Move(t, first, added)
	f.moved(lanes[0])

	f.bind()
	lanes = f.lanes(f.owned(2))
	f.bring(lanes[0])
	spare, err := c.Add(t.Context())
	f.Must(err)
	before := f.bind()
	lanes = f.lanes(f.owned(3))
	f.bring(lanes[1])
	slot := c.Slot(t, f.streams[1])
	c.BeginMove(t, slot, spare)
	c.MoveKeys(t, slot, 1, spare, 10)
	f.bring(lanes[1]) // it was met without a slot
	c.EndMove(t, slot, spare)
	f.bring(lanes[1])
	f.Must(f.sink.Ready(t.Context()))
	f.moved(lanes[2])
	if after := f.bind(); after == before {
		t.Error("the cluster is called as before")
	}
}

// A node without an answer hides no answer of the others, and errors name it, whichever node returned the cluster's
// state.
func TestANodeIsDown(t *testing.T) {
	t.Parallel()
	c := testenv.Cluster(t, 3, 0, "cluster-require-full-coverage no")
	f := onCluster(t, c, 3, sink.Options{})
	f.bind()
	o := f.owned(1)
	lanes := f.lanes(o)
	f.Must(f.sink.Ready(t.Context()))
	f.Must(c.Nodes[0].Signal(syscall.SIGSTOP))
	t.Cleanup(func() { _ = c.Nodes[0].Signal(syscall.SIGCONT) })
	ctx, cancel := context.WithTimeout(t.Context(), 6*time.Second)
	defer cancel()
	errs := make(chan error, 4)
	for range cap(errs) {
		go func() { errs <- f.sink.Ready(ctx) }()
	}
	for range cap(errs) {
		f.wantDown(<-errs, 0)
	}
	f.Must(c.Nodes[0].Signal(syscall.SIGCONT))
	testenv.Eventually(t, 20*time.Second, func() error { return f.sink.Ready(t.Context()) })
	f.Must(c.Nodes[0].Kill())
	f.wantDown(f.sink.Ready(t.Context()), 0)
	if _, err := lanes[0].Deliver(makeEvents(1)).Publish(t.Context()); err == nil ||
		!strings.Contains(err.Error(), c.Nodes[0].Addr()) || !strings.Contains(err.Error(), f.streams[0]) {
		t.Errorf("it is not said which node and stream stand still: %v", err)
	}
	f.bring(lanes[1])
	if err := f.sink.Check(t.Context(), o, f.streams); err == nil || errors.Is(err, outbox.ErrGap) {
		t.Errorf("a check: %v", err)
	}
	f.Must(c.Client.Del(t.Context(), "{"+f.streams[2]+"}:gate").Err())
	wantErr(t, f.sink.Check(t.Context(), o, f.streams), outbox.ErrGap)
	if err := f.sink.Observe(t.Context(), f.streams); err == nil {
		t.Error("all were observed")
	}
	// A restarted node may lack entries.
	f.Must(c.Nodes[0].Start(t.Context()))
	f.moved(lanes[0])
}

// A master that restarts before it is replaced keeps its name and slots, and may lack entries. Ready accepts it, but
// nothing is published to it before a Bind, and publishing to the others continues.
func TestAMasterIsBackBeforeItIsReplaced(t *testing.T) {
	t.Parallel()
	c := testenv.Cluster(t, 3, 1, "cluster-require-full-coverage no", "cluster-node-timeout 60000")
	f := onCluster(t, c, 3, sink.Options{})
	before := f.bind()
	o := f.owned(1)
	lanes := f.lanes(o)
	for _, l := range lanes {
		f.bring(l)
	}
	f.Must(c.Nodes[0].Kill())
	f.wantDown(f.sink.Ready(t.Context()), 0)
	f.Must(c.Nodes[0].Start(t.Context()))
	if c.Master(t, c.Slot(t, f.streams[0])) != 0 {
		t.Fatal("it was replaced")
	}
	testenv.Eventually(t, 20*time.Second, func() error { return f.sink.Ready(t.Context()) })
	f.bring(lanes[1])
	f.moved(lanes[0])
	wantErr(t, f.sink.Check(t.Context(), o, f.streams), outbox.ErrMoved)
	if after := f.bind(); after == before {
		t.Error("the cluster is called as before")
	}
	testenv.Eventually(t, 20*time.Second, func() error { return f.sink.Ready(t.Context()) }) // it takes writes again
	for _, l := range f.lanes(f.owned(2)) {
		f.bring(l)
	}
}

// When a master without replicas gets its first one, it begins a new history, but its data is unchanged. This causes no
// adoption, and after another adoption the cluster keeps its name.
func TestAFirstReplicaInAClusterIsNoRestart(t *testing.T) {
	t.Parallel()
	c := testenv.Cluster(t, 3, 0, calm)
	f := onCluster(t, c, 3, sink.Options{})
	before := f.bind()
	lanes := f.lanes(f.owned(1))
	for _, l := range lanes {
		f.bring(l)
	}
	added, err := c.Add(t.Context())
	f.Must(err)
	node := c.On(t, 0)
	history := node.InfoMap(t.Context(), "replication").Item("Replication", "master_replid")
	testenv.Eventually(t, 20*time.Second, func() error {
		return c.Do(t.Context(), added, "CLUSTER", "REPLICATE", c.IDs[0])
	})
	testenv.Eventually(t, 30*time.Second, func() error {
		if node.InfoMap(t.Context(), "replication").Item("Replication", "master_replid") == history {
			return errors.New("the history goes on")
		}
		return nil
	})
	f.Must(f.sink.Ready(t.Context()))
	for i, l := range lanes {
		if _, err := l.Deliver(makeEvents(1)).Publish(t.Context()); err != nil {
			t.Errorf("stream %d: %v", i, err)
		}
	}
	if after := f.bind(); after != before {
		t.Errorf("the cluster is called %q and %q", before, after)
	}
	f.sink.Release() // what happens until somebody looks again nobody sees
	if after := f.bind(); after == before {
		t.Error("the cluster is called as before, whatever may have happened")
	}
}

// A master is cut off from the others, but clients reach it. Its view of the cluster is ignored, so exactly one change
// is noticed.
func TestAMinoritysViewIsNoReason(t *testing.T) {
	t.Parallel()
	c := testenv.FencedCluster(t, 3, 1)
	f := onCluster(t, c, 3, sink.Options{})
	f.bind()
	f.bring(f.lanes(f.owned(1))[0])
	c.Cut(0)
	f.promoted(1, f.streams[0], 0)
	cut := c.On(t, 0)
	testenv.Eventually(t, 30*time.Second, func() error {
		if info, err := cut.ClusterInfo(t.Context()).Result(); err != nil || !strings.Contains(info, "state:fail") {
			return fmt.Errorf("it does not know that it is cut off: %w", err)
		}
		return nil
	})
	testenv.Eventually(t, 20*time.Second, func() error { return f.sink.Ready(t.Context()) })
	name := f.bind()
	lanes := f.lanes(f.owned(2))
	for range 20 {
		f.Must(f.sink.Ready(t.Context()))
		for i, l := range lanes {
			if _, err := l.Deliver(makeEvents(1)).Publish(t.Context()); err != nil {
				t.Fatalf("stream %d: %v", i, err)
			}
		}
	}
	if again := f.bind(); again != name {
		t.Errorf("the cluster is called %q and %q", name, again)
	}
}

// Sentinel promotes one server, and soon afterwards another one: each has to be met.
func TestSentinelSwitchesTwice(t *testing.T) {
	t.Parallel()
	s := testenv.Sentinel(t, 2)
	f := boundTo(t, s.URL(), sink.Options{})
	first, err := f.sink.Bind(t.Context())
	if err != nil {
		t.Fatalf("a Sentinel was met instead of its server: %v", err)
	}
	names := map[string]bool{first: true}
	for _, r := range s.Sentinels { // all connections to them are new
		f.Must(r.Kill())
		f.Must(r.Start(t.Context()))
	}
	f.Must(s.Wait(t.Context()))
	master := 0
	for epoch := range int64(2) {
		l := f.lane(f.adopted(epoch + 1))
		f.Publish(l, makeEvents(1)...)
		f.Must(s.Servers[master].Kill())
		f.moved(l)
		master = s.Promoted(t, master)
		name := f.bind()
		if names[name] || name == "" {
			t.Errorf("the server is %q, one of %v", name, names)
		}
		names[name] = true
	}
	f.Publish(f.lane(f.adopted(3)), makeEvents(1)...)
}

// Without one node, the others are bound and looked at, also if it does not answer at all. The node is bound when it
// answers, and the next Bind names it.
func TestSomeNodesAreBound(t *testing.T) {
	t.Parallel()
	c := testenv.Cluster(t, 3, 0, "cluster-require-full-coverage no")
	f := onCluster(t, c, 3, sink.Options{})
	all := f.bind()
	f.owned(1)
	for down := range 3 {
		frozen := down == 2
		if frozen {
			f.Must(c.Nodes[down].Signal(syscall.SIGSTOP))
			t.Cleanup(func() { _ = c.Nodes[down].Signal(syscall.SIGCONT) })
		} else {
			f.Must(c.Nodes[down].Kill())
		}
		ctx, cancel := context.WithTimeout(t.Context(), 6*time.Second)
		some, err := f.sink.Bind(ctx)
		cancel()
		if !outbox.Alone(err) || some == "" || some == all {
			t.Errorf("bound to %q: %v", some, err)
		}
		states, err := f.sink.Look(t.Context(), f.Source, f.streams, nil)
		if !outbox.Alone(err) || len(states) != 3 {
			t.Fatalf("%+v: %v", states, err)
		}
		for i, s := range states {
			if gone := i == down; gone != outbox.Alone(s.Err) || gone == s.Gate {
				t.Errorf("without node %d: %+v", down, s)
			}
		}
		o := f.Owner(int64(down) + 2)
		for i, stream := range f.streams {
			ctx, cancel := context.WithTimeout(t.Context(), 6*time.Second)
			err := f.sink.Adopt(ctx, stream, o, true)
			cancel()
			if outbox.Lost(err) != (i == down) || err != nil && i != down {
				t.Errorf("without node %d, stream %d is adopted: %v", down, i, err)
			}
		}
		if frozen {
			f.Must(c.Nodes[down].Signal(syscall.SIGCONT))
		} else {
			f.Must(c.Nodes[down].Start(t.Context()))
		}
		testenv.Eventually(t, 20*time.Second, func() error { return f.sink.Ready(t.Context()) })
		f.moved(f.sink.Lane(f.streams[(down+1)%3], o, streamLane(o)))
		if whole := f.bind(); whole == some || (whole == all) != frozen {
			t.Errorf("with all nodes it is called %q", whole)
		}
		all = f.bind()
		if states, err := f.sink.Look(t.Context(), f.Source, f.streams, nil); err != nil {
			t.Errorf("%+v: %v", states, err)
		}
	}
}
