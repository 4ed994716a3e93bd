package relay

import (
	"context"
	"sync/atomic"
	"time"

	"posthaste/internal/pause"
	"posthaste/outbox"
)

const (
	// keepInterval is how often the leader reads the slot's state. keepLong applies to a streamed slot that may hold
	// back keepRoom bytes more: even a fast server needs about that long to write them.
	keepInterval = 250 * time.Millisecond
	keepLong     = time.Second
	keepRoom     = 512 << 20
	// softBytes is the retained WAL beyond which the leader helps the slot advance.
	softBytes = 16 << 20
	// softInterval is how long a slot that is not streamed may stay at one position.
	softInterval = 10 * time.Second
	// nudgeInterval bounds how often a streamed slot is helped along.
	nudgeInterval = 2 * time.Second
)

// slotKeeper bounds the WAL that the slot holds back, in every phase: the database's disk takes precedence. No event is
// lost, because the rows that a slot was moved past, or dropped with, are still in the table.
type slotKeeper struct {
	*Relay

	// mu is held while the slot is moved, so that a hand-over and the budget do not move it at the same time.
	mu   callLock
	last time.Time // of the last advance or nudge
	// next is where the slot may be moved as soon as everything older than its transaction has ended; zero for nowhere.
	next slotTarget
	// known is set while this process knows of a slot that it has not dropped itself.
	known bool
	// position is the slot's position when it was last read, 0 if it was not. still is set while this instance does not
	// move it.
	position outbox.LSN
	still    bool
	// streamed is set while a stream moves it, beingMade while this process makes one.
	streamed, beingMade bool

	// exhausted ends the running stream; nil if none runs.
	exhausted atomic.Pointer[func()]
}

// slotTarget is a position in the WAL. Everything that was committed at or before lsn is visible when every transaction
// older than xid has ended.
type slotTarget struct {
	lsn outbox.LSN
	xid uint64
}

// soft and hard are the retained bytes at which the keeper helps the slot advance, and at which it enforces the budget.
// hard is below the budget to leave room for WAL that is written while the keeper acts.
func (k *slotKeeper) soft() int64 { return min(softBytes, k.o.WALBudget/4) }
func (k *slotKeeper) hard() int64 { return k.o.WALBudget / 4 * 3 }

// run checks the slot until ctx ends.
func (k *slotKeeper) run(ctx context.Context) {
	// A slot that did not move while no instance led is left to the first hand-over. Its next target may be invalid:
	// another instance may have led, or the server may be a different one, which never had a slot.
	k.with(func() { k.last, k.next, k.still, k.known = time.Now(), slotTarget{}, false, false })
	for ctx.Err() == nil {
		next, err := k.tick(ctx)
		if err != nil && ctx.Err() == nil {
			k.log.Debug("slot upkeep", "err", err)
		}
		// The wait is never longer than next, because the disk fills in the meantime.
		pause.For(ctx, min(next, pause.UntilTick(next)))
	}
}

// tick makes one check and returns the wait before the next one.
func (k *slotKeeper) tick(ctx context.Context) (next time.Duration, err error) {
	st, err := k.look(ctx)
	if err != nil {
		return keepInterval, err
	}
	next = keepInterval
	if st.Active && k.activity.current() == phaseStream && k.hard()-st.RetainedBytes > keepRoom {
		next = keepLong
	}
	return next, k.act(ctx, st)
}

// act moves, drops or leaves the slot, depending on its state.
func (k *slotKeeper) act(ctx context.Context, st outbox.SlotStatus) error {
	if !st.Exists || st.Lost {
		k.health.clear(conditionWAL) // it holds nothing back
		return nil
	}
	phase := k.activity.current()
	over := st.RetainedBytes > k.hard()
	if !over {
		k.health.clear(conditionWAL)
	}
	switch {
	case phase == phaseStream && over:
		if end := k.exhausted.Load(); end != nil {
			(*end)()
		}
		return nil
	case phase == phaseStream:
		if st.RetainedBytes > k.soft() && k.idle() > nudgeInterval {
			k.with(func() { k.last = time.Now() })
			return k.o.Slots.Nudge(ctx)
		}
		return nil
	case over:
		return k.overBudget(ctx, k.enforce(ctx))
	case phase == phaseHandover:
		return nil // it moves the slot itself
	case st.RetainedBytes > k.soft() && k.idle() > time.Second,
		st.ConfirmedLagBytes > 0 && k.idle() > softInterval:
		return k.follow(ctx)
	}
	return nil
}

