package credits

import (
	"context"
	"crypto/rand"
	"errors"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"posthaste/internal/lab/testenv"
)

// If a sync crashes before the commit, or between commit and acknowledgement, nothing is lost and nothing is applied
// twice.
func TestACrashOfTheSync(t *testing.T) {
	t.Parallel()
	for _, point := range []string{"before_commit", "after_commit"} {
		t.Run(point, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			user := w.funded(100)
			w.must(newOp(user, Deduct, 30), OK)
			w.crash(point)
			testenv.Equal(t, "entries in the stream", w.unsynced(user), 2)
			w.must(newOp(user, Deduct, 300), Insufficient)
			w.inStep(user, 70)
			testenv.Equal(t, "entries in the stream", w.unsynced(user), 0)
			testenv.Equal(t, "frozen", w.ledger(user).Frozen, "")
		})
	}
}

// Several processes sync concurrently, while others write.
func TestManySyncs(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	users := make([]uuid.UUID, 20)
	for i := range users {
		users[i] = w.funded(100)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var syncs, writers sync.WaitGroup
	for range 3 {
		s := w.newSync()
		syncs.Go(func() { _ = s.Run(ctx) })
	}
	for _, u := range users {
		writers.Go(func() {
			for range 10 {
				_, err := w.bank.Apply(context.Background(), newOp(u, Deduct, 3))
				testenv.ErrorIs(t, "a deduction", err, nil)
			}
		})
	}
	writers.Wait()
	cancel()
	syncs.Wait()
	for _, u := range users {
		w.inStep(u, 70)
	}
}

// A slow acknowledgement does not undo the later one of another sync.
func TestALateAcknowledgement(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	user := w.funded(100)
	late := w.newSync()
	late.failpoint = func(name string) error {
		if name == "after_commit" {
			w.must(newOp(user, Deduct, 30), OK)
			w.settle()
		}
		return nil
	}
	if n, err := late.round(t.Context()); n != 1 || err != nil {
		t.Fatalf("%d operations, %v", n, err)
	}
	w.inStep(user, 70)
}

// A sync is suspended before its acknowledgement. Meanwhile Redis loses everything and is rebuilt, and its clock is
// behind that of the server before. The acknowledgement does not drop operations that are not in the ledger.
func TestALateAcknowledgementAfterARebuild(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	user := w.funded(100)
	ahead := time.Now().Add(time.Hour).UnixMilli()
	must(t, w.redis.Client.Do(t.Context(), "XSETID", streamKey(Bucket(user)), strconv.FormatInt(ahead, 10)).Err())
	w.must(newOp(user, Deduct, 10), OK)
	late := w.newSync()
	late.failpoint = func(name string) error {
		if name == "after_commit" {
			w.flush()
			w.settle()
			w.must(newOp(user, Deduct, 30), OK)
		}
		return nil
	}
	if n, err := late.round(t.Context()); n != 2 || err != nil {
		t.Fatalf("%d operations, %v", n, err)
	}
	w.inStep(user, 60)
	testenv.Equal(t, "lost operations", reading(w.sync.metrics.lost), 0)
}

// tamper rewrites a user's unsynced stream entries.
func (w *world) tamper(user uuid.UUID, edit func(entries []map[string]any) []map[string]any) {
	w.tb.Helper()
	ctx, key := w.tb.Context(), streamKey(Bucket(user))
	list, err := w.redis.Client.XRange(ctx, key, "-", "+").Result()
	must(w.tb, err)
	var values []map[string]any
	for _, m := range list {
		values = append(values, m.Values)
	}
	w.redis.Client.XTrimMaxLen(ctx, key, 0)
	for _, v := range edit(values) {
		must(w.tb, w.redis.Client.XAdd(ctx, &redis.XAddArgs{Stream: key, Values: v}).Err())
	}
}

// An entry that contradicts the ledger freezes its own user but no other in the bucket, and is kept.
func TestContradictionsFreezeOneUser(t *testing.T) {
	t.Parallel()
	type entries = []map[string]any
	with := func(m map[string]any, name string, value any) map[string]any {
		c := map[string]any{}
		for k, v := range m {
			c[k] = v
		}
		c[name] = value
		return c
	}
	cases := map[string]struct {
		edit   func(entries) entries
		reason string
		// last is the last operation that was applied.
		last int64
	}{
		"gap":          {func(e entries) entries { return entries{e[1], e[2]} }, reasonGap, 1},
		"out of order": {func(e entries) entries { return entries{e[1], e[0], e[2]} }, reasonGap, 1},
		"fork":         {func(e entries) entries { return entries{e[0], with(e[1], "q", "2"), e[2]} }, reasonFork, 2},
		"operation twice": {
			func(e entries) entries { return entries{e[0], with(e[1], "o", e[0]["o"]), e[2]} },
			reasonDuplicate, 2,
		},
		"balance": {
			func(e entries) entries { return entries{e[0], with(e[1], "b", "99"), e[2]} },
			reasonBalance, 2,
		},
		"refusal that is not": {
			func(e entries) entries { return entries{e[0], with(e[1], "c", "INSUFFICIENT"), e[2]} },
			reasonBalance, 2,
		},
		"amount": {
			func(e entries) entries { return entries{e[0], with(e[1], "a", "1e1"), e[2]} }, reasonMalformed,
			2,
		},
		"zero byte": {
			func(e entries) entries { return entries{e[0], with(e[1], "r", "a\x00b"), e[2]} },
			reasonMalformed, 2,
		},
		"repeated": {func(e entries) entries { return entries{e[0], e[0], e[1], e[2], e[1]} }, "", 4},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			user := w.funded(100)
			w.settle()
			for _, amount := range []int64{10, 20, 30} {
				w.must(newOp(user, Deduct, amount), OK)
			}
			other := neighbour(user)
			w.must(newOp(other, Add, 5), OK)
			w.tamper(user, func(e entries) entries { return append(c.edit(e[:3]), e[3]) })
			w.inStep(other, 5)
			a := w.ledger(user)
			testenv.Equal(t, "reason", a.Frozen, c.reason)
			testenv.Equal(t, "last operation", a.LastSeq, c.last)
			if c.reason == "" {
				w.inStep(user, 40)
				return
			}
			w.refused(newOp(user, Deduct, 1), ErrFrozen)
			w.redis.Client.Del(t.Context(), accountKey(user))
			w.refused(newOp(user, Deduct, 1), ErrFrozen) // loaded again: still frozen
			put := testenv.Value[int64](t, w.db, "SELECT count(*) FROM credit_quarantine WHERE user_id = $1", user)
			if put == 0 {
				t.Error("nothing was put aside")
			}
			testenv.Equal(t, "frozen accounts counted", reading(w.sync.metrics.frozen.WithLabelValues(c.reason)), 1)
		})
	}
}

