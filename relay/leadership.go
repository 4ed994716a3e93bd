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

// visibleWait is how long a hand-over waits for older transactions before it does without the short cut.
const visibleWait = 5 * time.Second

// leadership is one holding of the leader lock.
type leadership struct {
	*Relay
	locks outbox.LockSession

	exclusive, shared bool // holds of the pipe lock
	gates             *gates
	mode              outbox.Mode // the mode last recorded
	degraded          string
	handover          outbox.LSN
	reason            string // why the next phase is entered
	// noted is the highest confirmed position of the slot that is no surprise: beyond it, somebody else moved the slot.
	noted outbox.LSN
	// uncounted is set while something that may be lost is not counted.
	uncounted atomic.Bool
	// fence is the epoch of the gate that has fenced this leadership although the table names it: the table has gone back.
	fence int64
	// failures counts streams that ended soon after they began, to slow down a loop of failing hand-overs.
	failures int
	// silent is since when, in Unix nanoseconds, the state could not be read; 0 if it can.
	silent atomic.Int64
	// stuck is since when every phase has failed before it came to its work; zero if one has not.
	stuck time.Time
}

// run goes through the phases of the machine until leadership is lost or ctx ends.
func (l *leadership) run(ctx context.Context) error {
	l.leading.Store(true)
	l.metrics.leader.Set(1)
	l.mode, l.reason = outbox.ModeStandby, outbox.ReasonLeadership
	l.log.Info("leading")
	var wg sync.WaitGroup
	kctx, stop := context.WithCancel(ctx)
	defer func() {
		stop()
		wg.Wait()
		l.o.Sink.Release()
		l.leading.Store(false)
		l.metrics.leader.Set(0)
		for _, c := range []string{"slot", "publish", "adopt", "foreign_stream", conditionState, conditionLead, conditionWAL, conditionStalled} {
			l.health.clear(c)
		}
		l.metrics.idle()
		if l.o.Unobserve != nil {
			l.o.Unobserve()
		}
		l.log.Info("not leading any more")
	}()
	wg.Go(func() { l.keep(kctx) })
	wg.Go(func() { l.keepLosses(kctx) })
	wg.Go(func() { l.watch(kctx) })
	wg.Go(func() { l.keeper.run(kctx) })

	p := phaseStandby.next(onLed)
	for {
		l.enter(p, l.reason)
		t, err := l.do(ctx, p)
		switch {
		case ctx.Err() != nil && errors.Is(context.Cause(ctx), errLockLost):
			t = onLost
		case ctx.Err() != nil:
			t = onStop
		case errors.Is(err, outbox.ErrSuperseded):
			t = onLost
		case err != nil:
			l.log.Warn("phase ended", "phase", p, "err", err)
			l.failing(err)
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

// conditionLead is the readiness condition of a leader that does not come to its work.
const conditionLead = "lead"

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
	if l.stuck.IsZero() {
		return
	}
	l.stuck = time.Time{}
	l.health.clear(conditionLead)
}

// standDown records, as far as that is still possible, that nobody is active.
func (l *leadership) standDown(ctx context.Context, t transition) {
	reason := outbox.ReasonLeadership
	if t == onStop {
		reason = outbox.ReasonStop
	}
	l.switched(l.mode, outbox.ModeStandby, reason)
	l.enter(phaseStandby, reason)
	if t == onStop && l.gates != nil {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		_, _ = l.o.Store.SetActive(ctx, l.gates.owner.Epoch, outbox.ModeStandby, 0, "")
	}
}

// record persists what this leadership does now. A failure is retried by the next check, and harms nobody.
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

// check reads the state and says whether this leadership is still the one it names.
func (l *leadership) check(ctx context.Context) (outbox.State, error) {
	st, err := l.state(ctx)
	l.answered(ctx, err)
	if err == nil && st.Owner != l.gates.owner {
		err = outbox.ErrSuperseded
	}
	return st, err
}

// conditionState is the readiness condition of a Postgres that keeps the lock session and answers nothing else.
const conditionState = "postgres_state"

// answered notes whether Postgres answers. It is asked from several goroutines.
func (l *leadership) answered(ctx context.Context, err error) {
	switch since := l.silent.Load(); {
	case err == nil:
		if since != 0 {
			l.silent.Store(0)
			l.health.clear(conditionState)
		}
	case ctx.Err() != nil:
	case since == 0:
		l.silent.CompareAndSwap(0, time.Now().UnixNano())
	case time.Since(time.Unix(0, since)) > patience:
		if l.health.fail(conditionState, err.Error()) {
			l.log.Warn("the relay's state cannot be read", "err", err)
		}
	}
}

// adopt takes the pipe lock the desired mode needs, raises the epoch and then every gate. Nothing is read from the
// table before that is complete.
func (l *leadership) adopt(ctx context.Context) (transition, error) {
	st, err := l.state(ctx)
	if err != nil {
		pause.About(ctx, 200*time.Millisecond)
		return onOver, err
	}
	if l.gates != nil && st.Owner != l.gates.owner {
		return onOver, outbox.ErrSuperseded
	}
	alone, err := l.takePipe(ctx, st.Desired == outbox.ModePoll)
	if err != nil {
		return onOver, err
	}
	// What the lock allowed counts only with a state read after it.
	if st, err = l.state(ctx); err != nil {
		return onOver, err
	}
	if err := l.raise(ctx, st); err != nil {
		pause.About(ctx, 200*time.Millisecond)
		return onOver, err
	}
	if err := l.refreshBlocks(ctx); err != nil {
		return onOver, err
	}
	if alone {
		return onWantStream, nil
	}
	return onWantPoll, nil
}

// takePipe gets the pipe lock: shared for polling; exclusive for streaming, or shared for the time being when pollers on
// other instances still hold it.
func (l *leadership) takePipe(ctx context.Context, poll bool) (alone bool, err error) {
	if !poll && !l.exclusive {
		if l.exclusive, err = l.locks.TryPipe(ctx, true); err != nil {
			return false, err
		}
	}
	if !poll && l.exclusive {
		if l.shared {
			l.shared = false
			return true, l.locks.DropPipe(ctx, false)
		}
		return true, nil
	}
	for !l.shared {
		if l.shared, err = l.locks.TryPipe(ctx, false); err != nil {
			return false, err
		}
		if !l.shared {
			pause.About(ctx, 200*time.Millisecond)
		}
		if ctx.Err() != nil {
			return false, ctx.Err()
		}
	}
	if l.exclusive {
		l.exclusive = false
		return false, l.locks.DropPipe(ctx, true)
	}
	return false, nil
}

// raise writes the new owner and raises the gates of all streams. A gate that has seen a higher epoch than the table
// (the database was restored to an earlier time) is overtaken, as long as the table names us.
func (l *leadership) raise(ctx context.Context, st outbox.State) error {
	epoch, wentBack := max(st.Owner.Epoch, l.fence)+1, l.fence > 0
	l.fence = 0
	if l.gates == nil {
		l.own(st.Owner) // under which the slot is kept until then: Redis may be gone for long
	}
	for {
		a := outbox.Adoption{
			From: st.Owner.Epoch, To: outbox.Owner{Source: st.Owner.Source, Epoch: epoch, Nonce: newNonce()}, Holder: l.o.Holder, WentBack: wentBack,
		}
		var err error
		if a.Sink, a.Suspects, err = l.bind(ctx, st); err != nil {
			return err
		}
		ok, err := l.o.Store.Adopt(ctx, a)
		if err != nil {
			return err
		}
		if !ok {
			return outbox.ErrSuperseded
		}
		l.uncounted.Store(true)
		l.gates = newGates(a.To, l.o.Sink, l.o.Store)
		l.own(a.To)
		l.metrics.adoptions.Inc()
		err = l.raiseGates(ctx)
		var fenced *outbox.FencedError
		if !errors.As(err, &fenced) && !errors.Is(err, outbox.ErrMoved) {
			return err
		}
		if st, err = l.check(ctx); err != nil {
			return err
		}
		if fenced != nil {
			l.log.Warn("a gate is ahead of the table; overtaking it", "stream", fenced.Stream, "gate_epoch", fenced.Epoch, "epoch", epoch)
			epoch, wentBack = max(fenced.Epoch, epoch), true
		}
		epoch++
	}
}

// bind chooses the server that is published to, and looks whether it is the one of the last adoption, and has what was
// published there. It repeats what fails for the moment.
func (l *leadership) bind(ctx context.Context, st outbox.State) (server string, suspects []outbox.StreamState, err error) {
	bo := backoff{first: 50 * time.Millisecond, most: 2 * time.Second}
	for {
		server, suspects, err = l.tryBind(ctx, st)
		if err == nil || ctx.Err() != nil {
			return server, suspects, err
		}
		l.health.fail("adopt", err.Error())
		bo.wait(ctx)
		now, err := l.state(ctx)
		l.answered(ctx, err)
		if err == nil && now.Owner != st.Owner {
			return "", nil, outbox.ErrSuperseded
		}
	}
}

func (l *leadership) tryBind(ctx context.Context, st outbox.State) (server string, suspects []outbox.StreamState, err error) {
	streams, err := l.o.Store.Streams(ctx)
	if err != nil {
		return "", nil, err
	}
	actx, cancel := context.WithTimeout(ctx, publishTimeout)
	defer cancel()
	if server, err = l.o.Sink.Bind(actx); err != nil || len(streams) == 0 {
		return server, nil, err
	}
	states, err := l.o.Sink.Look(actx, streams)
	if err != nil {
		return "", nil, err
	}
	suspects, err = l.suspect(ctx, st, server, states)
	return server, suspects, err
}

// suspect names the streams that may lack what was settled: all, if the server is another process than at the last adoption;
// those that are gone, or whose gate is, or knows of less than we do. How much it is that they lack is counted later; before
// anything was delivered it is nothing.
func (l *leadership) suspect(ctx context.Context, st outbox.State, server string, states []outbox.StreamState) ([]outbox.StreamState, error) {
	other := server != "" && server != st.Sink
	var suspects []outbox.StreamState
	var gone []string
	for _, s := range states {
		if !s.Gate {
			gone = append(gone, s.Stream)
		}
		if other || !s.Gate || s.Forgot || s.Missing > 0 {
			suspects = append(suspects, s)
		}
	}
	if len(suspects) == 0 {
		return nil, nil
	}
	delivered, err := l.o.Store.Delivered(ctx)
	if err != nil || !delivered {
		return nil, err
	}
	if st.Sink != "" && other {
		l.log.Warn("the sink was restarted, or is another server: looking whether it has lost what was settled", "server", server)
	}
	if len(gone) > 0 {
		l.o.Sink.Missed(len(gone))
		l.log.Error("the sink has forgotten streams that were published to: it was flushed, restored, or is another one", "streams", gone)
	}
	return suspects, nil
}

// raiseGates raises the gate of every known stream, repeating what fails for the moment.
func (l *leadership) raiseGates(ctx context.Context) error {
	bo := backoff{first: 50 * time.Millisecond, most: 2 * time.Second}
	for {
		err := l.tryGates(ctx)
		var fenced *outbox.FencedError
		if err == nil {
			l.health.clear("adopt")
			l.health.clear("foreign_stream")
			return nil
		}
		if errors.As(err, &fenced) || errors.Is(err, outbox.ErrMoved) || ctx.Err() != nil {
			return err
		}
		var foreign *outbox.ForeignError
		if errors.As(err, &foreign) {
			l.health.fail("foreign_stream", err.Error())
		} else {
			l.health.fail("adopt", err.Error())
		}
		bo.wait(ctx)
		if _, err := l.check(ctx); errors.Is(err, outbox.ErrSuperseded) {
			return err
		}
	}
}

func (l *leadership) tryGates(ctx context.Context) error {
	streams, err := l.o.Store.Streams(ctx)
	if err != nil {
		return err
	}
	for _, s := range streams {
		actx, cancel := context.WithTimeout(ctx, publishTimeout)
		err := l.gates.adopt(actx, s, nil)
		cancel()
		if err != nil {
			return err
		}
	}
	return nil
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
	err := l.o.Sink.Check(actx, l.gates.owner, l.gates.streams())
	var fenced *outbox.FencedError
	if errors.Is(err, outbox.ErrGap) || errors.As(err, &fenced) {
		return false, err
	}
	return true, nil
}

// poll sweeps under the shared lock: because polling is wanted, or until the exclusive lock is free.
func (l *leadership) poll(ctx context.Context) (transition, error) {
	l.degraded = ""
	l.health.clear("slot") // nobody needs it while polling is wanted
	if err := l.record(ctx, outbox.ModePoll); err != nil {
		return onOver, err
	}
	// Only these: what a stream met later has in doubt may be younger than the mark.
	known := l.gates.streams()
	_, xid, err := l.o.Store.Mark(ctx)
	if err != nil {
		return onOver, err
	}
	for {
		settled := false // everything committed before the adoption is visible
		done := false
		var gate time.Time
		err := l.sweepWhile(ctx, l.gates, func(ctx context.Context) (bool, error) {
			l.working()
			st, err := l.check(ctx)
			if errors.Is(err, outbox.ErrSuperseded) {
				return false, err
			}
			if err == nil && st.Desired != outbox.ModePoll {
				l.exclusive, err = l.locks.TryPipe(ctx, true)
				if err != nil || l.exclusive {
					done = true
					l.reason = outbox.ReasonToggle
					return false, err
				}
			}
			if xid != 0 {
				if ok, err := l.o.Store.VisibleBelow(ctx, xid); err == nil && ok {
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
		if err := l.forgetDoubt(ctx, known); err != nil {
			return l.over(err)
		}
	}
}

// forgetDoubt makes the pass after which nothing in streams is in doubt any more. It is called when everything that was committed
// before the adoption is visible.
func (l *leadership) forgetDoubt(ctx context.Context, streams []string) error {
	if err := l.during(ctx, func(ctx context.Context) error { return l.o.Sweeper.Drain(ctx, l.scope(l.gates)) }); err != nil {
		return err
	}
	for _, s := range streams {
		if err := l.o.Sink.ForgetDoubt(ctx, l.gates.owner, s); err != nil {
			l.log.Debug("forget doubt", "stream", s, "err", err) // it costs memory until the next time
		}
	}
	return nil
}

var errToggled = errors.New("another mode is wanted")

// during runs fn, and cancels it when the leadership is superseded or another mode is wanted than when it began.
func (l *leadership) during(ctx context.Context, fn func(ctx context.Context) error) error {
	st, err := l.check(ctx)
	if err != nil {
		return err
	}
	poll := st.Desired == outbox.ModePoll
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
			switch {
			case errors.Is(err, outbox.ErrSuperseded):
				cancel(outbox.ErrSuperseded)
			case err == nil && (st.Desired == outbox.ModePoll) != poll:
				cancel(errToggled)
			}
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
	defer func() {
		if asking {
			_ = <-answers // Ensure is bounded; it must not run beside the next one
		}
	}()
	bo := backoff{first: time.Second, most: 5 * time.Second}
	due := time.Now().Add(l.delay())
	usable := false
	err := l.sweepWhile(ctx, l.gates, func(ctx context.Context) (bool, error) {
		l.working()
		select {
		case err := <-answers:
			asking = false
			if err == nil {
				usable = true
				return false, nil
			}
			l.unusable(ctx, err)
			bo.next = min(max(bo.next*2, bo.first), bo.most)
			due = time.Now().Add(pause.Jitter(bo.next))
		default:
		}
		if !asking && time.Now().After(due) {
			asking = true
			go func() { answers <- l.ensureSlot(ctx) }()
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
	st, err := l.o.Slots.Status(ctx)
	if err != nil {
		return err
	}
	reason := l.keeper.made(st) // before it can be seen
	created, err := l.o.Slots.Ensure(ctx, l.keeper.making)
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
	l.health.clear("slot")
	if serr == nil && st.Desired == outbox.ModeCDC {
		l.health.fail("slot", text)
	} else {
		l.health.degrade("slot", text)
	}
	_ = l.record(ctx, l.mode)
}
