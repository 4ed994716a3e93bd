package api

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/uuid"

	"posthaste/credits"
	"posthaste/idem"
	"posthaste/internal/testenv"
	"posthaste/sql"
)

func paidJSON(user string, amount int) string {
	return fmt.Sprintf(`{"user_id":%q,"amount":%d,"currency":"EUR","pay_with":"credits"}`, user, amount)
}

// relay runs what the relay runs beside its events: the sync and the payments, until the test ends. The two stop
// functions end them earlier.
func (w *world) relay() (stopSync, stopPayments func()) {
	w.tb.Helper()
	c, err := credits.NewClient(w.redis.URL())
	if err != nil {
		w.tb.Fatal(err)
	}
	log := testenv.Logger(w.tb)
	background := func(run func(context.Context) error) func() {
		ctx, cancel := context.WithCancel(context.Background())
		done := make(chan struct{})
		go func() { defer close(done); _ = run(ctx) }()
		stop := sync.OnceFunc(func() { cancel(); <-done })
		w.tb.Cleanup(stop)
		return stop
	}
	w.tb.Cleanup(func() { _ = c.Close() })
	bank := credits.New(credits.Options{Redis: c, Pool: w.db.Pool, Logger: log})
	return background(credits.NewSync(credits.SyncOptions{Redis: c, Pool: w.db.Pool, Logger: log}).Run),
		background(NewPayments(PaymentsOptions{Pool: w.db.Pool, Credits: bank, Logger: log}).Run)
}

// hasten makes every noted payment due.
func (w *world) hasten() {
	w.tb.Helper()
	w.db.Exec(w.tb, "UPDATE order_payments SET due = clock_timestamp() WHERE due IS NOT NULL")
}

// checkPaid is the oracle: every paid order has its event and its one deduction, and nothing else was taken from the
// user, who had funded credits; in the ledger and in Redis.
func (w *world) checkPaid(api *world, user string, funded, orders int) {
	w.tb.Helper()
	testenv.Eventually(w.tb, 20*time.Second, func() error {
		type sums struct{ orders, events, deductions, spent, ledger, entries int }
		var r sums
		err := w.db.Pool.QueryRow(w.tb.Context(), `SELECT
			(SELECT count(*) FROM orders WHERE status = 'PENDING' AND pay_with = 'credits' AND user_id = $1),
			(SELECT count(*) FROM outbox e JOIN orders o ON e.event_type = 'order.created' AND e.aggregate_id = `+
			`o.id::text
				AND o.pay_with = 'credits' AND o.user_id = $1),
			(SELECT count(*) FILTER (WHERE kind = 'deduct') - count(*) FILTER (WHERE kind = 'add' AND reference LIKE `+
			`'refund%')
				FROM credit_entries WHERE user_id = $1 AND outcome = 'OK'),
			(SELECT coalesce(sum(amount), 0)::bigint FROM orders WHERE status = 'PENDING' AND pay_with = 'credits' `+
			`AND user_id = $1),
			(SELECT balance FROM credit_accounts WHERE user_id = $1),
			(SELECT sum(CASE kind WHEN 'add' THEN amount ELSE -amount END)::bigint FROM credit_entries WHERE user_id `+
			`= $1 AND outcome = 'OK')`, user).
			Scan(&r.orders, &r.events, &r.deductions, &r.spent, &r.ledger, &r.entries)
		if err != nil {
			return err
		}
		if want := (sums{orders, orders, orders, r.spent, funded - r.spent, funded - r.spent}); r != want {
			return fmt.Errorf("got %+v, want %+v", r, want)
		}
		if b := api.do(http.MethodGet, "/balance/"+user, ""); !strings.HasPrefix(b.body,
			fmt.Sprintf(`{"balance":%d,`, funded-r.spent)) {
			return errors.New(b.String())
		}
		return nil
	})
}

