package relay

import (
	"context"
	"time"

	"posthaste/outbox"
)

// sweeps runs the sweeper under one owner's gates. Its methods may be called by one goroutine at a time. The callbacks
// that it gives the sweeper are safe for concurrent use.
type sweeps struct {
	*reporter
	store   outbox.Store
	sweeper outbox.Sweeper
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

// scope returns the scope of a sweep under g.
func (s *sweeps) scope(g *gates) outbox.Scope {
	return outbox.Scope{
		Owner: g.owner, Layout: g.layout, Ensure: g.ensure, Lane: g.lane, Claimed: s.refresh,
		BlockKey: s.blocks != nil, Blocked: s.blocks.blocker,
		Published: func(stream string, events []*outbox.Record, suppressed int) {
			s.published(outbox.ModePoll, stream, g.layout.Shards, events)
		},
		Parked: func(e *outbox.Record, err error) {
			s.blocks.add(e)
			s.parked(e, err)
		},
		Outcome: s.outcome,
	}
}

// refresh reads which events are parked, for block-key.
func (s *sweeps) refresh(ctx context.Context) error {
	if s.blocks == nil {
		return nil
	}
	return s.blocks.refresh(func() ([]outbox.Dead, error) { return s.store.Parked(ctx) })
}

// drain settles the rows that pass sees, in every part. newer: see Scope. Its success also ends a failure reported
// before.
func (s *sweeps) drain(ctx context.Context, g *gates, pass outbox.Pass, newer bool) error {
	scope := s.scope(g)
	scope.Newer = newer
	err := s.sweeper.Drain(ctx, scope, pass)
	if err == nil {
		s.outcome(nil)
	}
	return err
}
