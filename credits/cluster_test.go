package credits

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"

	"posthaste/internal/local"
	"posthaste/internal/testenv"
)

// cluster starts three masters that share the slots. newClient returns a client of the cluster with the settings of
// world.client.
func cluster(t *testing.T,
	start func(testing.TB, ...string) *testenv.RedisServer) (nodes []*testenv.RedisServer,
	newClient func() (redis.UniversalClient, *Connections),
) {
	t.Helper()
	const masters = 3
	do := func(n *testenv.RedisServer, args ...any) {
		t.Helper()
		if err := n.Client.Do(t.Context(), args...).Err(); err != nil {
			t.Fatalf("%v: %v", args, err)
		}
	}
	var addrs []string
	for i := range masters {
		n := start(t, "cluster-enabled yes", "cluster-node-timeout 30000")
		nodes, addrs = append(nodes, n), append(addrs, n.Addr())
		do(n, "CLUSTER", "ADDSLOTSRANGE", i*16384/masters, (i+1)*16384/masters-1)
		do(n, "CLUSTER", "SET-CONFIG-EPOCH", i+1)
	}
	for _, n := range nodes[1:] {
		do(nodes[0], "CLUSTER", "MEET", "127.0.0.1", n.Port)
	}
	testenv.Eventually(t, 20*time.Second, func() error {
		for _, n := range nodes {
			info, err := n.Client.ClusterInfo(context.Background()).Result()
			if err != nil || !strings.Contains(info, "cluster_state:ok") ||
				!strings.Contains(info, fmt.Sprintf("cluster_known_nodes:%d", masters)) {
				return fmt.Errorf("not one cluster yet: %w", err)
			}
		}
		return nil
	})
	return nodes, func() (redis.UniversalClient, *Connections) {
		o := &redis.UniversalOptions{Addrs: addrs, MaxRedirects: 3, IsClusterMode: true}
		connections := Configure(o)
		o.DialTimeout, o.ReadTimeout, o.WriteTimeout = 30*time.Second, 30*time.Second, 30*time.Second
		c := redis.NewUniversalClient(o)
		t.Cleanup(func() { _ = c.Close() })
		return c, connections
	}
}

// nodeOf returns the index of the master that has a user's keys before any slot moves.
func nodeOf(t *testing.T, nodes []*testenv.RedisServer, user uuid.UUID) int {
	t.Helper()
	slot, err := nodes[0].Client.ClusterKeySlot(t.Context(), accountKey(user)).Result()
	must(t, err)
	i := 0
	for int(slot) >= (i+1)*16384/len(nodes) {
		i++
	}
	return i
}

// All features on a cluster of three masters, of Redis and of Valkey: functions on every master, loads, the sync,
// reconciliation, and exact balances. Then one master loses its data, and only its buckets are rebuilt.
func TestOnACluster(t *testing.T) {
	t.Parallel()
	for name, start := range map[string]func(testing.TB, ...string) *testenv.RedisServer{
		"redis":  testenv.Redis,
		"valkey": testenv.Valkey,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			nodes, newClient := cluster(t, start)
			db, log := testenv.Postgres(t), testenv.Logger(t)
			onCluster := func(o *Options) { o.Redis, o.Connections = newClient() }
			w := &world{tb: t, db: db, redis: nodes[0]}
			w.bank = w.newBank(onCluster)
			c, _ := newClient()
			w.sync = NewSync(SyncOptions{Redis: c, Pool: db.Pool, Logger: log})
			users := make([]uuid.UUID, 12)
			for i := range users { // four on each master; random users would often leave a master without any
				for users[i] = uuid.New(); nodeOf(t, nodes, users[i]) != i%len(nodes); {
					users[i] = uuid.New()
				}
				w.must(newOp(users[i], Add, 50), OK)
			}
			for _, n := range nodes {
				if n.Client.DBSize(t.Context()).Val() == 0 {
					t.Error("a master has nothing")
				}
				wantEqual(t, "libraries", len(n.Client.FunctionList(t.Context(), functionQuery).Val()), 1)
			}
			nodes[1].Client.FunctionFlush(t.Context())
			banks := []*Bank{w.bank, w.newBank(onCluster), w.newBank(onCluster)}
			var spent atomic.Int64
			var wg sync.WaitGroup
			for i := range users {
				for j := range 100 {
					wg.Go(func() {
						op := newOp(users[i], Deduct, 1)
						for k := range 2 { // the second time in another process
							var r Result
							var err error
							// On a busy machine, some operations wait longer than their time limit.
							for range 50 {
								r, err = banks[(j+k)%3].Apply(context.Background(), op)
								if !errors.Is(err, ErrUnavailable) && !errors.Is(err, ErrUnknown) {
									break
								}
							}
							if err != nil {
								t.Error(err)
							} else if r.Outcome == OK && (k == 0 || !r.Replayed) {
								spent.Add(1)
							}
						}
					})
				}
			}
			wg.Wait()
			wantEqual(t, "spent", spent.Load(), int64(50*len(users)))
			for _, u := range users {
				w.inStep(u, 0)
			}
			r, err := Reconcile(t.Context(), c, db.Pool, nil)
			if err != nil || !r.Clean() || r.Accounts != len(users) || r.Cached != len(users) {
				t.Errorf("reconciliation: %+v, %v", r, err)
			}
			for _, u := range users {
				w.must(newOp(u, Add, 7), OK)
			}
			w.settle()
			nodes[2].Client.FlushAll(t.Context())
			w.settle()
			hit := 0
			for _, u := range users {
				testenv.Eventually(t, 20*time.Second, func() error {
					_, err := w.bank.Apply(t.Context(), newOp(u, Deduct, 1000))
					return err
				})
				w.inStep(u, 7)
				if nodeOf(t, nodes, u) == 2 {
					hit++
				}
			}
			if n := counter(w.sync.metrics.bumps); n == 0 || n > int64(hit) {
				t.Errorf("%d buckets rebuilt, %d accounts lost their data", n, hit)
			}
			wantEqual(t, "lost operations", counter(w.sync.metrics.lost), 0)
		})
	}
}

