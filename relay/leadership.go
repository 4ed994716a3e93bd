package relay

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"posthaste/internal/pause"
	"posthaste/outbox"
)

// leadership is one holding of the leader lock.
//
// The goroutine that calls run, which executes the phases, owns it.
type leadership struct {
	*Relay
	locks       outbox.LockSession
	reconciler  *reconciler
	housekeeper *housekeeper

	owner             outbox.Owner // whom the table must name
	exclusive, shared bool         // holds of the pipe lock
	gates             *gates
	mode              outbox.Mode // the mode last recorded
	degraded          string
	handover          outbox.LSN
	reason            string // why the next phase is entered
	// noted is the highest confirmed position of the slot that this leadership accounts for. If the slot is beyond it,
	// another program has moved the slot.
	noted outbox.LSN
	// fence is the epoch of the gate that has fenced this leadership although the table names it: the table has gone
	// back.
	fence int64
	// signed is the last sign of life, nil before the first.
	signed atomic.Pointer[signed]
	// told is the time of the last report of the reason why a change of the layout waits.
	told time.Time
	// failures counts streams that ended soon after they began, to slow down a loop of failing hand-overs.
	failures int
	// silent is since when the state could not be read; zero if it can.
	silent time.Time
	// stuck is the time since which every phase has failed before it began to work; zero if none has.
	stuck time.Time
	// worked is set when the phase has begun to work.
	worked bool
	// watched is when the gates were last checked.
	watched time.Time
	// absent are the streams that the adoption has left out, and leaving has those of the last one. partial is how long
	// they are left alone if adoptions leave some out again and again.
	absent  absent
	leaving atomic.Pointer[gates]
	partial pause.Backoff
}

// run executes the phases of the machine until leadership is lost or ctx ends.
func (l *leadership) run(ctx context.Context) error {
	l.activity.leading.Store(true)
	l.metrics.leader.Set(1)
	l.mode, l.reason = outbox.ModeStandby, outbox.ReasonLeadership
	l.log.Info("leading")
	var wg sync.WaitGroup
	kctx, stop := context.WithCancel(ctx)
	defer func() {
		stop()
		wg.Wait()
		l.o.Sweeper.Rest()
		l.o.Sink.Release()
		l.activity.leading.Store(false)
		l.metrics.leader.Set(0)
		for _, c := range []string{
			conditionSlot, conditionPublish, conditionAdopt, conditionRestore, conditionForeign, conditionTwin,
			conditionState, conditionLead, conditionWAL, conditionStalled, conditionStreams, conditionLayout,
			conditionTable, conditionHistory, conditionTrim,
		} {
			l.health.clear(c)
		}
		l.metrics.idle()
		if l.o.Unobserve != nil {
			l.o.Unobserve()
		}
		l.log.Info("not leading any more")
	}()
	wg.Go(func() { l.housekeeper.run(kctx) })
	wg.Go(func() { l.reconciler.watch(kctx) })
	wg.Go(func() { l.keeper.run(kctx) })
	wg.Go(func() { l.sign(kctx) })
	wg.Go(func() { l.confirm(kctx) })
	wg.Go(func() { l.tellSink(kctx) })

	p := phaseStandby.next(onLed)
	for {
		l.activity.enter(p, l.reason)
		l.worked = false
		t, err := l.do(ctx, p)
		switch {
		case ctx.Err() != nil && errors.Is(context.Cause(ctx), errLockLost):
			t = onLost
		case ctx.Err() != nil:
			t = onStop
		case superseded(err):
			l.recurs(conditionPhase, err, false)
			t = onLost
		case err != nil:
			l.phaseEnded(p, err)
			l.failing(err)
			if l.worked {
				l.recurs(conditionPhase, err, false)
			}
			pause.About(ctx, 200*time.Millisecond) // whatever it was, it may fail as fast the next time
		}
		if p = p.next(t); p == phaseStandby || p == phaseStopped {
			l.standDown(ctx, t)
			if err == nil {
				err = context.Cause(ctx)
			}
			return err
		}
	}
}

