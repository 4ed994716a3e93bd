package api

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"posthaste/credits"
	"posthaste/idem"
	"posthaste/internal/lab/testenv"
	"posthaste/sql"
)

// childEnv carries the configuration of an API process that the test binary becomes.
const childEnv = "POSTHASTE_TEST_API_CHILD"

// childConfig configures the process, with the failpoint at which it sends itself a signal once.
type childConfig struct {
	Postgres, Redis string
	Lease           time.Duration
	Credits         bool
	Point           string
	Signal          syscall.Signal
}

// child runs the API until it is killed. It prints its address first.
func child(text string) error {
	var c childConfig
	if err := json.Unmarshal([]byte(text), &c); err != nil {
		return err
	}
	cfg, err := sql.OrderPoolConfig(c.Postgres, "public")
	if err != nil {
		return err
	}
	cfg.MaxConns = 8
	pool, err := pgxpool.NewWithConfig(context.Background(), cfg)
	if err != nil {
		return err
	}
	rdb, err := idem.NewClient(c.Redis)
	if err != nil {
		return err
	}
	o := Options{Pool: pool, Redis: patient(rdb), Lease: c.Lease}
	if c.Credits {
		client, connections, err := credits.NewClient(c.Redis)
		if err != nil {
			return err
		}
		o.Credits = credits.New(credits.Options{Redis: patient(client), Connections: connections, Pool: pool})
	}
	s, err := New(o)
	if err != nil {
		return err
	}
	if c.Point != "" {
		s.failpoint = once(c.Point, func(context.Context) { _ = syscall.Kill(os.Getpid(), c.Signal) })
	}
	l, err := (&net.ListenConfig{}).Listen(context.Background(), "tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	fmt.Println("http://" + l.Addr().String())
	return NewHTTPServer(s.Public()).Serve(l)
}

type process struct {
	*world
	cmd *exec.Cmd
}

// spawn starts a process on the world's servers.
func (w *world) spawn(c childConfig) *process {
	w.tb.Helper()
	c.Postgres, c.Redis = w.db.URL, w.redis.URL()
	text, err := json.Marshal(c)
	must(w.tb, err)
	exe, err := os.Executable()
	must(w.tb, err)
	cmd := exec.CommandContext(context.Background(), exe, "-test.run=^$")
	cmd.Env = append(os.Environ(), childEnv+"="+string(text))
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	must(w.tb, err)
	must(w.tb, cmd.Start())
	w.tb.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	url, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		w.tb.Fatalf("the API process did not start: %v", err)
	}
	return &process{&world{tb: w.tb, db: w.db, redis: w.redis, url: strings.TrimSpace(url)}, cmd}
}

// killed kills the process while its order is in Postgres, which does not notice and continues.
func (p *process) killed(g *testenv.Gate) {
	_ = p.cmd.Process.Kill()
	g.Open()
}

// servers are a world without an API.
func servers(tb testing.TB) *world {
	tb.Helper()
	return &world{tb: tb, db: testenv.Postgres(tb), redis: testenv.Redis(tb)}
}

// until repeats a request until the answer is 201, and returns that.
func (w *world) until(within time.Duration, key, body string) reply {
	w.tb.Helper()
	var r reply
	testenv.Eventually(w.tb, within, func() error {
		r = w.post(key, body, "Prefer", "wait=1")
		return testenv.FailIf(r.status != 201, "%s", r.String())
	})
	return r
}

func TestKilledAtAnyPointTheRetryGetsTheOneOrder(t *testing.T) {
	t.Parallel()
	const lease = 1500 * time.Millisecond
	for _, point := range []string{
		"before_acquire", "after_acquire", "before_insert", inPostgres, "after_commit", "before_publish",
		"after_publish",
	} {
		t.Run(point, func(t *testing.T) {
			t.Parallel()
			w := servers(t)
			victim := w.spawn(childConfig{Lease: lease, Point: point, Signal: syscall.SIGKILL})
			if point == inPostgres {
				w.whenSent(victim.killed)
			}
			other := w.spawn(childConfig{Lease: lease})
			key := newKey()
			r, err := send(t.Context(), "POST", victim.url+"/orders", orderJSON(1), idem.KeyHeader, key)
			if err == nil && point != "before_publish" && point != "after_publish" {
				t.Fatalf("the victim answered %v", r)
			}
			_ = victim.cmd.Wait()
			start := time.Now()
			again := other.until(lease+10*time.Second, key, orderJSON(1)) // the usual lease is longer
			t.Logf("answered after %v", time.Since(start))
			if r.body != "" && r.body != again.body {
				t.Errorf("%v, then %v", r, again)
			}
			w.checkInvariants(1)
		})
	}
}

