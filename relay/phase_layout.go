package relay

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"posthaste/internal/pause"
	"posthaste/outbox"
)

// layoutInterval is how often a leader checks whether consumers have read everything.
const layoutInterval = 500 * time.Millisecond

// layoutTold is the interval at which the reason of a wait is reported again.
const layoutTold = 5 * time.Second

// Spread is a change of how many streams a type has.
type Spread struct {
	// Shards is one of outbox.ShardCounts.
	Shards int
	// Waiting is called with the reason why the change waits, whenever it changes and every few seconds.
	Waiting func(why string)

	mu   sync.Mutex // of last and told
	last string
	told time.Time
	done bool
	err  error
}

// wait reports the reason why the change waits.
func (s *Spread) wait(why string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if why != s.last || time.Since(s.told) >= layoutTold {
		s.last, s.told = why, time.Now()
		s.Waiting(why)
	}
}

// troubles reports, until ctx ends, why a spread cannot begin: a server that does not answer, a stream of another
// database.
func (r *Relay) troubles(ctx context.Context) {
	for pause.For(ctx, layoutTold) == nil {
		for _, reason := range r.Health().Reasons {
			if !strings.HasPrefix(reason, conditionLayout) { // which is reported where it waits
				r.o.Spread.wait(reason)
			}
		}
	}
}

// wantedLayout is how streams should be named.
func (l *leadership) wantedLayout() outbox.Layout {
	to := outbox.Layout{Prefix: l.o.Prefix, Shards: l.gates.layout.Shards}
	if l.o.Spread != nil {
		to.Shards = l.o.Spread.Shards
	}
	return to
}

// changeLayout changes the names of streams. It publishes and settles all events under the old layout. If the number of
// streams of a type changes, it then waits until every consumer group has acknowledged everything. Finally it writes
// the mark that has the new layout. It follows an adoption, and another adoption follows it. No other relay publishes
// during that time, because the state shows no active mode.
//
// Once: every published event is settled when the mark is written, so no gate needs the events of another stream.
// In order: each group has read the old streams before the first event goes to a new one.
func (l *leadership) changeLayout(ctx context.Context) (transition, error) {
	from, to := l.gates.layout, l.wantedLayout()
	if from.Shards == to.Shards {
		if done, err := l.o.Store.FirstLayout(ctx, l.gates.owner, to.Prefix); err != nil || done {
			return l.over(err)
		}
	} else if err := l.o.Store.CheckLayout(ctx, to.Shards); err != nil {
		return l.refuseLayout(err)
	}
	l.log.Info("changing how streams are named", "prefix", to.Prefix, "streams_per_type", to.Shards,
		"prefix_before", from.Prefix, "streams_per_type_before", from.Shards)
	if err := l.settleAll(ctx); err != nil {
		return l.over(err)
	}
	if from.Shards != to.Shards {
		if err := l.awaitReaders(ctx); err != nil {
			return l.over(err)
		}
	}
	if err := l.o.Store.ChangeLayout(ctx, l.gates.owner, to); err != nil {
		return l.refuseLayout(err)
	}
	l.log.Info("streams are named as configured now", "prefix", to.Prefix, "streams_per_type", to.Shards)
	l.health.clear(conditionLayout)
	l.reason = outbox.ReasonLayout
	return onOver, nil
}

// refuseLayout ends a spread if err shows that a type cannot have so many streams.
func (l *leadership) refuseLayout(err error) (transition, error) {
	if l.o.Spread == nil || !errors.Is(err, outbox.ErrLayout) {
		return l.over(err)
	}
	l.o.Spread.done, l.o.Spread.err = true, err
	return onStop, nil
}

// awaitLayout retries temporary failures, as the raising of gates does.
func (l *leadership) awaitLayout(ctx context.Context) error {
	err := l.persist(ctx, func() error { return l.o.Store.AwaitLayout(ctx) }, never,
		func(err error) { l.health.fail(conditionAdopt, err.Error()) })
	l.health.clear(conditionAdopt)
	return err
}

// settleAll sweeps until everything that was committed before the adoption is visible, and then makes one more pass.
// After it, every event that any instance has published is settled. The pass becomes the mark of every part.
func (l *leadership) settleAll(ctx context.Context) error {
	l.health.clear(conditionLayout)
	l.told = time.Now() // it takes a moment, as any adoption does
	known := l.gates.streams()
	_, xid, err := l.o.Store.Horizon(ctx)
	if err != nil {
		return err
	}
	visible := false
	err = l.sweepWhile(ctx, anyMode, func(ctx context.Context) (bool, error) {
		l.working()
		if ok, err := l.o.Store.VisibleBelow(ctx, xid); err == nil && ok {
			visible = true
			return false, nil
		}
		l.layoutWaits(ctx, false, "transactions that are older than this change are open; events are published as "+
			"before")
		return true, nil
	})
	if err == nil && !visible {
		err = cmp.Or(context.Cause(ctx), errSweepEnded)
	}
	if err != nil {
		return err
	}
	pass, err := l.pass(ctx, anyMode, false)
	if err != nil {
		return err
	}
	l.undoubted(ctx, known)
	return l.o.Store.SettleAll(ctx, l.gates.owner, pass)
}

// awaitReaders waits until no consumer group has unread or pending events in any stream. A sink that has just lost a
// stream reports no such events, although restored ones will be unread. Therefore unread checks the gates last.
func (l *leadership) awaitReaders(ctx context.Context) error {
	l.health.clear(conditionLayout) // it may be there as the milder one
	l.told = time.Time{}
	for ctx.Err() == nil {
		l.working()
		if err := l.rightful(ctx, anyMode); err != nil {
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
	streams, err := l.o.Store.Streams(ctx)
	if err != nil {
		return nil, err
	}
	actx, cancel := context.WithTimeout(ctx, publishTimeout)
	defer cancel()
	list, err := l.o.Sink.Unread(actx, l.gates.owner.Source, outbox.StreamNames(streams))
	if err == nil && len(list) == 0 {
		err = l.o.Sink.Check(actx, l.gates.owner, l.gates.streams())
	}
	return list, err
}

// unreadText describes the consumer group that has been idle longest, because it may never be read again.
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
		text += ", and has not read for " + worst.Idle.Round(time.Second).String()
	}
	if n := len(list) - 1; n > 0 {
		text += fmt.Sprintf("; and %d more", n)
	}
	return text
}

// layoutWaits reports why a change waits: in readiness, in the log and to the caller of a spread. If paused, nothing is
// published until then, and the state records the reason for posthaste status.
func (l *leadership) layoutWaits(ctx context.Context, paused bool, what string) {
	if l.o.Spread != nil {
		l.o.Spread.wait(what)
	}
	text := "the names of streams change: " + what
	if paused {
		text += ". Nothing is published until then. posthaste groups drop removes a group that has no consumers"
		l.health.fail(conditionLayout, text)
	} else {
		l.health.degrade(conditionLayout, text)
	}
	if time.Since(l.told) < layoutTold {
		return
	}
	l.told = time.Now()
	l.log.Warn("the names of streams wait to be changed", "why", what, "paused", paused)
	if paused {
		_, _ = l.o.Store.SetActive(ctx, l.gates.owner.Epoch, outbox.ModeStandby, 0, conditionLayout+": "+text)
	}
}
