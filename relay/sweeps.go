package relay

import (
	"context"
	"time"

	"posthaste/outbox"
	"posthaste/relay/sweep"
)

// sweeps runs the sweeper under one owner's gates. Its methods may be called by one goroutine at a time, except those
// of sweep.Host, which are safe for concurrent use.
type sweeps struct {
	*reporter
	store   DeadEvents
	sweeper *sweep.Sweeper
	blocks  *blocks // nil unless block-key
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

// Blocker implements sweep.Host.
func (s *sweeps) Blocker(e *outbox.Record) string { return s.blocks.blocker(e) }

// Published implements sweep.Host.
func (h host) Published(stream string, events []*outbox.Record) {
	h.published(outbox.ModePoll, stream, h.layout.Shards, events)
}

// Parked implements sweep.Host.
func (s *sweeps) Parked(e *outbox.Record, err error) {
	s.blocks.add(e)
	s.parked(e, err)
}

// Outcome implements sweep.Host.
func (s *sweeps) Outcome(err error) { s.outcome(err) }

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
