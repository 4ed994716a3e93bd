package relay

import (
	"context"
	"errors"
	"time"

	"posthaste/internal/pause"
	"posthaste/outbox"
	"posthaste/relay/sweep"
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
	_, xid, err := l.o.Store.Horizon(ctx)
	if err != nil {
		return onOver, err
	}
	toggled := toggled(true)
	for {
		settled := false // everything committed before the adoption is visible
		done := false
		wanted := true // polling, not only for the time being
		err := l.sweepWhile(ctx, func(st outbox.State) error {
			wanted = st.Desired == outbox.ModePoll || wanted && toggled(st) == nil
			return nil
		}, func(ctx context.Context) (bool, error) {
			l.working()
			if !wanted {
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
			return true, nil
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
		if err := l.o.Sink.ForgetDoubt(ctx, l.gates.owner, s); err != nil {
			l.log.Debug("forget doubt", "stream", s, "err", err) // it costs memory until the next time
		}
	}
}

// sweep sweeps alone until slot and publication are usable.
func (l *leadership) sweep(ctx context.Context) (transition, error) {
	if err := l.record(ctx, outbox.ModePoll); err != nil {
		return onOver, err
	}
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
	err := l.sweepWhile(ctx, toggled(false), func(ctx context.Context) (bool, error) {
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
			go func() { answers <- l.keeper.ensure(actx) }()
		}
		return true, nil
	})
	if err == nil && usable {
		return onUsable, nil
	}
	return l.over(err)
}

// delay slows down hand-overs that keep failing.
func (l *leadership) delay() time.Duration {
	if l.failures == 0 {
		return 0
	}
	return pause.Jitter(min(100*time.Millisecond<<min(l.failures, 7), 10*time.Second))
}

// sweeps runs the sweeper under one owner's gates. Its methods may be called by one goroutine at a time, except those
// of sweep.Host, which are safe for concurrent use.
type sweeps struct {
	*reporter
	store   DeadEvents
	sweeper *sweep.Sweeper
}

// while runs the sweeper until check returns false or an error, or the sweeper ends by itself (it returns ErrGap and
// similar errors). It calls check a few times a second.
func (s *sweeps) while(ctx context.Context, g *gates, check func(ctx context.Context) (bool, error)) error {
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan error, 1)
	go func() { done <- s.sweeper.Run(ctx, s.scope(g)) }()
	stop := func() error {
		cancel()
		return <-done
	}
	t := time.NewTicker(200 * time.Millisecond)
	defer t.Stop()
	for {
		select {
		case err := <-done:
			cancel()
			return err
		case <-t.C:
		}
		ok, err := check(ctx)
		if err != nil || !ok {
			if serr := stop(); err == nil {
				err = serr
			}
			return err
		}
	}
}

// host is the host of a sweep under gates.
type host struct {
	*sweeps
	*gates
}

// scope returns the scope of a sweep under g.
func (s *sweeps) scope(g *gates) sweep.Scope {
	return sweep.Scope{Host: host{s, g}, Owner: g.owner, Layout: g.layout, BlockKey: s.blocks != nil}
}

// Blockers, Parked, Outcome and Published implement sweep.Host.
func (s *sweeps) Blockers(events []*outbox.Record) []string { return s.blocks.blockers(events) }
func (s *sweeps) Parked(e *outbox.Record, err error)        { s.parked(e, err) }
func (s *sweeps) Outcome(err error)                         { s.outcome(err) }

// Published implements sweep.Host.
func (h host) Published(stream string, events []*outbox.Record) {
	h.published(outbox.ModePoll, stream, h.layout.Shards, events)
}

// Refresh reads which events are parked, for block-key.
func (s *sweeps) Refresh(ctx context.Context) error {
	if s.blocks == nil {
		return nil
	}
	return s.blocks.refresh(func() ([]outbox.Dead, error) { return s.store.Parked(ctx) })
}

// drain settles the rows that pass sees, in every part. newer: see sweep.Scope. Its success also ends a failure
// reported before.
func (s *sweeps) drain(ctx context.Context, g *gates, pass outbox.Pass, newer bool) error {
	scope := s.scope(g)
	scope.Newer = newer
	err := s.sweeper.Drain(ctx, scope, pass)
	if err == nil {
		s.outcome(nil)
	}
	return err
}
