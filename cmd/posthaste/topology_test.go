package main

import (
	"fmt"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"

	"posthaste/internal/lab/testenv"
	"posthaste/internal/redisurl"
)

// clustered is a world whose Redis is a cluster of three masters, each with a stream.
type clustered struct {
	*world
	cluster *testenv.RedisCluster
	types   []string
}

func newCluster(t *testing.T, c *testenv.RedisCluster) *clustered {
	t.Helper()
	w := &clustered{cluster: c, types: make([]string, 3), world: worldAt(t, c.URL(), c.Client)}
	for i := 0; slices.Contains(w.types, ""); i++ {
		typ := fmt.Sprintf("t%d", i)
		if m := c.Master(t, c.Slot(t, "outbox."+typ)); m < 3 && w.types[m] == "" {
			w.types[m] = typ
		}
	}
	return w
}

// signsOn has leaders sign that they are alive on a master. It precedes the first relay.
func (w *clustered) signsOn(master int) {
	w.t.Helper()
	source := uuid.New()
	for w.cluster.Master(w.t, w.cluster.Slot(w.t, "{posthaste:"+source.String()+"}:alive")) != master {
		source = uuid.New()
	}
	w.db.Exec(w.t, "ALTER TABLE relay_state ALTER COLUMN source SET DEFAULT '"+source.String()+"'")
}

// load writes events of all types.
func (w *clustered) load(rate int) *testenv.Load {
	return testenv.StartLoad(w.t, w.db, testenv.LoadOptions{Rate: rate, Types: w.types})
}

// slot returns the slot of the stream that was on the master at the start.
func (w *clustered) slot(master int) int { return w.cluster.Slot(w.t, "outbox."+w.types[master]) }

// flows waits until n more events are committed, and all are settled.
func (w *world) flows(load *testenv.Load, n int) {
	w.t.Helper()
	want := load.Committed() + n
	w.waitCommitted(load, want)
	w.waitSettled(int64(want))
}

// recovers waits until all events are settled again and the relay is ready, and ends the load.
func (w *clustered) recovers(r *child, load *testenv.Load) {
	w.t.Helper()
	w.flows(load, 200)
	w.ended(load)
	r.becomes("leader")
}

// besideANode returns a relay under load, in a cluster whose nodes work without the first one.
func besideANode(t *testing.T, mode string) (*clustered, *child, *testenv.Load) {
	t.Helper()
	w := newCluster(t, testenv.Cluster(t, 3, 0, "cluster-require-full-coverage no"))
	w.signsOn(1)
	r := w.relayIn(mode, "--stream-maxlen=0")
	load := w.load(300)
	w.flows(load, 200)
	return w, r, load
}

// promoted waits until another node has the stream that a master had.
func (w *clustered) promoted(master int) (now int) {
	w.t.Helper()
	other := w.cluster.On(w.t, (master+1)%3)
	testenv.Eventually(w.t, 30*time.Second, func() (err error) {
		now, err = w.cluster.MasterBy(w.t.Context(), other, w.slot(master%3))
		return testenv.FailIf(err != nil || now == master, "no replica was promoted, %w", err)
	})
	return now
}

// replaced kills a master, waits until another node has its stream, and starts it again.
func (w *clustered) replaced(master int, whenDown func()) (now int) {
	w.t.Helper()
	must(w.t, w.cluster.Nodes[master].Kill())
	if whenDown != nil {
		whenDown()
	}
	now = w.promoted(master)
	must(w.t, w.cluster.Nodes[master].Start(w.t.Context()))
	return now
}

// inMode runs do in one mode, and in both with full counts.
func inMode(t *testing.T, mode string, do func(t *testing.T, mode string)) {
	t.Helper()
	if full() {
		inModes(t, do)
		return
	}
	do(t, mode)
}

// epoch returns how often the streams were adopted.
func (w *world) epoch() int {
	w.t.Helper()
	return testenv.Value[int](w.t, w.db, "SELECT epoch FROM relay_state")
}

