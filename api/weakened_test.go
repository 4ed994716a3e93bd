package api

import (
	"context"
	"crypto/sha1"
	"encoding/hex"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"posthaste/idem"
	"posthaste/internal/testenv"
)

// weakScript is a client hook that replaces the text of the guard's scripts.
type weakScript map[string]string

// weaken returns options whose Redis client runs the named scripts (acq, hb, rel, pub) with parts replaced, given as
// from, to pairs.
func (w *world) weaken(edits ...string) func(*Options) {
	w.tb.Helper()
	texts := weakScript{}
	for _, name := range []string{"acq", "hb", "rel", "pub"} {
		b, err := os.ReadFile("../idem/lua/" + name + ".lua")
		must(w.tb, err)
		if text := strings.NewReplacer(edits...).Replace(string(b)); text != string(b) {
			sum := sha1.Sum(b)
			texts[hex.EncodeToString(sum[:])] = text
		}
	}
	if len(texts) == 0 {
		w.tb.Fatalf("no script has any of %q", edits)
	}
	made, err := idem.NewClient(w.redis.URL())
	must(w.tb, err)
	c := patient(made)
	w.tb.Cleanup(func() { _ = c.Close() })
	c.AddHook(texts)
	return func(o *Options) { o.Redis = c }
}

func (w weakScript) change(cmd redis.Cmder) {
	args := cmd.Args()
	if len(args) < 2 || args[0] != "evalsha" {
		return
	}
	if text, ok := w[args[1].(string)]; ok {
		args[0], args[1] = "eval", text
	}
}

func (w weakScript) DialHook(next redis.DialHook) redis.DialHook { return next }

func (w weakScript) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		w.change(cmd)
		return next(ctx, cmd)
	}
}

func (w weakScript) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		for _, cmd := range cmds {
			w.change(cmd)
		}
		return next(ctx, cmds)
	}
}

// Each way in which Redis may lose a key or grant it twice, with the whole service. With the unique index there is
// always one order. Without it (the mutation) there are two, which shows that the fault is real.
func TestTheUniqueIndexArbitrates(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name    string
		trouble func(w *world) (first, again reply)
	}{
		{"a crash between commit and publication", crashBeforePublish},
		{"a commit whose failure is guessed and its key deleted", guessedFailure},
		{"flushed", func(w *world) (reply, reply) {
			return w.around(func() error { return w.redis.Client.FlushAll(context.Background()).Err() })
		}},
		{"restarted without its file", func(w *world) (reply, reply) {
			return w.around(func() error {
				if err := w.redis.Kill(); err != nil {
					return err
				}
				if err := os.RemoveAll(w.redis.Dir + "/appendonlydir"); err != nil {
					return err
				}
				return w.redis.Start(context.Background())
			})
		}},
		{"gone", func(w *world) (reply, reply) { return w.around(w.redis.Kill) }},
		{"the finished record expired", expiresAfter},
		{"a lease that ends before the transaction", shortLease},
		{"two owners under one lease", twoOwners},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			for _, weak := range []bool{false, true} {
				w := newWorld(t)
				if weak {
					w.dropIndex()
				}
				first, again := c.trouble(w)
				if first.status != 0 && first.status != 201 || again.status != 201 {
					t.Fatalf("%v, then %v", first, again)
				}
				if same := first.body == "" || first.body == again.body; same == weak && first.body != "" {
					t.Errorf("without the index: %v; %v, then %v", weak, first, again)
				}
				if n := w.rows(); (n == 2) != weak {
					t.Errorf("without the index: %v, %d orders", weak, n)
				}
				if !weak {
					w.checkInvariants(1)
				}
			}
		})
	}
}

func (w *world) dropIndex() {
	w.tb.Helper()
	w.db.Exec(w.tb, "ALTER TABLE orders DROP CONSTRAINT orders_user_id_idem_key_key")
}

// around places an order, causes a fault, and places the order again through another process.
func (w *world) around(trouble func() error) (first, again reply) {
	w.tb.Helper()
	key := newKey()
	first = w.post(key, orderJSON(1))
	w.published()
	must(w.tb, trouble())
	return first, w.sibling().post(key, orderJSON(1), "Prefer", "wait=10")
}

func crashBeforePublish(w *world) (first, again reply) {
	dying := w.sibling(func(o *Options) { o.Lease = 100 * time.Millisecond })
	dying.s.failpoint = once("before_publish", func(context.Context) { panic("deliberate") })
	key := newKey()
	// The reply may be incomplete: the process is killed while sending it.
	first, _ = send(context.Background(), "POST", dying.url+"/orders", orderJSON(1), idem.KeyHeader, key)
	testenv.Eventually(w.tb, 20*time.Second, func() error {
		return testenv.FailIf(w.rows() == 0, "not committed yet")
	})
	// It queries Postgres only after its lease has ended, because Postgres has the order.
	quick := w.sibling(w.weaken("if tonumber(b)>ms then", "if false then"))
	return first, quick.post(key, orderJSON(1))
}

// guessedFailure treats an unanswered COMMIT as a failure, like a client that deletes its key after any error.
func guessedFailure(w *world) (first, again reply) {
	key := newKey()
	reached, goOn := make(chan struct{}), make(chan struct{})
	slow := w.sibling()
	slow.s.failpoint = once("after_commit", func(context.Context) { close(reached); <-goOn })
	answer := make(chan reply, 1)
	go func() { answer <- slow.post(key, orderJSON(1)) }()
	<-reached
	w.redis.Client.FlushAll(context.Background()) // the deleted key
	again = w.post(key, orderJSON(1))
	close(goOn)
	return <-answer, again
}