// settled waits until no payment is noted any more.
func (w *world) settled() {
	w.tb.Helper()
	testenv.Eventually(w.tb, 20*time.Second, func() error {
		w.hasten()
		if n := testenv.Value[int](w.tb, w.db, "SELECT count(*) FROM order_payments"); n > 0 {
			return fmt.Errorf("%d payments are noted", n)
		}
		return nil
	})
}

func (w *world) fund(user string, amount int) {
	w.tb.Helper()
	want(w.tb, w.credit("/add/"+user, newKey(), fmt.Sprintf(`{"amount":%d}`, amount)), 200, "")
}

func TestOrdersPaidByCredits(t *testing.T) {
	t.Parallel()
	w := newCreditWorld(t, false)
	w.relay()
	d := loadDocument(t)
	user := uuid.NewString()
	early := newKey()
	want(t, w.post(early, paidJSON(user, 30)), 404, "unknown_user")
	w.fund(user, 100)
	key := newKey()
	first := w.post(key, paidJSON(user, 30))
	want(t, first, 201, "")
	if o := first.order(t); o.Amount != 30 || o.Currency != "EUR" || o.Status != "PENDING" ||
		strings.Contains(first.body, "pay") {
		t.Errorf("body %s", first.body)
	}
	w.published()
	for i, r := range []reply{w.post(key, paidJSON(user, 30)), w.sibling().post(key, paidJSON(user, 30))} {
		if r.body != first.body || r.header.Get("Idempotent-Replayed") != "true" {
			t.Errorf("replay %d: %v of %v", i, r, first)
		}
	}
	want(t, w.post(key, strings.Replace(orderJSON(30), testUser, user, 1)), 422, "idempotency_key_reused")
	want(t, w.post(key, paidJSON(user, 31)), 422, "idempotency_key_reused")
	want(t, w.do(http.MethodGet, first.header.Get("Location"), ""), 200, "")
	// 404 stored nothing: the key is free.
	want(t, w.post(early, paidJSON(user, 30)), 201, "")

	short := newKey()
	refused := w.post(short, paidJSON(user, 41))
	want(t, refused, 402, "insufficient_credits")
	if !strings.Contains(refused.body, `"balance":40,"required":41`) {
		t.Errorf("refusal %s", refused.body)
	}
	w.fund(user, 1000)
	w.published()
	w.redis.Client.Del(t.Context(), w.redis.Client.Keys(t.Context(), "i:*").Val()...)
	for i, r := range []reply{w.post(short, paidJSON(user, 41)), w.sibling().post(short, paidJSON(user, 41))} {
		if r.status != 402 || r.body != refused.body || r.header.Get("Idempotent-Replayed") != "true" {
			t.Errorf("repeated refusal %d: %v of %v", i, r, refused)
		}
	}
	for body, code := range map[string]string{
		strings.Replace(paidJSON(user, 1), `"credits"`, `"cash"`, 1): "validation_failed",
		strings.Replace(paidJSON(user, 1), `"credits"`, `null`, 1):   "validation_failed",
		strings.Replace(paidJSON(user, 1), `"credits"`, `1`, 1):      "validation_failed",
		paidJSON(user, 1_000_000_000_000):                            "validation_failed",
		paidJSON(uuid.NewString(), 5):                                "unknown_user",
	} {
		header := http.Header{idem.KeyHeader: {newKey()}, "Content-Type": {"application/json"}}
		rec, _ := d.exchange(t, w.s.Public(), http.MethodPost, "/orders", body, header)
		var p problemBody
		if err := json.Unmarshal(rec.Body.Bytes(), &p); err != nil || p.Code != code {
			t.Errorf("%s: %d %s, want %s", body, rec.Code, rec.Body, code)
		}
	}
	w.settledBut(user)
	w.checkPaid(w, user, 1100, 2)
}

