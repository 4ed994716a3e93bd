package relay

import (
	"context"
	"slices"
	"testing"
	"time"

	"posthaste/outbox"
)

// keeping is a keeper on a world whose slot stands at 1000, in a phase, with a budget of 100,000 bytes.
func keeping(t *testing.T, p phase, do func(w *world, k *slotKeeper)) {
	t.Helper()
	inLeadership(t, Options{WALBudget: 100_000}, func(w *world, l *leadership) {
		w.pg.slot = &slot{w: w, confirmed: 1000, restart: 1000}
		l.adopts(w.t)
		l.activity.enter(p, "")
		do(w, l.keeper)
	})
}

// tick has the keeper look once, and returns its calls.
func (w *world) tick(t *testing.T, k *slotKeeper) []string {
	t.Helper()
	var from int
	w.do(func() { from = len(w.trace) })
	_, _ = k.tick(context.Background())
	return w.calls(from)
}

// The keeper's action depends on the phase, on how much WAL the slot holds back, and on the time since the last action.
func TestWhatTheKeeperDoes(t *testing.T) {
	t.Parallel()
	const little, much, over = 100, 30_000, 80_000
	look := "Slots.Status"
	mark := []string{look, "Slots.Nudge", "Store.Horizon"}
	advance := []string{look, "Slots.Nudge", "Store.Horizon", "Store.RaiseBarrier", "Slots.Advance", look}
	for name, c := range map[string]struct {
		phase phase
		wal   int
		idle  time.Duration
		want  []string
	}{
		"a stream with little":            {phaseStream, little, time.Hour, []string{look}},
		"a stream with much":              {phaseStream, much, nudgeInterval + 1, []string{look, "Slots.Nudge"}},
		"a stream that was helped before": {phaseStream, much, nudgeInterval / 2, []string{look}},
		"a stream over the budget":        {phaseStream, over, time.Hour, []string{look}},
		"a sweep with little":             {phaseSweep, little, softInterval / 2, []string{look}},
		"a sweep that stood for long":     {phaseSweep, little, softInterval + 1, mark},
		"a sweep with much":               {phasePoll, much, time.Second + 1, mark},
		"a sweep with much, just helped":  {phasePoll, much, time.Second / 2, []string{look}},
		"a sweep over the budget":         {phasePoll, over, 0, advance},
		"a hand-over with much":           {phaseHandover, much, time.Hour, []string{look}},
		"a hand-over over the budget":     {phaseHandover, over, 0, advance},
		"an adoption over the budget":     {phaseAdopt, over, 0, advance},
	} {
		keeping(t, c.phase, func(w *world, k *slotKeeper) {
			w.do(func() { w.grow(c.wal) })
			k.last = time.Now().Add(-c.idle)
			hit := 0
			end := func() { hit++ }
			k.exhausted.Store(&end)
			if got := w.tick(t, k); !slices.Equal(got, c.want) {
				t.Errorf("%s: calls %v, want %v", name, got, c.want)
			}
			if (hit == 1) != (c.phase == phaseStream && c.wal == over) {
				t.Errorf("%s: the stream was ended %d times", name, hit)
			}
		})
	}
}

// A slot is looked at more rarely where nothing can happen in between.
func TestHowOftenTheKeeperLooks(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		phase    phase
		streamed bool
		budget   int64
		wal      int
		want     time.Duration
	}{
		"a stream at rest":        {phaseStream, true, 1 << 30, 0, keepLong},
		"a stream with much WAL":  {phaseStream, true, 1 << 30, 300 << 20, keepInterval},
		"a small budget":          {phaseStream, true, 512 << 20, 0, keepInterval},
		"a slot without a reader": {phaseStream, false, 1 << 30, 0, keepInterval},
		"a sweep":                 {phaseSweep, true, 1 << 30, 0, keepInterval},
	} {
		keeping(t, c.phase, func(w *world, k *slotKeeper) {
			k.o.WALBudget = c.budget
			if c.streamed {
				w.pg.slot.active = &walsender{of: w.instance("two"), slot: w.pg.slot, gone: make(chan struct{})}
			}
			w.do(func() { w.grow(c.wal) })
			if got, err := k.tick(context.Background()); err != nil || got != c.want {
				t.Errorf("%s: again in %v, %v, want %v", name, got, err, c.want)
			}
		})
	}
}

