package relay

import (
	"context"
	"errors"
	"fmt"
	"time"

	"posthaste/internal/pause"
	"posthaste/outbox"
)

const (
	// visibleWait is how long a hand-over waits for older transactions before it omits the short cut.
	visibleWait = 5 * time.Second
	// blockedWait is how long a pass waits for a stream that cannot be published to.
	blockedWait = 2 * time.Second
	// movingWait is how long events wait while the slot is moved. That usually takes milliseconds, but the server first
	// waits for the standbys in synchronized_standby_slots, and one of them may be down.
	movingWait = time.Second
)

// handOver sweeps up to a known place in the WAL and moves the slot there, so that the backlog's WAL is only read past.
func (l *leadership) handOver(ctx context.Context) (transition, error) {
	refuse := func(err error) (transition, error) {
		if errors.Is(err, errToggled) || displaced(err) {
			return l.over(err)
		}
		if errors.Is(err, errBlocked) {
			return onNotReady, err
		}
		l.failures++
		l.unusable(ctx, err)
		return onNotReady, err
	}
	// The bulk first, so that the exact part is short.
	if _, err := l.drain(ctx, false); err != nil {
		return refuse(err)
	}
	var status outbox.SlotStatus
	err := l.beside(ctx, func(ctx context.Context) (err error) { // the keeper may be moving it
		status, err = l.keeper.look(ctx)
		return err
	})
	if err != nil {
		return refuse(err)
	}
	if status.Active {
		if err := l.evict(ctx); err != nil {
			return refuse(err)
		}
	}
	lsn, xid, err := l.o.Store.Horizon(ctx)
	if err != nil {
		return refuse(err)
	}
	visible, err := l.waitVisible(ctx, xid)
	if err != nil {
		return refuse(err)
	}
	if _, err := l.drain(ctx, false); err != nil {
		return refuse(err)
	}
	l.noted = status.Confirmed
	if visible {
		err := l.beside(ctx, func(ctx context.Context) error { return l.keeper.shortcut(ctx, lsn, xid) })
		if err != nil {
			return refuse(err)
		}
		l.noted = max(l.noted, lsn)
	}
	return onReady, nil
}

// beside runs fn, which needs the slot, and returns when fn has returned. If fn takes long, events are swept
// concurrently; the mark with which the stream begins covers them.
func (l *leadership) beside(ctx context.Context, fn func(ctx context.Context) error) error {
	fctx, cancel := context.WithCancel(ctx)
	defer cancel()
	answer := make(chan error, 1)
	go func() { answer <- fn(fctx) }()
	late := time.NewTimer(movingWait)
	defer late.Stop()
	select {
	case err := <-answer:
		return err
	case <-late.C:
	}
	var err error
	answered := false
	over := l.sweepWhile(ctx, toggled(false), func(context.Context) (bool, error) {
		select {
		case err = <-answer:
			answered = true
		default:
		}
		return !answered, nil
	})
	if !answered {
		cancel()
		err = <-answer
	}
	if over != nil {
		return over
	}
	return err
}

// evict frees the slot from another walsender: an earlier stream of ours that the server is still ending, or a dead
// leader's, which is terminated.
func (l *leadership) evict(ctx context.Context) error {
	for range 10 {
		st, err := l.o.Slots.Status(ctx)
		if err != nil || !st.Active {
			return err
		}
		pause.For(ctx, 50*time.Millisecond)
	}
	l.log.Warn("the slot is held by another walsender; ending it")
	return l.o.Slots.Evict(ctx)
}

// waitVisible waits until everything older than xid has ended, up to visibleWait. If the slot's position was moved or
// made without such a wait, going on without it could pass rows by: then it is an error.
func (l *leadership) waitVisible(ctx context.Context, xid uint64) (bool, error) {
	visible, err := l.o.Store.VisibleBelow(ctx, xid)
	if err != nil || visible {
		return visible, err
	}
	// Events do not wait for it.
	deadline := time.Now().Add(visibleWait)
	err = l.sweepWhile(ctx, toggled(false), func(ctx context.Context) (bool, error) {
		visible, err = l.o.Store.VisibleBelow(ctx, xid)
		return !visible && time.Now().Before(deadline), err
	})
	if err != nil || visible {
		return visible, err
	}
	hidden, err := l.keeper.hidden(ctx)
	if err != nil {
		return false, err
	}
	if hidden {
		return false, &outbox.SlotError{
			Reason: outbox.ReasonTransactionHeld,
			Err:    fmt.Errorf("a transaction older than the slot's position is still open"),
			Remedy: "look for the oldest xact_start in pg_stat_activity and pg_prepared_xacts, and end it",
		}
	}
	l.log.Info("older transactions are open; streaming without the short cut")
	return false, nil
}

// endHandOver completes the hand-over once no other program can move the slot. It makes one more pass, writes it as the
// mark of every part, and then reads H, which becomes the End of the pass that it returns.
func (l *leadership) endHandOver(ctx context.Context) (pass outbox.Pass, err error) {
	st, err := l.o.Slots.Status(ctx)
	if err != nil {
		return pass, err
	}
	if st.Confirmed > l.noted {
		if err := l.keeper.moved(ctx); err != nil {
			return pass, err
		}
		return pass, &outbox.SlotError{
			Reason: outbox.ReasonSlotActive,
			Err:    errors.New("another program moved the slot during the hand-over"),
			Remedy: "the relay retries automatically",
		}
	}
	l.keeper.streams(true)
	if pass, err = l.drain(ctx, false); err != nil {
		return pass, err
	}
	if err = l.o.Store.SettleAll(ctx, l.gates.owner, pass); err != nil {
		return pass, err
	}
	l.o.Sweeper.Rest()
	if pass.End, err = l.o.Store.InsertLSN(ctx); err != nil {
		return pass, err
	}
	l.handover = pass.End
	if l.failures == 0 {
		l.recovered() // else it has to run for a while first, so that readiness does not flicker
	}
	return pass, l.record(ctx, outbox.ModeCDC)
}

// recovered clears the reason why the slot was not streamed.
func (l *leadership) recovered() {
	l.degraded = ""
	l.health.clear(conditionSlot)
}