// An entry without a user is quarantined, and the bucket continues.
func TestAnEntryOfNobody(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	user := w.funded(5)
	key := streamKey(Bucket(user))
	// The entry is too long for a row of the quarantine, and too random to be compressed.
	long := make([]byte, 9000)
	_, _ = rand.Read(long)
	values := []map[string]any{
		{"x": "y"},
		{"u": uuid.NewString(), "n": "x\x00"},
		{"u": "not a user", "n": "-1"},
		{"x": long},
	}
	for _, v := range values {
		w.redis.Client.XAdd(t.Context(), &redis.XAddArgs{Stream: key, Values: v})
	}
	w.must(newOp(user, Deduct, 2), OK)
	w.inStep(user, 3)
	testenv.Equal(t, "put aside",
		testenv.Value[int64](t, w.db, "SELECT count(*) FROM credit_quarantine WHERE user_id IS NULL OR user_id <> $1",
			user),
		4)
}

// Stream ids may be set by hand, and ids that Redis generates afterwards are always greater.
func TestAnEntryWithAnIdOfItsOwn(t *testing.T) {
	t.Parallel()
	for _, id := range []string{"1-18446744073709551615", "9000000000000000000-0"} {
		t.Run(id, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			user, other := uuid.New(), uuid.New()
			w.redis.Client.XAdd(t.Context(),
				&redis.XAddArgs{Stream: streamKey(Bucket(user)), ID: id, Values: map[string]any{"x": "y"}})
			testenv.Eventually(t, 20*time.Second, func() error {
				_, _ = w.sync.round(t.Context())
				_, err := w.bank.Apply(t.Context(), newOp(user, Add, 5))
				return err
			})
			w.must(newOp(other, Add, 7), OK)
			w.inStep(other, 7)
			w.inStep(user, 5)
			testenv.Equal(t, "entries in the stream", w.unsynced(user), 0)
		})
	}
}

