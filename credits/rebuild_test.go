package credits

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"

	"posthaste/internal/lab/testenv"
)

// Redis loses everything. No process changes a balance before it has been rebuilt from the ledger, and the lost
// operations are counted.
func TestFlushAll(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	user := w.funded(100)
	synced := newOp(user, Deduct, 10)
	w.must(synced, OK)
	w.settle()
	for range 3 {
		w.must(newOp(user, Deduct, 20), OK) // lost
	}
	w.flush()
	w.refused(newOp(user, Deduct, 1), ErrRecovering)
	_, err := w.bank.Balance(t.Context(), user)
	testenv.ErrorIs(t, "balance", err, ErrRecovering)
	w.refused(synced, ErrRecovering)
	w.inStep(user, 90)
	testenv.Equal(t, "lost operations", reading(w.sync.metrics.lost), 3)
	testenv.Equal(t, "rebuilt buckets", reading(w.sync.metrics.bumps), 1)
	// An operation in the ledger is not carried out again, although Redis does not have it and the key is young.
	w.replayed(synced, OK, 90)
	w.must(newOp(user, Deduct, 90), OK)
	w.inStep(user, 0)
}

// While no node of a cluster can be asked, what is known of evictions is kept.
func TestEvictionsAreKept(t *testing.T) {
	t.Parallel()
	c := redis.NewClusterClient(&redis.ClusterOptions{Addrs: []string{"127.0.0.1:1"}, MaxRedirects: -1})
	defer func() { _ = c.Close() }()
	e := evictions{by: map[string]string{"node": "run|7"}}
	if e.read(t.Context(), c); e.by["node"] != "run|7" {
		t.Errorf("now %v", e.by)
	}
}

// Redis evicts outcomes, and nothing else, while its settings are wrong for a moment. A repeated operation is not
// carried out again.
func TestEvictedOutcomes(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	user := w.funded(100)
	synced, waiting := newOp(user, Deduct, 10), newOp(user, Deduct, 20)
	w.must(synced, OK)
	w.settle()
	w.must(waiting, OK) // is only in the stream
	for _, setting := range [][2]string{
		{"maxmemory-policy", "volatile-lru"},
		{"maxmemory", "100kb"},
		{"maxmemory", "0"},
		{"maxmemory-policy", "noeviction"},
	} {
		must(t, w.redis.Client.ConfigSet(t.Context(), setting[0], setting[1]).Err())
		w.redis.Client.Set(t.Context(), "written", 1, 0) // the server makes room for it
	}
	if n := w.redis.Client.Exists(t.Context(), outcomeKey(user, synced.ID), outcomeKey(user, waiting.ID)).Val(); n > 0 {
		t.Fatalf("%d outcomes are left", n)
	}
	w.settle()
	testenv.Equal(t, "rebuilt buckets", reading(w.sync.metrics.bumps), 1)
	for range 2 {
		w.replayed(waiting, OK, 70)
		w.must(synced, OK)
	}
	w.inStep(user, 70)
	testenv.Equal(t, "rebuilt buckets", reading(w.sync.metrics.bumps), 1)
}

// Redis loses everything before any of it was in the ledger.
func TestFlushAllAtOnce(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	user := w.funded(100)
	w.flush()
	w.refused(newOp(user, Deduct, 1), ErrRecovering)
	w.settle()
	testenv.Equal(t, "lost operations", reading(w.sync.metrics.lost), 1)
	w.refused(newOp(user, Deduct, 1), ErrUnknownUser)
	w.must(newOp(user, Add, 50), OK)
	w.inStep(user, 50)
}

// The sync alone detects every kind of loss: of the epoch, the count, the end of the stream, or the whole bucket.
func TestTheSyncNoticesALoss(t *testing.T) {
	t.Parallel()
	for name, lose := range map[string]func(context.Context, *redis.Client, int16){
		"everything": func(ctx context.Context, c *redis.Client, _ int16) { c.FlushAll(ctx) },
		"epoch":      func(ctx context.Context, c *redis.Client, b int16) { c.Del(ctx, epochKey(b)) },
		"count":      func(ctx context.Context, c *redis.Client, b int16) { c.HSet(ctx, epochKey(b), "n", 1) },
		"stream":     func(ctx context.Context, c *redis.Client, b int16) { c.Del(ctx, streamKey(b)) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			user := w.funded(100)
			w.must(newOp(user, Deduct, 10), OK)
			w.settle()
			w.must(newOp(user, Deduct, 20), OK)
			lose(t.Context(), w.redis.Client, Bucket(user))
			w.settle()
			testenv.Equal(t, "rebuilt buckets", reading(w.sync.metrics.bumps), 1)
			balance := int64(90)
			if name == "epoch" || name == "count" {
				balance = 70 // the stream existed and was written to the ledger first
			}
			w.insist(w.bank, newOp(user, Deduct, 1000))
			w.inStep(user, balance)
		})
	}
}

