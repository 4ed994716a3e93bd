package idem

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/sony/gobreaker/v2"

	"posthaste/internal/testenv"
)

// commandHook sees every command of a client before it leaves, and may change its arguments in place or refuse it.
type commandHook func(args []any) error

func (h commandHook) DialHook(next redis.DialHook) redis.DialHook { return next }

func (h commandHook) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		if err := h(cmd.Args()); err != nil {
			cmd.SetErr(err)
			return err
		}
		return next(ctx, cmd)
	}
}

func (h commandHook) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

// Each part of the guard around its scripts, left out on purpose: the promise it is there for is broken then, and only
// then.
func TestWeakenedGuards(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name   string
		broken func(t *testing.T, weak bool) bool
	}{
		{"scripts that are only sent by their hash do not survive SCRIPT FLUSH", unhealed},
		{"without the breaker every request pays for a dead server", untripped},
		{"a server that evicts forgets who is at work", evicted},
		{"the client's key as the record's name overwrites strangers' data", rawKey},
		{"a key without its scope gives one user another's receipt", unscoped},
		{"parts without their lengths run into each other", unprefixed},
		{"without the limit a long body fills Redis", unlimited},
		{"without the release a failed request blocks its retry", unreleased},
		{"without the publication a finished request runs again", unpublished},
		{"with the client's context a hang-up cuts the work", attached},
		{"waiters that poll on their own flood Redis", alone},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			for _, weak := range []bool{false, true} {
				if got := c.broken(t, weak); got != weak {
					t.Errorf("weakened: %v, broken: %v", weak, got)
				}
			}
		})
	}
}

func unhealed(t *testing.T, weak bool) bool {
	r := testenv.Redis(t, "appendonly no")
	g := guardOn(t, r.URL())
	g.client.AddHook(commandHook(func(args []any) error {
		return testenv.FailIf(weak && args[0] == "eval", "not sent")
	}))
	return begin(t, g, request("k", "a")).Ticket.Degraded()
}

func untripped(t *testing.T, weak bool) bool {
	r := testenv.Redis(t, "appendonly no")
	g := guardOn(t, r.URL())
	if weak {
		g.node("").breaker = gobreaker.NewCircuitBreaker[any](gobreaker.Settings{
			ReadyToTrip: func(gobreaker.Counts) bool { return false },
		})
	}
	var mu sync.Mutex
	sent := 0
	g.client.AddHook(commandHook(func([]any) error {
		mu.Lock()
		defer mu.Unlock()
		sent++
		return nil
	}))
	must(t, r.Kill())
	for i := range 50 {
		wantOutcome(t, begin(t, g, request(fmt.Sprint(i), "a")), Proceed)
	}
	return sent == 50
}

func evicted(t *testing.T, weak bool) bool {
	policy := "noeviction"
	if weak {
		policy = "allkeys-lru"
	}
	r := testenv.Redis(t, "appendonly no", "maxmemory-policy "+policy)
	g := guardOn(t, r.URL())
	ticket := begin(t, g, request("k", "a")).Ticket
	must(t, r.Client.ConfigSet(t.Context(), "maxmemory", "3mb").Err())
	// Other services' data. A full server without eviction refuses it. All keys have the same age on a clock of
	// seconds, so an evicting server chooses at random: there is room for about forty, with a thousand choices.
	for i := range 1000 {
		_ = r.Client.Set(t.Context(), fmt.Sprint("other ", i), strings.Repeat("x", 50_000), 0).Err()
	}
	return rawRecord(t, r.Client, ticket.key) == ""
}

func rawKey(t *testing.T, weak bool) bool {
	const name = "session:admin:0001"
	r := testenv.Redis(t, "appendonly no")
	r.Client.Set(t.Context(), name, "secret", 0)
	g := guardOn(t, r.URL())
	g.client.AddHook(commandHook(func(args []any) error {
		if weak && strings.HasPrefix(args[0].(string), "eval") {
			args[3] = name
		}
		return nil
	}))
	post(g, HTTPOptions{}, "u", name, func(w http.ResponseWriter,
		_ *http.Request,
	) {
		w.WriteHeader(http.StatusCreated)
	})
	return r.Client.Get(t.Context(), name).Val() != "secret"
}

func unscoped(t *testing.T, weak bool) bool {
	r := testenv.Redis(t, "appendonly no")
	o := HTTPOptions{}
	if weak {
		o.Scope = func(*http.Request) string { return "everybody" }
	}
	g := guardOn(t, r.URL())
	receipt := func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.WriteString(w, "receipt of "+r.Header.Get("User"))
	}
	post(g, o, "alice", clientKey, receipt)
	return post(g, o, "bob", clientKey, receipt) == "receipt of alice"
}

func unprefixed(_ *testing.T, weak bool) bool {
	name := NewKey
	if weak {
		name = func(parts ...string) Key { return NewKey(strings.Join(parts, "")) }
	}
	return name("user1", "POST", "/t", "1234") == name("user", "1POST", "/t", "1234")
}