func expiresAfter(w *world) (first, again reply) {
	short := w.sibling(w.weaken("'PX',ARGV[6])", "'PX',20)"))
	key := newKey()
	first = short.post(key, orderJSON(1))
	testenv.Eventually(w.tb, 20*time.Second, func() error {
		n, err := w.redis.Client.DBSize(context.Background()).Result()
		return testenv.FailIf(n != 0 || err != nil, "%d keys: %w", n, err)
	})
	return first, w.post(key, orderJSON(1))
}

// shortLease has an owner whose record expires just before its insert.
func shortLease(w *world) (first, again reply) {
	return overtaking(w, w.sibling(w.weaken("'PX',ARGV[4])", "'PX',20)")), w)
}

// twoOwners has an acquisition that ignores the lease.
func twoOwners(w *world) (first, again reply) {
	return overtaking(w, w, w.sibling(w.weaken("if tonumber(b)>ms then", "if false then")))
}

// overtaking runs one whole request while another, with the same key, is between the guard and the database.
func overtaking(w, slow, quick *world) (first, again reply) {
	w.tb.Helper()
	key := newKey()
	reached, goOn := make(chan struct{}), make(chan struct{})
	slow.s.failpoint = once("after_acquire", func(context.Context) { close(reached); <-goOn })
	answer := make(chan reply, 1)
	go func() { answer <- slow.post(key, orderJSON(1)) }()
	<-reached
	first = quick.post(key, orderJSON(1), "Prefer", "wait=5")
	close(goOn)
	return first, <-answer
}

// The server's clock jumps and Redis loses keys. Owners and clients are not affected, and Postgres has one order.
func TestOrdersWhileTheServersClockJumps(t *testing.T) {
	t.Parallel()
	const minutes = 60_000_000
	for _, c := range []struct {
		name   string
		jump   int64
		forget bool
		// overtaken: the second request does the work while the first is suspended.
		overtaken bool
	}{
		{"ahead", 10 * minutes, false, true},
		{"ahead, and forgets", 10 * minutes, true, true},
		{"back", -10 * minutes, false, false},
		{"back, and forgets", -10 * minutes, true, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			for _, weak := range []bool{false, true} {
				w := servers(t)
				set := func(us int64) {
					w.redis.Client.Del(t.Context(), "clock")
					w.redis.Client.RPush(t.Context(), "clock", us/1e6, us%1e6)
				}
				const start = int64(1_795_000_000_000_000)
				set(start)
				onClock := w.weaken("redis.call('TIME')", "redis.call('LRANGE','clock',0,-1)")
				slow, quick := w.sibling(onClock), w.sibling(onClock)
				if weak {
					w.dropIndex()
				}
				key := newKey()
				reached, goOn := make(chan struct{}), make(chan struct{})
				slow.s.failpoint = once("after_acquire", func(context.Context) { close(reached); <-goOn })
				answer := make(chan reply, 1)
				go func() { answer <- slow.post(key, orderJSON(1)) }()
				<-reached
				if c.forget {
					w.redis.Client.FlushAll(t.Context())
				}
				set(start + c.jump)
				second := quick.post(key, orderJSON(1), "Prefer", "wait=0")
				if c.overtaken {
					want(t, second, 201, "")
				} else {
					want(t, second, 409, "operation_in_progress") // the lease is still valid
				}
				w.redis.Client.FlushAll(t.Context())
				set(start)
				close(goOn)
				first := <-answer
				want(t, first, 201, "")
				if n := w.rows(); (n == 2) != (weak && c.overtaken) {
					t.Errorf("without the index: %v, %d orders", weak, n)
				}
				if weak {
					continue
				}
				if c.overtaken && first.body != second.body {
					t.Errorf("%v, then %v", first, second)
				}
				if r := w.sibling(onClock).post(key, orderJSON(1)); r.body != first.body {
					t.Errorf("afterwards %v, want %v", r, first)
				}
				w.checkInvariants(1)
			}
		})
	}
}

// If a stored fingerprint omits the amount (the mutation), another command gets the old receipt.
func TestWithoutItsFingerprintARowAnswersAnotherCommand(t *testing.T) {
	t.Parallel()
	for _, weak := range []bool{false, true} {
		w := newWorld(t)
		key := newKey()
		first := w.post(key, orderJSON(1))
		w.published()
		w.redis.Client.FlushAll(t.Context())
		if weak {
			o := first.order(t)
			fp := (&Command{UserID: o.UserID, Amount: 2, Currency: o.Currency}).fingerprint()
			w.db.Exec(t, "UPDATE orders SET idem_fp = $1", fp[:])
		}
		if r := w.sibling().post(key, orderJSON(2)); (r.body == first.body || r.status == 201) != weak {
			t.Errorf("without the fingerprint: %v, %v", weak, r)
		}
	}
}

// If a failed request does not release its key (the mutation), its own retry is refused.
func TestWithoutTheReleaseARetryIsTurnedAway(t *testing.T) {
	t.Parallel()
	for _, weak := range []bool{false, true} {
		w := newWorld(t)
		if weak {
			w = w.sibling(w.weaken("redis.call('DEL',KEYS[1])", ""))
		}
		w.s.failpoint = once("before_insert", func(context.Context) { panic("deliberate") })
		key := newKey()
		want(t, w.post(key, orderJSON(1)), 500, "internal_error")
		status := 201
		if weak {
			status = 409
		}
		if r := w.post(key, orderJSON(1), "Prefer", "wait=0"); r.status != status {
			t.Errorf("without the release: %v, %v", weak, r)
		}
	}
}
