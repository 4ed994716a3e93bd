package sink_test

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"posthaste/internal/lab/testenv"
	"posthaste/outbox"
	"posthaste/sink"
)

// Every class is provoked on a server that really is in that state. Nothing may be published meanwhile, nothing may be
// poison, and everything must be published once when the state ends.
func TestEveryClassPasses(t *testing.T) {
	t.Parallel()
	do := func(args ...any) func(f *fixture) { return func(f *fixture) { f.do(args...) } }
	set := func(name, value string) func(f *fixture) { return do("CONFIG", "SET", name, value) }
	user := func(rules ...any) func(f *fixture) {
		return do(append([]any{"ACL", "SETUSER", "default"}, rules...)...)
	}
	for _, c := range []struct {
		class      string
		config     []string
		begin, end func(f *fixture)
	}{
		{class: "oom", begin: set("maxmemory", "1"), end: set("maxmemory", "0")},
		{class: "readonly", begin: do("REPLICAOF", "127.0.0.1", "1"), end: do("REPLICAOF", "NO", "ONE")},
		{
			class: "masterdown", config: []string{"replica-serve-stale-data no"},
			begin: do("REPLICAOF", "127.0.0.1", "1"), end: do("REPLICAOF", "NO", "ONE"),
		},
		{class: "noreplicas", begin: set("min-replicas-to-write", "1"), end: set("min-replicas-to-write", "0")},
		{
			class: "misconf", config: []string{"save 3600 1000000"},
			begin: (*fixture).failSnapshot, end: (*fixture).repairSnapshot,
		},
		{
			class:  "loading",
			config: []string{"enable-debug-command yes", "loading-process-events-interval-bytes 1024"},
			begin:  (*fixture).reload, end: set("key-load-delay", "0"),
		},
		{
			class: "busy", config: []string{"busy-reply-threshold 1"},
			begin: (*fixture).busy, end: do("SCRIPT", "KILL"),
		},
		{class: "noperm", begin: user("-evalsha", "-eval"), end: user("+@all")},
		{class: "noperm", begin: user("-xadd"), end: user("+@all")},
		{class: "noperm", begin: user("resetkeys", "~elsewhere"), end: user("allkeys")},
		{
			class: "gatetype",
			begin: func(f *fixture) { f.do("RENAME", f.gate(), "{outbox.order}:aside"); f.do("SET", f.gate(), "x") },
			end:   func(f *fixture) { f.do("RENAME", "{outbox.order}:aside", f.gate()) },
		},
	} {
		t.Run(c.class, func(t *testing.T) {
			t.Parallel()
			f := newFixture(t, c.config...)
			l := f.lane(f.adopted(1))
			events := makeEvents(6)
			f.Publish(l, events[:2]...)
			c.begin(f)
			d := l.Deliver(events[2:])
			testenv.Eventually(t, 20*time.Second, func() error {
				ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
				defer cancel()
				_, err := d.Publish(ctx)
				if sink.Class(err) != c.class {
					return fmt.Errorf("class %q of %w, want %q", sink.Class(err), err, c.class)
				}
				// The user may have lost the rights to one stream only.
				if want := c.class == "noperm" || c.class == "gatetype"; outbox.Alone(err) != want {
					t.Errorf("%v is about one stream: %v", err, !want)
				}
				return nil
			})
			if slices.Contains([]string{"oom", "readonly", "noreplicas", "misconf"}, c.class) {
				wantNotReady(t, f.sink.Ready(t.Context()), "not_writable")
			}
			c.end(f)
			r := retry(t, d, c.class)
			f.Must(f.sink.Ready(t.Context()))
			f.wantStored(events...)
			f.wantLast(r)
			if n := f.metric("outbox_publish_errors_total", "class", c.class); n == 0 {
				t.Error("not counted")
			}
		})
	}
}

// failSnapshot makes a snapshot fail: its file cannot be put in the place of a folder.
func (f *fixture) failSnapshot() {
	f.Helper()
	f.Must(os.Mkdir(filepath.Join(f.server.Dir, "dump.rdb"), 0o700))
	f.snapshot("err")
}

