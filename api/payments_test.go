package api

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	"posthaste/credits"
	"posthaste/internal/lab/testenv"
)

// relay runs the sync and the payments of a relay until the test ends. The two stop functions end them earlier.
func (w *world) relay() (stopSync, stopPayments func()) {
	w.tb.Helper()
	c, connections, err := credits.NewClient(w.redis.URL())
	must(w.tb, err)
	log := testenv.Logger(w.tb)
	background := func(run func(context.Context) error) func() {
		stop := testenv.Background(w.tb, run)
		return func() { _ = stop() }
	}
	w.tb.Cleanup(func() { _ = c.Close() })
	bank := credits.New(credits.Options{Redis: c, Connections: connections, Pool: w.db.Pool, Logger: log})
	return background(credits.NewSync(credits.SyncOptions{Redis: c, Pool: w.db.Pool, Logger: log}).Run),
		background(NewPayments(PaymentsOptions{Pool: w.db.Pool, Credits: bank, Logger: log}).Run)
}

// hasten makes every noted payment due.
func (w *world) hasten() {
	w.tb.Helper()
	w.db.Exec(w.tb, "UPDATE order_payments SET due = clock_timestamp() WHERE due IS NOT NULL")
}

// notes waits until there are n notes of payments for which a condition holds, and makes them due meanwhile.
func (w *world) notes(n int, condition string, args ...any) {
	w.tb.Helper()
	testenv.Becomes(w.tb, "notes of payments", n, func() int {
		w.hasten()
		return testenv.Value[int](w.tb, w.db, "SELECT count(*) FROM order_payments p WHERE "+condition, args...)
	})
}

// settled waits until there is no note of a payment.
func (w *world) settled() {
	w.tb.Helper()
	w.notes(0, "true")
}

// inLedger waits until the first operation is in the ledger.
func (w *world) inLedger() {
	w.tb.Helper()
	testenv.Becomes(w.tb, "entries of the ledger", 1, func() int {
		return testenv.Value[int](w.tb, w.db, "SELECT count(*) FROM credit_entries")
	})
}

// settledBut waits until the user's notes of payments are gone, except for those without a deduction.
func (w *world) settledBut(user string) {
	w.tb.Helper()
	w.notes(0, `user_id = $1 AND EXISTS (
		SELECT FROM credit_entries e WHERE e.user_id = p.user_id AND e.op_id = p.op_id)`, user)
}

// While one command is paying, another places its order under the same key. Payments refunds the deduction, whether or
// not the request ends.
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
			n := testenv.Value[int](t, w.db, "SELECT count(*) FROM credit_entries WHERE user_id = $1", user)
			testenv.Equal(t, "entries, of the funds, the deduction and the refund", n, 3)
		})
	}
}

// Redis loses a deduction, and another command has placed its order under the same key. What was never deducted is not
// refunded.
func TestALostDeductionIsNotGivenBack(t *testing.T) {
	t.Parallel()
	w := newCreditWorld(t, false)
	stopSync, _ := w.relay()
	user, key := uuid.NewString(), newKey()
	w.fund(user, 100)
	w.inLedger()
	stopSync()
	plain := strings.Replace(orderJSON(30), testUser, user, 1)
	// Postgres alone guards: nothing stops the second command
	paying := w.sibling(func(o *Options) { o.Redis, o.Credits = nil, w.s.o.Credits })
	other := w.sibling(func(o *Options) { o.Redis = nil })
	paying.s.failpoint = once("after_deduct", func(ctx context.Context) {
		w.redis.Client.FlushAll(ctx)
		w.relay()
		w.until(20*time.Second, newKey(), paidJSON(user, 10)) // the balances were rebuilt
		want(t, other.post(key, plain), 201, "")
	})
	want(t, paying.post(key, paidJSON(user, 30)), 422, "idempotency_key_reused")
	w.settledBut(user)
	w.checkPaid(w, user, 100, 1)
	testenv.Equal(t, "refunds", testenv.Value[int](t, w.db,
		"SELECT count(*) FROM credit_entries WHERE reference LIKE 'refund%'"), 0)
}

// A deduction that is found long after its request is refunded. The key has that answer forever, also after the refusal
// was purged.
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
	other := w.sibling(func(o *Options) { o.Redis, o.Credits = nil, w.s.o.Credits })
	other.post(key, paidJSON(user, 30)).same(t, "again", first)
	w.settled()
	w.checkPaid(w, user, 100, 0)
}

// If the account refuses a refund, it is reported once and not repeated.
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
	w.notes(1, "due IS NULL")
	want(t, w.post(key, paidJSON(user, 30)), 409, "payment_refunded")
}

// The relay deletes refusals after 30 days: serve has no right to delete.
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
	testenv.Becomes(t, "refusals", 1, w.rows)
}

// A process ends after it has deducted, and then the key expires. The retry gets the order, which Payments would place.
func TestAKeyThatExpiresWhileItsOrderIsPaid(t *testing.T) {
	t.Parallel()
	w := newCreditWorld(t, false)
	strict := w.sibling(func(o *Options) { o.KeyMaxAge, o.Credits = time.Hour, w.s.o.Credits })
	const old = "018f0000-0000-7000-8000-000000000001" // minted in 2024
	user := uuid.NewString()
	w.fund(user, 100)
	want(t, strict.post(old, paidJSON(user, 30)), 422, "idempotency_key_expired")
	w.s.failpoint = once("after_deduct", func(context.Context) { panic("the request ends here") })
	want(t, w.post(old, paidJSON(user, 30)), 500, "internal_error")
	want(t, strict.post(old, paidJSON(user, 30)), 201, "")
	w.relay()
	w.settled()
	w.checkPaid(w, user, 100, 1)
}

