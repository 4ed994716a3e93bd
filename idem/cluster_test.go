package idem

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/sony/gobreaker/v2"

	"posthaste/internal/local"
	"posthaste/internal/testenv"
)

// clusterOfTwo returns two nodes that share the slots, with their ids.
func clusterOfTwo(t *testing.T) (nodes [2]*testenv.RedisServer, ids [2]string) {
	t.Helper()
	for i := range nodes {
		nodes[i] = testenv.Redis(t, "cluster-enabled yes", "appendonly no", "cluster-node-timeout 30000")
		do(t, nodes[i], "CLUSTER", "ADDSLOTSRANGE", i*8192, i*8192+8191)
		do(t, nodes[i], "CLUSTER", "SET-CONFIG-EPOCH", i+1)
		ids[i] = nodes[i].Client.Do(t.Context(), "CLUSTER", "MYID").Val().(string)
	}
	do(t, nodes[0], "CLUSTER", "MEET", "127.0.0.1", nodes[1].Port)
	testenv.Eventually(t, 20*time.Second, func() error {
		for _, n := range nodes {
			info, err := n.Client.ClusterInfo(context.Background()).Result()
			if err != nil || !strings.Contains(info, "cluster_state:ok") ||
				!strings.Contains(info, "cluster_slots_assigned:16384") {
				return fmt.Errorf("not one cluster yet: %w", err)
			}
		}
		return nil
	})
	return nodes, ids
}

func do(t *testing.T, r *testenv.RedisServer, args ...any) {
	t.Helper()
	if err := r.Client.Do(t.Context(), args...).Err(); err != nil {
		t.Fatalf("%v: %v", args, err)
	}
}

// A slot moves to another node while attempts are under way: the client follows ASK and MOVED, and the record with its
// owner comes along. A client that does not follow them gets a degraded ticket, never an error.
func TestASlotMovesUnderTheGuard(t *testing.T) {
	t.Parallel()
	nodes, ids := clusterOfTwo(t)
	cc := redis.NewClusterClient(&redis.ClusterOptions{
		Addrs: []string{nodes[0].Addr(), nodes[1].Addr()}, MaxRedirects: 3, ContextTimeoutEnabled: true, Protocol: 2,
	})
	t.Cleanup(func() { _ = cc.Close() })
	g := Patient(New(Options{Redis: cc, Routes: []string{"/t"}}))
	for i := range 20 { // both nodes
		d := begin(t, g, request(fmt.Sprint("warm", i), "a"))
		if wantOutcome(t, d, Proceed); d.Ticket.Degraded() {
			t.Fatal("degraded")
		}
		d.Ticket.Commit(t.Context(), result)
	}
	moving := request("moving", "a")
	ticket := begin(t, g, moving).Ticket
	slot := int(nodes[0].Client.ClusterKeySlot(t.Context(), moving.Key.String()).Val())
	from, to := slot/8192, 1-slot/8192
	do(t, nodes[to], "CLUSTER", "SETSLOT", slot, "IMPORTING", ids[from])
	do(t, nodes[from], "CLUSTER", "SETSLOT", slot, "MIGRATING", ids[to])
	stay := func(when string) {
		t.Helper()
		if err := ticket.Heartbeat(t.Context()); err != nil {
			t.Errorf("%s: %v", when, err)
		}
		wantOutcome(t, begin(t, g, moving), Busy)
	}
	stay("before its key moved")
	do(t, nodes[from], "MIGRATE", "127.0.0.1", nodes[to].Port, moving.Key.String(), 0, 5000)
	stay("asked elsewhere")
	// A client of one node gets ASK, and works without Redis.
	if d := begin(t, guardOn(t, nodes[from].URL()), moving); d.Outcome != Proceed || !d.Ticket.Degraded() {
		t.Errorf("a client that does not follow: %+v", d)
	}
	for _, n := range []int{to, from} {
		do(t, nodes[n], "CLUSTER", "SETSLOT", slot, "NODE", ids[to])
	}
	stay("moved")
	ticket.Commit(t.Context(), result)
	if !strings.HasPrefix(rawRecord(t, nodes[to].Client, moving.Key), "C|") {
		t.Error("the result is not where the slot is")
	}
	if d := begin(t, guardOn(t, nodes[from].URL()), moving); d.Outcome != Proceed || !d.Ticket.Degraded() {
		t.Errorf("a client that does not follow: %+v", d)
	}
	// A cluster refuses a script with two keys of different slots.
	err := nodes[to].Client.Eval(t.Context(), "return 1", []string{moving.Key.String(), "another"}).Err()
	if err == nil || !strings.HasPrefix(err.Error(), "CROSSSLOT") {
		t.Errorf("two keys: %v", err)
	}
}

