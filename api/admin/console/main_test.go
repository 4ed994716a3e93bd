package console_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/go-redis/v9"

	"posthaste/api/admin"
	"posthaste/api/admin/console"
	"posthaste/cdc"
	"posthaste/internal/ops"
	"posthaste/internal/testenv"
	"posthaste/sink"
	"posthaste/sql"
)

func TestMain(m *testing.M) { os.Exit(testenv.Main(m)) }

type world struct {
	t     *testing.T
	db    *testenv.Database
	redis *testenv.RedisServer
	url   string
	csrf  string
}

// newWorld runs a console as serve does: on real servers, behind the admin listener, without a relay.
func newWorld(t *testing.T, change func(o *console.Options)) *world {
	t.Helper()
	w := &world{t: t, db: testenv.Postgres(t), redis: testenv.Redis(t)}
	config, err := sql.PoolConfig(w.db.URL, "public", "console")
	must(t, err)
	config.MaxConns = console.Conns
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	must(t, err)
	t.Cleanup(pool.Close)
	client, err := sink.NewClient(w.redis.URL())
	must(t, err)
	t.Cleanup(func() { _ = client.Close() })
	slots, err := cdc.NewSlots(cdc.Options{Pool: pool, Slot: "posthaste_" + w.db.Relay})
	must(t, err)
	metrics := prometheus.NewRegistry()
	o := console.Options{
		Kind: "serve", RelayName: w.db.Relay, StreamPrefix: "outbox.", Pool: pool, Redis: client, Slots: slots,
		Metrics: metrics,
		Doctor: ops.DoctorOptions{
			PostgresURL: w.db.URL, Redis: &redis.UniversalOptions{Addrs: []string{w.redis.Addr()}},
			Schema: "public", RelayName: w.db.Relay, Slot: "posthaste_" + w.db.Relay,
			Publication: "posthaste", WALBudget: 1 << 30, StreamMaxlen: 1000, History: time.Hour,
			Restore: time.Hour,
		},
		Logger: testenv.Logger(t),
	}
	if change != nil {
		change(&o)
	}
	c := console.New(o)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	go func() { done <- c.Run(ctx) }()
	srv := httptest.NewUnstartedServer(admin.Handler(admin.Options{
		Source: ops.Source{Pool: pool, RelayName: w.db.Relay, Slots: slots},
		Ready:  http.NotFoundHandler(), Gatherer: metrics, Console: c,
	}))
	srv.Config.ReadTimeout = 2 * time.Second // shorter than the stream
	srv.Config.IdleTimeout = time.Minute     // longer than any pause between requests
	srv.Start()
	w.url = srv.URL
	t.Cleanup(func() {
		cancel() // disconnects the viewers; otherwise the server could not close
		if err := <-done; err != nil {
			t.Error(err)
		}
		srv.Close()
	})
	var session struct{ CSRF string }
	if status := w.get("/console/api/session", &session); status != 200 || session.CSRF == "" {
		t.Fatalf("session: %d", status)
	}
	w.csrf = session.CSRF
	return w
}

func (w *world) get(path string, into any) int {
	w.t.Helper()
	status, body := w.call("GET", path, "")
	if into != nil {
		if err := json.Unmarshal([]byte(body), into); err != nil {
			w.t.Fatalf("%s: %v: %s", path, err, body)
		}
	}
	return status
}

func (w *world) call(method, path, body string, header ...string) (int, string) {
	w.t.Helper()
	a, err := testenv.Request(w.t.Context(), method, w.url+path, body, header...)
	must(w.t, err)
	return a.Status, string(a.Body)
}

type viewer struct {
	resp  *http.Response
	lines *bufio.Scanner
}

func (w *world) view() *viewer {
	w.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, w.url+"/console/api/stream", nil)
	must(w.t, err)
	resp, err := http.DefaultClient.Do(req)
	must(w.t, err)
	w.t.Cleanup(func() { cancel(); resp.Body.Close() })
	v := &viewer{resp: resp, lines: bufio.NewScanner(resp.Body)}
	v.lines.Buffer(nil, 4<<20)
	return v
}

// next returns the data of the next message with the name, or an error when the stream has ended.
func (v *viewer) next(name string) (string, error) {
	event := ""
	for v.lines.Scan() {
		line := v.lines.Text()
		if e, ok := strings.CutPrefix(line, "event: "); ok {
			event = e
		}
		if d, ok := strings.CutPrefix(line, "data: "); ok && event == name {
			return d, nil
		}
	}
	return "", errors.Join(io.EOF, v.lines.Err())
}

// until reads states until cond holds, at most a fixed number.
func (v *viewer) until(t *testing.T, what string, cond func(console.State) bool) console.State {
	t.Helper()
	for range 40 {
		d, err := v.next("state")
		if err != nil {
			t.Fatalf("%s: the stream ended: %v", what, err)
		}
		var s console.State
		must(t, json.Unmarshal([]byte(d), &s))
		if cond(s) {
			return s
		}
	}
	t.Fatalf("%s: not in 40 states", what)
	return console.State{}
}

var must = testenv.Must