// The sync detects a loss and rebuilds before processes that have seen later operations make a call. They count the
// remaining losses, each operation once.
func TestALossThatOnlyIdleProcessesKnow(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	user := w.funded(100)
	w.settle()
	other := w.newBank()
	for _, b := range []*Bank{w.bank, w.bank, other, w.bank} {
		_, err := b.Apply(t.Context(), newOp(user, Deduct, 20))
		must(t, err)
	}
	w.flush()
	w.settle()
	testenv.Equal(t, "rebuilt buckets", reading(w.sync.metrics.bumps), 1)
	w.inStep(user, 100)
	w.must(newOp(user, Deduct, 5), OK)
	for range 2 {
		other.refresh(t.Context())
		w.bank.refresh(t.Context())
	}
	testenv.Equal(t, "lost operations", reading(w.sync.metrics.lost)+reading(w.bank.metrics.lost)+
		reading(other.metrics.lost),
		4)
	w.inStep(user, 95)
}

// An old snapshot is restored under load. Every process that has seen later operations refuses at once. No balance is
// overspent compared with the ledger, and the lost operations are counted exactly.
func TestAnOldSnapshotIsRestored(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "appendonly no", "dbfilename dump.rdb")
	user := w.funded(1000)
	for range 5 {
		w.must(newOp(user, Deduct, 10), OK)
	}
	must(t, w.redis.Client.Save(t.Context()).Err())
	old, err := os.ReadFile(filepath.Join(w.redis.Dir, "dump.rdb"))
	must(t, err)
	for range 20 {
		w.must(newOp(user, Deduct, 10), OK)
	}
	w.settle() // the ledger has 750
	for range 7 {
		w.must(newOp(user, Deduct, 10), OK) // in neither the ledger nor the snapshot
	}
	must(t, w.redis.Kill())
	must(t, os.WriteFile(filepath.Join(w.redis.Dir, "dump.rdb"), old, 0o600))
	var ok, refused atomic.Int64
	var stopped atomic.Bool
	var load sync.WaitGroup
	for range 4 {
		load.Go(func() {
			for !stopped.Load() {
				r, err := w.bank.Apply(context.Background(), newOp(user, Deduct, 10))
				switch {
				case err == nil && r.Outcome == OK:
					ok.Add(1)
				case errors.Is(err, ErrRecovering):
					refused.Add(1)
				}
			}
		})
	}
	must(t, w.redis.Start(t.Context()))
	testenv.Eventually(t, 20*time.Second, func() error {
		return testenv.FailIf(refused.Load() == 0, "nothing was refused yet")
	})
	testenv.Equal(t, "operations on the old balance", ok.Load(), 0)
	w.run()
	testenv.Eventually(t, 20*time.Second, func() error {
		return testenv.FailIf(ok.Load() == 0, "the bucket is still closed")
	})
	stopped.Store(true)
	load.Wait()
	other := *w
	other.sync = w.newSync()
	other.inStep(user, 750-10*min(ok.Load(), 75))
	testenv.Equal(t, "lost operations", reading(w.sync.metrics.lost), 7)
	testenv.Equal(t, "frozen", w.ledger(user).Frozen, "")
}

// A rebuild fails halfway: the bucket stays closed until another rebuild has finished.
func TestACrashOfTheRebuild(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	user := w.funded(100)
	w.settle()
	w.flush()
	w.crash("after_bump")
	w.refused(newOp(user, Deduct, 1), ErrRecovering)
	w.inStep(user, 100)
}

