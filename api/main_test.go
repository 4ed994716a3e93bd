package api

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/logging"

	"posthaste/idem"
	"posthaste/internal/lab/testenv"
	"posthaste/sql"
)

func TestMain(m *testing.M) {
	logging.Disable() // go-redis writes every failed dial to standard error
	if c := os.Getenv(childEnv); c != "" {
		fmt.Fprintln(os.Stderr, child(c))
		os.Exit(1)
	}
	os.Exit(testenv.Main(m))
}

// scale returns n with full counts, otherwise less.
func scale(n, less int) int {
	if os.Getenv("POSTHASTE_TEST_FULL") == "1" {
		return n
	}
	return less
}

type world struct {
	tb    testing.TB
	db    *testenv.Database
	redis *testenv.RedisServer
	s     *Server
	http  *httptest.Server
	url   string
}

// newWorld starts an API on its own servers. edit may change the options.
func newWorld(tb testing.TB, edit ...func(*Options)) *world {
	tb.Helper()
	w := &world{tb: tb, db: testenv.Postgres(tb), redis: testenv.Redis(tb)}
	w.start(w.db.URL, w.redis.URL(), edit...)
	return w
}

// sibling is another API process on the same servers.
func (w *world) sibling(edit ...func(*Options)) *world {
	w.tb.Helper()
	o := &world{tb: w.tb, db: w.db, redis: w.redis}
	o.start(w.db.URL, w.redis.URL(), edit...)
	return o
}

func (w *world) start(pgURL, redisURL string, edit ...func(*Options)) {
	w.tb.Helper()
	cfg, err := sql.OrderPoolConfig(pgURL, "public")
	must(w.tb, err)
	cfg.MaxConns = 8
	pool, err := pgxpool.NewWithConfig(context.Background(), cfg)
	must(w.tb, err)
	w.tb.Cleanup(pool.Close)
	made, err := idem.NewClient(redisURL)
	must(w.tb, err)
	rdb := patient(made)
	w.tb.Cleanup(func() { _ = rdb.Close() })
	o := Options{Pool: pool, Redis: rdb, Logger: testenv.Logger(w.tb)}
	for _, f := range edit {
		f(&o)
	}
	w.s, err = New(o)
	must(w.tb, err)
	w.http = httptest.NewUnstartedServer(nil)
	w.http.Config = NewHTTPServer(w.s.Public())
	w.http.Start()
	w.url = w.http.URL
	w.tb.Cleanup(w.http.Close)
}

// patience returns c's options without timeouts, and closes c.
func patience(c redis.UniversalClient) *redis.Options {
	o := *c.(*redis.Client).Options()
	_ = c.Close()
	o.DialTimeout, o.ReadTimeout, o.WriteTimeout, o.PoolTimeout = time.Minute, time.Minute, time.Minute, time.Minute
	o.Dialer = nil         // the existing one has the old timeout
	if o.MaxRetries == 0 { // zero would mean the default of three
		o.MaxRetries = -1
	}
	return &o
}

// patient makes the guard wait for Redis without a time limit. The default of half a second may pass on a busy machine,
// and then the request is guarded by Postgres alone, which would be another answer in tests whose Redis does not hang.
func patient(c redis.UniversalClient) *redis.Client {
	p := redis.NewClient(patience(c))
	p.AddHook(unbounded{})
	return p
}

// impatient uses the guard's client as the program configures it.
func impatient(tb testing.TB) func(*Options) {
	tb.Helper()
	return func(o *Options) {
		c, err := idem.NewClient("redis://" + o.Redis.(*redis.Client).Options().Addr)
		must(tb, err)
		tb.Cleanup(func() { _ = c.Close() })
		o.Redis = c
	}
}

// unbounded removes the deadline of every command.
type unbounded struct{}

func (unbounded) DialHook(next redis.DialHook) redis.DialHook { return next }

func (unbounded) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error { return next(context.WithoutCancel(ctx), cmd) }
}

func (unbounded) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error { return next(context.WithoutCancel(ctx), cmds) }
}

type reply struct {
	status int
	header http.Header
	body   string
}

func (r reply) String() string { return fmt.Sprintf("%d %s", r.status, r.body) }

// code returns the problem's code, or "" for a success.
func (r reply) code() string {
	var p problemBody
	if r.header.Get("Content-Type") != problemType || json.Unmarshal([]byte(r.body), &p) != nil {
		return ""
	}
	return p.Code
}

// has reports another value of a header.
func (r reply) has(tb testing.TB, name, value string) {
	tb.Helper()
	testenv.Equal(tb, name, r.header.Get(name), value)
}

// same reports an answer that is not the first one.
func (r reply) same(tb testing.TB, what string, first reply) {
	tb.Helper()
	if r.status != first.status || r.body != first.body {
		tb.Errorf("%s: %v, want %v", what, r, first)
	}
}

// replays is same for an answer that has to say that it is a repeated one.
func (r reply) replays(tb testing.TB, what string, first reply) {
	tb.Helper()
	r.same(tb, what, first)
	r.has(tb, "Idempotent-Replayed", "true")
}

