package api

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"

	"posthaste/idem"
	"posthaste/internal/testenv"
	"posthaste/sql"
)

// once makes a failpoint that acts at the first request to reach it.
func once(point string, act func(ctx context.Context)) func(ctx context.Context, name string) {
	var done atomic.Bool
	return func(ctx context.Context, name string) {
		if name == point && done.CompareAndSwap(false, true) {
			act(ctx)
		}
	}
}

// behindProxy starts an API that reaches Postgres through a proxy.
func behindProxy(t *testing.T) (*world, *testenv.Proxy) {
	t.Helper()
	w := &world{tb: t, db: testenv.Postgres(t), redis: testenv.Redis(t)}
	cfg, err := pgxpool.ParseConfig(w.db.URL)
	if err != nil {
		t.Fatal(err)
	}
	p := testenv.NewProxy(t, fmt.Sprintf("127.0.0.1:%d", cfg.ConnConfig.Port))
	w.start(fmt.Sprintf("postgres://postgres@%s/%s?sslmode=disable", p.Addr(), w.db.Name), w.redis.URL())
	return w, p
}

func (w *world) rows() int {
	return testenv.Value[int](w.tb, w.db, "SELECT count(*) FROM orders")
}

// The COMMIT arrives and its reply does not.
func TestALostCommitReplyIsResolvedToTheTruth(t *testing.T) {
	t.Parallel()
	w, p := behindProxy(t)
	w.s.failpoint = once("after_insert", func(context.Context) {
		p.Toxic(`{"name":"lost","type":"timeout","stream":"downstream","attributes":{"timeout":0}}`)
		go func() {
			testenv.Eventually(t, 20*time.Second, func() error {
				if w.rows() == 0 {
					return errors.New("not committed yet")
				}
				return nil
			})
			p.Remove("lost")
			p.Down()
			p.Up()
		}()
	})
	key := newKey()
	first := w.post(key, orderJSON(1))
	want(t, first, 201, "")
	if got := first.header.Get("Idempotent-Replayed"); got != "false" {
		t.Errorf("Idempotent-Replayed %q: it is this request's own order", got)
	}
	w.published()
	if r := w.post(key, orderJSON(1)); r.body != first.body {
		t.Errorf("%v, want %v", r, first)
	}
	w.checkInvariants(1)
}

// The COMMIT does not arrive, and the client of Postgres cannot tell.
func TestALostCommitIsDoneAgain(t *testing.T) {
	t.Parallel()
	w, p := behindProxy(t)
	w.s.failpoint = once("after_insert", func(context.Context) {
		p.Toxic(`{"name":"lost","type":"timeout","stream":"upstream","attributes":{"timeout":100}}`)
		time.AfterFunc(200*time.Millisecond, func() { p.Remove("lost") })
	})
	want(t, w.post(newKey(), orderJSON(1)), 201, "")
	w.checkInvariants(1)
}

// Nobody answers any more after the COMMIT was sent: the client is told so, and its retry gets the one order.
func TestAnUnknownOutcomeIsNamedAndTheKeyKept(t *testing.T) {
	t.Parallel()
	w, p := behindProxy(t)
	w.s.failpoint = once("after_insert", func(context.Context) {
		p.Toxic(`{"name":"lost","type":"timeout","stream":"downstream","attributes":{"timeout":0}}`)
		go func() {
			testenv.Eventually(t, 20*time.Second, func() error {
				if w.rows() == 0 {
					return errors.New("not committed yet")
				}
				return nil
			})
			p.Down()
		}()
	})
	key := newKey()
	r := w.post(key, orderJSON(1))
	want(t, r, 503, "outcome_unknown")
	if r.header.Get("Retry-After") == "" {
		t.Error("no Retry-After")
	}
	keys, _ := w.redis.Client.Keys(t.Context(), "i:*").Result()
	if len(keys) != 1 {
		t.Fatalf("the key was released: %v", keys)
	}
	p.Remove("lost")
	p.Up()
	want(t, w.do("GET", "/orders/by-key?user_id="+testUser, "", idem.KeyHeader, key), 200, "")
	again := w.post(key, orderJSON(1), "Prefer", "wait=0")
	want(t, again, 201, "")
	if again.header.Get("Idempotent-Replayed") != "true" {
		t.Error("executed again")
	}
	w.checkInvariants(1)
}