// An unused bucket has an entry of an unknown user. The relay is killed after it has closed the bucket for that.
func TestAnUnusedBucketIsClosed(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	user := uuid.New()
	bkt := Bucket(user)
	w.redis.Client.XAdd(t.Context(), &redis.XAddArgs{Stream: streamKey(bkt), Values: map[string]any{"x": "y"}})
	must(t, w.bank.ask(t.Context(), bkt)) // makes the bucket's row
	closed, err := w.sync.close(t.Context(), bkt)
	must(t, err)
	n, err := w.sync.apply(t.Context(), []int16{bkt})
	must(t, err)
	if !closed || n != 1 {
		t.Fatalf("closed: %v, %d entries", closed, n)
	}
	w.settle() // by another relay
	w.must(newOp(user, Add, 7), OK)
	w.inStep(user, 7)
}

// Postgres was restored to a time before the last rebuild: Redis is in an epoch that the ledger does not have.
func TestTheLedgerForgotAnEpoch(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	user := w.funded(100)
	w.settle()
	w.flush()
	w.settle()
	w.must(newOp(user, Deduct, 10), OK)
	w.inStep(user, 90)
	w.db.Exec(t, "UPDATE credit_epoch SET epoch = 1, bumped_at = NULL")
	w.bank = w.newBank() // another process
	w.refused(newOp(user, Deduct, 1), ErrRecovering)
	w.settle()
	w.must(newOp(user, Deduct, 1), OK)
	w.inStep(user, 89)
}

// A lost operation that was given up did not happen, although Redis still has its outcome: a repeated call carries it
// out. An operation that is in the ledger is replayed.
func TestAnOutcomeOfAnOlderEpoch(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	user := w.funded(100)
	kept, lost, refused := newOp(user, Deduct, 10), newOp(user, Deduct, 20), newOp(user, Deduct, 1000)
	w.must(kept, OK)
	w.must(refused, Insufficient)
	w.settle()
	w.must(lost, OK)
	w.redis.Client.Del(t.Context(), streamKey(Bucket(user)))
	w.settle()
	testenv.Equal(t, "lost operations", reading(w.sync.metrics.lost), 1)
	for op, want := range map[*Op]bool{&kept: true, &lost: false} {
		testenv.Equal(t, "replayed", w.must(*op, OK).Replayed, want)
	}
	w.replayed(lost, OK, 70)
	w.replayed(refused, Insufficient, 90)
	w.inStep(user, 70)
}

// The epoch ends after the ledger was read. By the next epoch, the operation may be in the ledger.
func TestTheEpochEndsAfterTheLedgerWasAsked(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	user := w.funded(100)
	op := newOp(user, Deduct, 10)
	op.MintedAt = time.Time{} // makes the bank read the ledger
	a := attempt{b: w.bank, op: &op, bucket: Bucket(user)}
	v, err := w.bank.view(t.Context(), a.bucket)
	must(t, err)
	a.askedIn = v.epoch
	w.must(op, OK) // another attempt with the same key
	w.settle()
	w.flush()
	w.refused(newOp(user, Deduct, 1), ErrRecovering)
	w.inStep(user, 90)
	w.must(newOp(user, Deduct, 1), OK) // loads the account
	res, err := insist(t.Context(), func() (Result, error) { return a.once(t.Context()) })
	if err != nil || !res.Replayed {
		t.Errorf("it was done twice: %+v, %v", res, err)
	}
	w.inStep(user, 89)
}

// A load of another account of the bucket reads the ledger after a rebuild that its process has not noticed. An
// operation in the ledger is not carried out again, although Redis does not have it and the key is young.
func TestALoadMeetsANewEpoch(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	user := w.funded(100)
	op := newOp(user, Deduct, 10)
	w.must(op, OK)
	w.settle()
	w.flush()
	w.settle()
	// This process locked the other account before Redis lost everything.
	err := w.bank.install(t.Context(), neighbour(user), "token", false)
	testenv.ErrorIs(t, "the load", err, ErrUnknownUser)
	w.replayed(op, OK, 90)
	w.inStep(user, 90)
}

// Postgres and Redis are restored to a time before the last rebuild. A process that knows the later epoch continues.
func TestBothForgotAnEpoch(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	user := w.funded(100)
	for range 2 {
		w.settle()
		w.flush()
		w.settle()
		w.insist(w.bank, newOp(user, Deduct, 10))
	}
	w.settle()
	w.db.Exec(t, "UPDATE credit_epoch SET epoch = 1, bumped_at = NULL")
	w.flush()
	w.settle()
	w.must(newOp(user, Deduct, 10), OK)
	w.inStep(user, 70)
}