// leads returns a check that no relay has adopted since now. A time limit of the relay that was exceeded since now is a
// reason to adopt: a busy machine may stop for seconds.
func (w *world) leads(r *child) (still func()) {
	w.t.Helper()
	was, before := w.epoch(), len(r.output())
	return func() {
		w.t.Helper()
		now := w.epoch()
		if now == was {
			return
		}
		since := r.output()[before:]
		for _, stall := range []string{"i/o timeout", "deadline exceeded", "lock session lost"} {
			if strings.Contains(since, stall) {
				w.t.Logf("epoch %d after %q, and was %d", now, stall, was)
				return
			}
		}
		w.t.Errorf("epoch %d, and was %d: a relay has adopted again: %s", now, was, since)
	}
}

// A master of a cluster is killed under load, and its replica is promoted. With replicas=1, no event needs restoring.
func TestAMasterIsKilledAndItsReplicaPromoted(t *testing.T) {
	t.Parallel()
	inMode(t, "cdc", func(t *testing.T, mode string) {
		w := newCluster(t, testenv.Cluster(t, 3, 1))
		w.relayIn(mode, "--redis-durability=replicas=1", "--stream-maxlen=0")
		load := w.load(400)
		kills := scale(6, 1)
		masters := []int{0, 1, 2}
		for i := range kills {
			w.flows(load, 200)
			if err := w.cluster.Wait(t.Context()); err != nil { // the replicas are connected
				t.Fatal(err)
			}
			masters[i%3] = w.replaced(masters[i%3], nil)
		}
		w.flows(load, 200)
		w.ended(load)
		w.has(0, "SELECT coalesce(sum(restored), 0)::bigint FROM outbox_reconcile") // a replica had acknowledged all
	})
}

// The promoted replica lacks acknowledged events. With durability none, they are published again, in order, before any
// newer event.
func TestAClustersReplicaThatLagsIsPromoted(t *testing.T) {
	t.Parallel()
	inMode(t, "poll", func(t *testing.T, mode string) {
		w := newCluster(t, testenv.FencedCluster(t, 3, 1))
		w.relayIn(mode, "--stream-maxlen=0")
		load := w.load(400)
		w.flows(load, 200)
		w.cluster.Cut(3) // the replica of the first master
		w.flows(load, 300)
		w.replaced(0, func() { w.cluster.Join(3) })
		w.flows(load, 200)
		w.ended(load)
		restored := testenv.Value[int64](t, w.db, "SELECT coalesce(sum(restored), 0)::bigint FROM outbox_reconcile")
		if restored < 50 {
			t.Errorf("%d events were restored: not the case", restored)
		}
	})
}

// A master that is cut off from the others accepts writes until it notices. Its replica is promoted without those
// writes, and the relay publishes them there again. The old master drops them when it rejoins.
func TestAMinorityMasterTakesWrites(t *testing.T) {
	t.Parallel()
	inMode(t, "cdc", func(t *testing.T, mode string) {
		w := newCluster(t, testenv.FencedCluster(t, 3, 1))
		w.relayIn(mode, "--stream-maxlen=0")
		load := w.load(400)
		w.flows(load, 200)
		was := w.epoch()
		w.cluster.Cut(0)
		w.promoted(0)
		w.flows(load, 200) // the relay reaches both masters
		w.cluster.Join(0)
		must(t, w.cluster.Wait(t.Context()))
		w.flows(load, 200)
		w.ended(load)
		restored := testenv.Value[int64](t, w.db, "SELECT coalesce(sum(restored), 0)::bigint FROM outbox_reconcile")
		if restored == 0 || w.epoch() == was {
			t.Errorf("%d events were restored, epoch %d to %d: not the case", restored, was, w.epoch())
		}
	})
}

// Slots move under a relay and a consumer. A move between known masters needs no adoption. When a master joins or
// leaves, the relay adopts again.
func TestSlotsMoveUnderLoad(t *testing.T) {
	t.Parallel()
	w := newCluster(t, testenv.Cluster(t, 3, 0, "cluster-node-timeout 15000"))
	r := w.relayIn("cdc", "--stream-maxlen=0")
	load := w.load(400)
	w.flows(load, 200)
	still := w.leads(r)
	rounds := scale(20, 2)
	for i := range rounds {
		for m := range 3 {
			w.cluster.Move(t, w.slot(m), (m+i+1)%3)
		}
		w.flows(load, 150)
	}
	still()
	added, err := w.cluster.Add(t.Context())
	must(t, err)
	w.cluster.Move(t, w.slot(0), added)
	w.flows(load, 150)
	gone := w.cluster.Master(t, w.slot(1))
	w.cluster.Drain(t, gone, added)
	w.flows(load, 150)
	w.ended(load)
	r.becomes("leader")
}

