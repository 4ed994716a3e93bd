package credits

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"posthaste/internal/lab/testenv"
	"posthaste/internal/redisurl"
)

// pair is a primary with a replica behind a link that can be cut. Its clients connect to the current primary.
type pair struct {
	*world
	replica *testenv.RedisServer
	link    *testenv.Link
	addr    atomic.Pointer[string]
}

func newPair(t *testing.T) *pair {
	t.Helper()
	p := &pair{world: &world{tb: t, db: testenv.Postgres(t), redis: testenv.Redis(t, "repl-diskless-sync-delay 0")}}
	p.link = testenv.NewLink(t, p.redis.Addr())
	host, port, _ := strings.Cut(p.link.Addr(), ":")
	p.replica = testenv.Redis(t, fmt.Sprintf("replicaof %s %s", host, port), "repl-ping-replica-period 1",
		"repl-timeout 60")
	testenv.Becomes(t, "the link of the replica", "up", func() string {
		return p.replica.Client.InfoMap(t.Context(), "replication").Item("Replication", "master_link_status")
	})
	a := p.redis.Addr()
	p.addr.Store(&a)
	c, _ := p.following()
	p.bank, p.sync = p.process(Durability{}), NewSync(SyncOptions{Redis: c, Pool: p.db.Pool, Logger: testenv.Logger(t)})
	return p
}

// following returns a client with the settings of NewClient that dials the current primary.
func (p *pair) following() (*redis.Client, *Connections) {
	made, connections := p.connected(p.redis.URL())
	own := again(made)
	own.Dialer = func(ctx context.Context, network, _ string) (net.Conn, error) {
		return (&net.Dialer{Timeout: time.Second}).DialContext(ctx, network, *p.addr.Load())
	}
	c := redis.NewClient(own)
	p.tb.Cleanup(func() { _ = c.Close() })
	return c, connections
}

func (p *pair) process(d Durability) *Bank {
	return p.newBank(func(o *Options) {
		o.Redis, o.Connections = p.following()
		o.Durability = d
	})
}

// caughtUp waits until the replica has all writes.
func (p *pair) caughtUp() {
	p.tb.Helper()
	testenv.Eventually(p.tb, 20*time.Second, func() error {
		a := p.redis.Client.InfoMap(p.tb.Context(), "replication").Item("Replication", "master_repl_offset")
		b := p.replica.Client.InfoMap(p.tb.Context(), "replication").Item("Replication", "slave_repl_offset")
		return testenv.FailIf(a != b, "the replica is at %s of %s", b, a)
	})
}

// failOver promotes the replica and stops the primary.
func (p *pair) failOver() {
	p.tb.Helper()
	must(p.tb, p.replica.Client.Do(p.tb.Context(), "REPLICAOF", "NO", "ONE").Err())
	a := p.replica.Addr()
	p.addr.Store(&a)
	must(p.tb, p.redis.Kill())
}

// A replica takes over that lacks acknowledged operations. No process continues from it, whether the process itself has
// seen later operations or only the ledger has them. Operations that neither the replica nor the ledger has are
// counted.
func TestAStaleReplicaTakesOver(t *testing.T) {
	t.Parallel()
	for _, fresh := range []bool{false, true} { // whether the process has just started or has seen the operations
		t.Run(fmt.Sprintf("fresh=%v", fresh), func(t *testing.T) {
			t.Parallel()
			p := newPair(t)
			user := p.funded(100)
			p.must(newOp(user, Deduct, 1), OK)
			p.caughtUp()
			p.link.Down()
			p.must(newOp(user, Deduct, 10), OK)
			p.must(newOp(user, Deduct, 10), OK)
			p.settle() // the ledger has 79
			for range 3 {
				p.must(newOp(user, Deduct, 20), OK)
			}
			p.failOver()
			if fresh {
				p.bank = p.process(Durability{})
			}
			p.closedFor(p.bank, user)
			p.settle()
			lost := int64(3)
			if fresh {
				lost = 0 // no running process has seen them
			}
			testenv.Equal(t, "lost operations", reading(p.sync.metrics.lost), lost)
			testenv.Equal(t, "rebuilt buckets", reading(p.sync.metrics.bumps), 1)
			p.inStep(user, 79)
			p.must(newOp(user, Deduct, 79), OK)
			p.inStep(user, 0)
			testenv.Equal(t, "frozen", p.ledger(user).Frozen, "")
		})
	}
}

