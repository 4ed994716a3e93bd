package cdc

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"posthaste/internal/lab/testenv"
	"posthaste/outbox"
)

// fillWAL writes about 30 MB of WAL into the outbox.
func (e *env) fillWAL(t testing.TB) {
	t.Helper()
	e.insertOf(t, "i::text", "to_jsonb(repeat(md5(i::text), 20))", 30000)
}

func TestAdvanceFreesTheWAL(t *testing.T) {
	t.Parallel()
	e := setup(t)
	e.fillWAL(t)
	if st := e.status(t); st.RetainedBytes < 20<<20 || st.ConfirmedLagBytes < 20<<20 {
		t.Fatalf("before: %+v", st)
	}
	var target outbox.LSN
	// Other tests write into the same WAL, and their open transactions hold it, until a round meets neither.
	testenv.Eventually(t, 30*time.Second, func() error {
		if err := e.slots.Nudge(t.Context()); err != nil {
			return err
		}
		target = e.walEnd(t)
		if err := e.slots.Advance(t.Context(), target); err != nil {
			return err
		}
		if st := e.status(t); st.Confirmed != target || target-st.Restart > 4<<20 {
			return fmt.Errorf("after: %+v, target %s", st, target)
		}
		return nil
	})
	// Going back is nothing.
	if err := e.slots.Advance(t.Context(), target-1000); err != nil {
		t.Error(err)
	}
	if got := e.status(t).Confirmed; got != target {
		t.Errorf("confirmed went to %s", got)
	}
	if n := testenv.Value[int](t, e.db,
		"SELECT count(*)::int FROM pg_replication_slots WHERE slot_name LIKE $1 || '_nudge%'", e.slot); n != 0 {
		t.Errorf("%d slots left behind", n)
	}
	c := e.run(t, true)
	e.insert(t, "behind the target")
	c.wait(t, 1)
	// The WAL of a slot that is being streamed is freed after a nudge, once what lies before is settled.
	e.fillWAL(t)
	c.wait(t, 30001)
	target = e.walEnd(t)
	freed := func(how func() error) {
		t.Helper()
		testenv.Eventually(t, 20*time.Second, func() error {
			if err := how(); err != nil {
				return err
			}
			if st := e.status(t); st.Restart < target {
				return fmt.Errorf("restart %s is still below %s", st.Restart, target)
			}
			return nil
		})
	}
	freed(func() error { return e.slots.Nudge(t.Context()) })
	_ = c.stop()
	// Without a nudge before, the record that Advance leaves behind serves the next one, unless another test's
	// transaction was open then. (Every 15 s the server writes such a record by itself.)
	e.fillWAL(t)
	target = e.walEnd(t)
	must(t, e.slots.Advance(t.Context(), target))
	freed(func() error {
		e.insert(t, "x")
		return e.slots.Advance(t.Context(), e.walEnd(t))
	})
}

// The oldest open transaction, even in another database, holds the WAL; nothing hangs on it for long.
func TestOpenTransactionHoldsTheWAL(t *testing.T) {
	t.Parallel()
	// A server of its own: an open transaction would hold up every slot that other tests create.
	srv := testenv.NewServer(t)
	e := prepare(t, srv.Database(t))
	e.ensure(t)
	tx, err := e.db.Pool.Begin(t.Context())
	must(t, err)
	_, err = tx.Exec(t.Context(), insertOne, "held")
	must(t, err)
	held := e.walEnd(t)
	e.fillWAL(t)
	begin := time.Now()
	must(t, e.slots.Nudge(t.Context()))
	target := e.walEnd(t)
	must(t, e.slots.Advance(t.Context(), target))
	if d := time.Since(begin); d > 30*time.Second { // else it lasts as long as the transaction
		t.Errorf("took %v", d)
	}
	if st := e.status(t); st.Confirmed != target || st.Restart > held {
		t.Errorf("after: %+v, the transaction began below %s", st, held)
	}
	// Neither can a new slot be made meanwhile, and that is said in time.
	must(t, e.slots.Drop(t.Context()))
	begin = time.Now()
	_, err = e.slots.Ensure(t.Context(), nil)
	wantReason(t, err, outbox.ReasonTransactionHeld)
	if d := time.Since(begin); d > createTimeout+20*time.Second {
		t.Errorf("took %v", d)
	}
	if st := e.status(t); st.Exists {
		t.Error("half a slot is left behind")
	}
	must(t, tx.Commit(t.Context()))
	e.ensure(t)
}