// Check reaches every master and names the one that does not answer. The others' memory is read too.
func TestAMasterIsDown(t *testing.T) {
	t.Parallel()
	nodes, _ := clusterOfTwo(t)
	last := nodes[0] // by address, as they are asked
	if nodes[1].Addr() > last.Addr() {
		last = nodes[1]
	}
	cc := redis.NewClusterClient(&redis.ClusterOptions{
		Addrs: []string{nodes[0].Addr(), nodes[1].Addr()}, ContextTimeoutEnabled: true, Protocol: 2,
	})
	t.Cleanup(func() { _ = cc.Close() })
	g := Patient(New(Options{Redis: cc, Routes: []string{"/t"}}))
	if err := g.Check(t.Context()); err != nil || len(Unreachable(t.Context(), cc)) > 0 || g.Short() {
		t.Errorf("all is well: %v, %v", err, Unreachable(t.Context(), cc))
	}
	for i, policy := range []string{"noeviction", "allkeys-lru"} {
		do(t, last, "CONFIG", "SET", "maxmemory-policy", policy)
		if got, err := EvictionPolicy(t.Context(), cc); err != nil || got != policy {
			t.Errorf("%d: policy %q, %v", i, got, err)
		}
	}
	info, err := last.Client.InfoMap(t.Context(), "memory").Result()
	must(t, err)
	used, err := strconv.Atoi(info["Memory"]["used_memory"])
	must(t, err)
	do(t, last, "CONFIG", "SET", "maxmemory", used*6/5)
	if err := g.Check(t.Context()); err != nil || !g.Short() {
		t.Errorf("the fuller master is not noticed: %v", err)
	}
	must(t, last.Kill())
	if got := Unreachable(t.Context(), cc); len(got) != 1 || got[0] != last.Addr() {
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
			c := testenv.Cluster(t, 3, 0, "cluster-require-full-coverage no", "appendonly no")
			client := redis.NewClusterClient(&redis.ClusterOptions{
				Addrs: c.Client.Options().Addrs, ContextTimeoutEnabled: true, Protocol: 2,
				ReadTimeout: testTimeout, PoolTimeout: testTimeout,
			})
			t.Cleanup(func() { _ = client.Close() })
			g := New(Options{Redis: client, Routes: []string{"/t"}})
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
			Patient(g)
			begin(t, g, on(1, "warm")).Ticket.Commit(t.Context(), result)
			must(t, down(c.Nodes[0]))
			opened := 0
			for i := range lost {
				g.timeout = callTimeout // a call to the node that hangs lasts as long
				d := begin(t, g, lost[i])
				if wantOutcome(t, d, Proceed); !d.Ticket.Degraded() {
					t.Fatal("a key on a master that is down is guarded")
				}
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
				if wantOutcome(t, d, Proceed); d.Ticket.Degraded() {
					t.Fatal("a key on a healthy master is not guarded")
				}
				d.Ticket.Commit(t.Context(), result)
				wantOutcome(t, begin(t, Patient(New(Options{Redis: client, Routes: []string{"/t"}})), r), Replay)
			}
		})
	}
}