func (l *leadership) do(ctx context.Context, p phase) (transition, error) {
	switch p {
	case phaseAdopt:
		return l.adopt(ctx)
	case phaseLayout:
		return l.changeLayout(ctx)
	case phasePoll:
		return l.poll(ctx)
	case phaseSweep:
		return l.sweep(ctx)
	case phaseHandover:
		return l.handOver(ctx)
	case phaseStream:
		return l.stream(ctx)
	default:
		panic("relay: no work in phase " + string(p))
	}
}

// standDown records, if that is still possible, that no instance is active.
func (l *leadership) standDown(ctx context.Context, t transition) {
	reason := outbox.ReasonLeadership
	if t == onStop {
		reason = outbox.ReasonStop
	}
	l.switched(l.mode, outbox.ModeStandby, reason)
	l.activity.enter(phaseStandby, reason)
	if t == onStop && l.gates != nil {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		_, _ = l.o.Store.SetActive(ctx, l.gates.owner.Epoch, outbox.ModeStandby, 0, "")
	}
}

// failing records that a phase has failed. working, which is called while events can flow, clears that.
func (l *leadership) failing(err error) {
	if l.stuck.IsZero() {
		l.stuck = time.Now()
	}
	if time.Since(l.stuck) > patience {
		l.health.fail(conditionLead, err.Error())
	}
}

func (l *leadership) working() {
	l.worked = true
	l.phaseWorks()
	if l.stuck.IsZero() {
		return
	}
	l.stuck = time.Time{}
	l.health.clear(conditionLead)
}

// record persists the mode of this leadership. If the write fails, the next check retries it.
func (l *leadership) record(ctx context.Context, mode outbox.Mode) error {
	ok, err := l.o.Store.SetActive(ctx, l.gates.owner.Epoch, mode, l.handover, l.degraded)
	if err != nil {
		return err
	}
	if !ok {
		return outbox.ErrSuperseded
	}
	l.switched(l.mode, mode, l.reason)
	l.mode = mode
	return nil
}

// check reads the state and returns ErrSuperseded if it names another owner.
func (l *leadership) check(ctx context.Context) (outbox.State, error) {
	st, err := l.activity.state(ctx)
	l.answered(ctx, err)
	if err == nil && st.Owner != l.owner {
		err = outbox.ErrSuperseded
	}
	return st, err
}

// persist repeats try until it succeeds, its error is final, or another owner has adopted. failed reports each failure.
func (l *leadership) persist(ctx context.Context, try func() error, final func(err error) bool, failed func(err error),
) error {
	bo := pause.Backoff{First: 50 * time.Millisecond, Most: 2 * time.Second}
	for {
		err := try()
		if err == nil || final(err) || ctx.Err() != nil {
			return err
		}
		failed(err)
		bo.Wait(ctx)
		if _, err := l.check(ctx); superseded(err) {
			return err
		}
	}
}

// answered notes whether Postgres answers.
func (l *leadership) answered(ctx context.Context, err error) {
	switch {
	case err == nil:
		if !l.silent.IsZero() {
			l.silent = time.Time{}
			l.health.clear(conditionState)
		}
	case ctx.Err() != nil:
	case l.silent.IsZero():
		l.silent = time.Now()
	case time.Since(l.silent) > patience:
		if l.health.fail(conditionState, err.Error()) {
			l.log.Warn("the relay's state cannot be read", "err", err)
		}
	}
}

// over translates the error that ended a sweep into the reason for adopting again.
func (l *leadership) over(err error) (transition, error) {
	var fenced *outbox.FencedError
	switch {
	case err == nil, errors.Is(err, errToggled):
		l.reason = outbox.ReasonToggle
		return onOver, nil
	case errors.Is(err, outbox.ErrGap):
		l.reason = slotReason(err)
		l.log.Warn("the sink has lost its place; adopting again", "err", err)
		l.recurs(conditionPhase, err, false)
		return onOver, nil
	case errors.As(err, &fenced):
		l.reason, l.fence = outbox.ReasonFenced, fenced.Epoch
		return onOver, err // adopt finds out whether the table still names us
	}
	return onOver, err
}

// rightful returns an error if the leadership is superseded, right rejects the state, or a gate does not belong to this
// owner any more. It ignores a check that fails for another reason.
func (l *leadership) rightful(ctx context.Context, right func(st outbox.State) error) error {
	st, err := l.check(ctx)
	if err == nil {
		err = right(st)
	} else if !superseded(err) {
		err = nil
	}
	if err != nil {
		return err
	}
	return l.watchGates(ctx)
}