// One node of a cluster is down and is not replaced. The events of its streams wait, in order. Those of other streams
// are published and settled.
func TestOthersFlowWhileANodeIsDown(t *testing.T) {
	t.Parallel()
	w, r, load := besideANode(t, "poll")
	// A sweep settles the events of the other streams when the node is back.
	must(t, w.cluster.Nodes[0].Kill())
	w.othersGoOn()
	r.waitUnready("outbox." + w.types[0] + " is blocked")
	r.waitUnready(w.cluster.Nodes[0].Addr())
	r.setMode("auto") // streaming waits for the node
	w.othersGoOn()
	must(t, w.cluster.Nodes[0].Start(t.Context()))
	w.waitMode("cdc")
	w.flows(load, 200)

	w.giveUp()
	fresh := "t100"
	for i := 101; w.cluster.Master(t, w.cluster.Slot(t, "outbox."+fresh)) != 0; i++ {
		fresh = fmt.Sprintf("t%d", i)
	}
	must(t, w.cluster.Nodes[0].Kill())
	settled := func() (still, others int64) {
		query := "SELECT count(*) FILTER (WHERE aggregate_type = $1), count(*) FILTER (WHERE aggregate_type <> $1) " +
			"FROM outbox_history"
		must(t, w.db.Pool.QueryRow(t.Context(), query, w.types[0]).Scan(&still, &others))
		return still, others
	}
	later := w.wrote(testenv.LoadOptions{Total: 20, Types: []string{fresh}})
	w.oracle.Others = append(w.oracle.Others, later)
	w.waitCommitted(load, load.Committed()+300)
	still, before := settled()
	testenv.Eventually(t, 30*time.Second, func() error {
		_, now := settled()
		return testenv.FailIf(now < before+300,
			"%d events of others are settled, and were %d when the node went down", now, before)
	})
	if now, _ := settled(); now != still {
		t.Errorf("%d events of the stream that stands still are settled, and were %d", now, still)
	}
	for _, text := range []string{
		"streams: ", "outbox." + w.types[0], "outbox." + fresh, " is blocked", w.cluster.Nodes[0].Addr(),
	} {
		r.waitUnready(text)
	}
	w.listsTheOthers()
	// The others also go on after a switch, and with another relay.
	r.setMode("poll")
	w.waitMode("poll")
	w.othersGoOn()
	r.kill()
	r = w.spawn("relay", "--stream-maxlen=0")
	w.othersGoOn()
	r.setMode("auto")
	w.othersGoOn()
	r.kill()
	r = w.spawn("relay", "--stream-maxlen=0")
	w.othersGoOn()
	r.waitUnready("outbox." + w.types[0] + " is blocked")
	must(t, w.cluster.Nodes[0].Start(t.Context()))
	w.waitMode("cdc")
	w.recovers(r, load)
	w.hasLen("outbox."+fresh, int64(later.Committed()))
}

// othersGoOn waits until more events are published of all nodes except the first: more than were being published.
func (w *clustered) othersGoOn() {
	w.t.Helper()
	others := func() (n int64) {
		for _, typ := range w.types[1:] {
			n += w.cluster.Client.XLen(w.t.Context(), "outbox."+typ).Val()
		}
		return n
	}
	before := others()
	testenv.Eventually(w.t, 30*time.Second, func() error {
		now := others()
		return testenv.FailIf(now < before+600, "%d events of others are published, and were %d", now, before)
	})
}