func TestABackendTerminatedBeforeItsCommit(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.s.failpoint = once("after_insert", func(ctx context.Context) {
		if _, err := w.db.Pool.Exec(ctx, `SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity
			WHERE datname = current_database() AND state = 'idle in transaction'`); err != nil {
			t.Error(err)
		}
	})
	want(t, w.post(newKey(), orderJSON(1)), 201, "")
	w.checkInvariants(1)
}

// A restarted Postgres leaves the pool full of dead connections. No client hears of it.
func TestDeadPooledConnectionsCostNoRequest(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() { w.post(newKey(), orderJSON(1)) })
	}
	wg.Wait()
	n := w.rows()
	w.db.Exec(t, `SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity
		WHERE datname = current_database() AND application_name = 'posthaste api'`)
	for range 8 {
		want(t, w.post(newKey(), orderJSON(1)), 201, "")
	}
	w.checkInvariants(n + 8)
}

func TestDefiniteFailuresReleaseTheKey(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		raise  string
		status int
		code   string
	}{
		"refused by Postgres":      {"RAISE check_violation", 503, "temporarily_unavailable"},
		"serialization, once":      {"RAISE SQLSTATE '40001'", 201, ""},
		"deadlock, once":           {"RAISE SQLSTATE '40P01'", 201, ""},
		"statement timeout":        {"RAISE SQLSTATE '57014'", 503, "temporarily_unavailable"},
		"lock timeout":             {"RAISE SQLSTATE '55P03'", 409, "operation_in_progress"},
		"too many connections":     {"RAISE SQLSTATE '53300'", 503, "temporarily_unavailable"},
		"disk full":                {"RAISE SQLSTATE '53100'", 503, "temporarily_unavailable"},
		"read-only after failover": {"RAISE SQLSTATE '25006'", 503, "temporarily_unavailable"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			w.db.Exec(t, "CREATE SEQUENCE tries")
			w.db.Exec(t, `CREATE FUNCTION once() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
				IF nextval('tries') = 1 THEN `+c.raise+`; END IF; RETURN NEW; END $$`)
			w.db.Exec(t, "CREATE TRIGGER once BEFORE INSERT ON orders FOR EACH ROW EXECUTE FUNCTION once()")
			key := newKey()
			first := w.post(key, orderJSON(1))
			want(t, first, c.status, c.code)
			if c.status == 201 {
				w.checkInvariants(1)
				return
			}
			want(t, w.post(key, orderJSON(1), "Prefer", "wait=0"), 201, "")
			w.checkInvariants(1)
		})
	}
}

func TestAnExhaustedPoolFailsInTime(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	var held []*pgxpool.Conn
	for range 8 {
		c, err := w.s.pool.Acquire(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		held = append(held, c)
	}
	start := time.Now()
	key := newKey()
	want(t, w.post(key, orderJSON(1)), 503, "temporarily_unavailable")
	if took := time.Since(start); took > 8*time.Second {
		t.Errorf("it took %v", took)
	}
	for _, c := range held {
		c.Release()
	}
	want(t, w.post(key, orderJSON(1), "Prefer", "wait=0"), 201, "")
}

func TestAPanicReleasesTheKey(t *testing.T) {
	t.Parallel()
	for _, point := range []string{"after_acquire", "after_insert", "after_commit"} {
		t.Run(point, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			w.s.failpoint = once(point, func(context.Context) { panic("deliberate") })
			key := newKey()
			want(t, w.post(key, orderJSON(1)), 500, "internal_error")
			want(t, w.post(key, orderJSON(1), "Prefer", "wait=0"), 201, "")
			w.checkInvariants(1)
		})
	}
}

func TestAClientsDisconnectNeverCutsAnOrder(t *testing.T) {
	t.Parallel()
	for _, point := range []string{
		"before_acquire", "after_acquire", "after_insert", "after_commit",
		"before_publish",
	} {
		t.Run(point, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			ctx, hangUp := context.WithCancel(t.Context())
			gone := make(chan struct{})
			w.s.failpoint = once(point, func(context.Context) {
				hangUp()
				<-gone
			})
			key := newKey()
			_, err := send(ctx, "POST", w.url+"/orders", orderJSON(1), idem.KeyHeader, key)
			close(gone)
			if err == nil && point != "before_publish" {
				t.Fatal("the client was answered")
			}
			testenv.Eventually(t, 20*time.Second, func() error {
				if w.rows() != 1 {
					return errors.New("no order yet")
				}
				return nil
			})
			r := w.post(key, orderJSON(1))
			want(t, r, 201, "")
			if r.header.Get("Idempotent-Replayed") != "true" {
				t.Error("executed again")
			}
			w.checkInvariants(1)
		})
	}
}