// A slot moves to another master while operations continue. Afterwards no operation fails because of the move, and none
// was carried out twice.
func TestABucketMovesInTheCluster(t *testing.T) {
	t.Parallel()
	t.Run("memory", func(t *testing.T) { t.Parallel(); aBucketMoves(t, testenv.Redis, Durability{}) })
	t.Run("durable", func(t *testing.T) { t.Parallel(); aBucketMoves(t, testenv.Valkey, Durability{AOF: true}) })
}

func aBucketMoves(t *testing.T, start func(testing.TB, ...string) *testenv.RedisServer, durable Durability) {
	t.Helper()
	nodes, newClient := cluster(t, start)
	db, log := testenv.Postgres(t), testenv.Logger(t)
	w := &world{tb: t, db: db, redis: nodes[0]}
	c, connections := newClient()
	w.bank = w.newBank(func(o *Options) { o.Redis, o.Connections, o.Durability = c, connections, durable })
	w.sync = NewSync(SyncOptions{Redis: c, Pool: db.Pool, Logger: log})
	user := w.funded(1_000_000) // more than the writers spend however long the move takes
	stop := make(chan struct{})
	var done atomic.Int64
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				op := newOp(user, Deduct, 1)
				for {
					r, err := w.bank.Apply(context.Background(), op)
					if err == nil && r.Outcome == OK {
						done.Add(1)
						break
					}
					if err != nil && !errors.Is(err, ErrUnavailable) && !errors.Is(err, ErrUnknown) || err == nil {
						t.Errorf("%+v %v", r, err)
						return
					}
				}
			}
		})
	}
	more := func() {
		from := done.Load()
		testenv.Eventually(t, 20*time.Second, func() error {
			return testenv.FailIf(done.Load() < from+20, "no progress")
		})
	}
	more()
	before := newOp(user, Deduct, 1)
	w.must(before, OK)
	done.Add(1)
	slot := int(nodes[0].Client.ClusterKeySlot(t.Context(), accountKey(user)).Val())
	from := nodeOf(t, nodes, user)
	to := (from + 1) % 3
	ids := make([]string, 3)
	for i, n := range nodes {
		ids[i] = n.Client.Do(t.Context(), "CLUSTER", "MYID").Val().(string)
	}
	do := func(n int, args ...any) {
		if err := nodes[n].Client.Do(t.Context(), args...).Err(); err != nil {
			t.Errorf("%v: %v", args, err)
		}
	}
	do(to, "FUNCTION", "LOAD", "REPLACE", library)
	do(to, "CLUSTER", "SETSLOT", slot, "IMPORTING", ids[from])
	do(from, "CLUSTER", "SETSLOT", slot, "MIGRATING", ids[to])
	for {
		keys := nodes[from].Client.ClusterGetKeysInSlot(t.Context(), slot, 100).Val()
		if len(keys) == 0 {
			break
		}
		args := []any{"MIGRATE", "127.0.0.1", nodes[to].Port, "", 0, 5000, "KEYS"}
		for _, k := range keys {
			args = append(args, k)
		}
		do(from, args...)
	}
	// New operations wait until the slot has moved: Redis refuses a command if only some of its keys exist in a moving
	// slot. A repeated operation is redirected to its record.
	testenv.Eventually(t, 20*time.Second, func() error {
		r, err := w.bank.Apply(t.Context(), before)
		if err == nil && !r.Replayed {
			t.Fatalf("done twice: %+v", r)
		}
		return err
	})
	for _, n := range []int{to, from} {
		do(n, "CLUSTER", "SETSLOT", slot, "NODE", ids[to])
	}
	more()
	close(stop)
	wg.Wait()
	w.inStep(user, 1_000_000-done.Load())
}

