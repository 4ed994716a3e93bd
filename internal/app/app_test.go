package app_test

import (
	"context"
	"errors"
	"net"
	"net/http"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"posthaste/internal/app"
	"posthaste/internal/cli"
	"posthaste/internal/lab/testenv"
)

func TestMain(m *testing.M) { os.Exit(testenv.Main(m)) }

// config is the default configuration with servers of the test's own, on free ports.
func config(t *testing.T) app.Config {
	t.Helper()
	db := testenv.Postgres(t)
	s := defaults(t)
	s.PostgresURL, s.RedisURL, s.RelayName = db.URL, testenv.Redis(t).URL(), db.Relay
	s.HTTPAddr, s.AdminAddr = "127.0.0.1:0", "127.0.0.1:0"
	c, err := s.Parse()
	must(t, err)
	c.Version = "test"
	return c
}

// The guard keeps its records in the Redis of its setting, and in no other.
func TestTheGuardHasARedisOfItsOwn(t *testing.T) {
	t.Parallel()
	c := config(t)
	guard, other := testenv.Redis(t), testenv.Redis(t)
	c.GuardRedisURL, c.RedisURL = guard.URL(), other.URL()
	serve, err := app.NewServe(t.Context(), c, testenv.Logger(t))
	must(t, err)
	stop := testenv.Background(t, serve.Run)
	a, err := testenv.Request(t.Context(), http.MethodPost, "http://"+serve.PublicAddr().String()+"/orders",
		`{"user_id":"01937c6e-5d0c-7c3a-9d1e-0f5a3c8b2e71","amount":100,"currency":"USD"}`,
		"Idempotency-Key", `"a-key-of-the-guard"`)
	must(t, err)
	if by := a.Header.Get("Idempotency-Guard"); a.Status != http.StatusCreated || by == "db" {
		t.Errorf("status %d, guarded by %q", a.Status, by)
	}
	keys := func(r *testenv.RedisServer) int { return len(r.Client.Keys(t.Context(), "i:*").Val()) }
	testenv.Becomes(t, "records in the guard's Redis", 1, func() int { return keys(guard) })
	testenv.Equal(t, "records in the other one", keys(other), 0)
	if err := stop(); err != nil && !errors.Is(err, context.Canceled) {
		t.Errorf("ended with %v", err)
	}
}

// A relay without its servers names the sink that it publishes to, and GET /relay does.
func TestRelayNamesItsSink(t *testing.T) {
	t.Parallel()
	for name, url := range map[string]string{"redis": "", "nats": "nats://127.0.0.1:1"} {
		c := config(t)
		c.RedisURL, c.SinkURL = "redis://127.0.0.1:1", url
		relay, err := app.NewRelay(t.Context(), c, testenv.Logger(t))
		must(t, err)
		stop := testenv.Background(t, relay.Run)
		at := "http://" + relay.AdminAddr().String()
		for path, want := range map[string]string{
			"/readyz": `"` + name + `: `,
			"/relay":  map[string]string{"redis": "Redis", "nats": "NATS"}[name] + " does not take events",
		} {
			testenv.Eventually(t, 20*time.Second, func() error {
				a, err := testenv.Request(t.Context(), http.MethodGet, at+path, "")
				must(t, err)
				return testenv.FailIf(!strings.Contains(string(a.Body), want), "%s of %s: %s", path, name, a.Body)
			})
		}
		must(t, stop())
	}
}

// Any client that reaches a listener beyond loopback could read and change everything.
func TestAnAdminListenerForEverybodyIsAskedFor(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(c *app.Config){
		"nothing": func(*app.Config) {},
		"token":   func(c *app.Config) { c.AdminToken = "secret" },
		"open":    func(c *app.Config) { c.AdminOpen = "on" },
		"TLS":     func(c *app.Config) { c.AdminTLS = adminTLS(t, false).AdminTLS },
		"mTLS": func(c *app.Config) {
			with := adminTLS(t, true)
			c.AdminTLS, c.AdminClientCA = with.AdminTLS, with.AdminClientCA
		},
	} {
		c := config(t)
		c.AdminAddr = "0.0.0.0:0"
		change(&c)
		serve, err := app.NewServe(t.Context(), c, testenv.Logger(t))
		if err == nil {
			serve.Close()
		}
		var usage *cli.UsageError
		if refused := errors.As(err, &usage) && strings.Contains(err.Error(), "--admin-open=on"); refused !=
			(name == "nothing" || name == "TLS") || !refused && err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// EachRegistry needs no server.
func TestEachRegistry(t *testing.T) {
	t.Parallel()
	c, err := defaults(t).Parse()
	must(t, err)
	c.PostgresURL, c.RedisURL = "postgres://127.0.0.1:1/none", "redis://127.0.0.1:1"
	var names []string
	err = app.EachRegistry(t.Context(), c, func(process string, reg *prometheus.Registry) error {
		names = append(names, process)
		families, err := reg.Gather()
		for _, f := range families {
			if f.GetName() == "posthaste_build_info" {
				return err
			}
		}
		return errors.Join(err, errors.New(process+" does not say which build it is"))
	})
	if err != nil || strings.Join(names, " ") != "serve relay consume deliver" {
		t.Errorf("%v, of %q", err, names)
	}
	stop := errors.New("stop")
	err = app.EachRegistry(t.Context(), c, func(string, *prometheus.Registry) error { return stop })
	testenv.ErrorIs(t, "an error that is to be returned", err, stop)
}

// A server answers the requests in flight before it ends.
func TestServeHTTPDrains(t *testing.T) {
	t.Parallel()
	l, err := app.Listen(t.Context(), "127.0.0.1:0")
	must(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	srv := &http.Server{ReadHeaderTimeout: time.Second, Handler: http.HandlerFunc(func(w http.ResponseWriter,
		_ *http.Request,
	) {
		cancel()
		<-ctx.Done()
		w.WriteHeader(http.StatusTeapot)
	})}
	done := make(chan error, 1)
	go func() { done <- app.ServeHTTP(ctx, srv, l, 10*time.Second) }()
	testenv.Equal(t, "status", get(t, "http://"+l.Addr().String()), http.StatusTeapot)
	testenv.ErrorIs(t, "the end", <-done, nil)
	if _, err := l.Accept(); !errors.Is(err, net.ErrClosed) { // another process may have its port already
		t.Errorf("it still listens: %v", err)
	}
}

// get returns the status of the answer to a GET.
func get(t *testing.T, url string) int {
	t.Helper()
	a, err := testenv.Request(t.Context(), http.MethodGet, url, "")
	must(t, err)
	return a.Status
}

var must = testenv.Must

func TestOneProcessor(t *testing.T) {
	const name = "GOMAXPROCS"
	before := runtime.GOMAXPROCS(3)
	defer runtime.GOMAXPROCS(before)
	t.Setenv(name, "3")
	undo := app.OneProcessor()
	testenv.Equal(t, "processors that the environment names", runtime.GOMAXPROCS(0), 3)
	undo()
	_ = os.Unsetenv(name) // Setenv restores it
	undo = app.OneProcessor()
	testenv.Equal(t, "processors", runtime.GOMAXPROCS(0), 1)
	undo()
	testenv.Equal(t, "processors after all", runtime.GOMAXPROCS(0), 3)
}
