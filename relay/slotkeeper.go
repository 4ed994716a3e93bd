package relay

import (
	"context"
	"errors"
	"sync"
	"time"

	"posthaste/internal/pause"
	"posthaste/outbox"
)

const (
	// keepInterval is how often the leader looks at the slot, and keepLong how often at one that is streamed and may
	// hold back keepRoom bytes more: even a quick server needs about as long to write them.
	keepInterval = 250 * time.Millisecond
	keepLong     = time.Second
	keepRoom     = 512 << 20
	// softBytes is the retained WAL beyond which the leader helps the slot along.
	softBytes = 16 << 20
	// softInterval is how long a slot that nobody streams may stand still.
	softInterval = 10 * time.Second
	// nudgeInterval bounds how often a streamed slot is helped along.
	nudgeInterval = 2 * time.Second
)

// slotKeeper bounds the WAL that the slot holds back, in every phase: the database's disk always wins. That loses
// nothing, because whatever a slot was moved past or dropped with is still in the table.
type slotKeeper struct {
	*reporter
	store  outbox.Store
	slots  outbox.Slots
	budget int64
	// phase and epoch are what this instance does now, and under which owner.
	phase func() phase
	epoch func() int64

	// mu is held while the slot is being moved, so that a hand-over and the budget do not meet.
	mu   callLock
	last time.Time // of the last advance or nudge
	// next is where the slot may be moved as soon as everything older than its transaction has ended; zero for nowhere.
	next slotTarget
	// known is set while this process knows of a slot that it has not dropped itself.
	known bool
	// position is where the slot stood at the last look, 0 without one; still is set while nobody of ours moves it.
	position outbox.LSN
	still    bool
	// streamed is set while a stream moves it, beingMade while this process makes one.
	streamed, beingMade bool

	// hit tells a running stream that the budget is exhausted.
	hitMu sync.Mutex
	hit   func()
}

// slotTarget is a position in the WAL. What was committed at or before lsn is visible when every transaction older than
// xid has ended.
type slotTarget struct {
	lsn outbox.LSN
	xid uint64
}

// soft and hard are the retained bytes at which the keeper helps the slot along, and at which it acts on the budget.
// The distance to the budget itself is for what is written while it acts.
func (k *slotKeeper) soft() int64 { return min(softBytes, k.budget/4) }
func (k *slotKeeper) hard() int64 { return k.budget / 4 * 3 }

// run looks at the slot until ctx ends.
func (k *slotKeeper) run(ctx context.Context) {
	// A slot that stood still while nobody led is left to the first hand-over. Where it was to go next may mean nothing
	// any more: another instance has led, or another server, which may never have had one.
	k.mu.Lock()
	k.last, k.next, k.still, k.known = time.Now(), slotTarget{}, false, false
	k.mu.Unlock()
	for ctx.Err() == nil {
		next, err := k.tick(ctx)
		if err != nil && ctx.Err() == nil {
			k.log.Debug("slot upkeep", "err", err)
		}
		// Never longer than that: the disk fills meanwhile.
		pause.For(ctx, min(next, pause.UntilTick(next)))
	}
}

// tick looks once, and returns after how long to look again.
func (k *slotKeeper) tick(ctx context.Context) (next time.Duration, err error) {
	st, err := k.look(ctx)
	if err != nil {
		return keepInterval, err
	}
	next = keepInterval
	if st.Active && k.phase() == phaseStream && k.hard()-st.RetainedBytes > keepRoom {
		next = keepLong
	}
	return next, k.act(ctx, st)
}