func (f *fixture) repairSnapshot() {
	f.Helper()
	f.Must(os.Remove(filepath.Join(f.server.Dir, "dump.rdb")))
	f.snapshot("ok")
}

func (f *fixture) snapshot(want string) {
	f.Helper()
	testenv.Eventually(f, 20*time.Second, func() error {
		_ = f.server.Client.BgSave(f.Context()).Err()
		info, err := f.server.Client.Info(f.Context(), "persistence").Result()
		if err == nil && !strings.Contains(info, "rdb_last_bgsave_status:"+want) {
			err = errors.New("no snapshot yet")
		}
		return err
	})
}

// reload makes the server load its data again, which takes some seconds unless it is sped up.
func (f *fixture) reload() {
	f.Helper()
	pipe := f.server.Client.Pipeline()
	for i := range 400 {
		pipe.Set(f.Context(), fmt.Sprintf("filler:%d", i), strings.Repeat("x", 200), 0)
	}
	_, err := pipe.Exec(f.Context())
	f.Must(err)
	f.do("CONFIG", "SET", "key-load-delay", "10000")
	f.background("DEBUG", "RELOAD")
	f.waitFor("LOADING")
}

func (f *fixture) busy() {
	f.Helper()
	f.background("EVAL", "while true do end", "0")
	f.waitFor("BUSY")
}

// waitFor waits until the server answers with the error.
func (f *fixture) waitFor(prefix string) {
	f.Helper()
	testenv.Eventually(f, 20*time.Second, func() error {
		err := f.server.Client.Ping(f.Context()).Err()
		return testenv.FailIf(!redis.HasErrorPrefix(err, prefix), "got %w, want %s", err, prefix)
	})
}

// background runs a command on a connection of its own until the test ends.
func (f *fixture) background(args ...any) {
	c := redis.NewClient(&redis.Options{
		Addr: f.server.Addr(), Protocol: 2, ReadTimeout: 20 * time.Second,
		MaxRetries: -1,
	})
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = c.Do(context.WithoutCancel(f.Context()), args...).Err()
	}()
	f.Cleanup(func() {
		_ = c.Close()
		<-done
	})
}

func TestClassesOfConnecting(t *testing.T) {
	t.Parallel()
	attemptBy := func(t *testing.T, c redis.UniversalClient, class string) {
		t.Helper()
		s, reg := newSink(t, c, sink.Options{})
		o := outbox.Owner{Source: [16]byte{1}, Epoch: 1, Nonce: nonce()}
		testenv.Eventually(t, 20*time.Second, func() error {
			err := s.Adopt(t.Context(), stream, o, false)
			if sink.Class(err) != class {
				return fmt.Errorf("class %q of %w, want %q", sink.Class(err), err, class)
			}
			if strings.Contains(err.Error(), "geheim") {
				t.Fatalf("the error tells the password: %v", err)
			}
			if class == "other" { // nothing that a check needs
				return nil
			}
			if err := s.Check(t.Context(), o, []string{stream}); sink.Class(err) != class { // a pipeline
				return fmt.Errorf("check: class %q of %w, want %q", sink.Class(err), err, class)
			}
			before, _ := lookup(t, reg, "outbox_publish_errors_total", "class", class)
			_, err = s.Look(t.Context(), o.Source, []string{stream}, nil)
			if after, _ := lookup(t, reg, "outbox_publish_errors_total", "class", class); sink.Class(err) != class ||
				after != before+1 {
				return fmt.Errorf("look: class %q of %w, want %q; counted %v times", sink.Class(err), err, class,
					after-before)
			}
			return nil
		})
	}
	attempt := func(t *testing.T, url, class string) {
		t.Helper()
		attemptBy(t, dial(t, url), class)
	}
	t.Run("noauth", func(t *testing.T) {
		t.Parallel()
		server := testenv.Redis(t, "requirepass secret")
		attempt(t, server.URL(), "noauth")
		attempt(t, "redis://:geheim@"+server.Addr(), "noauth")
	})
	t.Run("connection", func(t *testing.T) {
		t.Parallel()
		server := testenv.Redis(t)
		_ = server.Kill()
		attempt(t, "redis://:geheim@"+server.Addr(), "connection")
	})
	t.Run("other", func(t *testing.T) {
		t.Parallel()
		attempt(t, testenv.Redis(t, `rename-command HGETALL ""`).URL(), "other")
	})
	t.Run("clusterdown", func(t *testing.T) {
		t.Parallel()
		attemptBy(t, alone(t, testenv.Redis(t, "cluster-enabled yes")), "clusterdown")
	})
}