// An open transaction holds the WAL of a slot that was moved: the slot is dropped, because the database's disk always
// wins.
func TestTheKeeperDropsASlotThatCannotFollow(t *testing.T) {
	t.Parallel()
	keeping(t, phaseSweep, func(w *world, k *slotKeeper) {
		tx := w.begin()
		w.do(func() { w.grow(80_000) })
		w.tick(t, k)
		if w.pg.slot != nil || w.pg.state.Barrier == 0 || k.known {
			t.Errorf("slot %+v, barrier %d, known %v", w.pg.slot, w.pg.state.Barrier, k.known)
		}
		if got := w.tick(t, k); !slices.Equal(got, []string{"Slots.Status"}) {
			t.Errorf("without a slot: %v", got)
		}
		tx.rollback()
	})
}

// A walsender that holds a slot over its budget is ended; a slot that can be neither moved nor dropped is said, and
// taken back.
func TestTheBudgetIsEnforced(t *testing.T) {
	t.Parallel()
	keeping(t, phaseSweep, func(w *world, k *slotKeeper) {
		ws := &walsender{of: w.instance("two"), slot: w.pg.slot, gone: make(chan struct{})}
		w.pg.slot.active = ws
		w.do(func() { w.grow(80_000) })
		w.tick(t, k)
		if w.pg.slot.active != nil || w.count("Slots.Evict") != 1 || w.pg.slot.restart < 80_000 {
			t.Errorf("the slot holds back %d bytes", w.pg.wal-w.pg.slot.restart)
		}
		stuck := &stuckSlots{Slots: k.o.Slots}
		k.o.Slots = stuck
		w.do(func() { w.grow(80_000) })
		w.tick(t, k)
		k.health.says(t, "degraded: wal: ")
		k.o.Slots = stuck.Slots
		w.tick(t, k)
		w.tick(t, k)
		k.health.says(t)
	})
}

// stuckSlots cannot be moved, freed or dropped.
type stuckSlots struct{ outbox.Slots }

func (*stuckSlots) Advance(context.Context, outbox.LSN) error { return errRefused }
func (*stuckSlots) Evict(context.Context) error               { return errRefused }
func (*stuckSlots) Drop(context.Context) error                { return errRefused }

// A leader that was succeeded moves and drops nothing: the slot is another one's.
func TestASupersededKeeperLeavesTheSlotAlone(t *testing.T) {
	t.Parallel()
	keeping(t, phaseSweep, func(w *world, k *slotKeeper) {
		tx := w.begin()
		w.do(func() { w.pg.state.Owner.Epoch++; w.grow(80_000) })
		w.tick(t, k)
		if w.pg.slot == nil || w.pg.slot.confirmed != 1000 || w.count("Slots.Evict") > 0 {
			t.Errorf("slot %+v", w.pg.slot)
		}
		tx.rollback()
	})
}

// A new slot is noted before it can be seen, and what it stands for as soon as it is known; its making is counted by
// its reason.
func TestASlotIsMadeUnderABarrier(t *testing.T) {
	t.Parallel()
	for reason, prepare := range map[string]func(w *world, k *slotKeeper){
		madeNew:         func(w *world, _ *slotKeeper) { w.pg.slot = nil },
		madeMissing:     func(w *world, k *slotKeeper) { w.pg.slot = nil; k.known = true },
		madeLost:        func(w *world, _ *slotKeeper) { w.pg.slot.lost = true },
		madePublication: func(w *world, _ *slotKeeper) { w.pg.unpublished = true },
	} {
		inLeadership(t, Options{}, func(w *world, l *leadership) {
			w.pg.slot = &slot{w: w, confirmed: 1000, restart: 1000}
			l.adopts(w.t)
			prepare(w, l.keeper)
			from := len(w.trace)
			w.must(l.keeper.ensure(context.Background()))
			want := []string{
				"Slots.Status", "Slots.Ensure", "Store.RaiseBarrier", "Slots.Create", "Store.Horizon",
				"Store.RaiseBarrier",
			}
			if got := w.calls(from); !slices.Equal(got, want) {
				t.Errorf("%s: calls %v, want %v", reason, got, want)
			}
			if n := value(t, l.metrics.slotCreated.WithLabelValues(reason)); n != 1 {
				t.Errorf("%s: counted %v times", reason, n)
			}
			if b := w.pg.state.Barrier; b == 0 || b == outbox.BarrierUnknown || !l.keeper.known {
				t.Errorf("%s: barrier %d, known %v", reason, b, l.keeper.known)
			}
			if err := l.keeper.ensure(context.Background()); err != nil || w.count("Slots.Create") != 1 {
				t.Errorf("%s: made again, %v", reason, err)
			}
		})
	}
}