// With replicas=1, every acknowledged operation is on the replica that takes over.
func TestAReplicaThatWasWaitedForTakesOver(t *testing.T) {
	t.Parallel()
	p := newPair(t)
	p.bank = p.process(Durability{Replicas: 1})
	user := uuid.New()
	p.durable(newOp(user, Add, 100), OK)
	for range 10 {
		p.durable(newOp(user, Deduct, 1), OK)
	}
	p.link.Down()
	op := newOp(user, Deduct, 50)
	p.refused(op, ErrUnknown) // done, but not on the replica
	p.failOver()
	// Without a second replica, later operations cannot reach the durability. The balance shows which ones survived.
	r := p.insist(p.process(Durability{}), newOp(user, Add, 1))
	testenv.Equal(t, "balance after the failover", r.Balance, 91)
	p.bank = p.process(Durability{})
	p.inStep(user, 91)
}

// A replica takes over that lacks operations. Only the ledger and a process that has ended have seen them. A process
// with old marks does not reuse an operation number of the ledger: its first call already finds the bucket closed.
func TestOldKnowledgeOnAStaleReplica(t *testing.T) {
	t.Parallel()
	p, user, other := newSplit(t)
	p.must(newOp(user, Deduct, 10), OK)
	p.settle() // the ledger has 89; the replica and other do not know that
	p.failOver()
	var wg sync.WaitGroup
	for range 20 { // many concurrent connections
		wg.Go(func() { p.closedFor(other, user) })
	}
	wg.Wait()
	p.settle()
	p.bank = other
	p.inStep(user, 89)
	p.must(newOp(user, Deduct, 89), OK)
	p.inStep(user, 0)
	testenv.Equal(t, "frozen", p.ledger(user).Frozen, "")
}

// The same while entries from the old server's streams are being written to the ledger. The process waits for that.
func TestWhatIsOnItsWayIntoTheLedgerIsInIt(t *testing.T) {
	t.Parallel()
	p, user, other := newSplit(t)
	p.must(newOp(user, Deduct, 10), OK)
	at, goOn, done := make(chan struct{}), make(chan struct{}), make(chan struct{})
	p.sync.failpoint = func(name string) error {
		if name == "before_commit" {
			close(at)
			<-goOn
		}
		return nil
	}
	go func() {
		defer close(done)
		_, _ = p.sync.round(context.Background()) // drops entries that came from the old server
	}()
	<-at
	p.failOver()
	for range 3 {
		if r, err := other.Apply(t.Context(), newOp(user, Deduct, 1)); err == nil {
			t.Errorf("an operation on the stale balance: %+v", r)
		}
	}
	close(goOn)
	<-done
	p.sync.failpoint = func(string) error { return nil }
	p.closedFor(other, user)
	p.settle()
	p.bank = other
	p.inStep(user, 89)
	testenv.Equal(t, "frozen", p.ledger(user).Frozen, "")
}

// A replica takes over whose data are older than a rebuild of the bucket. It is in the old epoch, and so is a process
// with old marks.
func TestAnOlderEpochOnAStaleReplica(t *testing.T) {
	t.Parallel()
	p, user, other := newSplit(t)
	p.redis.Client.HSet(t.Context(), epochKey(Bucket(user)), "n", "0") // counts as a loss
	p.settle()
	p.insist(p.bank, newOp(user, Deduct, 10))
	p.settle()
	p.failOver()
	p.closedFor(other, user)
	p.settle()
	p.bank = other
	p.inStep(user, 89)
	testenv.Equal(t, "frozen", p.ledger(user).Frozen, "")
}