// act does what the slot's state asks for.
func (k *slotKeeper) act(ctx context.Context, st outbox.SlotStatus) error {
	if !st.Exists || st.Lost {
		k.health.clear(conditionWAL) // it holds nothing back
		return nil
	}
	phase := k.phase()
	over := st.RetainedBytes > k.hard()
	if !over {
		k.health.clear(conditionWAL)
	}
	switch {
	case phase == phaseStream && over:
		k.exhausted()
		return nil
	case phase == phaseStream:
		if st.RetainedBytes > k.soft() && k.idle() > nudgeInterval {
			k.helped()
			return k.slots.Nudge(ctx)
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

// overBudget says what keeps the budget from being enforced: events flow, and the disk fills.
func (k *slotKeeper) overBudget(ctx context.Context, err error) error {
	if err == nil {
		return nil
	}
	// A failure on the way may have been enough all the same.
	if st, serr := k.look(ctx); serr != nil || st.RetainedBytes <= k.hard() {
		return err
	}
	if k.health.degrade(conditionWAL, err.Error()) {
		k.log.Error("the slot holds back more WAL than its budget, and can be neither moved nor dropped", "err", err)
	}
	return err
}

// helped notes that the slot was helped along now, idle tells how long ago that was.
func (k *slotKeeper) helped() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.last = time.Now()
}

func (k *slotKeeper) idle() time.Duration {
	k.mu.Lock()
	defer k.mu.Unlock()
	return time.Since(k.last)
}

// look reads the slot's state into the gauges, and notices a move by somebody else.
func (k *slotKeeper) look(ctx context.Context) (outbox.SlotStatus, error) {
	k.mu.Lock() // so that nobody of ours moves it between the look and the comparison
	defer k.mu.Unlock()
	m := k.metrics
	before := k.phase()
	st, err := k.slots.Status(ctx)
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

// watch notices that somebody else has moved the slot, or made one: an operator, or a leader that was deposed in the
// middle of it. What that passed may not be visible. The caller holds mu.
func (k *slotKeeper) watch(ctx context.Context, st outbox.SlotStatus, before phase) error {
	// An adoption, too, lets it rest, for as long as the sink does not answer; and a stream that has not begun.
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
	k.still = !st.Active && !k.beingMade && resting(before) && resting(k.phase())
	return nil
}

// moved notes that the slot has passed, or the stream left out, what may not be visible.
func (k *slotKeeper) moved(ctx context.Context) error {
	return k.store.RaiseBarrier(ctx, k.epoch(), outbox.BarrierUnknown, false)
}

// know notes whether there is a slot that somebody else would have to drop.
func (k *slotKeeper) know(known bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.known = known
}

// made says why a slot was made in the place of what st shows.
func (k *slotKeeper) made(st outbox.SlotStatus) string {
	k.mu.Lock()
	defer k.mu.Unlock()
	switch {
	case st.Lost:
		return madeLost
	case st.Exists:
		return madePublication
	case k.known:
		return madeMissing
	}
	return madeNew
}

// follow moves the idle slot along, and only to where everything is visible: that is swept before the slot is streamed,
// so no hand-over, nor another leader's, has to wait for anything because of it. It costs no WAL: what is behind the
// beginning of an open transaction is held back by that.
func (k *slotKeeper) follow(ctx context.Context) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.phase() == phaseStream {
		k.next = slotTarget{}
		return nil
	}
	if k.next.xid == 0 {
		nudgeErr := k.slots.Nudge(ctx) // as in advance
		lsn, xid, err := k.store.Horizon(ctx)
		if err != nil {
			return err
		}
		k.next = slotTarget{lsn, xid}
		k.log.Debug("the slot follows when older transactions have ended", "lsn", lsn.String())
		return nudgeErr
	}
	visible, err := k.store.VisibleBelow(ctx, k.next.xid)
	if err != nil || !visible {
		return err
	}
	lsn := k.next.lsn
	k.next, k.last, k.still = slotTarget{}, time.Now(), false
	return k.slots.Advance(ctx, lsn)
}

// advance moves the idle slot to the present end of the WAL, whatever is visible. The rows it passes are in the table.
func (k *slotKeeper) advance(ctx context.Context) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.phase() == phaseStream {
		return nil
	}
	k.last, k.still = time.Now(), false
	// A running-transactions record below the target is what lets restart_lsn follow in this advance and not the next.
	nudgeErr := k.slots.Nudge(ctx)
	lsn, xid, err := k.store.Horizon(ctx)
	if err != nil {
		return err
	}
	// Noted before the slot moves, where the next leader finds it: a failure in between only makes a hand-over wait for
	// nothing.
	if err := k.store.RaiseBarrier(ctx, k.epoch(), xid, false); err != nil {
		return err
	}
	if err := k.slots.Advance(ctx, lsn); err != nil {
		return err
	}
	return nudgeErr
}

// enforce brings the slot under the budget: by advancing it, and if an older transaction holds its WAL all the same, by
// dropping it. A new one is made when the oldest transaction has moved on.
func (k *slotKeeper) enforce(ctx context.Context) error {
	err := k.advance(ctx)
	if errors.Is(err, outbox.ErrSuperseded) {
		return err // it is another one's to move, or drop
	}
	if err != nil {
		// As a rule a walsender that is just ending still holds it. A slot is quickly dropped, and slowly made again.
		if err = k.slots.Evict(ctx); err == nil {
			err = k.advance(ctx)
		}
	}
	st, serr := k.look(ctx)
	if serr != nil {
		return serr
	}
	if !st.Exists || st.RetainedBytes <= k.hard() || k.phase() == phaseStream {
		return err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.log.Warn("the WAL budget is exhausted and the slot cannot be advanced; dropping it", "retained_bytes",
		st.RetainedBytes,
		"budget_bytes", k.budget, "advance_err", err)
	k.known = false
	return k.slots.Drop(ctx)
}

// exhausted ends a running stream.
func (k *slotKeeper) exhausted() {
	k.hitMu.Lock()
	defer k.hitMu.Unlock()
	if k.hit != nil {
		k.hit()
	}
}

// streams notes whether a stream moves the slot. Where it stood before tells nothing then; that nobody else moved it
// until then is checked by the end of the hand-over.
func (k *slotKeeper) streams(on bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.streamed = on
	if on {
		k.still = false
	}
}

// onExhausted names what ends the running stream; nil when none runs.
func (k *slotKeeper) onExhausted(end func()) {
	k.hitMu.Lock()
	k.hit = end
	k.hitMu.Unlock()
}

// making notes that a slot is about to be made, even if nobody ever learns that it was. madeOrNot ends that.
func (k *slotKeeper) making(ctx context.Context) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.still, k.beingMade = false, true
	return k.moved(ctx)
}

// madeOrNot notes that nobody here makes a slot any more.
func (k *slotKeeper) madeOrNot() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.beingMade = false
}

