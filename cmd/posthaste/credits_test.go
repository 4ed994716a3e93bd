package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"

	"posthaste/credits"
	"posthaste/internal/lab/testenv"
)

// Credits in the whole program: three APIs, a relay that is killed in between, events in the stream, and the
// reconciliation at the end.
func TestCreditsEndToEnd(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	relay := w.spawn("relay")
	apis := []*child{w.spawn("serve"), w.spawn("serve"), w.spawn("serve")}
	// The client repeats requests as instructed, because a machine that pauses for a second does not answer in time.
	post := func(api *child, path string, amount int) (int, error) {
		id, err := uuid.NewV7()
		if err != nil {
			return 0, err
		}
		for until := time.Now().Add(20 * time.Second); ; wait(t, 50*time.Millisecond) {
			a, err := testenv.Request(context.Background(), http.MethodPost, api.http+path,
				fmt.Sprintf(`{"amount":%d}`, amount), "Idempotency-Key", id.String())
			if err != nil || a.Status != http.StatusServiceUnavailable || time.Now().After(until) {
				return a.Status, err
			}
		}
	}
	user := uuid.NewString()
	if status, err := post(apis[0], "/add/"+user, 100); status != http.StatusOK {
		t.Fatalf("add: %d %v: %s", status, err, apis[0].output())
	}
	statuses := map[int]*atomic.Int64{http.StatusOK: {}, http.StatusPaymentRequired: {}}
	var wg sync.WaitGroup
	for i := range 20 {
		wg.Go(func() {
			for range 10 {
				status, err := post(apis[i%3], "/deduct/"+user, 1)
				if n := statuses[status]; n != nil {
					n.Add(1)
				} else {
					t.Errorf("deduct: %d %v", status, err)
				}
			}
		})
		if i == 10 {
			relay.kill()
			w.spawn("relay")
		}
	}
	wg.Wait()
	if ok, short := statuses[http.StatusOK].Load(), statuses[http.StatusPaymentRequired].Load(); ok != 100 ||
		short != 100 {
		t.Errorf("%d deducted, %d refused, want 100 of each", ok, short)
	}
	w.waitExactly("outbox.credits", 101)
	var report credits.Report
	testenv.Eventually(t, 20*time.Second, func() (err error) {
		report, err = w.reconcile()
		return err
	})
	if report.Accounts != 1 || report.Total != 0 || len(report.Differences) != 0 {
		t.Errorf("reconciliation: %+v", report)
	}
	w.redis.Client.HSet(t.Context(), "{cr:"+bucketOf(user)+"}:a:"+user, "b", 5)
	w.once("credits", "reconcile").says(t, 1, "redis_balance") // the balance is forged
	w.unfreezes(user)
}

// Redis loses everything after orders were paid and settled. The events are restored from the log and the balances from
// the ledger. Neither restoration takes the result of the other for new events or operations.
func TestPaidOrdersAreRestored(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.relayIn("cdc", "--stream-maxlen=0")
	api := w.spawn("serve")
	user := uuid.NewString()
	post := func(path, body string, key uuid.UUID, want int) {
		t.Helper()
		testenv.Eventually(t, 20*time.Second, func() error {
			a, err := testenv.Request(t.Context(), http.MethodPost, api.http+path, body,
				"Idempotency-Key", key.String())
			return testenv.FailIf(err != nil || a.Status != want, "%s: %d %s, %w", path, a.Status, a.Body, err)
		})
	}
	newKey := func() uuid.UUID { return uuid.Must(uuid.NewV7()) }
	order := func(key uuid.UUID) {
		t.Helper()
		post("/orders", fmt.Sprintf(`{"user_id":%q,"amount":7,"currency":"USD","pay_with":"credits"}`, user), key,
			http.StatusCreated)
	}
	agree := func(orders, left int) {
		t.Helper()
		w.waitExactly("outbox.order", int64(orders))
		w.waitExactly("outbox.credits", int64(orders)+1)
		testenv.Eventually(t, 30*time.Second, func() error {
			report, err := w.reconcile()
			return testenv.FailIf(err != nil || report.Total != int64(left), "%d credits, want %d, %w", report.Total,
				left, err)
		})
		w.waitHas(0, "SELECT count(*) FROM outbox_backlog")
		w.hasLen("outbox.order", int64(orders))
		w.hasLen("outbox.credits", int64(orders)+1)
		w.lostNothing()
	}
	post("/add/"+user, `{"amount":1000}`, newKey(), http.StatusOK)
	first := newKey()
	order(first)
	for range 9 {
		order(newKey())
	}
	agree(10, 930)
	for range 2 {
		do(t, w.redis.Client, "flushall")
		agree(10, 930)
	}
	order(first) // the order was placed before
	agree(10, 930)
	order(newKey())
	w.waitHas(0, "SELECT count(*) FROM order_payments WHERE due IS NOT NULL") // Postgres has kept the records
	agree(11, 923)
	w.has(2*21, "SELECT sum(restored)::int FROM outbox_reconcile")
}

// reconcile runs credits reconcile. It returns an error if the ledger is behind.
func (w *world) reconcile() (report credits.Report, err error) {
	r := w.once("credits", "reconcile", "--json")
	err = json.Unmarshal([]byte(r.out), &report)
	return report, testenv.FailIf(err != nil || r.code != 0 || report.Pending > 0, "exit %d, %w: %s%s", r.code, err,
		r.out, r.errOut)
}

// unfreezes releases an account whose balance in Redis was forged.
func (w *world) unfreezes(user string) {
	w.t.Helper()
	command := func(code int, args string, texts ...string) {
		w.t.Helper()
		r := w.once(append([]string{"credits"}, strings.Fields(args)...)...)
		r.out += r.errOut
		r.says(w.t, code, texts...)
	}
	command(1, "unfreeze "+user, "not frozen")
	w.db.Exec(w.t, "UPDATE credit_accounts SET frozen = 'gap'")
	command(1, "unfreeze --yes "+user, "frozen: gap", "--settle=ledger or --settle=redis")
	command(1, "unfreeze --settle=ledger "+user, "--yes")
	command(0, "unfreeze --settle=ledger --yes --json "+user, `"released": true`)
	command(0, "balance "+user, "ledger: 0 credits", "redis:  not loaded")
	command(2, "balance somebody")
	command(1, "balance "+uuid.NewString())
	command(0, "reconcile")
}

func bucketOf(user string) string { return fmt.Sprintf("%03d", credits.Bucket(uuid.MustParse(user))) }