// settledBut waits until the user's notes of payments are gone, but for those that nothing was done for.
func (w *world) settledBut(user string) {
	w.tb.Helper()
	testenv.Eventually(w.tb, 20*time.Second, func() error {
		w.hasten()
		if n := testenv.Value[int](w.tb, w.db, `SELECT count(*) FROM order_payments p WHERE user_id = $1
			AND EXISTS (SELECT FROM credit_entries e WHERE e.user_id = p.user_id AND e.op_id = p.op_id)`, user); n > 0 {
			return fmt.Errorf("%d payments are noted", n)
		}
		return nil
	})
}

// What cannot be paid now stores nothing, whatever the reason, and the same key places the one order later.
func TestAnOrderThatCannotBePaidNow(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		status int
		code   string
		spoil  func(w *world, user string)
		fix    func(w *world, user string)
	}{
		"frozen": {423, "account_frozen", func(w *world, user string) {
			w.redis.Client.HSet(w.tb.Context(), accountOf(user), "f", "test")
		}, func(w *world, user string) {
			w.redis.Client.HDel(w.tb.Context(), accountOf(user), "f")
		}},
		"redis gone": {503, "credits_store_unavailable", func(w *world, _ string) {
			if err := w.redis.Kill(); err != nil {
				w.tb.Fatal(err)
			}
		}, func(w *world, _ string) {
			if err := w.redis.Start(w.tb.Context()); err != nil {
				w.tb.Fatal(err)
			}
		}},
		"redis lost its data": {503, "epoch_recovering", func(w *world, _ string) {
			w.redis.Client.FlushAll(w.tb.Context())
		}, func(w *world, _ string) { w.relay() }},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newCreditWorld(t, false)
			stopSync, _ := w.relay()
			user := uuid.NewString()
			w.fund(user, 50)
			testenv.Eventually(t, 20*time.Second, func() error {
				if testenv.Value[int](t, w.db, "SELECT count(*) FROM credit_entries") == 0 {
					return errors.New("not in the ledger yet")
				}
				return nil
			})
			stopSync()
			key := newKey()
			c.spoil(w, user)
			r := w.post(key, paidJSON(user, 20))
			want(t, r, c.status, c.code)
			if c.status == 503 && r.header.Get("Retry-After") == "" {
				t.Error("no Retry-After")
			}
			want(t, w.do(http.MethodGet, "/orders/by-key?user_id="+user, "", idem.KeyHeader, key), 404, "not_found")
			if n := w.rows(); n != 0 {
				t.Errorf("%d orders", n)
			}
			want(t, w.post(newKey(), orderJSON(1)), 201, "") // others go on
			c.fix(w, user)
			if name != "redis lost its data" {
				w.relay()
			}
			w.until(20*time.Second, key, paidJSON(user, 20))
			w.settled()
			w.checkPaid(w, user, 50, 1)
		})
	}
}

func accountOf(user string) string {
	return fmt.Sprintf("{cr:%03d}:a:%s", credits.Bucket(uuid.MustParse(user)), user)
}

// The process is killed at each step. With a retry there is one order, one event and one deduction; without one there
// are these three, or none of them.
func TestKilledWhilePayingAtAnyPoint(t *testing.T) {
	t.Parallel()
	const lease = 1500 * time.Millisecond
	for _, point := range []string{
		"before_acquire", "after_acquire", "after_note", "after_deduct", "after_insert", "after_commit",
		"before_publish", "after_publish",
	} {
		for _, retry := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s/retry=%v", point, retry), func(t *testing.T) {
				t.Parallel()
				w := servers(t)
				w.relay()
				victim := w.spawn(childConfig{Lease: lease, Credits: true, Point: point, Signal: syscall.SIGKILL})
				other := w.spawn(childConfig{Lease: lease, Credits: true})
				user := uuid.NewString()
				other.fund(user, 100)
				key := newKey()
				r, err := send(t.Context(), "POST", victim.url+"/orders", paidJSON(user, 30), idem.KeyHeader, key)
				if err == nil && point != "before_publish" && point != "after_publish" {
					t.Fatalf("the victim answered %v", r)
				}
				_ = victim.cmd.Wait()
				deducted := point != "before_acquire" && point != "after_acquire" && point != "after_note"
				orders := 0
				if deducted || retry {
					orders = 1
				}
				if retry {
					again := other.until(lease+10*time.Second, key, paidJSON(user, 30))
					if r.body != "" && r.body != again.body {
						t.Errorf("%v, then %v", r, again)
					}
				}
				w.checkPaid(other.world, user, 100, orders)
				if deducted || retry {
					w.settled()
				}
				w.checkPaid(other.world, user, 100, orders)
				// whenever it comes
				if again := other.until(20*time.Second, key, paidJSON(user, 30)); r.body != "" && r.body != again.body {
					t.Errorf("%v, then %v", r, again)
				}
				w.checkPaid(other.world, user, 100, 1)
			})
		}
	}
}

