package credits

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"posthaste/internal/lab/testenv"
)

const (
	childRedis    = "POSTHASTE_CREDITS_REDIS"
	childPostgres = "POSTHASTE_CREDITS_POSTGRES"
	childUser     = "POSTHASTE_CREDITS_USER"
	childCount    = "POSTHASTE_CREDITS_COUNT"
)

// child is one API process. It deducts 1 many times concurrently and prints how many deductions succeeded.
func child(redisURL, pgURL, user string) int {
	c, connections, err := patientClient(redisURL)
	if err != nil {
		return 1
	}
	pool, err := pgxpool.New(context.Background(), pgURL)
	if err != nil {
		return 1
	}
	b := New(Options{Redis: c, Connections: connections, Pool: pool})
	n, _ := strconv.Atoi(os.Getenv(childCount))
	ok, bad := hammer(b, uuid.MustParse(user), n)
	if bad != nil {
		println(bad.Error())
		return 1
	}
	_, _ = os.Stdout.WriteString(strconv.FormatInt(ok, 10))
	return 0
}

// hammer makes n deductions of 1, 50 concurrently. It sends every second one twice with the same id.
func hammer(b *Bank, user uuid.UUID, n int) (ok int64, bad error) {
	var done, next atomic.Int64
	var mu sync.Mutex
	var wg sync.WaitGroup
	for range 50 {
		wg.Go(func() {
			for {
				i := next.Add(1)
				if i > int64(n) {
					return
				}
				op := newOp(user, Deduct, 1)
				r, err := b.Apply(context.Background(), op)
				if err == nil && i%2 == 1 {
					var again Result
					if again, err = b.Apply(context.Background(), op); err == nil &&
						(!again.Replayed || again.Seq != r.Seq || again.Outcome != r.Outcome) {
						err = fmt.Errorf("replay %+v of %+v", again, r)
					}
				}
				if err != nil {
					mu.Lock()
					bad = errors.Join(bad, err)
					mu.Unlock()
					return
				}
				if r.Outcome == OK {
					done.Add(1)
				}
			}
		})
	}
	wg.Wait()
	return done.Load(), bad
}

func TestExactlyTheBalanceCanBeSpent(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	balance, deducts := 300, 600
	if os.Getenv("POSTHASTE_TEST_FULL") == "1" {
		balance, deducts = 5000, 10_002 // three processes, a third each
	}
	user := w.funded(int64(balance))
	w.run()
	var total atomic.Int64
	var wg sync.WaitGroup
	for range 3 {
		wg.Go(func() {
			cmd := exec.CommandContext(t.Context(), os.Args[0])
			cmd.Env = append(os.Environ(), childRedis+"="+w.redis.URL(), childPostgres+"="+w.db.URL, childUser+"="+
				user.String(),
				childCount+"="+strconv.Itoa(deducts/3))
			out, err := cmd.Output()
			if err != nil {
				t.Errorf("process: %v %s", err, out)
				return
			}
			n, err := strconv.ParseInt(string(out), 10, 64)
			if err != nil {
				t.Error(err)
			}
			total.Add(n)
		})
	}
	wg.Wait()
	testenv.Equal(t, "successes", total.Load(), int64(balance))
	w2 := *w
	w2.sync = w.newSync() // concurrently with the running sync
	w2.inStep(user, 0)
	n := testenv.Value[int](t, w.db, "SELECT count(*) FROM credit_entries WHERE user_id = $1", user)
	testenv.Equal(t, "entries", n, deducts+1)
}