// The guard's record of a refusal is newer than the refusal, which is purged before it. The key can be used again.
func TestTheRecordOfAPurgedRefusal(t *testing.T) {
	t.Parallel()
	w := newCreditWorld(t, false)
	w.relay()
	user, key := uuid.NewString(), newKey()
	w.fund(user, 10)
	want(t, w.post(key, paidJSON(user, 11)), 402, "insufficient_credits")
	w.published()
	w.db.Exec(t, "DELETE FROM orders")
	for range 2 {
		want(t, w.post(key, paidJSON(user, 11)), 402, "insufficient_credits")
	}
}

// Redis loses a deduction after the order was placed. It is repeated once, under the same id. If the user has spent the
// credits, it is reported.
func TestALostDeductionIsRepeated(t *testing.T) {
	t.Parallel()
	for _, spent := range []bool{false, true} {
		t.Run(fmt.Sprintf("spent=%v", spent), func(t *testing.T) {
			t.Parallel()
			w := newCreditWorld(t, false)
			stopSync, stopPayments := w.relay()
			user := uuid.NewString()
			w.fund(user, 100)
			w.inLedger()
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
			stopPayments() // the first round comes after the lease
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
				n := testenv.Value[int](t, w.db, "SELECT count(*) FROM order_payments WHERE due IS NULL")
				return testenv.FailIf(n != 1, "not given up yet")
			})
			stopSync()
		})
	}
}

// The ledger puts the deduction of an order in quarantine. Redis has its outcome, but the order is not paid.
func TestAnOrderWhoseDeductionIsInQuarantine(t *testing.T) {
	t.Parallel()
	w := newCreditWorld(t, false)
	w.relay()
	user := uuid.NewString()
	w.fund(user, 100)
	w.inLedger()
	accounts := w.redis.Client.Keys(t.Context(), "{cr:*}:a:"+user).Val()
	must(t, w.redis.Client.HIncrBy(t.Context(), accounts[0], "q", 1).Err()) // as if an operation were missing
	want(t, w.post(newKey(), paidJSON(user, 80)), 201, "")
	w.notes(1, "due IS NULL AND (SELECT count(*) FROM credit_quarantine) = 1")
}

// The relay was down for days. Operations that the ledger lacks may be on their way there, so Payments waits.
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
			newPaymentsRound(w)() // before the sync has run
			orders := 0
			if placed {
				orders = 1
			}
			n := testenv.Value[int](t, w.db, "SELECT count(*) FROM order_payments WHERE due IS NOT NULL")
			testenv.Equal(t, "notes that are still looked at", n, 1)
			w.relay()
			w.settled()
			w.checkPaid(w, user, 100, orders)
		})
	}
}

// newPaymentsRound returns a function that runs one round of Payments.
func newPaymentsRound(w *world) func() {
	p := NewPayments(PaymentsOptions{Pool: w.db.Pool, Credits: w.s.o.Credits, Logger: testenv.Logger(w.tb)})
	return func() {
		_, err := p.round(context.Background())
		testenv.ErrorIs(w.tb, "a round", err, nil)
	}
}

// A note without a deduction is kept while a process may still deduct, then dropped.
func TestNotesOfNothingAreDropped(t *testing.T) {
	t.Parallel()
	w := newCreditWorld(t, false)
	user := uuid.NewString()
	want(t, w.post(newKey(), paidJSON(user, 1)), 404, "unknown_user")
	round := newPaymentsRound(w)
	notes := func() int { return testenv.Value[int](t, w.db, "SELECT count(*) FROM order_payments") }
	w.hasten()
	round()
	testenv.Equal(t, "notes after the first look", notes(), 1)
	w.db.Exec(t, "UPDATE order_payments SET created_at = created_at - interval '49 hours'")
	w.hasten()
	round()
	testenv.Equal(t, "notes after two days", notes(), 0)
}

type heard chan string

func (h heard) Write(b []byte) (int, error) {
	h <- string(b)
	return len(b), nil
}

// Payments cannot read its notes, for example because its role lacks a right. The log has that, and its end.
func TestPaymentsThatCannotBeFinishedAreReported(t *testing.T) {
	t.Parallel()
	w := newCreditWorld(t, false)
	log := make(heard, 100)
	w.db.Exec(t, "ALTER TABLE order_payments RENAME TO elsewhere")
	testenv.Background(t, NewPayments(PaymentsOptions{
		Pool: w.db.Pool, Credits: w.s.o.Credits, Logger: slog.New(slog.NewTextHandler(log, nil)),
	}).Run)
	next := func(want string) {
		t.Helper()
		select {
		case line := <-log:
			if !strings.Contains(line, want) {
				t.Errorf("log: %s, want %s", line, want)
			}
		case <-time.After(20 * time.Second):
			t.Fatalf("the log does not say %s", want)
		}
	}
	next("level=WARN")
	w.db.Exec(t, "ALTER TABLE elsewhere RENAME TO order_payments")
	next("payments of orders are finished again")
}
