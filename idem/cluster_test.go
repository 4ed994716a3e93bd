package idem

import (
	"fmt"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/redis/go-redis/v9"
	"github.com/sony/gobreaker/v2"

	"posthaste/internal/lab/local"
	"posthaste/internal/lab/testenv"
)

// onCluster returns a patient guard on a cluster of three masters, and its client.
func onCluster(t *testing.T) (*testenv.RedisCluster, *redis.ClusterClient, *Guard) {
	t.Helper()
	c := testenv.Cluster(t, 3, 0, "cluster-require-full-coverage no", "appendonly no")
	client := redis.NewClusterClient(&redis.ClusterOptions{
		Addrs: c.Client.Options().Addrs, MaxRedirects: 3, ContextTimeoutEnabled: true, Protocol: 2,
		ReadTimeout: testTimeout, PoolTimeout: testTimeout,
	})
	t.Cleanup(func() { _ = client.Close() })
	return c, client, Patient(New(Options{Redis: client, Routes: []string{"/t"}}))
}

// All scripts work on every master. Then a slot moves to another one while attempts are under way: the client follows
// ASK and MOVED, and the record with its owner comes along. A client that does not follow them gets a degraded ticket,
// never an error.
func TestASlotMovesUnderTheGuard(t *testing.T) {
	t.Parallel()
	c, _, g := onCluster(t)
	for i := range 20 {
		req := request(fmt.Sprint("warm", i), "a")
		for range 2 { // the second follows a release
			d := begin(t, g, req)
			wantOutcome(t, d, Proceed)
			if err := d.Ticket.Heartbeat(t.Context()); err != nil || d.Ticket.Degraded() {
				t.Fatalf("degraded %v, heartbeat %v", d.Ticket.Degraded(), err)
			}
			d.Ticket.Abort(t.Context())
		}
		begin(t, g, req).Ticket.Commit(t.Context(), result)
		wantOutcome(t, begin(t, g, req), Replay)
	}
	moving := request("moving", "a")
	ticket := begin(t, g, moving).Ticket
	slot := c.Slot(t, moving.Key.String())
	to := (c.Master(t, slot) + 1) % 3
	from := c.BeginMove(t, slot, to)
	stay := func(when string) {
		t.Helper()
		testenv.ErrorIs(t, when, ticket.Heartbeat(t.Context()), nil)
		wantOutcome(t, begin(t, g, moving), Busy)
	}
	doesNotFollow := func() {
		t.Helper()
		if d := begin(t, guardOn(t, c.Nodes[from].URL()), moving); d.Outcome != Proceed || !d.Ticket.Degraded() {
			t.Errorf("a client that does not follow: %+v", d)
		}
	}
	stay("before its key moved")
	c.MoveKeys(t, slot, from, to, 10)
	stay("asked elsewhere")
	doesNotFollow()
	c.EndMove(t, slot, to)
	stay("moved")
	ticket.Commit(t.Context(), result)
	hasPrefix(t, rawRecord(t, c.On(t, to), moving.Key), "C|")
	doesNotFollow()
}

// Check reaches every master and names the one that does not answer. The others' memory is read too.
func TestAMasterIsDown(t *testing.T) {
	t.Parallel()
	c, client, g := onCluster(t)
	// The last one by address, as they are asked.
	i := 0
	for j, n := range c.Nodes {
		if n.Addr() > c.Nodes[i].Addr() {
			i = j
		}
	}
	last, set := c.Nodes[i], c.On(t, i).ConfigSet
	if err := g.Check(t.Context()); err != nil || len(Unreachable(t.Context(), client)) > 0 || g.Short() {
		t.Errorf("all is well: %v, %v", err, Unreachable(t.Context(), client))
	}
	for _, policy := range []string{"noeviction", "allkeys-lru"} {
		must(t, set(t.Context(), "maxmemory-policy", policy).Err())
		if got, err := EvictionPolicy(t.Context(), client); err != nil || got != policy {
			t.Errorf("policy %q, %v", got, err)
		}
	}
	used, err := strconv.Atoi(c.On(t, i).InfoMap(t.Context(), "memory").Item("Memory", "used_memory"))
	must(t, err)
	must(t, set(t.Context(), "maxmemory", strconv.Itoa(used*6/5)).Err())
	if err := g.Check(t.Context()); err != nil || !g.Short() {
		t.Errorf("the fuller master is not noticed: %v", err)
	}
	must(t, last.Kill())
	if got := Unreachable(t.Context(), client); len(got) != 1 || got[0] != last.Addr() {
		t.Errorf("unreachable: %v", got)
	}
	if err := g.Check(t.Context()); err == nil || !strings.Contains(err.Error(), "node "+last.Addr()) {
		t.Errorf("check: %v", err)
	}
}

// A master that is down does not affect the keys of the others: their breaker stays closed, and their results do not
// wait. Calls to it are bounded as with one server.
func TestAMasterThatIsDownIsNobodyElses(t *testing.T) {
	t.Parallel()
	for name, down := range map[string]func(*local.Redis) error{
		"killed": func(n *local.Redis) error { return n.Kill() },
		"hangs":  func(n *local.Redis) error { return n.Signal(syscall.SIGSTOP) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c, client, g := onCluster(t)
			on := func(master int, name string) Request {
				for i := 0; ; i++ {
					r := request(fmt.Sprint(name, i), "a")
					if c.Master(t, c.Slot(t, r.Key.String())) == master {
						return r
					}
				}
			}
			var lost, kept, more []Request
			for i := range 12 {
				n := strconv.Itoa(i)
				lost, kept, more = append(lost, on(0, "l"+n+".")), append(kept, on(1+i%2, "k"+n+".")),
					append(more, on(1+i%2, "m"+n+"."))
			}
			begin(t, g, on(1, "warm")).Ticket.Commit(t.Context(), result)
			must(t, down(c.Nodes[0]))
			opened := 0
			for i := range lost {
				g.timeout = callTimeout // a call to the node that hangs lasts as long
				d := begin(t, g, lost[i])
				wantGuarded(t, d, false)
				if g.node(c.Nodes[0].Addr()).breaker.State() == gobreaker.StateOpen {
					opened++
				}
				if d := begin(t, Patient(g), kept[i]); d.Ticket.Degraded() {
					t.Fatalf("%d: a key on a healthy master is not guarded", i)
				}
			}
			if opened == 0 {
				t.Error("the breaker of the master that is down never opened")
			}
			for _, r := range more {
				d := begin(t, g, r)
				wantGuarded(t, d, true)
				d.Ticket.Commit(t.Context(), result)
				wantOutcome(t, begin(t, Patient(New(Options{Redis: client, Routes: []string{"/t"}})), r), Replay)
			}
		})
	}
}
