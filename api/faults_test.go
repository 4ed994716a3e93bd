package api

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"

	"posthaste/idem"
	"posthaste/internal/lab/testenv"
)

// inPostgres is the state without a failpoint: the order was sent and not answered; see whenSent.
const inPostgres = "in Postgres"

// once makes a failpoint that acts for the first request to reach it.
func once(point string, act func(ctx context.Context)) func(ctx context.Context, name string) {
	var done atomic.Bool
	return func(ctx context.Context, name string) {
		if name == point && done.CompareAndSwap(false, true) {
			act(ctx)
		}
	}
}

// port is the address of the world's Postgres.
func (w *world) port() string {
	return fmt.Sprintf("127.0.0.1:%d", w.db.Pool.Config().ConnConfig.Port)
}

// through starts an API that reaches Postgres at addr.
func (w *world) through(addr string) {
	w.tb.Helper()
	w.start(testenv.Through(w.db.URL, addr), w.redis.URL())
}

func behindProxy(t *testing.T) (*world, *testenv.Link) {
	t.Helper()
	w := servers(t)
	p := testenv.NewLink(t, w.port())
	w.through(p.Addr())
	return w, p
}

func (w *world) rows() int {
	return testenv.Value[int](w.tb, w.db, "SELECT count(*) FROM orders")
}

// placed waits for the one order.
func (w *world) placed() {
	w.tb.Helper()
	testenv.Becomes(w.tb, "orders", 1, w.rows)
}

// whenSent calls act once an order has reached Postgres, where it waits until the gate is opened.
func (w *world) whenSent(act func(g *testenv.Gate)) {
	w.tb.Helper()
	g := w.db.Gate(w.tb, "outbox")
	go func() {
		g.Wait()
		act(g)
	}()
}

// The order arrives and the reply is lost.
func TestALostCommitReplyIsResolvedToTheTruth(t *testing.T) {
	t.Parallel()
	w, p := behindProxy(t)
	w.whenSent(func(g *testenv.Gate) {
		p.Set(testenv.Trouble{LoseReplies: true})
		g.Open()
		w.placed()
		p.Set(testenv.Trouble{})
		p.Down()
		p.Up()
	})
	key := newKey()
	first := w.post(key, orderJSON(1))
	want(t, first, 201, "")
	first.has(t, "Idempotent-Replayed", "false") // it is this request's own order
	w.published()
	w.post(key, orderJSON(1)).same(t, "again", first)
	w.checkInvariants(1)
}

// The order is delayed, and the client of Postgres does not know. It sends the order again. When the first one arrives,
// it finds the second.
func TestALostCommitIsDoneAgain(t *testing.T) {
	t.Parallel()
	w := servers(t)
	h := testenv.NewLink(t, w.port())
	w.through(h.Addr())
	h.HoldFrom("order.created")
	key := newKey()
	first := w.post(key, orderJSON(1))
	want(t, first, 201, "")
	if h.Held("order.created") != 1 {
		t.Fatal("nothing was held")
	}
	h.Release()
	testenv.Becomes(t, "what is on its way", 0, h.Late)
	w.sibling().post(key, orderJSON(1)).same(t, "again", first)
	w.checkInvariants(1)
}

