package relay

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"posthaste/internal/pause"
	"posthaste/outbox"
)

// layoutInterval is how often a leader looks whether consumers have read everything.
const layoutInterval = 500 * time.Millisecond

// layoutTold is how often it says in the log and in the state what it waits for.
const layoutTold = 5 * time.Second

// changesLayout tells whether a type is to have another number of streams than it has.
func (l *leadership) changesLayout() bool { return max(l.gates.shards, 1) != l.shards && !l.refused }

// changeLayout gives a type as many streams as are wanted: it publishes and settles what there is, under the old
// layout, then publishes nothing until every consumer group has acknowledged everything, and then writes down that what
// comes now goes elsewhere. It is behind an adoption, and another one follows. Nobody else publishes meanwhile: for
// others no mode is active.
//
// Once: what was published is settled when it is written down, so that no gate has to know what is in another stream.
// In order: nobody has anything before him in an old stream when something newer is in a new one.
func (l *leadership) changeLayout(ctx context.Context) (transition, error) {
	if err := l.store.CheckLayout(ctx, l.shards); err != nil {
		return l.refuseLayout(err)
	}
	l.log.Info("the streams per type are to be changed", "from", max(l.gates.shards, 1), "to", l.shards)
	if err := l.settleAll(ctx); err != nil {
		return l.over(err)
	}
	if err := l.awaitReaders(ctx); err != nil {
		return l.over(err)
	}
	if err := l.store.ChangeLayout(ctx, l.gates.owner, l.shards); err != nil {
		return l.refuseLayout(err)
	}
	l.log.Info("the streams per type have changed", "from", max(l.gates.shards, 1), "to", l.shards)
	l.health.clear(conditionLayout)
	l.reason = outbox.ReasonLayout
	return onOver, nil
}

// refuseLayout leaves the streams per type as they are if err says that they cannot be changed.
func (l *leadership) refuseLayout(err error) (transition, error) {
	if !errors.Is(err, outbox.ErrLayout) {
		return l.over(err)
	}
	l.refused = true
	l.health.clear(conditionLayout) // it may be there as what the change waits for
	l.health.degrade(conditionLayout, err.Error())
	l.log.Error("the streams per type stay as they are", "streams_per_type", l.gates.shards, "err", err)
	return onOver, nil
}

// awaitLayout repeats what fails for the moment, as when gates are raised.
func (l *leadership) awaitLayout(ctx context.Context) error {
	bo := backoff{first: 50 * time.Millisecond, most: 2 * time.Second}
	for {
		err := l.store.AwaitLayout(ctx)
		if err == nil || ctx.Err() != nil {
			l.health.clear(conditionAdopt)
			return err
		}
		l.health.fail(conditionAdopt, err.Error())
		bo.wait(ctx)
		if _, err := l.check(ctx); errors.Is(err, outbox.ErrSuperseded) {
			return err
		}
	}
}

// settleAll sweeps until everything that was committed before the adoption is visible, and then once more: so whatever
// anybody has published is settled. What that pass has seen becomes the mark of every part.
func (l *leadership) settleAll(ctx context.Context) error {
	l.health.clear(conditionLayout)
	l.told = time.Now() // it takes a moment, as any adoption does
	known := l.gates.streams()
	_, xid, err := l.store.Horizon(ctx)
	if err != nil {
		return err
	}
	visible := false
	var gate time.Time
	err = l.sweeps.while(ctx, l.gates, func(ctx context.Context) (bool, error) {
		l.working()
		if _, err := l.check(ctx); errors.Is(err, outbox.ErrSuperseded) {
			return false, err
		}
		if ok, err := l.store.VisibleBelow(ctx, xid); err == nil && ok {
			visible = true
			return false, nil
		}
		l.layoutWaits(ctx, false, "transactions that are older than this change are open; events are published as "+
			"before")
		return l.watchGates(ctx, &gate)
	})
	if err == nil && !visible {
		err = cmp.Or(context.Cause(ctx), errSweepEnded)
	}
	if err != nil {
		return err
	}
	var pass outbox.Pass
	err = l.whileOwned(ctx, func(outbox.State) error { return nil }, func(ctx context.Context) (err error) {
		if pass, err = l.store.BeginPass(ctx, l.gates.owner); err != nil {
			return err
		}
		return l.sweeps.drain(ctx, l.gates, pass)
	})
	if err != nil {
		return err
	}
	l.undoubted(ctx, known)
	return l.store.SettleAll(ctx, l.gates.owner, pass)
}

