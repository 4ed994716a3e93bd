package credits

import (
	"testing"

	"github.com/google/uuid"
)

func (w *world) reconcile() *Report {
	w.tb.Helper()
	r, err := Reconcile(w.tb.Context(), w.redis.Client, w.db.Pool)
	if err != nil {
		w.tb.Fatal(err)
	}
	return r
}

func TestReconcile(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	users := map[string]uuid.UUID{}
	for _, name := range []string{"in step", "evicted", "ahead", causeSum, causeGap, causeFrozen, causeBehind, causeBalance, causeStream} {
		users[name] = w.funded(100)
		w.must(newOp(users[name], Deduct, 10), OK)
	}
	w.settle()
	if r := w.reconcile(); len(r.Differences) != 0 || r.Accounts != 9 || r.Cached != 9 || r.Total != 810 || r.Pending != 0 {
		t.Fatalf("before: %+v", r)
	}
	ctx, c := t.Context(), w.redis.Client
	if ok, err := w.bank.Evict(ctx, users["evicted"]); !ok || err != nil {
		t.Fatal(ok, err)
	}
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
	for _, cause := range []string{causeSum, causeGap, causeFrozen, causeBehind, causeBalance, causeStream, causeUnknown} {
		wantEqual(t, "cause", got[users[cause]], cause)
	}
	wantEqual(t, "differences", len(r.Differences), 7)
	wantEqual(t, "the new account", got[fresh], "")
}