func unlimited(t *testing.T, weak bool) bool {
	r := testenv.Redis(t, "appendonly no")
	o := HTTPOptions{}
	if weak {
		o.MaxInline = 1 << 30
	}
	post(guardOn(t, r.URL()), o, "u", clientKey, func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, strings.Repeat("x", 1<<20))
	})
	return len(rawRecord(t, r.Client, NewKey("u", http.MethodPost, "/t", clientKey))) > DefaultMaxInline+512
}

func unreleased(t *testing.T, weak bool) bool {
	again := runsAgain(t, http.StatusServiceUnavailable, func(g *Guard) {
		if weak {
			g.scripts[scriptRelease] = redis.NewScript("return 'OK'")
		}
	})
	return !again
}

func unpublished(t *testing.T, weak bool) bool {
	return runsAgain(t, http.StatusCreated, func(g *Guard) {
		g.lease = 50 * time.Millisecond
		if weak {
			g.scripts[scriptPublish] = redis.NewScript("return 'OK'")
		}
	})
}

// runsAgain reports whether a second request runs the handler, after the first was answered with status.
func runsAgain(t *testing.T, status int, edit func(*Guard)) bool {
	t.Helper()
	r := testenv.Redis(t, "appendonly no")
	g := guardOn(t, r.URL())
	edit(g)
	runs := 0
	for range 2 {
		post(g, HTTPOptions{}, "u", clientKey, func(w http.ResponseWriter, _ *http.Request) {
			runs++
			w.WriteHeader(status)
		})
	}
	return runs == 2
}

func attached(t *testing.T, weak bool) bool {
	type clients struct{}
	r := testenv.Redis(t, "appendonly no")
	started, cut := make(chan struct{}), make(chan bool, 1)
	g := guardOn(t, r.URL())
	guarded := g.Handler(options(HTTPOptions{}), http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		ctx, client := r.Context(), r.Context().Value(clients{}).(context.Context)
		if weak {
			ctx = client
		}
		close(started)
		<-client.Done()
		cut <- ctx.Err() != nil
	}))
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		guarded.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), clients{}, r.Context())))
	}))
	t.Cleanup(s.Close)
	ctx, hangUp := context.WithCancel(t.Context())
	go func() {
		<-started
		hangUp()
	}()
	if res, err := s.Client().Do(posting(ctx, s.URL, "u", clientKey)); err == nil {
		_ = res.Body.Close()
		t.Error("the client was answered")
	}
	return <-cut
}

func alone(t *testing.T, weak bool) bool {
	const waiters = 50
	r := testenv.Redis(t, "appendonly no")
	owner := begin(t, guardOn(t, r.URL()), request("k", "a")).Ticket
	shared := guardOn(t, r.URL())
	guards := make([]*Guard, waiters)
	var wg sync.WaitGroup
	for i := range guards {
		if guards[i] = shared; weak {
			guards[i] = Patient(New(Options{Redis: shared.client, Routes: []string{"/t"}}))
		}
		wg.Go(func() {
			req := request("k", "a")
			req.Wait = 20 * time.Second
			begin(t, guards[i], req)
		})
	}
	testenv.Eventually(t, 15*time.Second, func() error {
		n := waiting(shared, owner.key)
		if weak {
			for _, g := range guards {
				n += waiting(g, owner.key)
			}
		}
		return testenv.FailIf(n < waiters, "not all wait yet")
	})
	before, start := calls(t, r, "get"), time.Now()
	testenv.Eventually(t, 20*time.Second, func() error { // the leader's pauses, or every waiter's
		return testenv.FailIf(time.Since(start) < 400*time.Millisecond, "polls are being counted")
	})
	polls, took := calls(t, r, "get")-before, time.Since(start)
	owner.Commit(t.Context(), result)
	wg.Wait()
	// A leader polls at least every 100 to 200 ms at the end, a few times more at the start; waiters on their own a
	// hundred times in these 400 ms, however long the machine makes of them.
	return polls > 20+int(took/(pollLast/2))
}

const clientKey = "0123456789abcdef"

func options(o HTTPOptions) HTTPOptions {
	o.Route = "/t"
	if o.Scope == nil {
		o.Scope = func(r *http.Request) string { return r.Header.Get("User") }
	}
	return o
}

// posting is a guarded request.
func posting(ctx context.Context, url, user, key string) *http.Request {
	req := httptest.NewRequestWithContext(ctx, http.MethodPost, url+"/t", strings.NewReader("x"))
	req.RequestURI = "" // set for servers; clients refuse it
	req.Header.Set("User", user)
	req.Header.Set(KeyHeader, key)
	req.Header.Set("Prefer", "wait=1")
	return req
}

// post returns the body once the request is over, its publication included.
func post(g *Guard, o HTTPOptions, user, key string, h http.HandlerFunc) string {
	rec := httptest.NewRecorder()
	g.Handler(options(o), h).ServeHTTP(rec, posting(context.Background(), "", user, key))
	return rec.Body.String()
}
