package credits

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"

	"posthaste/internal/testenv"
)

// pair is a primary with a replica behind a link that can be cut, and clients that follow where the primary is said to
// be.
type pair struct {
	*world
	replica *testenv.RedisServer
	link    *testenv.Proxy
	addr    atomic.Pointer[string]
}

func newPair(t *testing.T) *pair {
	t.Helper()
	p := &pair{world: &world{tb: t, db: testenv.Postgres(t), redis: testenv.Redis(t)}}
	p.link = testenv.NewProxy(t, p.redis.Addr())
	host, port, _ := strings.Cut(p.link.Addr(), ":")
	p.replica = testenv.Redis(t, fmt.Sprintf("replicaof %s %s", host, port), "repl-ping-replica-period 1",
		"repl-timeout 60")
	testenv.Eventually(t, time.Minute, func() error { // the primary lets five seconds pass before it sends anything
		if infoField(p.replica.Client.Info(t.Context(), "replication").Val(), "master_link_status") != "up" {
			return errors.New("no replica")
		}
		return nil
	})
	a := p.redis.Addr()
	p.addr.Store(&a)
	p.bank, p.sync = p.process(Durability{}),
		NewSync(SyncOptions{Redis: p.following(), Pool: p.db.Pool, Logger: testenv.Logger(t)})
	return p
}

// following is a client with the settings of NewClient that dials wherever the primary is.
func (p *pair) following() *redis.Client {
	own := again(p.client(p.redis.URL()))
	own.Dialer = func(ctx context.Context, network, _ string) (net.Conn, error) {
		return (&net.Dialer{Timeout: time.Second}).DialContext(ctx, network, *p.addr.Load())
	}
	c := redis.NewClient(own)
	p.tb.Cleanup(func() { _ = c.Close() })
	return c
}

func (p *pair) process(d Durability) *Bank {
	return p.newBank(func(o *Options) { o.Redis, o.Durability = p.following(), d })
}

// caughtUp waits until the replica has everything.
func (p *pair) caughtUp() {
	p.tb.Helper()
	testenv.Eventually(p.tb, 20*time.Second, func() error {
		a := infoField(p.redis.Client.Info(p.tb.Context(), "replication").Val(), "master_repl_offset")
		b := infoField(p.replica.Client.Info(p.tb.Context(), "replication").Val(), "slave_repl_offset")
		if a != b {
			return fmt.Errorf("the replica is at %s of %s", b, a)
		}
		return nil
	})
}

// failOver makes the replica the primary, and the primary vanish.
func (p *pair) failOver() {
	p.tb.Helper()
	if err := p.replica.Client.Do(p.tb.Context(), "REPLICAOF", "NO", "ONE").Err(); err != nil {
		p.tb.Fatal(err)
	}
	a := p.replica.Addr()
	p.addr.Store(&a)
	if err := p.redis.Kill(); err != nil {
		p.tb.Fatal(err)
	}
}

// A replica takes over that lacks what was acknowledged: nobody goes on from it, whether the process has seen more or
// only the ledger has, and what neither the replica nor the ledger has is counted.
func TestAStaleReplicaTakesOver(t *testing.T) {
	t.Parallel()
	for _, fresh := range []bool{false, true} { // a process that has seen the operations, or one that has just started
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
			testenv.Eventually(t, 20*time.Second, func() error { // the first attempts meet the old connections
				_, err := p.bank.Apply(t.Context(), newOp(user, Deduct, 1))
				if err == nil {
					t.Fatal("an operation on the stale balance")
				}
				if !errors.Is(err, ErrRecovering) {
					return err
				}
				return nil
			})
			p.settle()
			lost := int64(3)
			if fresh {
				lost = 0 // nobody who lives has seen them
			}
			wantEqual(t, "lost operations", counter(p.sync.metrics.lost), lost)
			wantEqual(t, "rebuilt buckets", counter(p.sync.metrics.bumps), 1)
			p.inStep(user, 79)
			p.must(newOp(user, Deduct, 79), OK)
			p.inStep(user, 0)
			wantEqual(t, "frozen", p.ledger(user).Frozen, "")
		})
	}
}

// With replicas=1 whatever was answered is on the replica that takes over.
func TestAReplicaThatWasWaitedForTakesOver(t *testing.T) {
	t.Parallel()
	p := newPair(t)
	p.bank = p.process(Durability{Replicas: 1})
	user := uuid.New()
	p.durable(newOp(user, Add, 100), OK)
	acked := int64(0)
	for range 10 {
		p.durable(newOp(user, Deduct, 1), OK)
		acked++
	}
	p.link.Down()
	op := newOp(user, Deduct, 50)
	p.refused(op, ErrUnknown) // done, and not on the replica
	p.failOver()
	var r Result
	testenv.Eventually(t, 20*time.Second, func() error {
		var err error
		// Without a second replica nothing more can be promised; the balance tells what is there.
		r, err = p.process(Durability{}).Apply(t.Context(), newOp(user, Add, 1))
		return err
	})
	wantEqual(t, "balance after the failover", r.Balance, 100-acked+1)
	p.bank = p.process(Durability{})
	p.inStep(user, 100-acked+1)
}