// Many attempts under few keys, in two processes, while the key of the account vanishes: one deduction per order.
func TestManyAttemptsToPay(t *testing.T) {
	t.Parallel()
	w := servers(t)
	w.relay()
	procs := []*process{w.spawn(childConfig{Credits: true}), w.spawn(childConfig{Credits: true})}
	user := uuid.NewString()
	procs[0].fund(user, 55)
	var wg sync.WaitGroup
	keys := make([]string, 8) // of which the credits pay five
	for i := range keys {
		keys[i] = newKey()
	}
	for i := range scale(400, 80) {
		wg.Go(func() {
			if i%20 == 0 {
				w.redis.Client.Del(context.Background(), accountOf(user))
				w.redis.Client.Del(context.Background(), w.redis.Client.Keys(context.Background(), "i:*").Val()...)
			}
			r := procs[i%2].post(keys[i%len(keys)], paidJSON(user, 10), "Prefer", "wait=10")
			if r.status != 201 && r.status != 402 && r.code() != "operation_in_progress" &&
				r.code() != "credits_store_unavailable" {
				t.Errorf("%v", r)
			}
		})
	}
	wg.Wait()
	placed := 0
	for _, k := range keys {
		testenv.Eventually(t, 20*time.Second, func() error {
			r := procs[0].post(k, paidJSON(user, 10), "Prefer", "wait=10")
			switch r.status {
			case 201:
				placed++
			case 402:
			default:
				return errors.New(r.String())
			}
			return nil
		})
	}
	if placed != 5 {
		t.Errorf("%d orders of 10 for 55 credits", placed)
	}
	w.settled()
	w.checkPaid(procs[0].world, user, 55, 5)
}

// A key under which another command placed its order while this one was paying: what was deducted is given back, by the
// request itself or, if it dies, by Payments.
func TestADeductionWithoutItsOrderIsGivenBack(t *testing.T) {
	t.Parallel()
	for _, dies := range []bool{false, true} {
		t.Run(fmt.Sprintf("dies=%v", dies), func(t *testing.T) {
			t.Parallel()
			w := newCreditWorld(t, false)
			w.relay()
			user, key := uuid.NewString(), newKey()
			w.fund(user, 100)
			plain := strings.Replace(orderJSON(30), testUser, user, 1)
			// Postgres alone guards: nothing stops the second command
			other := w.sibling(func(o *Options) { o.Redis = nil })
			w.s.failpoint = once("after_deduct", func(context.Context) {
				want(t, other.post(key, plain), 201, "")
				if dies {
					panic("the request ends here")
				}
			})
			r := w.post(key, paidJSON(user, 30))
			if dies {
				want(t, r, 500, "internal_error")
			} else {
				want(t, r, 422, "idempotency_key_reused")
			}
			w.settled()
			w.checkPaid(w, user, 100, 0)
			want(t, w.sibling(func(o *Options) { o.Redis = nil }).post(key, paidJSON(user, 30)), 422,
				"idempotency_key_reused")
			w.checkInvariants(1)
			if n := testenv.Value[int](t, w.db, "SELECT count(*) FROM credit_entries WHERE user_id = $1",
				user); n != 3 {
				t.Errorf("%d entries, want the funds, the deduction and the refund", n)
			}
		})
	}
}