// newSplit returns a pair whose link is down. A user has 99. The replica has that state, and so has the other process,
// which does not refresh its marks.
func newSplit(t *testing.T) (p *pair, user uuid.UUID, other *Bank) {
	t.Helper()
	p = newPair(t)
	user = p.funded(100)
	p.settle()
	other = p.process(Durability{})
	_, err := other.Apply(t.Context(), newOp(user, Deduct, 1))
	must(t, err)
	p.settle()
	p.caughtUp()
	p.link.Down()
	return p, user, other
}

// Sentinels have no balances. A process that starts finds the primary through them.
func TestThroughSentinel(t *testing.T) {
	t.Parallel()
	s := testenv.Sentinel(t, 1)
	w := &world{tb: t, db: testenv.Postgres(t)}
	client := func() (redis.UniversalClient, *Connections) {
		o, err := redisurl.Parse(s.URL())
		must(t, err)
		c := Configure(o)
		o.DialTimeout, o.ReadTimeout, o.WriteTimeout = 30*time.Second, 30*time.Second, 30*time.Second
		u := redis.NewUniversalClient(o)
		t.Cleanup(func() { _ = u.Close() })
		return u, c
	}
	onSentinel := func(o *Options) { o.Redis, o.Connections = client() }
	w.bank = w.newBank(onSentinel)
	w.sync = NewSync(SyncOptions{Redis: w.bank.o.Redis, Pool: w.db.Pool, Logger: testenv.Logger(t)})
	user := uuid.New()
	w.insist(w.bank, newOp(user, Add, 100))
	w.settle()
	w.insist(w.newBank(onSentinel), newOp(user, Deduct, 1))
}

// When a process connects to a server, a bucket whose keys have the wrong type does not affect other buckets.
func TestABadBucketIsNobodyElsesTrouble(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	user, bad := w.funded(100), w.funded(100)
	for Bucket(bad) == Bucket(user) {
		bad = w.funded(100)
	}
	w.settle()
	w.redis.Client.HSet(t.Context(), epochKey(Bucket(bad)), "n", "abc")
	_, err := w.newBank().Apply(t.Context(), newOp(user, Deduct, 1))
	must(t, err)
}

// The same without Postgres. No operation is sent to a new server, because the process cannot find out whether it lacks
// any. A server that was compared before remains in use, also over new connections.
func TestANewServerWithoutPostgres(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	user := w.funded(100)
	w.settle()
	var down atomic.Bool
	config := w.db.Pool.Config()
	config.BeforeConnect = func(context.Context, *pgx.ConnConfig) error {
		return testenv.FailIf(down.Load(), "postgres is gone")
	}
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	must(t, err)
	defer pool.Close()
	b := w.newBank(func(o *Options) { o.Pool = pool })
	apply := func() error {
		_, err := b.Apply(t.Context(), newOp(user, Deduct, 1))
		return err
	}
	must(t, apply())
	down.Store(true)
	pool.Reset()
	kill := func() {
		must(t, w.redis.Client.ClientKillByFilter(t.Context(), "TYPE", "normal", "SKIPME", "yes").Err())
	}
	kill()
	testenv.Eventually(t, 20*time.Second, apply)
	w.redis.Restart(t)
	testenv.Eventually(t, 20*time.Second, func() error {
		err := apply()
		if err == nil {
			t.Fatal("an operation on a server that nobody has compared with the ledger")
		}
		if !errors.Is(err, errNotMet) || !errors.Is(err, ErrUnavailable) || errors.Is(err, ErrUnknown) {
			return err
		}
		return nil
	})
	down.Store(false)
	testenv.Eventually(t, 20*time.Second, apply)
}