// overBudget reports why the budget cannot be enforced: events flow, but the disk fills.
func (k *slotKeeper) overBudget(ctx context.Context, err error) error {
	if err == nil {
		return nil
	}
	// An attempt that ends with an error may still have freed enough.
	if st, serr := k.look(ctx); serr != nil || st.RetainedBytes <= k.hard() {
		return err
	}
	if k.health.degrade(conditionWAL, err.Error()) {
		k.log.Error("the slot holds back more WAL than its budget, and can be neither moved nor dropped", "err", err)
	}
	return err
}

// with runs f while nothing of this instance moves the slot.
func (k *slotKeeper) with(f func()) {
	k.mu.Lock()
	defer k.mu.Unlock()
	f()
}

// idle is how long the slot was not helped.
func (k *slotKeeper) idle() (d time.Duration) {
	k.with(func() { d = time.Since(k.last) })
	return d
}

// look reads the slot's state, updates the gauges, and detects a move by another program.
func (k *slotKeeper) look(ctx context.Context) (outbox.SlotStatus, error) {
	k.mu.Lock() // so that nobody of ours moves it between the look and the comparison
	defer k.mu.Unlock()
	m := k.metrics
	before := k.activity.current()
	st, err := k.o.Slots.Status(ctx)
	if err != nil {
		m.scrapeErrors.WithLabelValues("slot").Inc()
		return st, err
	}
	if st.Exists && st.Confirmed != 0 { // one without a position is still being made
		k.known = true
	}
	if err := k.watch(ctx, st, before); err != nil {
		return st, err
	}
	boolGauge(m.slotActive, st.Active)
	boolGauge(m.slotLost, st.Lost)
	m.slotRetained.Set(float64(st.RetainedBytes))
	m.slotConfirmed.Set(float64(st.ConfirmedLagBytes))
	m.slotMaxKeep.Set(float64(st.MaxKeepBytes))
	return st, nil
}

// watch detects that another program has moved or created the slot: an operator, or a leader that was deposed while it
// did so. Commits that the slot has passed may not be visible. The caller holds mu.
func (k *slotKeeper) watch(ctx context.Context, st outbox.SlotStatus, before phase) error {
	// The slot also rests during an adoption, as long as the sink does not answer, and before a stream has begun.
	resting := func(p phase) bool {
		switch p {
		case phaseAdopt, phaseLayout, phasePoll, phaseSweep, phaseHandover:
			return true
		}
		return p == phaseStream && !k.streamed
	}
	if moved := k.still && st.Confirmed > k.position; moved {
		if err := k.moved(ctx); err != nil {
			return err
		}
		k.log.Warn("another program has moved the slot; it is not streamed before older transactions have ended",
			"from", k.position.String(), "to", st.Confirmed.String())
	}
	// A stream moves it, also one that is just ending; and one that is being made moves when it is complete.
	k.position = st.Confirmed
	k.still = !st.Active && !k.beingMade && resting(before) && resting(k.activity.current())
	return nil
}

// moved records that the slot has passed, or that the stream has left out, commits that may not be visible.
func (k *slotKeeper) moved(ctx context.Context) error {
	return k.o.Store.RaiseBarrier(ctx, k.activity.epoch(), outbox.BarrierUnknown, false)
}

// follow moves the idle slot, and only to a position up to which everything is visible. All of that is swept before the
// slot is streamed, so no hand-over, of this leader or another, has to wait because of the move. Staying behind open
// transactions costs no WAL: the server keeps the WAL since the oldest one began anyway.
func (k *slotKeeper) follow(ctx context.Context) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.activity.current() == phaseStream {
		k.next = slotTarget{}
		return nil
	}
	if k.next.xid == 0 {
		nudgeErr := k.o.Slots.Nudge(ctx) // as in advance
		lsn, xid, err := k.o.Store.Horizon(ctx)
		if err != nil {
			return err
		}
		k.next = slotTarget{lsn, xid}
		k.log.Debug("the slot follows when older transactions have ended", "lsn", lsn.String())
		return nudgeErr
	}
	visible, err := k.o.Store.VisibleBelow(ctx, k.next.xid)
	if err != nil || !visible {
		return err
	}
	lsn := k.next.lsn
	k.next, k.last, k.still = slotTarget{}, time.Now(), false
	return k.o.Slots.Advance(ctx, lsn)
}