func TestAmountsAreStrict(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	user := w.funded(1000)
	before := w.account(user)
	keys := []string{accountKey(user), outcomeKey(user, uuid.New()), streamKey(Bucket(user)), epochKey(Bucket(user))}
	for _, amount := range []string{
		"-1", "0", "", "00", "01", "0x10", "1e2", "1.0", "1.5", "nan", "inf", " 1", "1 ",
		"1\n", "+1", "1000000000000", "9007199254740993",
	} {
		for _, fn := range []string{fnAdd, fnDeduct} {
			r, err := call(t.Context(), w.redis.Client, fn, keys, amount, "fp", user.String(), uuid.NewString(), 1, 0,
				1000, 10,
				durMemory, "0", "")
			if err != nil || r[0] != "BAD_AMOUNT" {
				t.Errorf("%s %q: got %v, %v", fn, amount, r, err)
			}
		}
	}
	testenv.Equal(t, "balance", w.account(user)["b"], before["b"])
	testenv.Equal(t, "entries", w.redis.Client.XLen(t.Context(), keys[2]).Val(), 1)
	testenv.Equal(t, "outcomes", w.redis.Client.Exists(t.Context(), keys[1]).Val(), 0)
}

// A key of the wrong type makes the call fail before it has written anything.
func TestNoPartialWrites(t *testing.T) {
	t.Parallel()
	for _, broken := range []string{"account", "outcome", "stream", "epoch", "numbers"} {
		t.Run(broken, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			user := w.funded(1000)
			op := newOp(user, Deduct, 1)
			bkt := Bucket(user)
			ctx, c := t.Context(), w.redis.Client
			key := map[string]string{
				"account": accountKey(user), "outcome": outcomeKey(user, op.ID), "stream": streamKey(bkt),
				"epoch": epochKey(bkt),
			}[broken]
			if broken == "numbers" {
				c.HSet(ctx, accountKey(user), "b", "ten")
			} else {
				c.Del(ctx, key)
				c.SAdd(ctx, key, "x")
			}
			before := snapshot(t, w)
			w.refused(op, ErrUnavailable)
			testenv.Equal(t, "redis", snapshot(t, w), before)
		})
	}
}

// snapshot returns everything in Redis.
func snapshot(tb testing.TB, w *world) string {
	tb.Helper()
	var b strings.Builder
	keys := w.redis.Client.Keys(tb.Context(), "*").Val()
	slices.Sort(keys)
	for _, k := range keys {
		fmt.Fprintf(&b, "%s %x\n", k, w.redis.Client.Dump(tb.Context(), k).Val())
	}
	return b.String()
}

// A refused id stays refused, even if the balance would allow the operation later. Redis replays the refusal, and so
// does the ledger after Redis has dropped it.
func TestARefusalStaysARefusal(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	user := w.funded(10)
	op := newOp(user, Deduct, 50)
	first := w.must(op, Insufficient)
	w.must(newOp(user, Add, 100), OK)
	again := w.must(op, Insufficient)
	if !again.Replayed || again.Balance != 10 || again.Seq != first.Seq || !again.At.Equal(first.At) {
		t.Errorf("got %+v, want a replay of %+v", again, first)
	}
	other := op
	other.Fingerprint[3]++
	w.refused(other, ErrReused)
	w.inStep(user, 110)
	w.redis.Client.Del(t.Context(), outcomeKey(user, op.ID))
	op.MintedAt = time.Time{}
	if again = w.must(op, Insufficient); !again.Replayed || again.Seq != first.Seq {
		t.Errorf("from the ledger: got %+v, want a replay of %+v", again, first)
	}
	other = op
	other.Fingerprint[3]++
	w.refused(other, ErrReused)
	w.inStep(user, 110)
}

// If Redis may have dropped the outcome of a key, the ledger is read, whether or not the key contains its time.
func TestAnOldKeyIsLookedUp(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	user := w.funded(100)
	op := newOp(user, Deduct, 5)
	w.must(op, OK)
	w.settle()
	w.redis.Client.Del(t.Context(), outcomeKey(user, op.ID))
	for _, at := range []time.Time{{}, time.Now().Add(-OutcomeTTL), time.Now().Add(time.Hour)} {
		op.MintedAt = at
		w.replayed(op, OK, 95)
	}
	expires := w.newBank(func(o *Options) { o.KeyMaxAge = time.Hour })
	stale := newOp(user, Deduct, 5)
	stale.MintedAt = time.Now().Add(-2 * time.Hour)
	w.refusedBy(expires, stale, ErrExpired)
	w.inStep(user, 95)
}