func TestInFlightAnswers(t *testing.T) {
	t.Parallel()
	reg := prometheus.NewRegistry()
	w := newWorld(t, func(o *Options) { o.Registerer = reg })
	reached, goOn := make(chan struct{}), make(chan struct{})
	w.s.failpoint = once("after_acquire", func(context.Context) { close(reached); <-goOn })
	key := newKey()
	first := make(chan reply)
	go func() { first <- w.post(key, orderJSON(1)) }()
	<-reached
	r := w.post(key, orderJSON(1), "Prefer", "wait=0")
	want(t, r, 409, "operation_in_progress")
	if r.header.Get("Retry-After") != "1" || r.header.Get("Preference-Applied") != "wait=0" || waits(t, reg) != 0 {
		t.Errorf("%v after %d waits", r.header, waits(t, reg))
	}
	start := time.Now()
	want(t, w.sibling().post(key, orderJSON(1), "Prefer", "wait=1"), 409, "operation_in_progress")
	if took := time.Since(start); took < 900*time.Millisecond || took > 9*time.Second { // the longest wait is 10 s
		t.Errorf("wait=1 took %v", took)
	}
	// Another body while the first is under way: decided when it is.
	other := make(chan reply)
	go func() { other <- w.post(key, orderJSON(2), "Prefer", "wait=10") }()
	waiting := make(chan reply)
	go func() { waiting <- w.sibling().post(key, orderJSON(1), "Prefer", "wait=10") }()
	close(goOn)
	want(t, <-other, 422, "idempotency_key_reused")
	a, b := <-first, <-waiting
	if a.status != 201 || a.body != b.body || b.header.Get("Idempotent-Replayed") != "true" {
		t.Errorf("%v, %v", a, b)
	}
	w.checkInvariants(1)
}

// waits is how often a request of the process has waited for another.
func waits(t *testing.T, reg *prometheus.Registry) uint64 {
	t.Helper()
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() == "idem_wait_seconds" {
			return f.GetMetric()[0].GetHistogram().GetSampleCount()
		}
	}
	t.Fatal("no metric of waits")
	return 0
}

// After Redis lost a key, somebody with another body may take the lease. The rightful client is served nevertheless.
func TestAThiefOfAForgottenKeyDoesNotLockOutItsOwner(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	key := newKey()
	first := w.post(key, orderJSON(1))
	w.published()
	w.redis.Client.FlushAll(t.Context())
	reached, goOn := make(chan struct{}), make(chan struct{})
	thiefs := w.sibling()
	thiefs.s.failpoint = once("after_acquire", func(context.Context) { close(reached); <-goOn })
	thief := make(chan reply)
	go func() { thief <- thiefs.post(key, orderJSON(2)) }()
	<-reached
	start := time.Now()
	if r := w.sibling().post(key, orderJSON(1), "Prefer", "wait=10"); r.status != 201 || r.body != first.body ||
		time.Since(start) > 8*time.Second {
		t.Errorf("the owner got %v after %v", r, time.Since(start))
	}
	close(goOn)
	want(t, <-thief, 422, "idempotency_key_reused")
	if r := w.sibling().post(key, orderJSON(1), "Prefer", "wait=0"); r.body != first.body {
		t.Errorf("after the thief: %v", r)
	}
	w.checkInvariants(1)
}

func TestALockedRowIsAnOperationInProgress(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	key := newKey()
	user := uuid.MustParse(testUser)
	cmd := Command{UserID: user, Amount: 1, Currency: "USD"}
	fp := cmd.fingerprint()
	tx, err := sql.BeginOrder(t.Context(), w.db.Pool, &sql.Order{
		ID: uuid.Must(uuid.NewV7()), UserID: user, Key: OrderKey(user, key), Fingerprint: fp[:], Amount: 1,
		Currency: "USD",
		Status:   sql.OrderPending, CreatedAt: time.Now(),
	}, nil)
	if err != nil {
		t.Fatal(err)
	}
	want(t, w.post(key, orderJSON(1)), 409, "operation_in_progress")
	tx.Rollback(t.Context())
	want(t, w.post(key, orderJSON(1), "Prefer", "wait=0"), 201, "")
	w.checkInvariants(1)
}
