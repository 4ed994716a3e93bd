package credits

import (
	"context"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/uuid"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/go-redis/v9"

	"posthaste/internal/lab/testenv"
)

func (w *world) reconcile() *Report {
	w.tb.Helper()
	r, err := Reconcile(w.tb.Context(), w.redis.Client, w.db.Pool, nil)
	must(w.tb, err)
	return r
}

// unfreeze requires the error, or none, and returns the output for the operator.
func (w *world) unfreeze(user uuid.UUID, s Settlement, want error) *Account {
	w.tb.Helper()
	a, err := w.bank.Unfreeze(w.tb.Context(), user, s)
	testenv.ErrorIs(w.tb, "to unfreeze", err, want)
	return a
}

func TestReconcile(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	users := map[string]uuid.UUID{}
	for _, name := range []string{
		"in step", "evicted", "ahead", causeSum, causeGap, causeFrozen, causeBehind,
		causeBalance, causeStream,
	} {
		users[name] = w.funded(100)
		w.must(newOp(users[name], Deduct, 10), OK)
	}
	w.settle()
	if r := w.reconcile(); !r.Clean() || r.Accounts != 9 || r.Cached != 9 || r.Total != 810 || r.Pending != 0 {
		t.Fatalf("before: %+v", r)
	}
	ctx, c := t.Context(), w.redis.Client
	c.Del(ctx, accountKey(users["evicted"]))
	w.must(newOp(users["ahead"], Deduct, 5), OK)
	w.must(newOp(users["ahead"], Deduct, 500), Insufficient)
	w.db.Exec(t, "UPDATE credit_accounts SET balance = 91 WHERE user_id = $1", users[causeSum])
	w.db.Exec(t, "DELETE FROM credit_entries WHERE user_id = $1 AND seq = 1", users[causeGap])
	w.db.Exec(t, "UPDATE credit_entries SET amount = 90, kind = 'add' WHERE user_id = $1", users[causeGap])
	w.db.Exec(t, "UPDATE credit_accounts SET frozen = 'gap' WHERE user_id = $1", users[causeFrozen])
	c.HSet(ctx, accountKey(users[causeBehind]), "q", 1)
	c.HSet(ctx, accountKey(users[causeBalance]), "b", 91)
	c.HSet(ctx, accountKey(users[causeStream]), "q", 7)
	fresh, unknown := w.funded(3), w.funded(4)
	c.HSet(ctx, accountKey(unknown), "q", 5)
	r := w.reconcile()
	if r.Accounts != 10 || r.Pending != 2 || r.Cached != 9 {
		t.Errorf("got %+v", r)
	}
	got := map[uuid.UUID]string{}
	for _, d := range r.Differences {
		got[d.UserID] = d.Cause
		if d.Explanation == "" {
			t.Errorf("%+v is not explained", d)
		}
	}
	users[causeUnknown] = unknown
	for _, cause := range []string{
		causeSum, causeGap, causeFrozen, causeBehind, causeBalance, causeStream,
		causeUnknown,
	} {
		testenv.Equal(t, "cause", got[users[cause]], cause)
	}
	testenv.Equal(t, "differences", len(r.Differences), 7)
	testenv.Equal(t, "the new account", got[fresh], "")
	// The sum was changed by one, so the counter-account differs too.
	if len(r.Buckets) != 1 || r.Buckets[0].Bucket != Bucket(users[causeSum]) ||
		r.Buckets[0].Accounts-r.Buckets[0].Issued != 1 {
		t.Errorf("buckets %+v", r.Buckets)
	}
}

// Keys that were overwritten by hand are reported as differences, and do not hide other differences.
func TestReconcileKeysOfAnotherType(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	account, stream, ahead := w.funded(100), w.funded(100), w.funded(100)
	w.settle()
	w.must(newOp(stream, Deduct, 1), OK)
	for _, k := range []string{accountKey(account), streamKey(Bucket(stream)), accountKey(uuid.New())} {
		w.redis.Client.Set(t.Context(), k, "somebody's", 0)
	}
	w.redis.Client.HSet(t.Context(), accountKey(ahead), "b", 101)
	got := map[uuid.UUID]string{}
	r := w.reconcile()
	for _, d := range r.Differences {
		got[d.UserID] = d.Cause
	}
	if got[account] != causeBalance || got[stream] != causeStream || got[ahead] != causeBalance || len(got) != 4 {
		t.Errorf("got %+v", r.Differences)
	}
	a, err := Inspect(t.Context(), w.redis.Client, w.db.Pool, account)
	if err != nil || a.Difference == "" || a.Redis != nil {
		t.Errorf("got %+v, %v", a, err)
	}
}