// A client's clock is ahead, for example by its time zone. As long as its key counts as young, Redis has the outcome.
func TestAKeyFromTheFuture(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	user := w.funded(100)
	op := newOp(user, Deduct, 5)
	op.MintedAt = time.Now().Add(14 * time.Hour)
	w.must(op, OK)
	kept := w.redis.Client.PTTL(t.Context(), outcomeKey(user, op.ID)).Val()
	if young := time.Until(op.MintedAt.Add(youngLimit)); kept < young {
		t.Errorf("Redis has the outcome for %s, the ledger is not read for %s", kept, young)
	}
}

func TestLimits(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	nobody := uuid.New()
	w.refused(newOp(nobody, Deduct, 1), ErrUnknownUser)
	_, err := w.bank.Balance(t.Context(), nobody)
	testenv.ErrorIs(t, "balance of nobody", err, ErrUnknownUser)
	_, err = w.bank.DurableBalance(t.Context(), nobody)
	testenv.ErrorIs(t, "durable balance of nobody", err, ErrUnknownUser)
	for _, text := range []string{"\xff", "a\x00b", strings.Repeat("x", MaxReference+1)} { // Postgres cannot store them
		op := newOp(nobody, Add, 7)
		op.Reference = text
		w.refused(op, ErrUnavailable)
	}
	// An addition creates the account even while all processes cache that it does not exist.
	w.must(newOp(nobody, Add, 7), OK)
	w.inStep(nobody, 7)

	w.redis.Client.HSet(t.Context(), accountKey(nobody), "b", strconv.FormatInt(MaxBalance-1, 10))
	w.must(newOp(nobody, Add, 2), Overflow)
	w.redis.Client.HSet(t.Context(), accountKey(nobody), "b", 7)
	w.bank.maxStream = 1
	w.refused(newOp(nobody, Add, 1), ErrBackpressure)
	w.redis.Client.HSet(t.Context(), accountKey(nobody), "f", "test")
	w.refused(newOp(nobody, Add, 1), ErrFrozen)
	w.redis.Client.ConfigSet(t.Context(), "maxmemory-policy", "allkeys-lru")
	w.refusedBy(w.newBank(), newOp(nobody, Add, 1), ErrUnavailable)
}

// All callers in a process share one read of the ledger.
func TestAThousandMissesMakeOneRead(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	user := w.funded(1000)
	w.settle()
	w.redis.Client.Del(t.Context(), accountKey(user))
	pool, err := pgxpool.NewWithConfig(t.Context(), w.db.Pool.Config())
	must(t, err)
	t.Cleanup(pool.Close)
	own := func(o *Options) { o.Pool = pool }
	banks := []*Bank{w.newBank(own), w.newBank(own)}
	var wg sync.WaitGroup
	var failed atomic.Int64
	for i := range 1000 {
		wg.Go(func() {
			op, err := newOp(user, Deduct, 1), errLoading
			// each attempt waits only briefly, and a busy machine needs more
			for try := 0; try < 50 && errors.Is(err, errLoading); try++ {
				_, err = banks[i%2].Apply(context.Background(), op)
			}
			if err != nil {
				failed.Add(1)
				t.Log(err)
			}
		})
	}
	wg.Wait()
	testenv.Equal(t, "failed", failed.Load(), 0)
	testenv.Equal(t, "reads of the ledger", reading(banks[0].metrics.loads)+reading(banks[1].metrics.loads), 1)
	// Each process reads the bucket's epoch. If a load takes long, there are a few more reads.
	if n := pool.Stat().AcquireCount(); n > 100 {
		t.Errorf("%d queries for the state of one bucket", n)
	}
	w.inStep(user, 0)
}