// awaitReaders waits until nobody has anything before him in any stream. A sink that has just forgotten a stream has
// nothing in it, and somebody may not have read what will be restored: so the gates are asked last.
func (l *leadership) awaitReaders(ctx context.Context) error {
	l.health.clear(conditionLayout) // it may be there as the milder one
	l.told = time.Time{}
	var gate time.Time
	for ctx.Err() == nil {
		l.working()
		if _, err := l.check(ctx); errors.Is(err, outbox.ErrSuperseded) {
			return err
		}
		if _, err := l.watchGates(ctx, &gate); err != nil {
			return err
		}
		list, err := l.unread(ctx)
		switch {
		case finished(err):
			return err
		case err != nil:
			l.layoutWaits(ctx, true, "the consumer groups cannot be looked at: "+err.Error())
		case len(list) == 0:
			return nil
		default:
			l.layoutWaits(ctx, true, unreadText(list))
		}
		pause.For(ctx, layoutInterval)
	}
	return context.Cause(ctx)
}

func (l *leadership) unread(ctx context.Context) ([]outbox.Unread, error) {
	streams, err := l.store.Streams(ctx)
	if err != nil {
		return nil, err
	}
	actx, cancel := context.WithTimeout(ctx, publishTimeout)
	defer cancel()
	list, err := l.sink.Unread(actx, l.gates.owner.Source, outbox.StreamNames(streams))
	if err == nil && len(list) == 0 {
		err = l.sink.Check(actx, l.gates.owner, l.gates.streams())
	}
	return list, err
}

// unreadText names who is waited for: the one that nobody reads for the longest time, because that may be for ever.
func unreadText(list []outbox.Unread) string {
	worst := list[0]
	for _, u := range list[1:] {
		if u.Group != "" && (worst.Group == "" || u.Idle > worst.Idle) {
			worst = u
		}
	}
	if worst.Group == "" {
		return fmt.Sprintf("stream %q is new; consumers find it within seconds", worst.Stream)
	}
	text := fmt.Sprintf("group %q of stream %q has %d entries before it", worst.Group, worst.Stream, worst.Entries)
	if worst.Idle >= time.Minute {
		text += ", and nobody has read for it for " + worst.Idle.Round(time.Second).String()
	}
	if n := len(list) - 1; n > 0 {
		text += fmt.Sprintf("; and %d more", n)
	}
	return text
}

// layoutWaits says what a change waits for, in readiness and in the log. paused: nothing is published meanwhile, which
// is also said in the state, where posthaste status reads it.
func (l *leadership) layoutWaits(ctx context.Context, paused bool, what string) {
	text := fmt.Sprintf("the streams per type change from %d to %d: %s", max(l.gates.shards, 1), l.shards, what)
	say := l.health.degrade
	if paused {
		text += fmt.Sprintf(". Nothing is published until then. posthaste groups drop removes a group that nobody "+
			"reads for; --streams-per-type=%d calls it off", max(l.gates.shards, 1))
		say = l.health.fail
	}
	say(conditionLayout, text)
	if time.Since(l.told) < layoutTold {
		return
	}
	l.told = time.Now()
	l.log.Warn("the streams per type wait to be changed", "why", what, "paused", paused)
	if paused {
		_, _ = l.store.SetActive(ctx, l.gates.owner.Epoch, outbox.ModeStandby, 0, conditionLayout+": "+text)
	}
}
