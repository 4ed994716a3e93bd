package credits

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"

	"posthaste/internal/lab/local"
	"posthaste/internal/lab/testenv"
)

// onCluster returns a world on a cluster, and what makes a client of it with the settings of world.client. edit changes
// the bank.
func onCluster(t *testing.T, c *testenv.RedisCluster, edit ...func(*Options)) (
	w *world, newClient func() (redis.UniversalClient, *Connections),
) {
	t.Helper()
	newClient = func() (redis.UniversalClient, *Connections) {
		o := &redis.UniversalOptions{Addrs: c.Client.Options().Addrs, MaxRedirects: 3, IsClusterMode: true}
		connections := Configure(o)
		o.DialTimeout, o.ReadTimeout, o.WriteTimeout = 30*time.Second, 30*time.Second, 30*time.Second
		client := redis.NewUniversalClient(o)
		t.Cleanup(func() { _ = client.Close() })
		return client, connections
	}
	w = &world{tb: t, db: testenv.Postgres(t)}
	w.bank = w.newBank(append(edit, func(o *Options) { o.Redis, o.Connections = newClient() })...)
	client, _ := newClient()
	w.sync = NewSync(SyncOptions{Redis: client, Pool: w.db.Pool, Logger: testenv.Logger(t)})
	return w, newClient
}

// userOn returns a user whose keys are on a master.
func userOn(t *testing.T, c *testenv.RedisCluster, master int) uuid.UUID {
	t.Helper()
	for {
		if user := uuid.New(); c.Master(t, c.Slot(t, accountKey(user))) == master {
			return user
		}
	}
}

// hasty returns a client that repeats little, and waits for an answer for so long.
func hasty(t *testing.T, c *testenv.RedisCluster, read time.Duration) *redis.ClusterClient {
	t.Helper()
	client := redis.NewClusterClient(&redis.ClusterOptions{
		Addrs: c.Client.Options().Addrs, MaxRedirects: 3, MaxRetries: -1, ContextTimeoutEnabled: true, Protocol: 2,
		ReadTimeout: read, PoolTimeout: patience,
	})
	t.Cleanup(func() { _ = client.Close() })
	return client
}

// All features on a cluster of three masters, of Redis and of Valkey: functions on every master, loads, the sync,
// reconciliation, and exact balances. Then one master loses its data, and only its buckets are rebuilt.
func TestOnACluster(t *testing.T) {
	t.Parallel()
	for name, start := range map[string]func(testing.TB, int, int, ...string) *testenv.RedisCluster{
		"redis":  testenv.Cluster,
		"valkey": testenv.ValkeyCluster,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := start(t, 3, 0)
			w, newClient := onCluster(t, c)
			users := make([]uuid.UUID, 12)
			for i := range users { // four on each master; random users would often leave a master without any
				users[i] = userOn(t, c, i%3)
				w.must(newOp(users[i], Add, 50), OK)
			}
			for i := range c.Nodes {
				testenv.Equal(t, "libraries", len(c.On(t, i).FunctionList(t.Context(), functionQuery).Val()), 1)
			}
			c.On(t, 1).FunctionFlush(t.Context())
			other := func(o *Options) { o.Redis, o.Connections = newClient() }
			banks := []*Bank{w.bank, w.newBank(other), w.newBank(other)}
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
			testenv.Equal(t, "spent", spent.Load(), int64(50*len(users)))
			for _, u := range users {
				w.inStep(u, 0)
			}
			r, err := Reconcile(t.Context(), w.bank.o.Redis, w.db.Pool, nil)
			if err != nil || !r.Clean() || r.Accounts != len(users) || r.Cached != len(users) {
				t.Errorf("reconciliation: %+v, %v", r, err)
			}
			for _, u := range users {
				w.must(newOp(u, Add, 7), OK)
			}
			w.settle()
			c.On(t, 2).FlushAll(t.Context())
			w.settle()
			for _, u := range users {
				w.insist(w.bank, newOp(u, Deduct, 1000))
				w.inStep(u, 7)
			}
			if n := reading(w.sync.metrics.bumps); n == 0 || n > 4 {
				t.Errorf("%d buckets rebuilt, 4 accounts lost their data", n)
			}
			testenv.Equal(t, "lost operations", reading(w.sync.metrics.lost), 0)
		})
	}
}

