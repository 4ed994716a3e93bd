package credits

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"

	"posthaste/internal/testenv"
)

// inUse is a bank in use; its client awaits a reply for longer than the tests keep the server from answering.
func (w *world) inUse(user uuid.UUID) *Bank {
	w.tb.Helper()
	b := w.newBank()
	if _, err := b.Balance(w.tb.Context(), user); err != nil {
		w.tb.Fatal(err)
	}
	return b
}

// under waits until so many pipelines are under way, and so many calls wait.
func (l *lane) under(tb testing.TB, pipelines, calls int) {
	tb.Helper()
	testenv.Eventually(tb, 20*time.Second, func() error {
		l.mu.Lock()
		defer l.mu.Unlock()
		if l.running != pipelines || len(l.queue) != calls {
			return fmt.Errorf("%d pipelines are under way and %d calls wait, want %d and %d", l.running, len(l.queue),
				pipelines, calls)
		}
		return nil
	})
}

// Calls that are made at the same time share pipelines: many operations in few reads of the server.
func TestConcurrentCallsShareRoundTrips(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	user := w.funded(1000)
	b := w.inUse(user)
	reads := func() int64 {
		var n int64
		for _, c := range []string{infoField(w.redis.Client.Info(t.Context(), "stats").Val(),
			"total_reads_processed")} {
			for _, d := range c {
				n = 10*n + int64(d-'0')
			}
		}
		return n
	}
	l, err := b.calls.lane(t.Context(), accountKey(user))
	if err != nil {
		t.Fatal(err)
	}
	if err := w.redis.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	const callers = 400
	var wg sync.WaitGroup
	var ok atomic.Int64
	for i := range callers {
		if i <= lanes { // the first occupy the pipelines, one each
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
	if err := w.redis.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	before := reads()
	wg.Wait()
	wantEqual(t, "successes", ok.Load(), callers)
	if n := reads() - before; n > callers/4 {
		t.Errorf("%d reads of the server for %d operations", n, callers)
	}
	w.inStep(user, 1000-callers)
}

// A connection that dies in the middle of a pipeline: each of its calls finds out by itself, under its own id.
func TestAPipelineIsCutOff(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	user := w.funded(10_000)
	b, proxy := w.proxied(user)
	spent := int64(1)
	for _, bytes := range []string{"700", "9000", "41"} {
		proxy.Toxic(`{"name":"cut","type":"limit_data","stream":"downstream","attributes":{"bytes":` + bytes + `}}`)
		ops := make([]Op, 200)
		errs := make([]error, len(ops))
		var wg sync.WaitGroup
		for i := range ops {
			ops[i] = newOp(user, Deduct, 1)
			wg.Go(func() { _, errs[i] = b.Apply(context.Background(), ops[i]) })
		}
		wg.Wait()
		proxy.Remove("cut")
		unknown := 0
		for i := range ops {
			if errors.Is(errs[i], ErrUnknown) {
				unknown++
			} else if errs[i] != nil && !errors.Is(errs[i], ErrUnavailable) {
				t.Errorf("%v", errs[i])
			}
			// Whatever was said: repeated, it is done, once.
			testenv.Eventually(t, 20*time.Second, func() error {
				r, err := b.Apply(context.Background(), ops[i])
				if err == nil && (r.Outcome != OK || errs[i] == nil && !r.Replayed) {
					t.Errorf("repeated after %v: %+v", errs[i], r)
				}
				return err
			})
		}
		t.Logf("after %s bytes: %d outcomes unknown", bytes, unknown)
		spent += int64(len(ops))
	}
	w.inStep(user, 10_000-spent)
}

// Who gives up while waiting has certainly done nothing; who gives up later cannot know.
func TestGivingUpInTheQueue(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	user := w.funded(100)
	b := w.inUse(user)
	if err := w.redis.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
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
	l.mu.Lock()
	l.running++ // as if another pipeline began now
	l.mu.Unlock()
	if batch := l.take(nil); len(batch) != 0 {
		t.Error("the call would be sent all the same")
	}
	giveUp()
	busy.Wait()
	if err := w.redis.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	for _, op := range sent {
		w.must(op, OK)
	}
	w.inStep(user, 98)
	wantEqual(t, "entries", testenv.Value[int](t, w.db, "SELECT count(*) FROM credit_entries WHERE op_id = $1",
		never.ID),
		0)
}

// An operation's id is its user's: another user in the same bucket may have the same one.
func TestTwoUsersWithOneID(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	a, b := w.funded(10), uuid.New()
	for Bucket(b) != Bucket(a) {
		b = uuid.New()
	}
	w.must(newOp(b, Add, 20), OK)
	op := newOp(a, Deduct, 1)
	w.must(op, OK)
	op.User = b
	if r := w.must(op, OK); r.Replayed || r.Balance != 19 {
		t.Errorf("got %+v, want the other user's own operation", r)
	}
}

// With its memory full Redis refuses every operation before anything is written, and still lets go of what the ledger
// has: that is how it gets out of it.
func TestMemoryIsFull(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	user := w.funded(100)
	for range 20 {
		w.must(newOp(user, Deduct, 1), OK)
	}
	if err := w.redis.Client.ConfigSet(t.Context(), "maxmemory", "1").Err(); err != nil {
		t.Fatal(err)
	}
	before := w.account(user)["b"]
	w.refused(newOp(user, Deduct, 1), ErrUnavailable)
	w.refused(newOp(user, Add, 1), ErrUnavailable)
	wantEqual(t, "balance", w.account(user)["b"], before)
	w.settle()
	wantEqual(t, "entries in the stream", w.redis.Client.XLen(t.Context(), streamKey(Bucket(user))).Val(), 0)
	w.redis.Client.ConfigSet(t.Context(), "maxmemory", "0")
	w.must(newOp(user, Deduct, 1), OK)
	w.inStep(user, 79)
}

// A call that may have been carried out is not answered by what the next one was told.
func TestARefusalAfterDoubtIsNoAnswer(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	user := w.funded(100)
	var armed atomic.Bool
	b, proxy := w.proxied(user, func(o *redis.Options, proxy *testenv.Proxy) {
		dial := o.Dialer
		o.Dialer = func(_ context.Context, network, addr string) (net.Conn, error) {
			// The first connection was given up: the repeat finds a server that knows nothing.
			if armed.CompareAndSwap(true, false) {
				w.redis.Client.FlushAll(context.Background())
				proxy.Remove("lost")
			}
			return dial(context.Background(), network, addr)
		}
	})
	proxy.Toxic(`{"name":"lost","type":"timeout","stream":"downstream","attributes":{"timeout":0}}`)
	armed.Store(true)
	if _, err := b.Apply(t.Context(), newOp(user, Deduct, 10)); !errors.Is(err, ErrUnknown) {
		t.Errorf("got %v, want ErrUnknown", err)
	}
	if armed.Load() {
		t.Error("the call was not repeated")
	}
}

// A server that refuses new connections says so to nobody's command in particular: every call of the pipeline is told
// that nothing was done.
func TestAServerRefusesConnections(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	user := w.funded(100)
	admin := w.redis.Client.Conn() // asked for nothing while it stays
	defer admin.Close()
	set := func(rules ...any) {
		if err := admin.Do(t.Context(), append([]any{"ACL", "SETUSER", "default"}, rules...)...).Err(); err != nil {
			t.Fatal(err)
		}
	}
	set(">first")
	b := w.newBank(func(o *Options) {
		o.Redis, o.Connections = w.connected("redis://:first@" + w.redis.Addr() + "/0")
	})
	if _, err := b.Apply(t.Context(), newOp(user, Deduct, 1)); err != nil { // the look at the settings is fresh now
		t.Fatal(err)
	}
	set("resetpass", ">second")
	if err := admin.Do(t.Context(), "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes").Err(); err != nil {
		t.Fatal(err)
	}
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