func TestFunctionsComeBack(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	user := w.funded(100)
	w.redis.Client.FunctionFlush(t.Context())
	w.must(newOp(user, Deduct, 1), OK)
	w.redis.Client.FunctionFlush(t.Context())
	w.settle()
	w.redis.Client.FunctionFlush(t.Context())
	w.inStep(user, 99)
	// The functions survive a restart, like all other data.
	must(t, w.redis.Stop())
	w.refused(newOp(user, Deduct, 1), ErrUnavailable)
	must(t, w.redis.Start(t.Context()))
	testenv.Eventually(t, 20*time.Second, func() error { return w.redis.Client.Ping(t.Context()).Err() })
	testenv.Equal(t, "libraries", len(w.redis.Client.FunctionList(t.Context(), functionQuery).Val()), 1)
	w.must(newOp(user, Deduct, 1), OK)
	w.inStep(user, 98)
}

// A lost reply does not cause a second deduction.
func TestALostReply(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	user := w.funded(100)
	b, proxy := w.proxied(user)
	proxy.Set(testenv.Trouble{LoseReplies: true})
	op := newOp(user, Deduct, 10)
	w.refusedBy(b, op, ErrUnknown)
	proxy.Set(testenv.Trouble{})
	r, err := b.Apply(t.Context(), op)
	if err != nil || !r.Replayed || r.Balance != 89 {
		t.Errorf("got %+v, %v, want a replay with balance 89", r, err)
	}
	proxy.Down()
	if _, err := b.Apply(t.Context(), newOp(user, Deduct, 1)); !errors.Is(err, ErrUnavailable) &&
		!errors.Is(err, ErrUnknown) {
		t.Errorf("got %v, want ErrUnavailable or ErrUnknown", err)
	}
	w.inStep(user, 89)
}

// During a rolling deployment, a server has two versions of the library. Each process calls the functions of its own
// version, and both versions use the same accounts and outcomes.
func TestTwoVersionsSideBySide(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	user := w.funded(100)
	op := newOp(user, Deduct, 10)
	w.must(op, OK)
	next := strings.NewReplacer("posthaste_credits_v1", "posthaste_credits_v2", "_v1'", "_v2'").Replace(library)
	must(t, w.redis.Client.FunctionLoadReplace(t.Context(), next).Err())
	bkt := Bucket(user)
	args := []any{
		"FCALL", "cr_deduct_v2", 4, accountKey(user), outcomeKey(user, op.ID), streamKey(bkt), epochKey(bkt), 10,
		op.fp(), user.String(), op.ID.String(), 1, 0, 1000, maxStream, durMemory, "0", "",
	}
	if r, err := w.redis.Client.Do(t.Context(), args...).StringSlice(); err != nil || r[0] != "REPLAY" || r[3] != "90" {
		t.Errorf("the next version on an old record: %v, %v", r, err)
	}
	other := newOp(user, Deduct, 5)
	args[4], args[7], args[8], args[10] = outcomeKey(user, other.ID), 5, other.fp(), other.ID.String()
	if r, err := w.redis.Client.Do(t.Context(), args...).StringSlice(); err != nil || r[0] != string(OK) {
		t.Errorf("the next version: %v, %v", r, err)
	}
	// This version continues, finds the outcome recorded by the other version, and reloads its own library without
	// changing the other's.
	w.replayed(other, OK, 85)
	w.redis.Client.FunctionDelete(t.Context(), "posthaste_credits_v1")
	w.must(newOp(user, Deduct, 5), OK)
	both := redis.FunctionListQuery{LibraryNamePattern: "posthaste_credits_v*"}
	testenv.Equal(t, "libraries", len(w.redis.Client.FunctionList(t.Context(), both).Val()), 2)
	w.inStep(user, 80)
}