// Transactions that overlap hold up the creation of a slot for several times as long as each of them lasts. Where one
// attempt is too short for that, a later one is not.
func TestASlotIsMadeBesideTransactionsThatOverlap(t *testing.T) {
	t.Parallel()
	const first, lasting = 200 * time.Millisecond, 600 * time.Millisecond
	srv := testenv.NewServer(t)
	e := prepare(t, srv.Database(t))
	e.slots.creating.Store(int64(first))
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	for i := range 4 {
		wg.Go(func() {
			took := lasting * time.Duration(i+1) / 4 // so that they do not end together
			for ; ctx.Err() == nil; took = lasting {
				_, _ = e.db.Pool.Exec(ctx, "SELECT pg_current_xact_id(), pg_sleep($1)", took.Seconds())
			}
		})
	}
	testenv.Eventually(t, 30*time.Second, func() error {
		const query = "SELECT count(*) FROM pg_stat_activity WHERE backend_xid IS NOT NULL"
		if n := testenv.Value[int](t, e.db, query); n < 3 {
			return fmt.Errorf("%d transactions are open", n)
		}
		return nil
	})
	attempts := 0
	testenv.Eventually(t, time.Minute, func() error {
		attempts++
		_, err := e.slots.Ensure(t.Context(), nil)
		if err != nil {
			wantReason(t, err, outbox.ReasonTransactionHeld)
		}
		return err
	})
	if attempts < 2 {
		t.Errorf("the slot was made in %v: nothing overlapped", first)
	}
	if d := time.Duration(e.slots.creating.Load()); d != createTimeout {
		t.Errorf("the next one may take %v", d)
	}
}

// A slot survives a failover where the server can, and ends when it is dropped.
func TestDropAndEvict(t *testing.T) {
	t.Parallel()
	e := setup(t)
	got, want := testenv.Value[string](t, e.db,
		"SELECT coalesce(to_jsonb(s) ->> 'failover', 'unknown') FROM pg_replication_slots s WHERE slot_name = $1",
		e.slot), "true"
	if testenv.Value[int](t, e.db, "SELECT current_setting('server_version_num')::int") < 170000 {
		want = "unknown"
	}
	if got != want {
		t.Errorf("the slot survives a failover: %s, want %s", got, want)
	}
	if err := e.slots.Evict(t.Context()); err != nil {
		t.Errorf("nobody to evict: %v", err)
	}
	bystander := setup(t)
	other := bystander.run(t, true)
	c := e.run(t, true)
	if st := e.status(t); !st.Active || st.ActivePID == 0 {
		t.Errorf("status %+v", st)
	}
	must(t, e.slots.Evict(t.Context()))
	if st := e.status(t); st.Active || !st.Exists {
		t.Errorf("after the eviction: %+v", st)
	}
	wantReason(t, c.ended(t, 20*time.Second), outbox.ReasonConnection)
	c = e.run(t, true)
	must(t, e.slots.Drop(t.Context()))
	// Whether the slot is still there when the reader looks is a matter of microseconds.
	err := c.ended(t, 20*time.Second)
	var slot *outbox.SlotError
	if !errors.As(err, &slot) || slot.Reason != outbox.ReasonSlotMissing && slot.Reason != outbox.ReasonConnection {
		t.Errorf("got %v", err)
	}
	wantReason(t, runOnce(t, c.r), outbox.ReasonSlotMissing)
	if st := e.status(t); st.Exists || st.Confirmed != 0 || st.RetainedBytes != 0 {
		t.Errorf("after the drop: %+v", st)
	}
	if err := e.slots.Drop(t.Context()); err != nil {
		t.Errorf("once more: %v", err)
	}
	wantReason(t, e.slots.Advance(t.Context(), 1), outbox.ReasonSlotMissing)
	bystander.insert(t, "undisturbed")
	other.wait(t, 1)
}

func TestEveryQueryPrepares(t *testing.T) {
	t.Parallel()
	testenv.Postgres(t).PrepareAll(t, "queries")
}