// ensured notes a new slot: what was committed before its position and was not visible yet will not be streamed. It may
// also be a slot that was made by a leader that came no further.
func (k *slotKeeper) ensured(ctx context.Context) (xid uint64, err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if _, xid, err = k.store.Horizon(ctx); err != nil {
		return 0, err
	}
	return xid, k.store.RaiseBarrier(ctx, k.epoch(), xid, true)
}

// shortcut moves the slot to lsn, everything below which has been swept and was visible, as was every transaction older
// than xid.
func (k *slotKeeper) shortcut(ctx context.Context, lsn outbox.LSN, xid uint64) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if err := k.slots.Advance(ctx, lsn); err != nil {
		return err
	}
	k.last, k.still = time.Now(), false
	// A younger one stays: the budget moved the slot in between, and that still has to be waited for.
	return k.store.LowerBarrier(ctx, k.epoch(), xid)
}

// hidden reports whether something may have been committed before the slot's position that nobody can see yet.
func (k *slotKeeper) hidden(ctx context.Context) (bool, error) {
	st, err := k.store.State(ctx)
	if err != nil || st.Barrier == 0 {
		return false, err
	}
	barrier := st.Barrier
	if barrier == outbox.BarrierUnknown {
		// From now on it is known, so that it need not be waited for anew each time.
		if barrier, err = k.ensured(ctx); err != nil {
			return false, err
		}
	}
	visible, err := k.store.VisibleBelow(ctx, barrier)
	return !visible, err
}