func (r reply) order(tb testing.TB) orderBody {
	tb.Helper()
	var o orderBody
	if err := json.Unmarshal([]byte(r.body), &o); err != nil {
		tb.Fatalf("body of %v: %v", r, err)
	}
	return o
}

// do sends a request. headers are name, value pairs.
func (w *world) do(method, path, body string, headers ...string) reply {
	w.tb.Helper()
	r, err := send(context.Background(), method, w.url+path, body, headers...)
	if err != nil {
		w.tb.Fatalf("%s %s: %v", method, path, err)
	}
	return r
}

var client = &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 2000}, Timeout: time.Minute}

func send(ctx context.Context, method, url, body string, headers ...string) (reply, error) {
	req, err := http.NewRequestWithContext(ctx, method, url, bytes.NewReader([]byte(body)))
	if err != nil {
		return reply{}, err
	}
	if body != "" {
		req.Header.Set("Content-Type", "application/json")
	}
	for i := 0; i < len(headers); i += 2 {
		req.Header[headers[i]] = append(req.Header[headers[i]], headers[i+1])
	}
	res, err := client.Do(req)
	if err != nil {
		return reply{}, err
	}
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	return reply{res.StatusCode, res.Header, string(b)}, err
}

const testUser = "5b3c1f9e-8a57-4d0e-9d55-2f4a6b1c7e11"

func orderJSON(amount int) string {
	return fmt.Sprintf(`{"user_id":%q,"amount":%d,"currency":"USD"}`, testUser, amount)
}

func (w *world) post(key, body string, headers ...string) reply {
	w.tb.Helper()
	return w.do(http.MethodPost, "/orders", body, append([]string{idem.KeyHeader, key}, headers...)...)
}

// insist repeats a request while the answer allows it, as clients do, and returns the last answer. unknown reports
// whether the outcome of an attempt was unknown; that attempt may have placed the order.
func (w *world) insist(key, body string) (r reply, unknown bool) {
	w.tb.Helper()
	for range 20 {
		r = w.post(key, body, "Prefer", "wait=10")
		unknown = unknown || r.code() == "outcome_unknown"
		if r.status != 409 && r.status != 503 {
			break
		}
	}
	return r, unknown
}

func newKey() string { return uuid.NewString() }

func want(tb testing.TB, r reply, status int, code string) {
	tb.Helper()
	if r.status != status || r.code() != code {
		tb.Fatalf("got %v, want %d %q", r, status, code)
	}
}

// checkInvariants is the oracle of every fault test: one row per key, as many events as orders, each event equal to its
// order.
func (w *world) checkInvariants(orders int) {
	w.tb.Helper()
	type row struct{ orders, keys, events, matching int }
	var r row
	err := w.db.Pool.QueryRow(w.tb.Context(), `SELECT
		(SELECT count(*) FROM orders WHERE status = 'PENDING'), (SELECT count(DISTINCT (user_id, idem_key)) FROM `+
		`orders WHERE status = 'PENDING'),
		(SELECT count(*) FROM outbox WHERE event_type = 'order.created'),
		(SELECT count(*) FROM outbox e JOIN orders o ON e.aggregate_id = o.id::text AND e.payload->>'id' = o.id::text
			AND (e.payload->>'amount')::bigint = o.amount AND e.payload->>'user_id' = o.user_id::text)`).
		Scan(&r.orders, &r.keys, &r.events, &r.matching)
	must(w.tb, err)
	if want := (row{orders, orders, orders, orders}); r != want {
		w.tb.Errorf("orders, keys, events, events of their order: %+v, want %+v", r, want)
	}
}

// published waits until Redis has the finished record of every key it has.
func (w *world) published() {
	w.tb.Helper()
	testenv.Eventually(w.tb, 20*time.Second, func() error {
		keys, err := w.redis.Client.Keys(context.Background(), "i:*").Result()
		if err != nil {
			return err
		}
		for _, k := range keys {
			if v, _ := w.redis.Client.Get(context.Background(), k).Result(); !strings.HasPrefix(v, "C|") {
				return errors.New("a pending record is left")
			}
		}
		return nil
	})
}

// series returns the sum of a metric's series that have the labels: of counters, gauges, and the counts of histograms.
func series(tb testing.TB, reg *prometheus.Registry, name string, labels ...string) (sum float64) {
	tb.Helper()
	families, err := reg.Gather()
	must(tb, err)
	found := false
	for _, f := range families {
		for _, m := range f.GetMetric() {
			have := map[string]string{}
			for _, l := range m.GetLabel() {
				have[l.GetName()] = l.GetValue()
			}
			ok := f.GetName() == name
			for i := 0; i < len(labels); i += 2 {
				ok = ok && have[labels[i]] == labels[i+1]
			}
			if ok {
				found = true
				sum += m.GetCounter().GetValue() + m.GetGauge().GetValue() + float64(m.GetHistogram().GetSampleCount())
			}
		}
	}
	if !found {
		tb.Fatalf("no series %s %v", name, labels)
	}
	return sum
}

// counted returns a value of idem_requests_total.
func counted(tb testing.TB, reg *prometheus.Registry, outcome string) float64 {
	tb.Helper()
	return series(tb, reg, "idem_requests_total", "outcome", outcome)
}

var must = testenv.Must
