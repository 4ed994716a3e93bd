package credits

import (
	"context"
	"errors"
	"net"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"

	"posthaste/internal/lab/testenv"
)

// inUse returns a bank with an open connection. Its client waits for a reply longer than the tests block the server.
func (w *world) inUse(user uuid.UUID) *Bank {
	w.tb.Helper()
	b := w.newBank()
	_, err := b.Balance(w.tb.Context(), user)
	must(w.tb, err)
	return b
}

// under waits until the given numbers of pipelines are running and of calls are queued.
func (l *lane) under(tb testing.TB, pipelines, calls int) {
	tb.Helper()
	testenv.Eventually(tb, 20*time.Second, func() error {
		p, c := l.queue.State()
		return testenv.FailIf(p != pipelines || c != calls,
			"%d pipelines are under way and %d calls wait, want %d and %d", p, c, pipelines, calls)
	})
}

// Concurrent calls share pipelines: the server reads many operations at once.
func TestConcurrentCallsShareRoundTrips(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	user := w.funded(1000)
	b := w.inUse(user)
	reads := func() int64 {
		stats := w.redis.Client.InfoMap(t.Context(), "stats")
		n, err := strconv.ParseInt(stats.Item("Stats", "total_reads_processed"), 10, 64)
		must(t, err)
		return n
	}
	l, err := b.calls.lane(t.Context(), accountKey(user))
	must(t, err)
	must(t, w.redis.Signal(syscall.SIGSTOP))
	const callers = 400
	var wg sync.WaitGroup
	var ok atomic.Int64
	for i := range callers {
		if i <= lanes { // the first calls occupy one pipeline each
			l.under(t, i, 0)
		}
		wg.Go(func() {
			if r, err := b.Apply(context.Background(), newOp(user, Deduct, 1)); err == nil && r.Outcome == OK {
				ok.Add(1)
			} else {
				t.Errorf("%+v %v", r, err)
			}
		})
	}
	l.under(t, lanes, callers-lanes)
	must(t, w.redis.Signal(syscall.SIGCONT))
	before := reads()
	wg.Wait()
	testenv.Equal(t, "successes", ok.Load(), callers)
	if n := reads() - before; n > callers/4 {
		t.Errorf("%d reads of the server for %d operations", n, callers)
	}
	w.inStep(user, 1000-callers)
}

// A connection is lost during a pipeline. Each of its calls is resolved separately, by its own id.
func TestAPipelineIsCutOff(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	user := w.funded(10_000)
	b, proxy := w.proxied(user)
	spent := int64(1)
	for _, bytes := range []int{700, 9000, 41} {
		proxy.Set(testenv.Trouble{CutReplies: bytes})
		ops := make([]Op, 200)
		errs := make([]error, len(ops))
		var wg sync.WaitGroup
		for i := range ops {
			ops[i] = newOp(user, Deduct, 1)
			wg.Go(func() { _, errs[i] = b.Apply(context.Background(), ops[i]) })
		}
		wg.Wait()
		proxy.Set(testenv.Trouble{})
		unknown := 0
		for i := range ops {
			if errors.Is(errs[i], ErrUnknown) {
				unknown++
			} else if errs[i] != nil && !errors.Is(errs[i], ErrUnavailable) {
				t.Errorf("%v", errs[i])
			}
			// Whatever the first reply was, the repeated operation is carried out exactly once.
			testenv.Eventually(t, 20*time.Second, func() error {
				r, err := b.Apply(context.Background(), ops[i])
				if err == nil && (r.Outcome != OK || errs[i] == nil && !r.Replayed) {
					t.Errorf("repeated after %v: %+v", errs[i], r)
				}
				return err
			})
		}
		t.Logf("after %d bytes: %d outcomes unknown", bytes, unknown)
		spent += int64(len(ops))
	}
	w.inStep(user, 10_000-spent)
}

