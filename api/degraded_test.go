package api

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"

	"posthaste/internal/lab/testenv"
	"posthaste/sql"
)

func TestWithoutRedisOrdersFlowAndStayUnique(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	must(t, w.redis.Kill())
	start := time.Now()
	for i := range 20 {
		key := newKey()
		first := w.post(key, orderJSON(i+1))
		want(t, first, 201, "")
		first.has(t, "Idempotency-Guard", "db")
		again := w.post(key, orderJSON(i+1))
		again.replays(t, "again", first)
		want(t, w.post(key, orderJSON(i+100)), 422, "idempotency_key_reused")
	}
	if took := time.Since(start); took > 25*time.Second { // half a second per request would mean that each tried Redis
		t.Errorf("60 requests without Redis took %v", took)
	}
	w.checkInvariants(20)
}

func TestWithoutPostgresRequestsFailQuicklyAndReplaysAreServed(t *testing.T) {
	t.Parallel()
	w := &world{tb: t, redis: testenv.Redis(t)}
	server := testenv.NewServer(t)
	w.db = server.Database(t)
	w.start(w.db.URL, w.redis.URL())
	key := newKey()
	first := w.post(key, orderJSON(1))
	want(t, first, 201, "")
	w.published()
	other := w.sibling()
	other.s.database.Confirmed(t.Context())
	must(t, server.Stop("immediate"))
	start := time.Now()
	r := w.post(newKey(), orderJSON(1))
	want(t, r, 503, "temporarily_unavailable")
	r.has(t, "Retry-After", "1")
	want(t, w.do("GET", "/orders?user_id="+testUser, ""), 503, "temporarily_unavailable")
	if took := time.Since(start); took > 8*time.Second { // less than the deadline of one request
		t.Errorf("failing took %v", took)
	}
	other.post(key, orderJSON(1)).same(t, "a replay without Postgres", first)
	// A process that has not reached its database cannot know which database a record belongs to.
	want(t, w.sibling().post(key, orderJSON(1)), 503, "temporarily_unavailable")
	testenv.Equal(t, "readiness", fmt.Sprint(w.s.Ready(t.Context()).Reasons), "[postgres]")
	must(t, server.Start(t.Context()))
	// The failed request released its key: its retry does not wait.
	testenv.Becomes(t, "status", 201, func() int { return w.post(newKey(), orderJSON(1)).status })
}

func TestReadiness(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	testenv.Equal(t, "all well", readyz(w.s), "200 {}")
	w.redis.Client.ConfigSet(t.Context(), "maxmemory-policy", "allkeys-lru")
	testenv.Equal(t, "unsafe eviction", readyz(w.s), `200 {"degraded":["redis_eviction"]}`)
	w.redis.Client.ConfigSet(t.Context(), "maxmemory-policy", "noeviction")
	w.redis.Client.ConfigSet(t.Context(), "maxmemory", "1")
	testenv.Contains(t, "memory full", readyz(w.s), `200 {"degraded":["guard: OOM `)
	w.redis.Client.Set(t.Context(), "filling", strings.Repeat("x", 20<<20), 0)
	used, err := strconv.ParseFloat(w.redis.Client.InfoMap(t.Context(), "memory").Item("Memory", "used_memory"), 64)
	must(t, err)
	w.redis.Client.ConfigSet(t.Context(), "maxmemory", strconv.Itoa(int(used/0.9)))
	testenv.Equal(t, "memory short", readyz(w.s), `200 {"degraded":["guard_memory"]}`)
	w.redis.Client.ConfigSet(t.Context(), "maxmemory", "0")
	testenv.Equal(t, "well again", readyz(w.s), "200 {}")
	w.db.Exec(t, "ALTER TABLE outbox RENAME TO elsewhere")
	testenv.Contains(t, "no outbox", readyz(w.s), "503 ", `"reasons":["tables"]`, "table outbox ")
	w.db.Exec(t, "ALTER TABLE elsewhere RENAME TO outbox")
	must(t, w.redis.Kill())
	testenv.Equal(t, "no Redis", readyz(w.s), `200 {"degraded":["redis"]}`)
	empty := &world{tb: t, db: testenv.Empty(t), redis: testenv.Redis(t)}
	empty.start(empty.db.URL, empty.redis.URL())
	status, body, _ := strings.Cut(readyz(empty.s), " ")
	var r Readiness
	if err := json.Unmarshal([]byte(body), &r); status != "503" || err != nil || fmt.Sprint(r.Reasons) != "[schema]" ||
		len(r.Remedy) != 1 {
		t.Errorf("no schema: %s %s", status, body)
	}
	want(t, empty.post(newKey(), orderJSON(1)), 503, "temporarily_unavailable")
}

// A check of the servers that hangs does not hold up a stop.
func TestAStopWaitsForNoCheck(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	hangs := make(chan struct{})
	w.s.ready.Read = func(context.Context) (Readiness, error) {
		<-hangs
		return Readiness{}, nil
	}
	ctx, stop := context.WithCancel(t.Context())
	stop()
	must(t, w.s.Run(ctx))
	close(hangs)
}