// If an account's row was set back or deleted, the next operation contradicts the account's entries. Other accounts are
// not affected.
func TestARowOfTheLedgerIsSetBack(t *testing.T) {
	t.Parallel()
	for name, back := range map[string]string{
		"deleted":  "DELETE FROM credit_accounts WHERE user_id = $1",
		"set back": "UPDATE credit_accounts SET last_seq = 1, balance = 100 WHERE user_id = $1",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			user, other := w.funded(100), w.funded(50)
			w.must(newOp(user, Deduct, 10), OK)
			w.settle()
			w.db.Exec(t, back, user)
			w.redis.Client.Del(t.Context(), accountKey(user))
			w.must(newOp(user, Add, 1), OK)
			w.must(newOp(other, Deduct, 1), OK)
			w.inStep(other, 49)
			testenv.Equal(t, "reason", w.ledger(user).Frozen, reasonFork)
			w.refused(newOp(user, Add, 1), ErrFrozen)
		})
	}
}

// A bucket whose keys were overwritten cannot be used. The other buckets can.
func TestABucketOfAnotherType(t *testing.T) {
	t.Parallel()
	for name, key := range map[string]func(int16) string{"epoch": epochKey, "stream": streamKey} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			user, other := w.funded(5), w.funded(5)
			for Bucket(other) == Bucket(user) {
				other = w.funded(5)
			}
			w.settle()
			ctx, k := t.Context(), key(Bucket(user))
			w.redis.Client.Set(ctx, k, "somebody's", 0)
			w.refused(newOp(user, Deduct, 1), ErrUnavailable)
			w.must(newOp(other, Deduct, 2), OK)
			w.inStep(other, 3)
			// Once the key is gone the bucket is rebuilt.
			w.redis.Client.Del(ctx, k)
			w.settle()
			w.must(newOp(user, Deduct, 1), OK)
			w.inStep(user, 4)
		})
	}
}

// While Postgres does not answer, operations continue and wait in Redis. The metrics still show how many wait, and for
// how long.
func TestTheLagRisesWithoutPostgres(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	user := w.funded(100)
	w.settle()
	pool, err := pgxpool.New(t.Context(), w.db.URL)
	must(t, err)
	t.Cleanup(pool.Close)
	w.sync.o.Pool = pool
	_, err = w.sync.round(t.Context())
	must(t, err)
	pool.Close() // closes only the pool of the sync
	w.must(newOp(user, Deduct, 10), OK)
	testenv.Eventually(t, 20*time.Second, func() error {
		w.sync.looked = time.Time{}
		if _, err := w.sync.round(t.Context()); err == nil {
			return errors.New("a round without Postgres is not a failure")
		}
		lag := reading(w.sync.metrics.lag)
		return testenv.FailIf(lag < 1, "the operation waits for %d s; want more than a second", lag)
	})
}

// While Redis refuses the sync to read the streams, operations continue. The metric rises, although nobody knows how
// many wait.
func TestTheLagRisesWhenStreamsCannotBeRead(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	user := w.funded(100)
	w.settle()
	must(t, w.redis.Client.Do(t.Context(), "ACL", "SETUSER", "default", "-xrange").Err())
	w.must(newOp(user, Deduct, 10), OK)
	testenv.Eventually(t, 20*time.Second, func() error {
		if _, err := w.sync.round(t.Context()); err == nil {
			return errors.New("a round without streams is not a failure")
		}
		lag := reading(w.sync.metrics.lag)
		return testenv.FailIf(lag < 1, "the lag is %d s; want more than a second", lag)
	})
	must(t, w.redis.Client.Do(t.Context(), "ACL", "SETUSER", "default", "+xrange").Err())
	w.inStep(user, 90)
	testenv.Equal(t, "lag", reading(w.sync.metrics.lag), 0)
}

// The functions alone prevent loading an account while the stream has entries of it that the ledger lacks.
func TestLoadNeverOverwritesTheStream(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	user := w.funded(100)
	w.settle()
	w.must(newOp(user, Deduct, 40), OK)
	bkt := Bucket(user)
	w.redis.Client.Del(t.Context(), accountKey(user))
	keys := []string{accountKey(user), epochKey(bkt), streamKey(bkt), lockKey(user)}
	load := func(mark, floor int) string {
		r, err := call(t.Context(), w.redis.Client, fnLoad, keys, 100, 1, "", 1, floor, mark, user.String(), "t", 0)
		must(t, err)
		return strings.Join(r, " ")
	}
	testenv.Equal(t, "with its entry in the stream", load(1, 0), "BEHIND")
	w.settle()
	testenv.Equal(t, "from a ledger read before", load(1, 0), "BEHIND")
	testenv.Equal(t, "from a ledger that is ahead", load(9, 0), "EPOCH")
	testenv.Equal(t, "the account", w.redis.Client.Exists(t.Context(), accountKey(user)).Val(), 0)
}
