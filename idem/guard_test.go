package idem

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/redis/go-redis/v9"

	"posthaste/internal/lab/testenv"
)

var result = Record{Status: 201, Ref: "0192d3a0-0000-7000-8000-000000000000", Payload: "x1"}

func TestOneDoesTheWorkAndOthersGetItsResult(t *testing.T) {
	t.Parallel()
	r := testenv.Redis(t)
	g, other := guardOn(t, r.URL()), guardOn(t, r.URL())
	d := begin(t, g, request("k", "a"))
	wantOutcome(t, d, Proceed)
	if d.Ticket.Degraded() || d.Ticket.Token() == 0 {
		t.Fatalf("ticket %+v, want one with a token", d.Ticket)
	}
	busy := begin(t, other, request("k", "a"))
	wantOutcome(t, busy, Busy)
	if busy.RetryAfter <= 0 || busy.RetryAfter > time.Second {
		t.Errorf("retry after %v, want at most a second", busy.RetryAfter)
	}
	d.Ticket.Commit(t.Context(), result)
	for _, g := range []*Guard{g, other, other} { // the third comes from the cache
		replays(t, g, request("k", "a"), result)
	}
	wantOutcome(t, begin(t, guardOn(t, r.URL()), request("k", "b")), Mismatch)
	wantOutcome(t, begin(t, other, request("k", "b")), Mismatch)
}

func TestAbortFreesTheKeyOnlyForItsOwner(t *testing.T) {
	t.Parallel()
	r := testenv.Redis(t)
	g := guardOn(t, r.URL(), func(o *Options) { o.Lease = 50 * time.Millisecond })
	first := begin(t, g, request("k", "a")).Ticket
	first.Abort(t.Context())
	second := begin(t, g, request("k", "a"))
	wantOutcome(t, second, Proceed)
	// The lease ends, and a third attempt takes over; the second must not affect it any more.
	var third Decision
	testenv.Eventually(t, 20*time.Second, func() error {
		third = begin(t, g, request("k", "a"))
		return testenv.FailIf(third.Outcome != Proceed, "outcome %d", third.Outcome)
	})
	if third.Ticket.Token() <= second.Ticket.Token() {
		t.Errorf("token %d does not follow %d", third.Ticket.Token(), second.Ticket.Token())
	}
	before := rawRecord(t, r.Client, first.key)
	second.Ticket.Abort(t.Context())
	testenv.Equal(t, "the record after a lost owner's abort", rawRecord(t, r.Client, first.key), before)
	testenv.ErrorIs(t, "heartbeat of a lost owner", second.Ticket.Heartbeat(t.Context()), ErrLost)
	// Its publication counts: only the holder of the committed row may make one.
	second.Ticket.Commit(t.Context(), result)
	d := begin(t, g, request("k", "a"))
	wantOutcome(t, d, Replay)
	third.Ticket.Commit(t.Context(), Record{Status: 500, Ref: "other"})
	replays(t, guardOn(t, r.URL()), request("k", "a"), result)
}

func TestKeepRenewsTheLeaseAndNoticesItsLoss(t *testing.T) {
	t.Parallel()
	r := testenv.Redis(t)
	// It is renewed at most three times, every four seconds: the loss must come before the last renewal.
	g := guardOn(t, r.URL(), func(o *Options) { o.Lease = 12 * time.Second })
	d := begin(t, g, request("k", "a"))
	kept, stop := d.Ticket.Keep(t.Context())
	defer stop()
	record := rawRecord(t, r.Client, d.Ticket.key)
	testenv.Eventually(t, 20*time.Second, func() error {
		return testenv.FailIf(rawRecord(t, r.Client, d.Ticket.key) == record, "no heartbeat")
	})
	// Another attempt's record replaces it.
	r.Client.Set(t.Context(), d.Ticket.key.String(), "P|"+d.Ticket.fp.text()+"|99|other|99999999999999", 0)
	select {
	case <-kept.Done():
	case <-time.After(20 * time.Second):
		t.Fatal("the loss was not noticed")
	}
	testenv.ErrorIs(t, "cause", context.Cause(kept), ErrLost)
}

func TestResentScriptsAreHarmless(t *testing.T) {
	t.Parallel()
	r := testenv.Redis(t)
	g := guardOn(t, r.URL())
	req := request("k", "a")
	one, two := g.acquire(t.Context(), &req, "same"), g.acquire(t.Context(), &req, "same")
	if two.Outcome != Proceed || one.Ticket.Token() != two.Ticket.Token() {
		t.Fatalf("the same attempt got %+v, then %+v", one, two)
	}
	if three := g.acquire(t.Context(), &req, "other"); three.Outcome != Busy {
		t.Fatalf("another attempt got %+v", three)
	}
	one.Ticket.Commit(t.Context(), result)
	one.Ticket.Commit(t.Context(), result)
	wantOutcome(t, begin(t, g, req), Replay)
}

func TestScriptsHealAfterAFlush(t *testing.T) {
	t.Parallel()
	r := testenv.Redis(t)
	reg := prometheus.NewRegistry()
	g := guardOn(t, r.URL(), func(o *Options) { o.Registerer = reg })
	for i := range 3 {
		must(t, r.Client.ScriptFlush(t.Context()).Err())
		d := begin(t, g, request(fmt.Sprint(i), "a"))
		if d.Ticket.Degraded() {
			t.Fatal("degraded after SCRIPT FLUSH")
		}
		r.Client.ScriptFlush(t.Context())
		d.Ticket.Commit(t.Context(), result)
		hasPrefix(t, rawRecord(t, r.Client, d.Ticket.key), "C|")
	}
	testenv.Equal(t, "degraded", testutil.ToFloat64(g.metrics.requests.WithLabelValues("/t", OutcomeDegraded)), 0)
}