// A node hangs, takes no writes, or has lost its stream and refuses the events that are restored, when a relay starts.
// The others do not wait for it.
func TestOthersFlowBesideAUselessNode(t *testing.T) {
	t.Parallel()
	w, r, load := besideANode(t, "cdc")
	r.kill()
	must(t, w.cluster.On(t, 0).ConfigSet(t.Context(), "maxmemory", "1").Err())
	r = w.spawn("relay", "--stream-maxlen=0")
	w.othersGoOn()
	r.waitUnready("OOM")
	must(t, w.cluster.On(t, 0).ConfigSet(t.Context(), "maxmemory", "0").Err())
	w.flows(load, 200)
	r.kill()
	must(t, w.cluster.On(t, 0).Do(t.Context(), "acl", "setuser", "default", "-xadd").Err())
	must(t, w.cluster.On(t, 0).Del(t.Context(), "outbox."+w.types[0]).Err())
	r = w.spawn("relay", "--stream-maxlen=0")
	w.othersGoOn()
	r.waitUnready("can't run this command")
	must(t, w.cluster.On(t, 0).Do(t.Context(), "acl", "setuser", "default", "+xadd").Err())
	w.flows(load, 200)
	r.kill()
	must(t, w.cluster.Nodes[0].Signal(syscall.SIGSTOP))
	t.Cleanup(func() { _ = w.cluster.Nodes[0].Signal(syscall.SIGCONT) })
	r = w.spawn("relay", "--stream-maxlen=0")
	w.othersGoOn()
	must(t, w.cluster.Nodes[0].Signal(syscall.SIGCONT))
	w.waitMode("cdc")
	w.recovers(r, load)
}

// giveUp makes a group of each stream give up an event.
func (w *clustered) giveUp() {
	w.t.Helper()
	for _, typ := range w.types {
		stream := "outbox." + typ
		must(w.t, w.cluster.Client.XGroupCreate(w.t.Context(), stream, "readers-"+typ, "0").Err())
		w.gaveUp(stream, "readers-"+typ, "1-0", map[string]any{"id": uuid.NewString()})
	}
}

// listsTheOthers checks that the lists for operators have the data of all nodes except the first, and name the node
// that did not answer.
func (w *clustered) listsTheOthers() {
	w.t.Helper()
	for _, words := range []string{"dead list", "dead list --json", "groups list", "groups list --json"} {
		r := w.once(strings.Fields(words)...)
		if r.code == 0 || !strings.Contains(r.errOut, "node "+w.cluster.Nodes[0].Addr()) {
			w.t.Errorf("%s: exit %d, %s", words, r.code, r.errOut)
		}
		for i, typ := range w.types {
			if there := strings.Contains(r.out, "readers-"+typ); there != (i > 0) {
				w.t.Errorf("%s: has node %d: %v\n%s", words, i, there, r.out)
			}
		}
	}
	w.once("status").says(w.t, 0, "node "+w.cluster.Nodes[0].Addr())
}

// The whole cluster is down for longer than any timeout.
func TestTheWholeClusterIsDownForAWhile(t *testing.T) {
	t.Parallel()
	w := newCluster(t, testenv.Cluster(t, 3, 0))
	r := w.relayIn("cdc", "--stream-maxlen=0")
	load := w.load(300)
	w.flows(load, 200)
	must(t, w.cluster.Kill())
	r.waitUnready("node 127.0.0.1:")
	if full() {
		wait(t, 20*time.Second)
	}
	w.waitCommitted(load, load.Committed()+300)
	must(t, w.cluster.Start(t.Context()))
	w.recovers(r, load)
}

// Sentinel promotes one replica, and soon afterwards another.
func TestSentinelFailsOverTwiceUnderLoad(t *testing.T) {
	t.Parallel()
	inMode(t, "poll", func(t *testing.T, mode string) {
		s := testenv.Sentinel(t, 2)
		u, err := redisurl.Parse(s.URL())
		must(t, err)
		client := redis.NewUniversalClient(u)
		t.Cleanup(func() { _ = client.Close() })
		w := worldAt(t, s.URL(), client)
		w.relayIn(mode, "--redis-durability=replicas=1", "--stream-maxlen=0")
		load := testenv.StartLoad(t, w.db, testenv.LoadOptions{Rate: 400})
		master := 0
		for range 2 {
			w.flows(load, 200)
			must(t, s.Servers[master].Kill())
			old := master
			master = s.Promoted(t, old)
			must(t, s.Servers[old].Start(t.Context()))
			must(t, s.Wait(t.Context()))
		}
		w.flows(load, 200)
		w.ended(load)
	})
}
