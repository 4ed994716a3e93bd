package console_test

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"os"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/go-redis/v9"

	"posthaste/api/admin"
	"posthaste/api/admin/console"
	"posthaste/cdc"
	"posthaste/internal/lab/testenv"
	"posthaste/internal/ops"
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
			Publication: "posthaste", WALBudget: 1 << 30, StreamMaxlen: 1000, History: time.Hour, Restore: time.Hour,
		},
		Logger: testenv.Logger(t),
	}
	if change != nil {
		change(&o)
	}
	c := console.New(o)
	stop := testenv.Background(t, c.Run)
	srv := httptest.NewServer(admin.Handler(admin.Options{
		Source: ops.Source{Pool: pool, RelayName: w.db.Relay, Slots: slots},
		Ready:  http.NotFoundHandler(), Gatherer: metrics, Console: c,
	}))
	w.url = srv.URL
	t.Cleanup(func() {
		testenv.ErrorIs(t, "Run", stop(), nil)
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

// expect is call for an answer with a status. It returns the body.
func (w *world) expect(want int, method, path, body string, header ...string) string {
	w.t.Helper()
	status, answer := w.call(method, path, body, header...)
	if status != want {
		w.t.Errorf("%s %s %.30s %q: %d %.80s, want %d", method, path, body, header, status, answer, want)
	}
	return answer
}

// until requests the state, as a page does, until cond holds.
func (w *world) until(what string, cond func(console.State) bool) (s console.State) {
	w.t.Helper()
	testenv.Eventually(w.t, time.Minute, func() error {
		s = console.State{}
		w.get("/console/api/state", &s)
		return testenv.FailIf(!cond(s), "%s: not yet", what)
	})
	return s
}

var must = testenv.Must