// watchGates checks the gates about once a second, also those that the adoption left out.
func (l *leadership) watchGates(ctx context.Context) error {
	if time.Since(l.watched) < time.Second {
		return nil
	}
	l.watched = time.Now()
	actx, cancel := context.WithTimeout(ctx, time.Second) // a toggle waits for the answer
	defer cancel()
	if err := l.o.Sink.Check(actx, l.gates.owner, l.gates.streams()); displaced(err) {
		return err
	}
	bctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	for stream := range l.gates.away { // each time in another order: one call may use all the time
		if err := l.gates.back(bctx, stream); displaced(err) {
			return err
		}
		if bctx.Err() != nil {
			break
		}
	}
	return nil
}

// confirm waits, in every phase of the leader, for the durability of the streams whose repair failed.
func (l *leadership) confirm(ctx context.Context) {
	for pause.For(ctx, time.Second) == nil {
		if g := l.leaving.Load(); g != nil {
			g.confirm(ctx)
		}
	}
}

// anyMode is right in every mode.
func anyMode(outbox.State) error { return nil }

// toggled returns a function that ends what depends on the desired mode with errToggled, if another one is desired.
// poll is whether polling was.
func toggled(poll bool) func(st outbox.State) error {
	return func(st outbox.State) error {
		if (st.Desired == outbox.ModePoll) != poll {
			return errToggled
		}
		return nil
	}
}

// sweepWhile sweeps for as long as that is rightful, until check returns false or an error.
func (l *leadership) sweepWhile(ctx context.Context, right func(st outbox.State) error,
	check func(ctx context.Context) (bool, error),
) error {
	return l.sweeps.while(ctx, l.gates, func(ctx context.Context) (bool, error) {
		if err := l.rightful(ctx, right); err != nil {
			return false, err
		}
		return check(ctx)
	})
}

// drain makes one pass over the table, until another mode is desired. poll is whether polling is. When it returns nil,
// every event that was visible at its start is settled. A part is not swept any more when its share is, so the pass
// ends with errBlocked when a stream is blocked.
func (l *leadership) drain(ctx context.Context, poll bool) (outbox.Pass, error) {
	began, toggled := time.Now(), toggled(poll)
	return l.pass(ctx, func(st outbox.State) error {
		err := toggled(st)
		if err == nil && time.Since(began) > blockedWait && l.health.lasting(conditionStreams) {
			err = errBlocked
		}
		return err
	}, poll)
}

// pass makes one pass over the table. It ends when it is not rightful any more, and returns the cause. newer: see
// sweep.Scope.
func (l *leadership) pass(ctx context.Context, right func(st outbox.State) error, newer bool) (
	pass outbox.Pass, err error,
) {
	st, err := l.check(ctx)
	if err == nil {
		err = right(st)
	}
	if err != nil {
		return pass, err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	done := make(chan error, 1)
	go func() {
		var err error
		if pass, err = l.o.Store.BeginPass(ctx, l.gates.owner); err == nil {
			err = l.sweeps.drain(ctx, l.gates, pass, newer)
		}
		done <- err
	}()
	t := time.NewTicker(300 * time.Millisecond)
	defer t.Stop()
	for {
		select {
		case err := <-done:
			if cause := context.Cause(ctx); cause != nil {
				return pass, cause // cut short, whatever came of it
			}
			return pass, err
		case <-t.C:
			if err := l.rightful(ctx, right); err != nil {
				cancel(err)
			}
		}
	}
}

// unusable reports why the slot cannot be streamed. The sweep still publishes events, so this is a fault only if the
// desired mode is cdc.
func (l *leadership) unusable(ctx context.Context, err error) {
	if ctx.Err() != nil {
		return
	}
	text := err.Error()
	if l.degraded != text {
		l.log.Warn("the slot is not usable; polling until it is", "reason", slotReason(err), "err", err)
	}
	l.degraded = text
	l.reason = slotReason(err)
	st, serr := l.check(ctx)
	l.health.clear(conditionSlot)
	if serr == nil && st.Desired == outbox.ModeCDC {
		l.health.fail(conditionSlot, text)
	} else {
		l.health.degrade(conditionSlot, text)
	}
	_ = l.record(ctx, l.mode)
}