// alone is a client of one node of a cluster, which follows it nowhere.
func alone(t *testing.T, server *testenv.RedisServer) *redis.Client {
	t.Helper()
	o := &redis.UniversalOptions{Addrs: []string{server.Addr()}}
	sink.Configure(o)
	c := redis.NewClient(o.Simple())
	t.Cleanup(func() { _ = c.Close() })
	return c
}

func TestTimeoutAndCancel(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	o := f.adopted(1)
	p := testenv.NewLink(t, f.server.Addr())
	l := f.through(p).Lane(stream, o, streamLane(o))
	p.Set(testenv.Trouble{Delay: 2000 * time.Millisecond})
	d := l.Deliver(makeEvents(1))
	// The client's own limits are seconds, every time; the machine may take one once.
	testenv.Eventually(t, 20*time.Second, func() error {
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		defer cancel()
		start := time.Now()
		wantClass(t, second(d.Publish(ctx)), "timeout")
		took := time.Since(start)
		return testenv.FailIf(took > time.Second, "a context of 50 ms took %v", took)
	})
	canceled, cancelNow := context.WithCancel(t.Context())
	cancelNow()
	wantClass(t, second(d.Publish(canceled)), "canceled")
	if got := sink.Class(nil); got != "" {
		t.Errorf("class %q of nil", got)
	}
}

func TestNewClientKeepsThePasswordToItself(t *testing.T) {
	t.Parallel()
	if _, err := sink.NewClient("redis://:geheim@localhost/geheim"); err == nil ||
		strings.Contains(err.Error(), "gehe") {
		t.Errorf("the password is accepted, or told: %v", err)
	}
	for _, url := range []string{"redis://localhost:6379/2", "rediss://u:p@localhost", "unix:///run/redis.sock"} {
		o := dial(t, url).(*redis.Client).Options()
		if o.MaxRetries != 0 || !o.ContextTimeoutEnabled || o.Protocol != 2 || o.PoolSize < 64 {
			t.Errorf("%s: retries %d, context timeouts %v, protocol %d, %d connections", url, o.MaxRetries,
				o.ContextTimeoutEnabled, o.Protocol, o.PoolSize)
		}
	}
}

// Nothing is sent in plain text for the order in which options were set.
func TestTLSThatIsAskedForAfterTheRest(t *testing.T) {
	t.Parallel()
	ca := testenv.NewCA(t)
	server := testenv.RedisTLS(t, ca)
	o := &redis.UniversalOptions{Addrs: []string{server.Addr()}}
	sink.Configure(o)
	o.TLSConfig = &tls.Config{Certificates: []tls.Certificate{ca.Pair(t)}, RootCAs: ca.Pool}
	c := redis.NewUniversalClient(o)
	defer c.Close()
	if err := c.Ping(t.Context()).Err(); err != nil {
		t.Error(err)
	}
	o.TLSConfig.RootCAs = testenv.NewCA(t).Pool
	other := redis.NewUniversalClient(o)
	defer other.Close()
	if err := other.Ping(t.Context()).Err(); err == nil {
		t.Error("a certificate of somebody else is accepted")
	}
}

func TestEveryClassHasASeriesFromTheStart(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	for _, class := range []string{
		"oom", "wrongtype", "too_large", "timeout", "connection", "durability", "gap", "fenced",
		"foreign", "other",
	} {
		if _, ok := lookup(t, f.reg, "outbox_publish_errors_total", "class", class); !ok {
			t.Errorf("no series for %s", class)
		}
	}
	if _, ok := lookup(t, f.reg, "outbox_suppressed_total", "reason", "doubt"); !ok {
		t.Error("no series for doubt")
	}
}