// If an account is deleted from the ledger with all its entries, nothing contradicts itself. Only the counter-account
// shows it.
func TestAVanishedAccountIsMissed(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	user := w.funded(100)
	w.must(newOp(user, Deduct, 10), OK)
	w.must(newOp(user, Deduct, 500), Insufficient)
	w.settle()
	w.redis.Client.Del(t.Context(), accountKey(user))
	w.db.Exec(t, "DELETE FROM credit_entries")
	w.db.Exec(t, "DELETE FROM credit_accounts")
	r := w.reconcile()
	if r.Clean() || len(r.Differences) != 0 || len(r.Buckets) != 1 || r.Buckets[0].Issued != 90 ||
		r.Buckets[0].Accounts != 0 {
		t.Errorf("got %+v", r)
	}
}

// A frozen account is released only after the operator has chosen a balance. Then the account works again, and its
// balances agree.
func TestUnfreeze(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		settle  Settlement
		balance int64
	}{{SettleLedger, 90}, {SettleRedis, 40}} {
		t.Run(string(c.settle), func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			user := w.funded(100)
			w.unfreeze(uuid.New(), SettleLedger, ErrUnknownUser)
			w.settle()
			w.unfreeze(user, SettleLedger, ErrNotFrozen)
			for _, amount := range []int64{10, 20, 30} {
				w.must(newOp(user, Deduct, amount), OK)
			}
			w.tamper(user, func(e []map[string]any) []map[string]any { return []map[string]any{e[0], e[2]} }) // a gap
			w.settle()
			w.refused(newOp(user, Deduct, 1), ErrFrozen)
			a := w.unfreeze(user, SettleNone, ErrUnsettled)
			if a.Frozen != reasonGap || a.Ledger != 90 || *a.Redis != 40 || a.Quarantined != 1 ||
				a.Quarantine[0].Amount != "30" || a.Difference == "" {
				t.Errorf("not settled: %+v", a)
			}
			w.db.Exec(t, "UPDATE credit_accounts SET balance = 91 WHERE user_id = $1", user)
			w.unfreeze(user, c.settle, ErrDamaged) // the ledger was changed by hand
			w.db.Exec(t, "UPDATE credit_accounts SET balance = 90 WHERE user_id = $1", user)
			w.refused(newOp(user, Deduct, 1), ErrFrozen)
			w.unfreeze(user, c.settle, nil)
			w.must(newOp(user, Deduct, 1), OK)
			w.inStep(user, c.balance-1)
			if r := w.reconcile(); !r.Clean() {
				t.Errorf("afterwards: %+v", r)
			}
		})
	}
}

// An account is frozen again before its settlement is in the ledger. The next settlement is not taken for the first
// one.
func TestUnfreezeTwice(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	user := w.funded(100)
	w.settle()
	w.must(newOp(user, Deduct, 10), OK)
	spoil := func() {
		w.redis.Client.XAdd(t.Context(),
			&redis.XAddArgs{Stream: streamKey(Bucket(user)), Values: map[string]any{"u": user.String(), "x": "y"}})
	}
	w.tamper(user, func(e []map[string]any) []map[string]any {
		e[0]["q"] = "7" // a gap
		return e
	})
	w.settle()
	spoil()
	w.unfreeze(user, SettleRedis, nil)
	w.settle() // freezes the account again
	testenv.Equal(t, "reason", w.ledger(user).Frozen, reasonMalformed)
	a := w.unfreeze(user, SettleRedis, nil)
	testenv.Equal(t, "balances", [2]int64{a.Ledger, *a.Redis}, [2]int64{100, 90})
	w.inStep(user, 90)
}

// The balance in Redis cannot be settled by one operation. The account stays frozen.
func TestUnfreezeWithAnImpossibleBalance(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	user := w.funded(100)
	w.settle()
	w.must(newOp(user, Deduct, 10), OK)
	w.tamper(user, func(e []map[string]any) []map[string]any {
		e[0]["q"] = "7" // a gap
		return e
	})
	w.settle()
	for _, balance := range []any{101 + MaxAmount, "many"} {
		w.redis.Client.HSet(t.Context(), accountKey(user), "b", balance)
		w.unfreeze(user, SettleRedis, ErrUnfit)
		w.refused(newOp(user, Deduct, 1), ErrFrozen)
	}
	w.unfreeze(user, SettleLedger, nil)
	w.inStep(user, 100)
}

