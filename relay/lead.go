package relay

import (
	"context"
	"errors"
	"sync"
	"time"

	"posthaste/internal/pause"
	"posthaste/outbox"
)

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
		l.sink.Release()
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
		if l.unobserve != nil {
			l.unobserve()
		}
		l.log.Info("not leading any more")
	}()
	wg.Go(func() { l.housekeeper.run(kctx) })
	wg.Go(func() { l.reconciler.watch(kctx) })
	wg.Go(func() { l.watchdog.run(kctx) })
	wg.Go(func() { l.keeper.run(kctx) })
	wg.Go(func() { l.sign(kctx) })
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
		case errors.Is(err, outbox.ErrSuperseded):
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
		_, _ = l.store.SetActive(ctx, l.gates.owner.Epoch, outbox.ModeStandby, 0, "")
	}
}