// A call that is given up while queued has certainly not been carried out. For a call given up later, the outcome is
// unknown.
func TestGivingUpInTheQueue(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	user := w.funded(100)
	b := w.inUse(user)
	must(t, w.redis.Signal(syscall.SIGSTOP))
	var busy sync.WaitGroup
	wait, giveUp := context.WithCancel(t.Context())
	defer giveUp()
	sent := []Op{newOp(user, Deduct, 1), newOp(user, Deduct, 1)} // one per lane
	l, _ := b.calls.lane(t.Context(), accountKey(user))
	for i := range sent {
		busy.Go(func() {
			if _, err := b.Apply(wait, sent[i]); !errors.Is(err, ErrUnknown) {
				t.Errorf("a call that was sent to a hanging server: %v", err)
			}
		})
		l.under(t, i+1, 0)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	never := newOp(user, Deduct, 7)
	if _, err := b.Apply(ctx, never); !errors.Is(err, ErrUnavailable) || errors.Is(err, ErrUnknown) {
		t.Errorf("a call that was never sent: %v", err)
	}
	if calls := l.queue.Take(); len(calls) != 0 {
		t.Error("the call would be sent all the same")
	}
	giveUp()
	busy.Wait()
	must(t, w.redis.Signal(syscall.SIGCONT))
	for _, op := range sent {
		w.must(op, OK)
	}
	w.inStep(user, 98)
	testenv.Equal(t, "entries", testenv.Value[int](t, w.db, "SELECT count(*) FROM credit_entries WHERE op_id = $1",
		never.ID),
		0)
}

// An operation's id belongs to its user: another user in the same bucket may use the same id. Both operations reach the
// ledger, with an event each.
func TestTwoUsersWithOneID(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	a := w.funded(10)
	b := neighbour(a)
	w.must(newOp(b, Add, 20), OK)
	op := newOp(a, Deduct, 1)
	w.must(op, OK)
	op.User = b
	if r := w.must(op, OK); r.Replayed || r.Balance != 19 {
		t.Errorf("got %+v, want the other user's own operation", r)
	}
	w.settle()
	testenv.Equal(t, "balances", [2]int64{w.ledger(a).Balance, w.ledger(b).Balance}, [2]int64{9, 19})
	testenv.Equal(t, "events", testenv.Value[int](t, w.db,
		"SELECT count(*) FROM outbox WHERE payload ->> 'op_id' = $1", op.ID.String()), 2)
}

// With its memory full, Redis refuses every operation before it writes anything. It still drops the entries that are in
// the ledger, and thereby frees memory.
func TestMemoryIsFull(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	user := w.funded(100)
	for range 20 {
		w.must(newOp(user, Deduct, 1), OK)
	}
	must(t, w.redis.Client.ConfigSet(t.Context(), "maxmemory", "1").Err())
	before := w.account(user)["b"]
	w.refused(newOp(user, Deduct, 1), ErrUnavailable)
	w.refused(newOp(user, Add, 1), ErrUnavailable)
	testenv.Equal(t, "balance", w.account(user)["b"], before)
	w.settle()
	testenv.Equal(t, "entries in the stream", w.unsynced(user), 0)
	w.redis.Client.ConfigSet(t.Context(), "maxmemory", "0")
	w.must(newOp(user, Deduct, 1), OK)
	w.inStep(user, 79)
}

// The user of Redis lacks the right to one of the commands of an operation. The operation writes nothing.
func TestRightsAreCheckedFirst(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	user := w.funded(100)
	ops := map[string]Op{"xadd": newOp(user, Deduct, 1), "hset": newOp(user, Deduct, 1), "set": newOp(user, Deduct, 1)}
	for command, op := range ops {
		must(t, w.redis.Client.Do(t.Context(), "ACL", "SETUSER", "default", "-"+command).Err())
		_, err := w.bank.Apply(t.Context(), op)
		if err == nil || !strings.Contains(err.Error(), "NOPERM") && !strings.Contains(err.Error(), "can't run this") {
			t.Errorf("%s: %v", command, err)
		}
		must(t, w.redis.Client.Do(t.Context(), "ACL", "SETUSER", "default", "+"+command).Err())
	}
	w.inStep(user, 100)
	for _, op := range ops {
		w.must(op, OK)
	}
	w.inStep(user, 97)
}

// If a call may have been carried out, a refusal of the next call is not its outcome.
func TestARefusalAfterDoubtIsNoAnswer(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	user := w.funded(100)
	var armed atomic.Bool
	b, proxy := w.proxied(user, func(o *redis.Options, proxy *testenv.Link) {
		dial := o.Dialer
		o.Dialer = func(_ context.Context, network, addr string) (net.Conn, error) {
			// The first connection is lost, and the repeated call finds an empty server.
			if armed.CompareAndSwap(true, false) {
				w.redis.Client.FlushAll(context.Background())
				proxy.Set(testenv.Trouble{})
			}
			return dial(context.Background(), network, addr)
		}
	})
	proxy.Set(testenv.Trouble{LoseReplies: true})
	armed.Store(true)
	w.refusedBy(b, newOp(user, Deduct, 10), ErrUnknown)
	if armed.Load() {
		t.Error("the call was not repeated")
	}
}

// If a server refuses a new connection, its error belongs to no single command. Every call of the pipeline returns that
// nothing was done.
func TestAServerRefusesConnections(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	user := w.funded(100)
	admin := w.redis.Client.Conn() // stays idle
	defer admin.Close()
	set := func(rules ...any) {
		must(t, admin.Do(t.Context(), append([]any{"ACL", "SETUSER", "default"}, rules...)...).Err())
	}
	set(">first")
	b := w.newBank(func(o *Options) {
		o.Redis, o.Connections = w.connected("redis://:first@" + w.redis.Addr() + "/0")
	})
	if _, err := b.Apply(t.Context(), newOp(user, Deduct, 1)); err != nil { // renews the check of the settings
		t.Fatal(err)
	}
	set("resetpass", ">second")
	must(t, admin.Do(t.Context(), "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes").Err())
	var wg sync.WaitGroup
	for range 20 {
		wg.Go(func() {
			if r, err := b.Apply(context.Background(), newOp(user, Deduct, 1)); !errors.Is(err, ErrUnavailable) ||
				errors.Is(err, ErrUnknown) {
				t.Errorf("got %+v, %v, want ErrUnavailable", r, err)
			}
		})
	}
	wg.Wait()
	set("nopass")
	w.inStep(user, 99)
}