// Postgres does not answer after the order was sent: the client gets the unknown outcome, and its retry gets the one
// order.
func TestAnUnknownOutcomeIsNamedAndTheKeyKept(t *testing.T) {
	t.Parallel()
	w, p := behindProxy(t)
	w.whenSent(func(g *testenv.Gate) {
		p.Set(testenv.Trouble{LoseReplies: true})
		g.Open()
		w.placed()
		p.Down()
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
	p.Set(testenv.Trouble{})
	p.Up()
	want(t, w.do("GET", "/orders/by-key?user_id="+testUser, "", idem.KeyHeader, key), 200, "")
	again := w.post(key, orderJSON(1), "Prefer", "wait=0")
	want(t, again, 201, "")
	again.has(t, "Idempotent-Replayed", "true")
	w.checkInvariants(1)
}

func TestABackendTerminatedBeforeItsCommit(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.whenSent(func(g *testenv.Gate) {
		w.db.Exec(t, `SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity
			WHERE datname = current_database() AND wait_event = 'PgSleep'`)
		g.Open()
	})
	want(t, w.post(newKey(), orderJSON(1)), 201, "")
	w.checkInvariants(1)
}

// The lease is lost before the order is sent: it is not sent, and the answer is the order of the next owner.
func TestALeaseThatIsLostBeforeTheOrderIsSent(t *testing.T) {
	t.Parallel()
	for _, fulfilled := range []bool{true, false} {
		t.Run(fmt.Sprintf("the other is done: %v", fulfilled), func(t *testing.T) {
			t.Parallel()
			reg := prometheus.NewRegistry()
			w := newWorld(t, func(o *Options) { o.Lease, o.Registerer = 3*time.Second, reg })
			key := newKey()
			goOn, other := make(chan struct{}), make(chan reply, 1)
			w.s.failpoint = once("after_acquire", func(context.Context) {
				w.redis.Client.FlushAll(context.Background())
				quick := w.sibling()
				reached := make(chan struct{})
				point := "after_acquire"
				if fulfilled {
					point = "before_publish"
				}
				quick.s.failpoint = once(point, func(context.Context) { close(reached); <-goOn })
				go func() { other <- quick.post(key, orderJSON(1)) }()
				<-reached
				w.leaseIsLost(reg)
			})
			first := w.post(key, orderJSON(1))
			if n := w.rows(); (n == 1) != fulfilled {
				t.Errorf("%d orders", n)
			}
			close(goOn)
			r := <-other
			want(t, r, 201, "")
			if fulfilled && (first.body != r.body || first.header.Get("Idempotent-Replayed") != "true") {
				t.Errorf("%v, the other got %v", first, r)
			}
			if !fulfilled {
				want(t, first, 409, "operation_in_progress")
			}
			w.checkInvariants(1)
		})
	}
}

// leaseIsLost waits until the process with reg has noticed that it lost a lease.
func (w *world) leaseIsLost(reg *prometheus.Registry) {
	w.tb.Helper()
	testenv.Eventually(w.tb, 4*time.Second, func() error {
		return testenv.FailIf(series(w.tb, reg, "idem_lease_lost_total") == 0,
			"the lease is not lost")
	})
}

// The lease is lost while the order is in Postgres, and another process takes the key over. The sent order is still
// resolved.
func TestALeaseThatIsLostWhileTheOrderIsInPostgres(t *testing.T) {
	t.Parallel()
	reg := prometheus.NewRegistry()
	w := newWorld(t, func(o *Options) { o.Lease, o.Registerer = 3*time.Second, reg })
	key := newKey()
	other := make(chan reply, 1)
	w.whenSent(func(g *testenv.Gate) {
		w.redis.Client.FlushAll(context.Background())
		quick := w.sibling()
		reached := make(chan struct{})
		quick.s.failpoint = once("before_insert", func(context.Context) { close(reached) })
		go func() { other <- quick.post(key, orderJSON(1)) }()
		<-reached // the second has the key now; the first notices at its next heartbeat, within a second
		w.leaseIsLost(reg)
		g.Open()
	})
	first := w.post(key, orderJSON(1))
	want(t, first, 201, "")
	first.has(t, "Idempotent-Replayed", "false") // it is this request's own order
	(<-other).same(t, "the other", first)
	w.checkInvariants(1)
}

// A restarted Postgres leaves the pool full of broken connections. No client gets an error.
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
		c, err := w.s.o.Pool.Acquire(t.Context())
		must(t, err)
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
	for _, point := range []string{"after_acquire", "before_insert", "after_commit"} {
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
		"before_acquire", "after_acquire", "before_insert", inPostgres, "after_commit",
		"before_publish",
	} {
		t.Run(point, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			ctx, hangUp := context.WithCancel(t.Context())
			gone := make(chan struct{})
			if point == inPostgres {
				w.whenSent(func(g *testenv.Gate) {
					hangUp()
					<-gone
					g.Open()
				})
			}
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
			w.placed()
			r := w.post(key, orderJSON(1))
			want(t, r, 201, "")
			r.has(t, "Idempotent-Replayed", "true")
			w.checkInvariants(1)
		})
	}
}

