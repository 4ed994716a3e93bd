package relay

import (
	"context"
	"errors"
	"sync/atomic"
	"time"

	"posthaste/outbox"
	"posthaste/relay/stream"
)

// leaderStore and leaderSink are what the phases use.
type leaderStore interface {
	States
	Adoptions
	KnownStreams
	Layouts
	Horizons
	Marks
}

type leaderSink interface {
	stream.Servers
	stream.Gates
	stream.Publisher
	stream.Readers
}

// leadership is one holding of the leader lock.
//
// The goroutine that executes the phases (lead.go) owns it.
type leadership struct {
	*reporter
	holder      string
	prefix      string
	spread      *Spread
	locks       outbox.LockSession
	store       leaderStore
	sink        leaderSink
	slots       outbox.Slots
	activity    *activity
	sweeps      *sweeps
	keeper      *slotKeeper
	reconciler  *reconciler
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
	// noted is the highest confirmed position of the slot that this leadership accounts for. If the slot is beyond it,
	// another program has moved the slot.
	noted outbox.LSN
	// fence is the epoch of the gate that has fenced this leadership although the table names it: the table has gone
	// back.
	fence int64
	// signed is the last sign of life, nil before the first; id identifies this process.
	signed atomic.Pointer[signed]
	id     string
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

// check reads the state and returns ErrSuperseded if it names another owner.
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

// watchGates checks about once a second whether the gates still belong to this owner, and returns an error if not. It
// ignores a check that fails for another reason.
func (l *leadership) watchGates(ctx context.Context, lastGate *time.Time) (bool, error) {
	if time.Since(*lastGate) < time.Second {
		return true, nil
	}
	*lastGate = time.Now()
	actx, cancel := context.WithTimeout(ctx, publishTimeout)
	defer cancel()
	err := l.sink.Check(actx, l.gates.owner, l.gates.streams())
	if displaced(err) {
		return false, err
	}
	return true, nil
}

// during runs fn, and cancels it when the leadership is superseded or another mode is desired. poll is whether polling
// is desired.
func (l *leadership) during(ctx context.Context, poll bool, fn func(ctx context.Context) error) error {
	return l.whileOwned(ctx, func(st outbox.State) error { return toggled(st, poll) }, fn)
}

// toggled returns errToggled if another mode is desired. poll is whether polling was.
func toggled(st outbox.State, poll bool) error {
	if (st.Desired == outbox.ModePoll) != poll {
		return errToggled
	}
	return nil
}

// whileOwned runs fn. It cancels fn when the leadership is superseded or right rejects the state, and returns the
// cause.
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

// drain makes one pass over the table, under the same conditions as during. When it returns nil, every event that was
// visible at its start is settled. A pass for a hand-over publishes no later events, so it ends with errBlocked when a
// stream is blocked.
func (l *leadership) drain(ctx context.Context, poll bool) (pass outbox.Pass, err error) {
	began := time.Now()
	err = l.whileOwned(ctx, func(st outbox.State) error {
		err := toggled(st, poll)
		if err == nil && !poll && time.Since(began) > blockedWait && l.health.lasting(conditionStreams) {
			err = errBlocked
		}
		return err
	}, func(ctx context.Context) (err error) {
		if pass, err = l.store.BeginPass(ctx, l.gates.owner); err != nil {
			return err
		}
		return l.sweeps.drain(ctx, l.gates, pass, poll)
	})
	return pass, err
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