// A master that is down or does not respond affects only the balances on it: operations on other masters continue, and
// so does writing them to the ledger.
func TestAMasterOfTheClusterIsDown(t *testing.T) {
	t.Parallel()
	for name, edit := range map[string]struct {
		down func(*local.Redis) error
		up   func(testing.TB, *local.Redis) error
	}{
		"killed": {
			func(n *local.Redis) error { return n.Kill() },
			func(tb testing.TB, n *local.Redis) error { return n.Start(tb.Context()) },
		},
		"hangs": {
			func(n *local.Redis) error { return n.Signal(syscall.SIGSTOP) },
			func(_ testing.TB, n *local.Redis) error { return n.Signal(syscall.SIGCONT) },
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := testenv.Cluster(t, 3, 0, "cluster-require-full-coverage no", "appendonly yes")
			newClient := func(read time.Duration) *redis.ClusterClient {
				o := c.Client.Options()
				n := redis.NewClusterClient(&redis.ClusterOptions{
					Addrs: o.Addrs, MaxRedirects: 3, MaxRetries: -1, ContextTimeoutEnabled: true, Protocol: 2,
					ReadTimeout: read, PoolTimeout: patience,
				})
				t.Cleanup(func() { _ = n.Close() })
				return n
			}
			w := &world{tb: t, db: testenv.Postgres(t)}
			w.bank = New(Options{Redis: newClient(30 * time.Second), Pool: w.db.Pool, Logger: testenv.Logger(t)})
			w.sync = NewSync(SyncOptions{Redis: newClient(time.Second), Pool: w.db.Pool, Logger: testenv.Logger(t)})
			users := make([]uuid.UUID, len(c.Nodes))
			for i := range users {
				for users[i] = uuid.New(); c.Master(t, c.Slot(t, accountKey(users[i]))) != i; {
					users[i] = uuid.New()
				}
				w.must(newOp(users[i], Add, 50), OK)
			}
			w.run()
			in := func(i int, seq int64) {
				t.Helper()
				testenv.Eventually(t, time.Minute, func() error {
					a := w.ledger(users[i])
					return testenv.FailIf(a.LastSeq != seq,
						"the ledger has %d operations of node %d, want %d", a.LastSeq, i, seq)
				})
			}
			for i := range users {
				in(i, 1)
			}
			down := c.Master(t, c.Slot(t, ownerKey)) // the node with the owner key
			must(t, edit.down(c.Nodes[down]))
			for i, u := range users {
				if i == down {
					continue
				}
				for seq := range int64(3) { // each may wait for a check of the node that is down
					testenv.Eventually(t, 20*time.Second, func() error {
						w.bank.fit.Store(nil) // forces a new check, which otherwise happens every few seconds
						_, err := w.bank.Apply(t.Context(), newOp(u, Deduct, 1))
						return err
					})
					in(i, 2+seq)
				}
			}
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			if _, err := w.bank.Apply(ctx, newOp(users[down], Deduct, 1)); err == nil {
				t.Error("an operation on a master that is down is done")
			}
			must(t, edit.up(t, c.Nodes[down]))
			testenv.Eventually(t, time.Minute, func() error {
				_, err := w.bank.Apply(t.Context(), newOp(users[down], Deduct, 100))
				return err
			})
			testenv.Eventually(t, time.Minute, func() error {
				a := w.ledger(users[down])
				return testenv.FailIf(a.LastSeq < 2, "the ledger has %d operations of the node that is back", a.LastSeq)
			})
			wantEqual(t, "lost operations", counter(w.sync.metrics.lost), 0)
		})
	}
}

// Losses of a bucket are counted while the node of another bucket is down.
func TestLossesAreCountedBesideAMasterThatIsDown(t *testing.T) {
	t.Parallel()
	c := testenv.Cluster(t, 3, 0, "cluster-require-full-coverage no")
	b := New(Options{Redis: c.Client, Pool: testenv.Postgres(t).Pool, Logger: testenv.Logger(t)})
	first, later := int16(0), int16(0)
	down := c.Master(t, c.Slot(t, epochKey(first)))
	for c.Master(t, c.Slot(t, epochKey(later))) == down {
		later++
	}
	for _, bkt := range []int16{first, later} {
		_, err := call(t.Context(), c.Client, fnOpen, []string{epochKey(bkt), streamKey(bkt)}, 1, 0)
		must(t, err)
		b.buckets[bkt].epoch, b.buckets[bkt].claim = 1, 7
	}
	must(t, c.Nodes[down].Kill())
	if err := b.claim(t.Context()); err == nil {
		t.Error("a node that is down has answered")
	}
	wantEqual(t, "lost operations", counter(b.metrics.lost), 7)
	wantEqual(t, "still to be counted", b.buckets[first].claim, 7)
	wantEqual(t, "counted", b.buckets[later].claim, 0)
}