// A slot moves to another master while operations continue. Afterwards no operation fails because of the move, and none
// was carried out twice.
func TestABucketMovesInTheCluster(t *testing.T) {
	t.Parallel()
	t.Run("memory", func(t *testing.T) { t.Parallel(); aBucketMoves(t, testenv.Cluster(t, 3, 0), Durability{}) })
	t.Run("durable", func(t *testing.T) {
		t.Parallel()
		aBucketMoves(t, testenv.ValkeyCluster(t, 3, 0, "appendfsync always"), Durability{AOF: true})
	})
}

func aBucketMoves(t *testing.T, c *testenv.RedisCluster, durable Durability) {
	t.Helper()
	w, _ := onCluster(t, c, func(o *Options) { o.Durability = durable })
	user := uuid.New()
	w.durable(newOp(user, Add, 1_000_000), OK) // more than the writers spend however long the move takes
	var stopped atomic.Bool
	var done atomic.Int64
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for !stopped.Load() {
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
	w.durable(before, OK)
	done.Add(1)
	slot := c.Slot(t, accountKey(user))
	to := (c.Master(t, slot) + 1) % 3
	must(t, c.On(t, to).FunctionLoadReplace(t.Context(), library).Err())
	from := c.BeginMove(t, slot, to)
	for c.MoveKeys(t, slot, from, to, 100) > 0 { //nolint:revive // repeats
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
	c.EndMove(t, slot, to)
	more()
	stopped.Store(true)
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
			w := &world{tb: t, db: testenv.Postgres(t)}
			w.bank = New(Options{Redis: hasty(t, c, 30*time.Second), Pool: w.db.Pool, Logger: testenv.Logger(t)})
			w.sync = NewSync(SyncOptions{Redis: hasty(t, c, time.Second), Pool: w.db.Pool, Logger: testenv.Logger(t)})
			users := make([]uuid.UUID, len(c.Nodes))
			for i := range users {
				users[i] = userOn(t, c, i)
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
			others := slices.DeleteFunc([]int{0, 1, 2}, func(i int) bool { return i == down })
			for _, i := range others {
				w.bank.fit.Store(nil) // forces a new check, which otherwise happens every few seconds
				for range 3 {
					w.insist(w.bank, newOp(users[i], Deduct, 1))
				}
			}
			for _, i := range others {
				in(i, 4)
			}
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			if _, err := w.bank.Apply(ctx, newOp(users[down], Deduct, 1)); err == nil {
				t.Error("an operation on a master that is down is done")
			}
			must(t, edit.up(t, c.Nodes[down]))
			w.insist(w.bank, newOp(users[down], Deduct, 100))
			testenv.Eventually(t, time.Minute, func() error {
				a := w.ledger(users[down])
				return testenv.FailIf(a.LastSeq < 2, "the ledger has %d operations of the node that is back", a.LastSeq)
			})
			testenv.Equal(t, "lost operations", reading(w.sync.metrics.lost), 0)
		})
	}
}

// Losses of a bucket are counted while the node of another bucket is down.
func TestLossesAreCountedBesideAMasterThatIsDown(t *testing.T) {
	t.Parallel()
	c := testenv.Cluster(t, 3, 0, "cluster-require-full-coverage no")
	b := New(Options{Redis: hasty(t, c, time.Second), Pool: testenv.Postgres(t).Pool, Logger: testenv.Logger(t)})
	first, later := int16(0), int16(0)
	down := c.Master(t, c.Slot(t, epochKey(first)))
	for c.Master(t, c.Slot(t, epochKey(later))) == down {
		later++
	}
	for _, bkt := range []int16{first, later} {
		_, err := call(t.Context(), c.Client, fnOpen, []string{epochKey(bkt), streamKey(bkt)}, 1, 0, "")
		must(t, err)
		b.buckets[bkt].epoch, b.buckets[bkt].claim = 1, 7
	}
	must(t, c.Nodes[down].Kill())
	if err := b.claim(t.Context()); err == nil {
		t.Error("a node that is down has answered")
	}
	testenv.Equal(t, "lost operations", reading(b.metrics.lost), 7)
	testenv.Equal(t, "still to be counted", b.buckets[first].claim, 7)
	testenv.Equal(t, "counted", b.buckets[later].claim, 0)
}