func TestInFlightAnswers(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	reached, goOn := make(chan struct{}), make(chan struct{})
	w.s.failpoint = once("after_acquire", func(context.Context) { close(reached); <-goOn })
	key := newKey()
	first := make(chan reply)
	go func() { first <- w.post(key, orderJSON(1)) }()
	<-reached
	r := w.post(key, orderJSON(1), "Prefer", "wait=0")
	want(t, r, 409, "operation_in_progress")
	r.has(t, "Retry-After", "1")
	r.has(t, "Preference-Applied", "wait=0")
	start := time.Now()
	want(t, w.sibling().post(key, orderJSON(1), "Prefer", "wait=1"), 409, "operation_in_progress")
	if took := time.Since(start); took < 900*time.Millisecond || took > 9*time.Second { // the longest wait is 10 s
		t.Errorf("wait=1 took %v", took)
	}
	// A request with another body waits for the first one's outcome.
	other := make(chan reply)
	go func() { other <- w.post(key, orderJSON(2), "Prefer", "wait=10") }()
	waiting := make(chan reply)
	go func() { waiting <- w.sibling().post(key, orderJSON(1), "Prefer", "wait=10") }()
	close(goOn)
	want(t, <-other, 422, "idempotency_key_reused")
	a, b := <-first, <-waiting
	want(t, a, 201, "")
	b.replays(t, "who waited", a)
	w.checkInvariants(1)
}

// After Redis lost a key, a request with another body may take the lease. The owner of the key still gets its order.
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
	w.sibling().post(key, orderJSON(1), "Prefer", "wait=0").same(t, "after the thief", first)
	w.checkInvariants(1)
}

func TestALockedRowIsAnOperationInProgress(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	key := newKey()
	user := uuid.MustParse(testUser)
	tx, err := w.db.Pool.Begin(t.Context())
	must(t, err)
	orderKey := OrderKey(user, key)
	if _, err := tx.Exec(t.Context(), `INSERT INTO orders
		(id, user_id, idem_key, idem_fp, amount, currency, status, created_at)
		VALUES (gen_random_uuid(), $1, $2, 'x', 1, 'USD', 'PENDING', now())`, user, orderKey[:]); err != nil {
		t.Fatal(err)
	}
	want(t, w.post(key, orderJSON(1)), 409, "operation_in_progress")
	must(t, tx.Rollback(t.Context()))
	want(t, w.post(key, orderJSON(1), "Prefer", "wait=0"), 201, "")
	w.checkInvariants(1)
}

// A commit waits for a synchronous standby that is gone, and which may be promoted. The API gives up, and must not end
// the server's wait: the order would count as committed, and be lost with this server.
func TestAnOrderThatNoStandbyHasIsNotConfirmed(t *testing.T) {
	t.Parallel()
	w := &world{tb: t, db: testenv.NewServer(t).Database(t), redis: testenv.Redis(t)}
	w.start(w.db.URL, w.redis.URL())
	w.db.Standby(t, "nobody")
	w.db.WaitHeld(t)
	key := newKey()
	want(t, w.post(key, orderJSON(1)), 503, "outcome_unknown")
	testenv.Equal(t, "visible orders", w.rows(), 0)
	w.db.Standby(t, "")
	r, _ := w.insist(key, orderJSON(1))
	want(t, r, 201, "")
	w.checkInvariants(1)
}