// advance moves the idle slot to the current end of the WAL, regardless of visibility. The rows it passes are in the
// table.
func (k *slotKeeper) advance(ctx context.Context) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.activity.current() == phaseStream {
		return nil
	}
	k.last, k.still = time.Now(), false
	// With a running-transactions record below the target, restart_lsn follows in this advance and not only in the next
	// one.
	nudgeErr := k.o.Slots.Nudge(ctx)
	lsn, xid, err := k.o.Store.Horizon(ctx)
	if err != nil {
		return err
	}
	// The barrier is raised before the slot moves, so that the next leader finds it. A failure in between only makes a
	// hand-over wait unnecessarily.
	if err := k.o.Store.RaiseBarrier(ctx, k.activity.epoch(), xid, false); err != nil {
		return err
	}
	if err := k.o.Slots.Advance(ctx, lsn); err != nil {
		return err
	}
	return nudgeErr
}

// enforce brings the slot under the budget. It advances the slot, and drops it if an older transaction still holds back
// its WAL. A new slot is created when the oldest transaction has advanced.
func (k *slotKeeper) enforce(ctx context.Context) error {
	err := k.advance(ctx)
	if superseded(err) {
		return err // it is another one's to move, or drop
	}
	if err != nil {
		// Usually a walsender that is just ending still holds the slot. Ending it is better than dropping the slot,
		// which is slow to create again.
		if err = k.o.Slots.Evict(ctx); err == nil {
			err = k.advance(ctx)
		}
	}
	st, serr := k.look(ctx)
	if serr != nil {
		return serr
	}
	if !st.Exists || st.RetainedBytes <= k.hard() || k.activity.current() == phaseStream {
		return err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.log.Warn("the WAL budget is exhausted and the slot cannot be advanced; dropping it", "retained_bytes",
		st.RetainedBytes,
		"budget_bytes", k.o.WALBudget, "advance_err", err)
	k.known = false
	return k.o.Slots.Drop(ctx)
}

// streams records whether a stream moves the slot. While it does, the position from before cannot be compared; the end
// of the hand-over checks that no other program has moved the slot until then.
func (k *slotKeeper) streams(on bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.streamed = on
	if on {
		k.still = false
	}
}

// ensure makes sure that there is a slot that can be streamed.
func (k *slotKeeper) ensure(ctx context.Context) error {
	st, err := k.o.Slots.Status(ctx)
	if err != nil {
		return err
	}
	reason := madeNew
	k.with(func() {
		switch {
		case st.Lost:
			reason = madeLost
		case st.Exists:
			reason = madePublication
		case k.known:
			reason = madeMissing
		}
	})
	defer k.with(func() { k.beingMade = false })
	created, err := k.o.Slots.Ensure(ctx, func(ctx context.Context) (err error) {
		// Before the slot can be seen, in case the answer to its creation is lost.
		k.with(func() { k.still, k.beingMade = false, true; err = k.moved(ctx) })
		return err
	})
	if err != nil || !created {
		return err
	}
	k.metrics.slotCreated.WithLabelValues(reason).Inc()
	k.with(func() { k.known = true }) // it may be dropped before anything reads it again
	_, err = k.ensured(ctx)
	return err
}

// ensured raises the barrier for a new slot: transactions that committed before its position and were not visible yet
// are not streamed. The slot may also have been created by a leader that ended before it streamed.
func (k *slotKeeper) ensured(ctx context.Context) (xid uint64, err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if _, xid, err = k.o.Store.Horizon(ctx); err != nil {
		return 0, err
	}
	return xid, k.o.Store.RaiseBarrier(ctx, k.activity.epoch(), xid, true)
}

// shortcut moves the slot to lsn, everything below which has been swept and was visible, as was every transaction older
// than xid.
func (k *slotKeeper) shortcut(ctx context.Context, lsn outbox.LSN, xid uint64) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if err := k.o.Slots.Advance(ctx, lsn); err != nil {
		return err
	}
	k.last, k.still = time.Now(), false
	// A younger one stays: the budget moved the slot in between, and that still has to be waited for.
	return k.o.Store.LowerBarrier(ctx, k.activity.epoch(), xid)
}

// hidden reports whether a transaction may have committed before the slot's position without being visible yet.
func (k *slotKeeper) hidden(ctx context.Context) (bool, error) {
	st, err := k.o.Store.State(ctx)
	if err != nil || st.Barrier == 0 {
		return false, err
	}
	barrier := st.Barrier
	if barrier == outbox.BarrierUnknown {
		// Replace an unknown barrier by a known one, so that the next attempts do not wait for newer transactions.
		if barrier, err = k.ensured(ctx); err != nil {
			return false, err
		}
	}
	visible, err := k.o.Store.VisibleBelow(ctx, barrier)
	return !visible, err
}