// A suspended process resumes after another one did its work.
func TestAZombieThatWakesUpDoesNotOrderAgain(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name, point string
		forget      bool // Redis loses everything before the process resumes
	}{
		{"before its insert", "after_acquire", false},
		{"before it sends the order", "before_insert", false},
		{"with its order in Postgres", inPostgres, false},
		{"with Redis forgetting", "after_acquire", true},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			w := servers(t)
			const lease = 500 * time.Millisecond
			zombie := w.spawn(childConfig{Lease: lease, Point: c.point, Signal: syscall.SIGSTOP})
			if c.point == inPostgres {
				w.whenSent(func(g *testenv.Gate) {
					_ = zombie.cmd.Process.Signal(syscall.SIGSTOP)
					g.Open() // nothing keeps the order from being committed
				})
			}
			other := w.spawn(childConfig{Lease: lease})
			key := newKey()
			late := make(chan reply, 1)
			go func() {
				r, err := send(context.Background(), "POST", zombie.url+"/orders", orderJSON(1), idem.KeyHeader, key)
				testenv.ErrorIs(t, "the request to the zombie", err, nil)
				late <- r
			}()
			testenv.Eventually(t, 20*time.Second, func() error {
				stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", zombie.cmd.Process.Pid))
				return testenv.FailIf(err != nil || !strings.Contains(string(stat), ") T "), "not stopped: %w", err)
			})
			winner := other.until(15*time.Second, key, orderJSON(1))
			if c.forget {
				w.published()
				w.redis.Client.FlushAll(t.Context())
			}
			must(t, zombie.cmd.Process.Signal(syscall.SIGCONT))
			r := <-late
			if r.status == 503 && (r.code() == "temporarily_unavailable" || r.code() == "outcome_unknown") {
				// it was suspended for longer than an order may take, so it did nothing or returned an unknown outcome
				r = zombie.post(key, orderJSON(1))
			}
			r.same(t, "the zombie", winner)
			other.post(key, orderJSON(1)).same(t, "afterwards", winner)
			w.checkInvariants(1)
		})
	}
}

// A thousand requests with one key over three processes all get the same reply, and one gets it as the first unless the
// outcome of an attempt was unknown.
func TestAThousandRequestsOverThreeProcesses(t *testing.T) {
	t.Parallel()
	w := servers(t)
	procs := []*process{w.spawn(childConfig{}), w.spawn(childConfig{}), w.spawn(childConfig{})}
	key := newKey()
	replies := make([]reply, 1000)
	dark := make([]bool, len(replies))
	var wg sync.WaitGroup
	for i := range replies {
		wg.Go(func() { replies[i], dark[i] = procs[i%3].insist(key, orderJSON(7)) })
	}
	wg.Wait()
	originals := 0
	for i, r := range replies {
		if r.status != 201 || r.body != replies[0].body {
			t.Fatalf("reply %d: %v, others got %v", i, r, replies[0])
		}
		if r.header.Get("Idempotent-Replayed") == "false" {
			originals++
		}
	}
	if originals != 1 && (originals > 1 || !slices.Contains(dark, true)) {
		t.Errorf("%d replies say they are the first", originals)
	}
	w.checkInvariants(1)
}

func TestManyKeysWithDuplicatesShuffled(t *testing.T) {
	t.Parallel()
	w := servers(t)
	procs := []*process{w.spawn(childConfig{}), w.spawn(childConfig{})}
	const copies = 8
	keys := scale(10_000, 150)
	names := make([]string, keys)
	for i := range names {
		names[i] = newKey()
	}
	var mu sync.Mutex
	bodies := map[string]string{}
	work := make(chan int)
	var wg sync.WaitGroup
	for worker := range 24 {
		wg.Go(func() {
			for i := range work {
				key := names[i%keys]
				r, _ := procs[(worker+i)%2].insist(key, orderJSON(i%keys+1))
				mu.Lock()
				if first, ok := bodies[key]; r.status != 201 || (ok && first != r.body) {
					t.Errorf("%v, before it %s", r, first)
				}
				bodies[key] = r.body
				mu.Unlock()
			}
		})
	}
	for i := range keys * copies {
		work <- i * 7919 % (keys * copies) // a fixed shuffle
	}
	close(work)
	wg.Wait()
	w.checkInvariants(keys)
}

// Whatever happens to Redis under load, no request fails, and nothing is ordered twice.
func TestRedisTroubleUnderLoad(t *testing.T) {
	t.Parallel()
	w := newWorld(t, impatient(t))
	other := w.sibling(impatient(t))
	var stopped atomic.Bool
	var mu sync.Mutex
	n := 0
	var wg sync.WaitGroup
	for range 6 {
		wg.Go(func() {
			for !stopped.Load() {
				key := newKey()
				a := w.post(key, orderJSON(1), "Prefer", "wait=10")
				b := other.post(key, orderJSON(1), "Prefer", "wait=10")
				mu.Lock()
				n++
				if a.status != 201 || b.status != 201 || a.body != b.body {
					t.Errorf("%v, then %v", a, b)
				}
				mu.Unlock()
			}
		})
	}
	grow := func() {
		mu.Lock()
		from := n
		mu.Unlock()
		testenv.Eventually(t, 20*time.Second, func() error {
			mu.Lock()
			defer mu.Unlock()
			return testenv.FailIf(n < from+scale(50, 20), "no progress")
		})
	}
	ctx := context.Background()
	for _, trouble := range []func() error{
		func() error { return w.redis.Client.FlushAll(ctx).Err() },
		func() error { return w.redis.Client.ScriptFlush(ctx).Err() },
		func() error { return w.redis.Client.ConfigSet(ctx, "maxmemory", "1").Err() },
		func() error { return w.redis.Client.ConfigSet(ctx, "maxmemory", "0").Err() },
		func() error { return w.redis.Client.Do(ctx, "REPLICAOF", "127.0.0.1", "1").Err() },
		func() error { return w.redis.Client.Do(ctx, "REPLICAOF", "NO", "ONE").Err() },
		func() error { return w.redis.Client.ConfigSet(ctx, "min-replicas-to-write", "1").Err() },
		func() error { return w.redis.Client.ConfigSet(ctx, "min-replicas-to-write", "0").Err() },
		func() error { return w.redis.Signal(syscall.SIGSTOP) },
		func() error { return w.redis.Signal(syscall.SIGCONT) },
		func() error { return w.redis.Kill() },
		func() error { return w.redis.Start(ctx) },
	} {
		grow()
		must(t, trouble())
	}
	grow()
	stopped.Store(true)
	wg.Wait()
	w.checkInvariants(n)
}