// A deduction that is found long after its request is taken back, and the key answers so forever, also when the
// refusal was purged.
func TestAnOldDeductionIsGivenBack(t *testing.T) {
	t.Parallel()
	w := newCreditWorld(t, false)
	w.relay()
	user, key := uuid.NewString(), newKey()
	w.fund(user, 100)
	w.s.failpoint = once("after_deduct", func(context.Context) {
		w.db.Exec(t, "UPDATE order_payments SET created_at = created_at - interval '16 minutes'")
		panic("the request ends here")
	})
	want(t, w.post(key, paidJSON(user, 30)), 500, "internal_error")
	w.settled()
	w.checkPaid(w, user, 100, 0)
	first := w.post(key, paidJSON(user, 30))
	want(t, first, 409, "payment_refunded")
	w.published()
	w.db.Exec(t, "DELETE FROM orders")
	w.redis.Client.Del(t.Context(), w.redis.Client.Keys(t.Context(), "i:*").Val()...)
	if again := w.sibling(func(o *Options) { o.Redis, o.Credits = nil, w.s.credits }).post(key,
		paidJSON(user, 30)); again.body != first.body {
		t.Errorf("%v, want %v", again, first)
	}
	w.settled()
	w.checkPaid(w, user, 100, 0)
}

// A deduction that the account cannot take back is left to a human, once, and is not tried again forever.
func TestADeductionThatCannotBeGivenBack(t *testing.T) {
	t.Parallel()
	w := newCreditWorld(t, false)
	w.relay()
	user := uuid.NewString()
	w.fund(user, 100)
	w.s.failpoint = once("after_deduct", func(ctx context.Context) {
		w.db.Exec(t, "UPDATE order_payments SET created_at = created_at - interval '16 minutes'")
		w.redis.Client.HSet(ctx, accountOf(user), "b", credits.MaxBalance)
		panic("the request ends here")
	})
	key := newKey()
	want(t, w.post(key, paidJSON(user, 30)), 500, "internal_error")
	testenv.Eventually(t, 20*time.Second, func() error {
		w.db.Exec(t, "UPDATE order_payments SET due = clock_timestamp() WHERE due > clock_timestamp()")
		if n := testenv.Value[int](t, w.db, "SELECT count(*) FROM order_payments WHERE due IS NULL"); n != 1 {
			return fmt.Errorf("%d payments wait for a human, want 1", n)
		}
		return nil
	})
	want(t, w.post(key, paidJSON(user, 30)), 409, "payment_refunded")
}

// Refusals are forgotten after 30 days, by the relay: serve has no right to delete.
func TestOldRefusalsArePurged(t *testing.T) {
	t.Parallel()
	w := newCreditWorld(t, false)
	for _, days := range []int{29, 31} {
		w.db.Exec(t, `INSERT INTO orders (id, user_id, idem_key, idem_fp, fence, amount, currency, status, `+
			`resp_status, resp_body, created_at)
			VALUES ($1, $2, $4, '\x01', 0, 1, 'USD', 'REJECTED', 402, '{}', now() - make_interval(days => $3))`,
			uuid.New(), uuid.New(), days, []byte(fmt.Sprintf("%016d", days)))
	}
	w.relay()
	testenv.Eventually(t, 20*time.Second, func() error {
		if n := testenv.Value[int](t, w.db, "SELECT count(*) FROM orders"); n != 1 {
			return fmt.Errorf("%d refusals, want 1", n)
		}
		return nil
	})
}

