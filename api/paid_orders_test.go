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
	"posthaste/internal/lab/testenv"
)

func paidJSON(user string, amount int) string {
	return fmt.Sprintf(`{"user_id":%q,"amount":%d,"currency":"EUR","pay_with":"credits"}`, user, amount)
}

func accountOf(user string) string {
	return fmt.Sprintf("{cr:%03d}:a:%s", credits.Bucket(uuid.MustParse(user)), user)
}

func (w *world) fund(user string, amount int) {
	w.tb.Helper()
	want(w.tb, w.credit("/add/"+user, newKey(), fmt.Sprintf(`{"amount":%d}`, amount)), 200, "")
}

// checkPaid is the oracle: every paid order has its event and one deduction, and nothing else was taken from the user,
// whose account began with funded credits. Ledger and Redis agree.
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
		b := api.do(http.MethodGet, "/balance/"+user, "")
		return testenv.FailIf(!strings.HasPrefix(b.body, fmt.Sprintf(`{"balance":%d,`, funded-r.spent)),
			"%s", b.String())
	})
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
		r.replays(t, fmt.Sprintf("replay %d", i), first)
	}
	want(t, w.post(key, strings.Replace(orderJSON(30), testUser, user, 1)), 422, "idempotency_key_reused")
	want(t, w.post(key, paidJSON(user, 31)), 422, "idempotency_key_reused")
	want(t, w.do(http.MethodGet, first.header.Get("Location"), ""), 200, "")
	// The 404 stored nothing, so the key is free.
	want(t, w.post(early, paidJSON(user, 30)), 201, "")

	short := newKey()
	refused := w.post(short, paidJSON(user, 41))
	want(t, refused, 402, "insufficient_credits")
	testenv.Contains(t, "the refusal", refused.body, `"balance":40,"required":41`)
	w.fund(user, 1000)
	w.published()
	w.redis.Client.Del(t.Context(), w.redis.Client.Keys(t.Context(), "i:*").Val()...)
	for i, r := range []reply{w.post(short, paidJSON(user, 41)), w.sibling().post(short, paidJSON(user, 41))} {
		r.replays(t, fmt.Sprintf("repeated refusal %d", i), refused)
	}
	byKey := w.do(http.MethodGet, "/orders/by-key?user_id="+user, "", idem.KeyHeader, short)
	if byKey.status != 200 || !strings.Contains(byKey.body, `"status":"REJECTED"`) ||
		!strings.Contains(byKey.body, `"problem":`+refused.body) {
		t.Errorf("by key: %v", byKey)
	}
	want(t, w.do(http.MethodGet, "/orders/"+byKey.order(t).ID.String(), ""), 404, "not_found")
	if r := w.do(http.MethodGet, "/orders?user_id="+user, ""); strings.Contains(r.body, "REJECTED") {
		t.Errorf("a refused order is listed: %v", r)
	}
	want(t, w.sibling().post(short, paidJSON(user, 40)), 422, "idempotency_key_reused")
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

// An order that cannot be paid now stores nothing, whatever the reason. The same key places the one order later.
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
			must(w.tb, w.redis.Kill())
		}, func(w *world, _ string) {
			must(w.tb, w.redis.Start(w.tb.Context()))
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
			w.inLedger()
			stopSync()
			key := newKey()
			c.spoil(w, user)
			r := w.post(key, paidJSON(user, 20))
			want(t, r, c.status, c.code)
			if c.status == 503 && r.header.Get("Retry-After") == "" {
				t.Error("no Retry-After")
			}
			want(t, w.do(http.MethodGet, "/orders/by-key?user_id="+user, "", idem.KeyHeader, key), 404, "not_found")
			testenv.Equal(t, "orders", w.rows(), 0)
			want(t, w.post(newKey(), orderJSON(1)), 201, "") // other orders work
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

// The process is killed at each step. After a retry there is one order, one event and one deduction. Without a retry
// there are all three or none.
func TestKilledWhilePayingAtAnyPoint(t *testing.T) {
	t.Parallel()
	const lease = 1500 * time.Millisecond
	for _, point := range []string{
		"before_acquire", "after_acquire", "after_note", "after_deduct", "before_insert", inPostgres, "after_commit",
		"before_publish", "after_publish",
	} {
		for _, retry := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s/retry=%v", point, retry), func(t *testing.T) {
				t.Parallel()
				w := servers(t)
				w.relay()
				victim := w.spawn(childConfig{Lease: lease, Credits: true, Point: point, Signal: syscall.SIGKILL})
				if point == inPostgres {
					w.whenSent(victim.killed)
				}
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
				// at any time
				if again := other.until(20*time.Second, key, paidJSON(user, 30)); r.body != "" && r.body != again.body {
					t.Errorf("%v, then %v", r, again)
				}
				w.checkPaid(other.world, user, 100, 1)
			})
		}
	}
}

// Many attempts under few keys, in two processes, while the account's key vanishes: one deduction per order.
func TestManyAttemptsToPay(t *testing.T) {
	t.Parallel()
	w := servers(t)
	w.relay()
	procs := []*process{w.spawn(childConfig{Credits: true}), w.spawn(childConfig{Credits: true})}
	user := uuid.NewString()
	procs[0].fund(user, 55)
	var wg sync.WaitGroup
	keys := make([]string, 8) // the credits suffice for five
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
	testenv.Equal(t, "orders of 10 for 55 credits", placed, 5)
	w.settled()
	w.checkPaid(procs[0].world, user, 55, 5)
}