// Redis lost the account, or loaded it from the ledger again. The quarantined operation is in neither balance, so it
// must not be given up without the operator's decision.
func TestUnfreezeAfterARebuild(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	user := w.funded(100)
	w.settle()
	w.must(newOp(user, Deduct, 1), OK)
	w.db.Exec(t, "UPDATE credit_accounts SET balance = 99 WHERE user_id = $1", user)
	w.settle()
	w.db.Exec(t, "UPDATE credit_accounts SET balance = 100 WHERE user_id = $1", user)
	w.redis.Client.Del(t.Context(), accountKey(user))
	w.unfreeze(user, SettleNone, ErrUnsettled)
	w.unfreeze(user, SettleRedis, ErrNotInRedis)
	w.refused(newOp(user, Deduct, 1), ErrFrozen) // loads the account
	testenv.Equal(t, "balance in redis", w.account(user)["b"], "100")
	w.unfreeze(user, SettleNone, ErrUnsettled)
	w.unfreeze(user, SettleLedger, nil)
	w.inStep(user, 100)
}

// An account that changes constantly while the sync empties its stream is reported as correct.
func TestReconcileBesideABusyAccount(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	user := w.funded(1_000_000)
	w.settle()
	w.run()
	ctx, stop := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	defer func() { stop(); wg.Wait() }()
	for range 8 {
		wg.Go(func() {
			for ctx.Err() == nil {
				_, _ = w.bank.Apply(context.Background(), newOp(user, Deduct, 1)) // refused if too many operations wait
			}
		})
	}
	for range 8 {
		r, err := Reconcile(t.Context(), w.redis.Client, w.db.Pool, nil)
		must(t, err)
		if !r.Clean() {
			t.Errorf("%+v %+v", r.Differences, r.Buckets)
		}
	}
}

// All series exist with value zero at the start, so that their first increase is visible.
func TestMetricsBeginAtZero(t *testing.T) {
	t.Parallel()
	reg := prometheus.NewRegistry()
	New(Options{Registerer: reg})
	NewSync(SyncOptions{Registerer: reg})
	families, err := reg.Gather()
	must(t, err)
	series := map[string]int{}
	for _, f := range families {
		series[f.GetName()] = len(f.GetMetric())
		for _, m := range f.GetMetric() {
			if m.GetCounter().GetValue()+m.GetGauge().GetValue()+m.GetHistogram().GetSampleSum() != 0 {
				t.Errorf("%s begins at %v", f.GetName(), m)
			}
		}
	}
	for name, want := range map[string]int{
		"credits_ops_total": len(codes) + 4, "credits_ledger_reads_total": 1,
		"credits_sync_lag_seconds": 1,
		"credits_frozen_total":     len(reasons), "credits_epoch_bumps_total": 1, "credits_lost_operations_total": 1,
		"credits_reconcile_drift": 1, "outbox_events_written_total": 2,
	} {
		testenv.Equal(t, name, series[name], want)
	}
	if !slices.Contains(reasons, reasonFork) {
		t.Error("forks are not counted")
	}
}

// The drift metric shows changes that were made by hand in the ledger.
func TestDrift(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	a, b := w.funded(100), w.funded(50)
	w.settle()
	w.sync.compare(t.Context())
	testenv.Equal(t, "drift", reading(w.sync.metrics.drift), 0)
	w.db.Exec(t, "UPDATE credit_accounts SET balance = 93 WHERE user_id = $1", a)
	w.db.Exec(t, "DELETE FROM credit_accounts WHERE user_id = $1", b)
	w.sync.compare(t.Context())
	testenv.Equal(t, "drift", reading(w.sync.metrics.drift), 57)
	// A comparison that fails does not look like one without a difference.
	var log strings.Builder
	w.sync.log = slog.New(slog.NewTextHandler(&log, nil))
	w.db.Exec(t, "ALTER TABLE credit_accounts RENAME TO elsewhere")
	w.sync.compare(t.Context())
	testenv.Contains(t, "log", log.String(), "level=WARN")
}