// Redis loses a deduction after the order was placed: it is deducted again, once, under the same id; or, if the user
// has spent the credits, it is reported.
func TestALostDeductionIsRepeated(t *testing.T) {
	t.Parallel()
	for _, spent := range []bool{false, true} {
		t.Run(fmt.Sprintf("spent=%v", spent), func(t *testing.T) {
			t.Parallel()
			w := newCreditWorld(t, false)
			stopSync, stopPayments := w.relay()
			user := uuid.NewString()
			w.fund(user, 100)
			testenv.Eventually(t, 20*time.Second, func() error {
				if testenv.Value[int](t, w.db, "SELECT count(*) FROM credit_entries") == 0 {
					return errors.New("not in the ledger yet")
				}
				return nil
			})
			stopSync()
			stopPayments()
			want(t, w.post(newKey(), paidJSON(user, 80)), 201, "")
			w.redis.Client.FlushAll(t.Context())
			stopSync, stopPayments = w.relay()
			if !spent {
				w.settled()
				w.checkPaid(w, user, 100, 1)
				return
			}
			stopPayments() // the first look comes after the lease
			testenv.Eventually(t, 20*time.Second, func() error {
				if r := w.credit("/deduct/"+user, newKey(), `{"amount":50}`); r.status != 200 {
					return errors.New(r.String())
				}
				return nil
			})
			w.hasten()
			c := newPaymentsRound(w)
			testenv.Eventually(t, 20*time.Second, func() error {
				w.hasten()
				c()
				if n := testenv.Value[int](t, w.db, "SELECT count(*) FROM order_payments WHERE due IS NULL"); n != 1 {
					return errors.New("not given up yet")
				}
				return nil
			})
			stopSync()
		})
	}
}

// The relay was away for days: what the ledger does not have may still be on its way there, and decides nothing.
func TestPaymentsWaitForTheLedger(t *testing.T) {
	t.Parallel()
	for _, placed := range []bool{true, false} {
		t.Run(fmt.Sprintf("placed=%v", placed), func(t *testing.T) {
			t.Parallel()
			w := newCreditWorld(t, false)
			user := uuid.NewString()
			w.fund(user, 100)
			if !placed {
				w.s.failpoint = once("after_deduct", func(context.Context) { panic("the request ends here") })
			}
			w.post(newKey(), paidJSON(user, 30))
			w.db.Exec(t, "UPDATE order_payments SET created_at = created_at - interval '49 hours'")
			w.hasten()
			newPaymentsRound(w)() // before the sync has done anything
			orders := 0
			if placed {
				orders = 1
			}
			if n := testenv.Value[int](t, w.db, "SELECT count(*) FROM order_payments WHERE due IS NOT NULL"); n != 1 {
				t.Errorf("%d notes are still looked at, want 1", n)
			}
			w.relay()
			w.settled()
			w.checkPaid(w, user, 100, orders)
		})
	}
}

// newPaymentsRound returns one round of Payments.
func newPaymentsRound(w *world) func() {
	p := NewPayments(PaymentsOptions{Pool: w.db.Pool, Credits: w.s.credits, Logger: testenv.Logger(w.tb)})
	return func() {
		if _, err := p.round(context.Background()); err != nil {
			w.tb.Error(err)
		}
	}
}

// A note of which nothing came is kept for as long as somebody may still deduct, then dropped.
func TestNotesOfNothingAreDropped(t *testing.T) {
	t.Parallel()
	w := newCreditWorld(t, false)
	user := uuid.NewString()
	want(t, w.post(newKey(), paidJSON(user, 1)), 404, "unknown_user")
	round := newPaymentsRound(w)
	notes := func() int { return testenv.Value[int](t, w.db, "SELECT count(*) FROM order_payments") }
	w.hasten()
	round()
	if n := notes(); n != 1 {
		t.Fatalf("%d notes after the first look, want 1", n)
	}
	w.db.Exec(t, "UPDATE order_payments SET created_at = created_at - interval '49 hours'")
	w.hasten()
	round()
	if n := notes(); n != 0 {
		t.Errorf("%d notes after two days, want none", n)
	}
	if !errors.Is(paymentErrorOf(sql.ErrOrderNotFound), sql.ErrOrderNotFound) {
		t.Error("a payment's error hides its cause")
	}
}

func paymentErrorOf(err error) error { return &paymentError{err} }