func TestAnUnusableRecordDegradesOnlyItsKey(t *testing.T) {
	t.Parallel()
	r := testenv.Redis(t)
	g := guardOn(t, r.URL())
	for i, put := range []func(k string) error{
		func(k string) error { return r.Client.Set(t.Context(), k, "rubbish", 0).Err() },
		func(k string) error { return r.Client.Set(t.Context(), k, "P|x|1|a|soon", 0).Err() },
		func(k string) error {
			return r.Client.Set(t.Context(), k, "C|"+NewFingerprint(1, "a").text()+"|1|x|y", 0).Err()
		},
		func(k string) error { return r.Client.LPush(t.Context(), k, "v").Err() },
	} {
		req := request(fmt.Sprint(i), "a")
		for range 4 { // more than the breaker stands
			must(t, put(req.Key.String()))
			d := begin(t, g, req)
			wantGuarded(t, d, false)
			r.Client.Del(t.Context(), req.Key.String())
		}
		_ = put(req.Key.String())
		d := begin(t, g, req)
		d.Ticket.Commit(t.Context(), result)
		if i < 2 || i == 3 { // the third looks finished, so a publication leaves it alone
			hasPrefix(t, rawRecord(t, r.Client, req.Key), "C|")
		}
	}
	wantGuarded(t, begin(t, g, request("fresh", "a")), true)
}

func TestWithoutRedisRequestsGoOnQuickly(t *testing.T) {
	t.Parallel()
	started := make(chan error, 1)
	does := func(args ...any) func(r *testenv.RedisServer) error {
		return func(r *testenv.RedisServer) error { return r.Client.Do(context.Background(), args...).Err() }
	}
	for name, c := range map[string]struct {
		down, up func(r *testenv.RedisServer) error
	}{
		"killed": {
			func(r *testenv.RedisServer) error { return r.Kill() },
			func(r *testenv.RedisServer) error { return r.Start(context.Background()) },
		},
		"hanging": {
			func(r *testenv.RedisServer) error { return r.Signal(syscall.SIGSTOP) },
			func(r *testenv.RedisServer) error { return r.Signal(syscall.SIGCONT) },
		},
		"loading": {
			func(r *testenv.RedisServer) error { return loading(r, started) },
			func(r *testenv.RedisServer) error {
				return errors.Join(does("CONFIG", "SET", "key-load-delay", "0")(r), <-started)
			},
		},
		"full":     {does("CONFIG", "SET", "maxmemory", "1"), does("CONFIG", "SET", "maxmemory", "0")},
		"readonly": {does("REPLICAOF", "127.0.0.1", "1"), does("REPLICAOF", "NO", "ONE")},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := testenv.Redis(t)
			g := quickGuardOn(t, r.URL())
			wantOutcome(t, begin(t, g, request("before", "a")), Proceed)
			must(t, c.down(r))
			start := time.Now()
			for i := range 50 {
				d := begin(t, g, request(fmt.Sprint("down", i), "a"))
				wantGuarded(t, d, false)
				d.Ticket.Commit(t.Context(), result)
			}
			// Three calls to open the breaker, and one a second while it is open; each bounded.
			if took := time.Since(start); took > 4*callTimeout+10*time.Second { // without the breaker it would be 50 s
				t.Errorf("50 requests took %v", took)
			}
			must(t, c.up(r))
			i := 0
			testenv.Eventually(t, 30*time.Second, func() error {
				i++
				return testenv.FailIf(begin(t, g, request(fmt.Sprint("up", i), "a")).Ticket.Degraded(),
					"still degraded")
			})
		})
	}
}

// loading restarts a server with so much data that it answers LOADING for about 15 s, unless the load is sped up. Then
// started gets the result.
func loading(r *testenv.RedisServer, started chan error) error {
	ctx := context.Background()
	const fill = "for i=1,100000 do redis.call('SET','other'..i,1) end return 1"
	if err := r.Client.Eval(ctx, fill, nil).Err(); err != nil {
		return err
	}
	if err := r.Stop(); err != nil {
		return err
	}
	go func() { started <- r.Start(ctx, "key-load-delay 100") }()
	for {
		select {
		case err := <-started:
			return fmt.Errorf("it did not say that it is loading: %w", err)
		default:
		}
		if redis.HasErrorPrefix(r.Client.Ping(ctx).Err(), "LOADING") {
			return nil
		}
	}
}

// Batched publications have the same results as single ones, also if the server has lost the script.
func TestManyPublicationsAtOnce(t *testing.T) {
	t.Parallel()
	r := testenv.Redis(t)
	g := guardOn(t, r.URL())
	for round := range 5 {
		const n = 100
		tickets := make([]*Ticket, n)
		for i := range tickets {
			tickets[i] = begin(t, g, request(fmt.Sprint(round, " ", i), "a")).Ticket
		}
		r.Client.ScriptFlush(t.Context())
		var wg sync.WaitGroup
		for i, ticket := range tickets {
			wg.Go(func() { ticket.Commit(t.Context(), Record{Status: 201, Ref: fmt.Sprint(i)}) })
		}
		wg.Wait()
		for i, ticket := range tickets {
			rec, _, err := parseRecord(rawRecord(t, r.Client, ticket.key))
			if err != nil || rec.Ref != fmt.Sprint(i) {
				t.Fatalf("record %d: %+v, %v", i, rec, err)
			}
		}
	}
	testenv.Eventually(t, 20*time.Second, func() error {
		flying, waiting := g.node("").publications.State()
		return testenv.FailIf(flying+waiting != 0, "the queue is not at rest")
	})
}
