package api

import (
	"context"
	"fmt"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/go-redis/v9"

	"posthaste/idem"
	"posthaste/internal/lab/testenv"
)

// failover is a Redis with a replica behind a proxy, and the address that clients use.
type failover struct {
	replica *testenv.RedisServer
	link    *testenv.Link
	addr    atomic.Pointer[string]
}

// withReplica gives the world's Redis a replica that has caught up.
func (w *world) withReplica() *failover {
	w.tb.Helper()
	f := &failover{link: testenv.NewLink(w.tb, w.redis.Addr())}
	f.redirect(w.redis.Addr())
	_, port, err := net.SplitHostPort(f.link.Addr())
	must(w.tb, err)
	w.redis.Client.ConfigSet(w.tb.Context(), "repl-diskless-sync-delay", "0")
	f.replica = testenv.Redis(w.tb, "replicaof 127.0.0.1 "+port)
	testenv.Becomes(w.tb, "the link of the replica", "up", func() string {
		return f.replica.Client.InfoMap(w.tb.Context(), "replication").Item("Replication", "master_link_status")
	})
	return f
}

func (f *failover) redirect(addr string) { f.addr.Store(&addr) }

// client returns options with a Redis client that dials the current address.
func (f *failover) client(w *world) func(*Options) {
	w.tb.Helper()
	made, err := idem.NewClient(w.redis.URL())
	must(w.tb, err)
	o := patience(made)
	o.Dialer = func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "tcp", *f.addr.Load())
	}
	c := redis.NewClient(o)
	c.AddHook(unbounded{})
	w.tb.Cleanup(func() { _ = c.Close() })
	return func(o *Options) { o.Redis = c }
}

// A replica that is behind is promoted. Keys that it lacks are answered from Postgres.
func TestFailoverToAReplicaThatIsBehind(t *testing.T) {
	t.Parallel()
	w := servers(t)
	f := w.withReplica()
	one := w.sibling(f.client(w))
	reached, goOn := make(chan struct{}), make(chan struct{})
	var asleep atomic.Bool
	one.s.failpoint = func(_ context.Context, name string) {
		if name == "after_acquire" && asleep.CompareAndSwap(true, false) {
			close(reached)
			<-goOn
		}
	}
	known, unknown, flying := newKey(), newKey(), newKey()
	first := map[string]reply{known: one.post(known, orderJSON(1))}
	w.published()
	testenv.Eventually(t, 20*time.Second, func() error {
		keys, err := f.replica.Client.Keys(context.Background(), "i:*").Result()
		if err != nil || len(keys) != 1 {
			return fmt.Errorf("the replica has %v: %w", keys, err)
		}
		v := f.replica.Client.Get(context.Background(), keys[0]).Val()
		return testenv.FailIf(!strings.HasPrefix(v, "C|"), "the replica has a pending record")
	})
	// From here on the link transmits nothing, and both ends keep their connection.
	f.link.Set(testenv.Trouble{LoseReplies: true})
	first[unknown] = one.post(unknown, orderJSON(1))
	w.published()
	asleep.Store(true)
	late := make(chan reply, 1)
	go func() { late <- one.post(flying, orderJSON(1)) }()
	<-reached
	if n := f.replica.Client.DBSize(t.Context()).Val(); n != 1 {
		t.Fatalf("the replica was not frozen: it has %d keys", n)
	}
	must(t, f.replica.Client.Do(t.Context(), "REPLICAOF", "NO", "ONE").Err())
	f.redirect(f.replica.Addr())
	must(t, w.redis.Kill())
	reg := prometheus.NewRegistry()
	two := w.sibling(f.client(w), func(o *Options) { o.Registerer = reg })
	first[flying] = two.post(flying, orderJSON(1), "Prefer", "wait=0")
	close(goOn)
	replies := map[string][]reply{flying: {<-late}}
	for key := range first {
		replies[key] = append(replies[key], two.post(key, orderJSON(1)),
			w.sibling(f.client(w)).post(key, orderJSON(1)))
	}
	for key, rs := range replies {
		want(t, first[key], 201, "")
		for _, r := range rs {
			r.replays(t, "after the failover", first[key])
		}
	}
	w.checkInvariants(3)
	for outcome, n := range map[string]float64{idem.OutcomeReplayPG: 1, idem.OutcomeDegraded: 0} {
		testenv.Equal(t, "counted as "+outcome, counted(t, reg, outcome), n)
	}
}