// A slot that this instance creates while the keeper reads the state and sees none is expected. An unknown barrier for
// it would make the hand-over wait for unrelated transactions. A slot that another program creates does raise one.
func TestASlotOfOurOwnIsNoSurprise(t *testing.T) {
	t.Parallel()
	inLeadership(t, Options{}, func(w *world, l *leadership) {
		ctx := context.Background()
		l.adopts(w.t)
		l.activity.enter(phaseSweep, "")
		w.tick(t, l.keeper)
		tx := w.begin() // the slot waits for it
		made := background(func() error { return l.keeper.ensure(ctx) })
		elapse(time.Second)
		w.tick(t, l.keeper)
		tx.rollback()
		w.must(<-made)
		w.tick(t, l.keeper)
		w.tick(t, l.keeper)
		if b := w.pg.state.Barrier; b == 0 || b == outbox.BarrierUnknown {
			t.Errorf("barrier %d for a slot of our own", b)
		}
		w.do(w.dropSlot)
		w.tick(t, l.keeper)
		w.do(func() { w.pg.slot = &slot{w: w, confirmed: w.pg.wal, restart: w.pg.wal} })
		w.tick(t, l.keeper)
		if b := w.pg.state.Barrier; b != outbox.BarrierUnknown {
			t.Errorf("barrier %d for somebody else's slot", b)
		}
	})
}

// The gauges show the state of the slot. A failed read is counted and changes none of them.
func TestTheKeeperShowsTheSlot(t *testing.T) {
	t.Parallel()
	keeping(t, phaseSweep, func(w *world, k *slotKeeper) {
		w.do(func() { w.grow(500) })
		w.tick(t, k)
		m := k.metrics
		retained, lag := value(t, m.slotRetained), value(t, m.slotConfirmed)
		if retained < 500 || lag != retained || value(t, m.slotActive) != 0 || value(t, m.slotMaxKeep) != -1 {
			t.Errorf("retained %v, lag %v, active %v, at most %v", retained, lag, value(t, m.slotActive), value(t,
				m.slotMaxKeep))
		}
		w.plan = fault{"Slots.Status", w.counts["Slots.Status"], refused}
		w.do(func() { w.grow(500) })
		w.tick(t, k)
		if value(t, m.scrapeErrors.WithLabelValues("slot")) != 1 || value(t, m.slotRetained) != retained {
			t.Error("a look that failed is not counted, or shown")
		}
	})
}

// A leadership begins without a target for the slot, because another instance may have led since.
func TestTheKeeperBeginsAnew(t *testing.T) {
	t.Parallel()
	keeping(t, phaseSweep, func(w *world, k *slotKeeper) {
		k.next, k.still, k.position = slotTarget{9000, 1}, true, 1
		ctx, cancel := context.WithTimeout(context.Background(), keepInterval)
		defer cancel()
		k.run(ctx)
		if k.next.xid != 0 || w.pg.state.Barrier != 0 || w.pg.slot.confirmed != 1000 {
			t.Errorf("target %+v, barrier %d, slot at %v", k.next, w.pg.state.Barrier, w.pg.slot.confirmed)
		}
	})
	// Nor of a missing slot: this may be a new server, which never had one.
	keeping(t, phaseSweep, func(w *world, k *slotKeeper) {
		k.known = true
		w.do(w.dropSlot)
		ctx, cancel := context.WithTimeout(context.Background(), keepInterval)
		defer cancel()
		k.run(ctx)
		if k.known {
			t.Error("a slot that was never there counts as missing")
		}
	})
}

