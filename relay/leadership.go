package relay

import (
	"context"
	"errors"
	"sync/atomic"
	"time"

	"posthaste/outbox"
)

// leadership is one holding of the leader lock.
//
// One goroutine owns it, the one that goes through the phases (lead.go).
type leadership struct {
	*reporter
	holder      string
	prefix      string
	spread      *Spread
	locks       outbox.LockSession
	store       outbox.Store
	sink        outbox.Sink
	slots       outbox.Slots
	activity    *activity
	sweeps      *sweeps
	keeper      *slotKeeper
	repairs     *repairer
	losses      *lossCounter
	housekeeper *housekeeper
	watchdog    *watchdog
	// unobserve is Options.Unobserve.
	unobserve func()
	// newStream joins a run of the slot reader.
	newStream func(g *gates, begin func(context.Context) (outbox.Pass, error),
		guard func(context.Context, bool) error) *streaming

	exclusive, shared bool // holds of the pipe lock
	gates             *gates
	mode              outbox.Mode // the mode last recorded
	degraded          string
	handover          outbox.LSN
	reason            string // why the next phase is entered
	// noted is the highest confirmed position of the slot that is no surprise: beyond it, somebody else moved the slot.
	noted outbox.LSN
	// fence is the epoch of the gate that has fenced this leadership although the table names it: the table has gone
	// back.
	fence int64
	// signed is what was signed last, nil before; id is this process.
	signed atomic.Pointer[signed]
	id     string
	// told is when it was last reported what a change of the layout waits for.
	told time.Time
	// failures counts streams that ended soon after they began, to slow down a loop of failing hand-overs.
	failures int
	// silent is since when the state could not be read; zero if it can.
	silent time.Time
	// stuck is since when every phase has failed before it came to its work; zero if one has not.
	stuck time.Time
	// worked is whether the phase has come to its work.
	worked bool
}

// failing notes that a phase has failed. working, called while events can flow, forgets that.
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

// record persists what this leadership does now. A failure is retried by the next check, and harms nobody.
func (l *leadership) record(ctx context.Context, mode outbox.Mode) error {
	ok, err := l.store.SetActive(ctx, l.gates.owner.Epoch, mode, l.handover, l.degraded)
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

// check reads the state and says whether this leadership is still the one it names.
func (l *leadership) check(ctx context.Context) (outbox.State, error) {
	st, err := l.activity.state(ctx)
	l.answered(ctx, err)
	if err == nil && st.Owner != l.gates.owner {
		err = outbox.ErrSuperseded
	}
	return st, err
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

// over turns the error that ended a sweep into the reason for adopting again.
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

// watchGates asks, about once a second, whether the gates are still ours; an error says they are not. Trouble in asking
// is no answer.
func (l *leadership) watchGates(ctx context.Context, lastGate *time.Time) (bool, error) {
	if time.Since(*lastGate) < time.Second {
		return true, nil
	}
	*lastGate = time.Now()
	actx, cancel := context.WithTimeout(ctx, publishTimeout)
	defer cancel()
	err := l.sink.Check(actx, l.gates.owner, l.gates.streams())
	var fenced *outbox.FencedError
	if errors.Is(err, outbox.ErrGap) || errors.As(err, &fenced) {
		return false, err
	}
	return true, nil
}

// during runs fn, and cancels it when the leadership is superseded or another mode is desired; poll tells whether
// polling is.
func (l *leadership) during(ctx context.Context, poll bool, fn func(ctx context.Context) error) error {
	return l.whileOwned(ctx, func(st outbox.State) error {
		if (st.Desired == outbox.ModePoll) != poll {
			return errToggled
		}
		return nil
	}, fn)
}

// whileOwned runs fn, and cancels it when the leadership is superseded, or the state is not right any more, with the
// error that says so.
func (l *leadership) whileOwned(ctx context.Context, right func(st outbox.State) error,
	fn func(ctx context.Context) error,
) error {
	st, err := l.check(ctx)
	if err == nil {
		err = right(st)
	}
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	done := make(chan error, 1)
	go func() { done <- fn(ctx) }()
	t := time.NewTicker(300 * time.Millisecond)
	defer t.Stop()
	for {
		select {
		case err := <-done:
			if cause := context.Cause(ctx); cause != nil {
				return cause // cut short, whatever fn made of it
			}
			return err
		case <-t.C:
			st, err := l.check(ctx)
			if errors.Is(err, outbox.ErrSuperseded) {
				cancel(outbox.ErrSuperseded)
			} else if err == nil {
				if err = right(st); err != nil {
					cancel(err)
				}
			}
		}
	}
}

// drain makes one pass over the table, as during does what it is given: everything that was visible when it began is
// settled then.
func (l *leadership) drain(ctx context.Context, poll bool) (pass outbox.Pass, err error) {
	err = l.during(ctx, poll, func(ctx context.Context) (err error) {
		if pass, err = l.store.BeginPass(ctx, l.gates.owner); err != nil {
			return err
		}
		return l.sweeps.drain(ctx, l.gates, pass)
	})
	return pass, err
}

// unusable notes why the slot cannot be streamed. Events go on by the sweep; whether that is good enough is the desired
// mode's to say.
func (l *leadership) unusable(ctx context.Context, err error) {
	if ctx.Err() != nil {
		return
	}
	text := err.Error()
	if l.degraded != text {
		l.log.Warn("the slot is not usable; sweeping meanwhile", "reason", slotReason(err), "err", err)
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