// No order can be taken while a lock blocks its insert or no standby confirms its commit.
func TestReadinessWhileOrdersHang(t *testing.T) {
	t.Parallel()
	d := testenv.NewServer(t).Database(t)
	w := &world{tb: t, db: d, redis: testenv.Redis(t)}
	w.start(d.URL, w.redis.URL())
	tx, err := d.Pool.Begin(t.Context())
	must(t, err)
	_, err = tx.Exec(t.Context(), "LOCK TABLE orders")
	must(t, err)
	testenv.Contains(t, "the table is locked", readyz(w.s), "503 ", "posthaste doctor")
	must(t, tx.Rollback(t.Context()))
	for _, c := range []struct{ standby, reasons string }{{"gone", "[commits]"}, {"", "[]"}} {
		d.Standby(t, c.standby)
		reasons := func() string { return fmt.Sprint(w.s.Ready(t.Context()).Reasons) }
		testenv.Becomes(t, "reasons with standby "+c.standby, c.reasons, reasons)
	}
}

// The password was changed. The probe keeps its old connection, but orders get none.
func TestReadinessWhileOrdersGetNoConnection(t *testing.T) {
	t.Parallel()
	d := testenv.NewServer(t).Database(t)
	w := &world{tb: t, db: d, redis: testenv.Redis(t)}
	w.start(d.URL, w.redis.URL(), func(o *Options) { o.Probe = d.Pool })
	testenv.Equal(t, "at first", readyz(w.s), "200 {}")
	d.Exec(t, "ALTER ROLE postgres PASSWORD 'another'")
	w.s.o.Pool.Reset() // as after the lifetime of a connection
	want(t, w.post(newKey(), orderJSON(1)), 503, "temporarily_unavailable")
	testenv.Contains(t, "afterwards", readyz(w.s), "503 ", `"reasons":["postgres"]`, "password")
}

// readyz returns the status and the body of an answer from a fresh check.
func readyz(s *Server) string {
	s.ready.Forget()
	rec := httptest.NewRecorder()
	s.Readyz().ServeHTTP(rec, httptest.NewRequestWithContext(context.Background(), http.MethodGet, "/readyz", nil))
	return fmt.Sprint(rec.Code, " ", rec.Body)
}

func TestMetrics(t *testing.T) {
	t.Parallel()
	reg := prometheus.NewPedanticRegistry()
	w := newWorld(t, func(o *Options) { o.Registerer = reg })
	for _, o := range []string{
		"acquired", "takeover", "replay_redis", "replay_pg", "busy", "waited", "mismatch",
		"degraded", "unknown", "rejected",
	} {
		testenv.Equal(t, o, series(t, reg, "idem_requests_total", "route", "/orders", "outcome", o), 0)
	}
	series(t, reg, "outbox_events_written_total", "type", "order.created")
	series(t, reg, "http_request_duration_seconds", "route", "/orders", "method", "POST", "status", "503")
	key := newKey()
	w.post(key, orderJSON(1))
	w.published()
	w.post(key, orderJSON(1))
	w.post(key, orderJSON(2))
	for label, v := range map[[2]string]float64{
		{"outcome", "acquired"}: 1, {"outcome", "replay_redis"}: 1,
		{"outcome", "mismatch"}: 1,
	} {
		testenv.Equal(t, label[1], series(t, reg, "idem_requests_total", label[0], label[1]), v)
	}
	testenv.Equal(t, "events written", series(t, reg, "outbox_events_written_total", "type", "order.created"), 1)
	if series(t, reg, "idem_script_seconds", "script", "acq") < 1 ||
		series(t, reg, "idem_script_seconds", "script", "pub") != 1 {
		t.Error("script durations are not counted")
	}
	if got := series(t, reg, "http_request_duration_seconds", "route", "/orders", "method", "POST", "status",
		"422"); got != 1 {
		t.Errorf("422: %v", got)
	}
	w.redis.Client.ConfigSet(t.Context(), "maxmemory-policy", "allkeys-lru")
	w.s.Ready(t.Context())
	testenv.Equal(t, "redis_eviction_unsafe", series(t, reg, "redis_eviction_unsafe"), 1)
}

func TestRunWatchesRedis(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.redis.Client.ConfigSet(t.Context(), "maxmemory-policy", "allkeys-lru")
	stop := testenv.Background(t, w.s.Run)
	testenv.Eventually(t, 20*time.Second, func() error {
		policy := w.s.eviction.Load()
		return testenv.FailIf(policy == nil || *policy != "allkeys-lru", "not yet")
	})
	must(t, stop())
}

// Readiness checks take no connection from orders, and concurrent ones share an answer.
func TestAskingForReadinessLeavesTheOrdersTheirConnections(t *testing.T) {
	t.Parallel()
	var probe *sql.Pool
	w := newWorld(t, func(o *Options) {
		cfg := o.Pool.Config()
		cfg.MaxConns = 1
		var err error
		if probe, err = pgxpool.NewWithConfig(context.Background(), cfg); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(probe.Close)
		o.Probe = probe
	})
	before := w.s.o.Pool.Stat().AcquireCount()
	h := w.s.Readyz()
	var all sync.WaitGroup
	for range 40 {
		all.Go(func() {
			rec := httptest.NewRecorder()
			h.ServeHTTP(rec, httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/readyz", nil))
			testenv.Equal(t, "status", rec.Code, http.StatusOK)
		})
	}
	all.Wait()
	testenv.Equal(t, "connections of the orders' that were taken", w.s.o.Pool.Stat().AcquireCount()-before, 0)
	if n := probe.Stat().AcquireCount(); n == 0 || n > 20 {
		t.Errorf("%d connections were taken", n)
	}
}
