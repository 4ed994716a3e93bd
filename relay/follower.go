package relay

import (
	"context"
	"time"

	"posthaste/internal/pause"
	"posthaste/outbox"
)

// assist is one round of a standby: if poll mode is active it sweeps along until the state changes, otherwise it waits
// a little. Either way the caller then tries to lead.
func (r *Relay) assist(ctx context.Context, locks outbox.LockSession) error {
	st, err := r.activity.state(ctx)
	if err != nil {
		return err
	}
	if r.o.Spread != nil {
		r.o.Spread.wait("a relay leads: " + st.Holder + "; stop every relay")
		pause.About(ctx, 500*time.Millisecond)
		return nil
	}
	if st.Desired != outbox.ModePoll || st.Active != outbox.ModePoll {
		r.activity.enter(phaseStandby, outbox.ReasonLeadership)
		pause.About(ctx, 500*time.Millisecond)
		return nil
	}
	ok, err := locks.TryPipe(ctx, false)
	if err != nil || !ok {
		pause.About(ctx, 200*time.Millisecond)
		return err
	}
	defer func() { _ = locks.DropPipe(context.WithoutCancel(ctx), false) }()
	// Only a state that was read under the lock is valid.
	if st, err = r.activity.state(ctx); err != nil || st.Desired != outbox.ModePoll || st.Active != outbox.ModePoll {
		return err
	}
	return r.sweepAlong(ctx, locks, st)
}

// sweepAlong sweeps under the leader's owner until that changes or the leader is gone.
func (r *Relay) sweepAlong(ctx context.Context, locks outbox.LockSession, st outbox.State) error {
	// A follower publishes only to the server that the leader has adopted. Another server may lack events, and only an
	// adoption by the leader finds out which.
	server, err := r.o.Sink.Bind(ctx)
	defer r.o.Sink.Release()
	var twin *outbox.Sign // of a copy's table the original's relay is the leader until the copy's has adopted
	if err == nil {
		twin, err = r.o.Sink.Alive(ctx, st.Owner.Source, r.member(st), nil)
	}
	if err != nil || twin != nil || server != st.Sink {
		pause.About(ctx, 200*time.Millisecond)
		return nil //nolint:nilerr // watchSink says it
	}
	r.activity.own(st.Owner)
	r.activity.enter(phasePoll, outbox.ReasonToggle)
	g := newGates(st.Owner, st.Layout, r.o.Sink, r.o.Store)
	defer r.o.Sweeper.Rest()
	err = r.sweeps.while(ctx, g, func(ctx context.Context) (bool, error) {
		now, err := r.activity.state(ctx)
		if err != nil {
			return false, err
		}
		if now.Owner != st.Owner || now.Desired != outbox.ModePoll || now.Active != outbox.ModePoll {
			return false, nil
		}
		// A free leader lock is taken by the caller, after this sweep has ended.
		led, err := locks.TryLead(ctx)
		if err != nil {
			return false, err
		}
		return !led, nil // the caller asks again and gets it again: the lock is held by the session
	})
	r.health.clear(conditionPublish) // this instance does not publish now
	if err != nil && (finished(err) || superseded(err)) {
		// The leader will adopt again. Until then there is no owner to sweep under.
		r.log.Debug("polling as a follower ended", "err", err)
		pause.About(ctx, 200*time.Millisecond)
		return nil
	}
	return err
}