// A commit that is not visible yet is not in the table for a sweep, and behind the slot it is not in the stream: the
// slot stays before it. Only the budget does not wait, and that is noted where the next leader finds it.
func TestSlotFollowsWhatIsVisible(t *testing.T) {
	t.Parallel()
	keeping(t, phaseSweep, func(w *world, k *slotKeeper) {
		ctx, slot := context.Background(), w.pg.slot
		tx := w.begin()
		w.do(func() { w.grow(500) })
		for range 3 {
			if err := k.follow(ctx); err != nil || slot.confirmed != 1000 {
				t.Fatalf("the slot was moved to %v beside an open transaction, %v", slot.confirmed, err)
			}
		}
		tx.rollback()
		if err := k.follow(ctx); err != nil || slot.confirmed < 1500 || w.pg.state.Barrier != 0 {
			t.Errorf("the slot was moved to %v, and a hand-over has to wait for transaction %d; %v", slot.confirmed,
				w.pg.state.Barrier, err)
		}
		tx = w.begin()
		w.do(func() { w.grow(500) })
		if err := k.advance(ctx); err != nil || slot.confirmed < 2000 || w.pg.state.Barrier <= tx.xid {
			t.Errorf("moved to %v for the budget; a hand-over waits for transaction %d, want one behind %d; %v",
				slot.confirmed, w.pg.state.Barrier, tx.xid, err)
		}
		tx.rollback()
	})
}

// If another program moves the idle slot, or creates one, the commits that it has passed may not be visible. A move by
// the relay itself is expected, and so is one by a stream, also if the slot was not read since the stream began: an
// unnecessary barrier would keep the next stream from beginning while a transaction is open.
func TestTheSlotIsMovedBySomebodyElse(t *testing.T) {
	t.Parallel()
	moved := func(w *world, _ *slotKeeper) { w.do(w.moveSlot) }
	byUs := func(_ *world, k *slotKeeper) {
		if err := k.shortcut(context.Background(), 1100, 7); err != nil {
			t.Error(err)
		}
	}
	for name, c := range map[string]struct {
		phase          phase
		before, action func(w *world, k *slotKeeper)
		want           bool
	}{
		"moved":                    {phasePoll, nil, moved, true},
		"moved beside an adoption": {phaseAdopt, nil, moved, true},
		"moved in a hand-over":     {phaseHandover, nil, moved, true},
		"made": {phaseSweep, func(w *world, _ *slotKeeper) { w.do(w.dropSlot) }, func(w *world, _ *slotKeeper) {
			w.pg.slot = &slot{w: w, confirmed: 1, restart: 1}
		}, true},
		"dropped":                    {phaseSweep, nil, func(w *world, _ *slotKeeper) { w.do(w.dropSlot) }, false},
		"moved by us":                {phaseSweep, nil, byUs, false},
		"moved by us in a hand-over": {phaseHandover, nil, byUs, false},
		"streamed":                   {phaseStream, func(_ *world, k *slotKeeper) { k.streams(true) }, moved, false},
		"by a stream that ended": {phasePoll, func(w *world, _ *slotKeeper) {
			w.pg.slot.active = &walsender{of: w.instance("two"), slot: w.pg.slot, gone: make(chan struct{})}
		}, func(w *world, _ *slotKeeper) { w.do(func() { w.pg.slot.active = nil; w.moveSlot() }) }, false},
		"by a stream that has just begun": {phaseHandover, nil, func(w *world, k *slotKeeper) {
			k.streams(true)
			w.do(w.moveSlot)
		}, false},
	} {
		keeping(t, c.phase, func(w *world, k *slotKeeper) {
			w.do(func() { w.grow(1000) })
			k.last = time.Now() // it has nothing to do
			if c.before != nil {
				c.before(w, k)
			}
			w.tick(t, k)
			c.action(w, k)
			w.tick(t, k)
			if (w.pg.state.Barrier == outbox.BarrierUnknown) != c.want {
				t.Errorf("%s: barrier %d, want one: %v", name, w.pg.state.Barrier, c.want)
			}
		})
	}
}
