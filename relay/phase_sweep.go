package relay

import (
	"context"
	"errors"
	"time"

	"posthaste/internal/pause"
	"posthaste/outbox"
)

// poll sweeps under the shared lock: because polling is wanted, or until the exclusive lock is free.
func (l *leadership) poll(ctx context.Context) (transition, error) {
	l.degraded = ""
	l.health.clear(conditionSlot) // nobody needs it while polling is wanted
	if err := l.record(ctx, outbox.ModePoll); err != nil {
		return onOver, err
	}
	// Only the streams known now: the doubt of a stream that is met later may be younger than the horizon.
	known := l.gates.streams()
	_, xid, err := l.store.Horizon(ctx)
	if err != nil {
		return onOver, err
	}
	for {
		settled := false // everything committed before the adoption is visible
		done := false
		wanted := true // polling, not only for the time being
		var gate time.Time
		err := l.sweeps.while(ctx, l.gates, func(ctx context.Context) (bool, error) {
			l.working()
			st, err := l.check(ctx)
			if errors.Is(err, outbox.ErrSuperseded) {
				return false, err
			}
			if err == nil {
				wanted = st.Desired == outbox.ModePoll
			}
			if err == nil && !wanted {
				l.exclusive, err = l.locks.TryPipe(ctx, true)
				if err != nil || l.exclusive {
					done = true
					l.reason = outbox.ReasonToggle
					return false, err
				}
			}
			if xid != 0 {
				if ok, err := l.store.VisibleBelow(ctx, xid); err == nil && ok {
					settled = true
					return false, nil
				}
			}
			return l.watchGates(ctx, &gate)
		})
		if err != nil || done || !settled {
			return l.over(err)
		}
		xid = 0
		// With a blocked stream, the doubt stays until the next adoption.
		if err := l.forgetDoubt(ctx, known, wanted); err != nil && !errors.Is(err, errBlocked) {
			return l.over(err)
		}
	}
}

// forgetDoubt makes a pass and then clears the doubt of streams. It is called when everything that was committed before
// the adoption is visible. poll is whether polling is desired; the pass ends when that changes.
func (l *leadership) forgetDoubt(ctx context.Context, streams []string, poll bool) error {
	if _, err := l.drain(ctx, poll); err != nil {
		return err
	}
	l.undoubted(ctx, streams)
	return nil
}

// undoubted clears the doubt of streams in the sink.
func (l *leadership) undoubted(ctx context.Context, streams []string) {
	for _, s := range streams {
		if err := l.sink.ForgetDoubt(ctx, l.gates.owner, s); err != nil {
			l.log.Debug("forget doubt", "stream", s, "err", err) // it costs memory until the next time
		}
	}
}

// sweep sweeps alone until slot and publication are usable.
func (l *leadership) sweep(ctx context.Context) (transition, error) {
	if err := l.record(ctx, outbox.ModePoll); err != nil {
		return onOver, err
	}
	var gate time.Time
	answers := make(chan error, 1)
	asking := false
	actx, cancel := context.WithCancel(ctx)
	defer func() {
		cancel()
		if asking {
			_ = <-answers // it must not run beside the next one
		}
	}()
	bo := pause.Backoff{First: time.Second, Most: 5 * time.Second}
	due := time.Now().Add(l.delay())
	usable := false
	err := l.sweeps.while(ctx, l.gates, func(ctx context.Context) (bool, error) {
		l.working()
		select {
		case err := <-answers:
			asking = false
			switch {
			case err != nil:
				l.unusable(ctx, err)
				due = time.Now().Add(pause.Jitter(bo.Next()))
			case l.health.lasting(conditionStreams): // a hand-over would hold up the other streams
				due = time.Now().Add(time.Second)
			default:
				usable = true
				return false, nil
			}
		default:
		}
		if !asking && time.Now().After(due) {
			asking = true
			go func() { answers <- l.ensureSlot(actx) }()
		}
		st, err := l.check(ctx)
		if errors.Is(err, outbox.ErrSuperseded) {
			return false, err
		}
		if err == nil && st.Desired == outbox.ModePoll {
			l.reason = outbox.ReasonToggle
			return false, nil
		}
		return l.watchGates(ctx, &gate)
	})
	if err == nil && usable {
		return onUsable, nil
	}
	return l.over(err)
}

func (l *leadership) ensureSlot(ctx context.Context) error {
	st, err := l.slots.Status(ctx)
	if err != nil {
		return err
	}
	reason := l.keeper.made(st) // before it can be seen
	defer l.keeper.madeOrNot()
	created, err := l.slots.Ensure(ctx, l.keeper.making)
	if err == nil && created {
		l.metrics.slotCreated.WithLabelValues(reason).Inc()
		l.keeper.know(true) // it may be dropped before anybody looks at it again
		_, err = l.keeper.ensured(ctx)
	}
	return err
}

// delay slows down hand-overs that keep failing.
func (l *leadership) delay() time.Duration {
	if l.failures == 0 {
		return 0
	}
	return pause.Jitter(min(100*time.Millisecond<<min(l.failures, 7), 10*time.Second))
}