// safeNewKey returns the member of a problem that permits a client to send its order under a new key.
func (r reply) safeNewKey(tb testing.TB) bool {
	tb.Helper()
	var p problemBody
	must(tb, json.Unmarshal([]byte(r.body), &p))
	return p.SafeNewKey
}

// While an order may still be placed under a key, or may have been, no answer permits a new key.
func TestNoAnswerPermitsASecondOrder(t *testing.T) {
	t.Parallel()
	keys, err := ParseKeys(strings.NewReader(hashOf("full") + " " + testUser + "\n" + hashOf("cut") + " " + testUser +
		" scopes=read\n"))
	must(t, err)
	w := newWorld(t, func(o *Options) { o.Keys = keys })
	full, cut := []string{"Authorization", "Bearer full"}, []string{"Authorization", "Bearer cut"}
	reached, goOn := make(chan struct{}), make(chan struct{})
	w.s.failpoint = once("after_acquire", func(context.Context) { close(reached); <-goOn })
	key := newKey()
	first := make(chan reply)
	go func() { first <- w.post(key, orderJSON(1), full...) }()
	<-reached
	r := w.do("GET", "/orders/by-key", "", append([]string{idem.KeyHeader, key}, full...)...)
	want(t, r, 404, "not_found")
	testenv.Equal(t, "by key: safe_new_key", r.safeNewKey(t), false)
	close(goOn)
	want(t, <-first, 201, "")
	r = w.post(key, orderJSON(1), cut...) // the scopes of the credential were reduced
	want(t, r, 403, "forbidden_scope")
	testenv.Equal(t, "without the scope: safe_new_key", r.safeNewKey(t), false)
}

// A key expires while an attempt is under way. The retry must not get the answer that nothing was done.
func TestAKeyThatExpiresDuringAnAttempt(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	strict := w.sibling(func(o *Options) { o.KeyMaxAge = time.Hour })
	reached, goOn := make(chan struct{}), make(chan struct{})
	w.s.failpoint = once("after_acquire", func(context.Context) { close(reached); <-goOn })
	const old = "018f0000-0000-7000-8000-000000000001" // minted in 2024
	first := make(chan reply)
	go func() { first <- w.post(old, orderJSON(1)) }()
	<-reached
	r := strict.post(old, orderJSON(1), "Prefer", "wait=0")
	close(goOn)
	placed := <-first
	want(t, placed, 201, "")
	want(t, r, 409, "operation_in_progress")
	strict.post(old, orderJSON(1)).replays(t, "afterwards", placed)
	w.checkInvariants(1)
}

// The order is on its way, and what is sent to find its outcome is refused: with an error that permits a new attempt,
// or because the key is locked.
func TestAnUnknownOutcomeStaysUnknown(t *testing.T) {
	t.Parallel()
	for _, code := range []string{"serialization_failure", "lock_not_available"} {
		t.Run(code, func(t *testing.T) {
			t.Parallel()
			w := servers(t)
			h := testenv.NewLink(t, w.port())
			w.through(h.Addr())
			w.db.Exec(t, `CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
				BEGIN RAISE EXCEPTION 'refused' USING ERRCODE = '`+code+`'; END $$`)
			w.db.Exec(t, "CREATE TRIGGER refuse BEFORE INSERT ON orders FOR EACH ROW EXECUTE FUNCTION refuse()")
			h.HoldFrom("order.created")
			key := newKey()
			want(t, w.post(key, orderJSON(1)), 503, "outcome_unknown")
			testenv.Equal(t, "held", h.Held("order.created"), 1)
			testenv.Equal(t, "records", len(w.redis.Client.Keys(t.Context(), "i:*").Val()), 1)
			w.db.Exec(t, "DROP TRIGGER refuse ON orders")
			h.Release()
			w.placed()
			r, _ := w.insist(key, orderJSON(1))
			want(t, r, 201, "")
			w.checkInvariants(1)
		})
	}
}
