package relay

import (
	"context"
	"errors"
	"posthaste/internal/poison"
	"time"

	"posthaste/outbox"
)

// publish puts rows into their streams, in order, and notes in f what there is to settle.
func (s *stream) publish(sp span, rows []*outbox.Row, f *flight) error {
	var order []string
	byStream := map[string][]*outbox.Row{}
	for _, r := range rows {
		if blocker := s.l.blocks.blocker(&r.Event); blocker != "" {
			if err := s.park(sp.intake, r, poison.ClassBlocked, poison.WaitsFor(blocker), 0, nil); err != nil {
				return err
			}
			continue
		}
		name := outbox.StreamName(s.l.o.Prefix, r.AggregateType)
		if byStream[name] == nil {
			order = append(order, name)
		}
		byStream[name] = append(byStream[name], r)
	}
	for _, name := range order {
		if err := s.publishTo(sp, name, byStream[name], f); err != nil {
			return err
		}
	}
	return nil
}

// publishTo publishes the rows of one stream.
func (s *stream) publishTo(sp span, name string, rows []*outbox.Row, f *flight) error {
	ln := s.lane(name)
	ln.tell()
	events := make([]*outbox.Event, len(rows))
	for i, r := range rows {
		events[i] = &r.Event
	}
	d := ln.pub.Deliver(events)
	receipt, parked, err := s.deliver(sp, name, d, rows)
	if err != nil {
		return err
	}
	sent := events
	if len(parked) > 0 {
		sent = events[:0:0]
	}
	for i, r := range rows {
		if parked[i] {
			continue
		}
		if len(parked) > 0 {
			sent = append(sent, events[i])
		}
		f.items = append(f.items, outbox.Settlement{ID: r.ID, AggregateID: r.AggregateID, Seq: r.Seq, XID: r.XID, Stream: name, EntryID: receipt.EntryIDs[i], Time: r.Time})
	}
	f.marks = append(f.marks, outbox.Mark{Stream: name, Lane: s.laneID(), Number: receipt.Number})
	s.l.published(outbox.ModeCDC, name, sent)
	return nil
}

func (s *stream) laneID() outbox.Lane {
	return outbox.Lane{Part: outbox.StreamLane, Nonce: s.gates.owner.Nonce}
}

func (s *stream) lane(name string) *lane {
	ln := s.lanes[name]
	if ln == nil {
		ln = &lane{pub: s.l.o.Sink.Lane(name, s.gates.owner, s.laneID())}
		s.mu.Lock()
		s.lanes[name] = ln
		s.mu.Unlock()
	}
	return ln
}

// tell passes on what the settler finished, for the next publish to carry along.
func (ln *lane) tell() {
	if n := ln.settled.Load(); n > ln.told {
		ln.pub.Settled(n)
		ln.told = n
	}
}

// tellSettled reports what was settled while nothing was published.
func (s *stream) tellSettled(ctx context.Context) {
	var marks []outbox.Mark
	for name, ln := range s.lanes {
		if n := ln.settled.Load(); n > ln.told {
			marks = append(marks, outbox.Mark{Stream: name, Lane: s.laneID(), Number: n})
		}
	}
	if len(marks) == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, publishTimeout)
	defer cancel()
	if s.l.o.Sink.Settled(ctx, s.gates.owner, marks) != nil {
		return // the next publish carries it
	}
	for _, m := range marks {
		s.lanes[m.Stream].told = m.Number
		s.lanes[m.Stream].pub.Settled(m.Number)
	}
}

// deliver repeats a delivery until it is complete. An event that is refused for its own sake is parked after a few
// attempts; everything else is repeated for as long as the intake lasts.
func (s *stream) deliver(sp span, name string, d outbox.Delivery, rows []*outbox.Row) (outbox.Receipt, map[int]bool, error) {
	bo := backoff{first: 50 * time.Millisecond, most: 2 * time.Second}
	parked := map[int]bool{}
	for {
		actx, cancel := context.WithTimeout(sp.work, publishTimeout)
		receipt, err := d.Publish(actx)
		cancel()
		s.l.publishOutcome(err)
		s.sinkFailing.Store(err != nil)
		var refused *outbox.PoisonError
		switch {
		case err == nil:
			if len(parked) == 0 {
				s.refused.Accepted(name)
			}
			return receipt, parked, nil
		case finished(err):
			return outbox.Receipt{}, nil, err
		case errors.As(err, &refused):
			if attempts, park := s.refused.Refused(name, refused.ID); park {
				if err := s.giveUp(sp.intake, d, rows, refused, attempts, parked); err != nil {
					return outbox.Receipt{}, nil, err
				}
				s.refused.Parked(name, refused.ID)
				bo.reset()
				continue
			}
		}
		bo.wait(sp.intake)
		// A mode change cancels the repetition: what may have been published becomes doubt.
		if sp.intake.Err() != nil || sp.work.Err() != nil {
			return outbox.Receipt{}, nil, context.Cause(sp.intake)
		}
	}
}

// giveUp parks the event that the sink refuses, and with block-key those of its aggregate behind it.
func (s *stream) giveUp(ctx context.Context, d outbox.Delivery, rows []*outbox.Row, p *outbox.PoisonError, attempts int, parked map[int]bool) error {
	r := rows[p.Index]
	if err := s.park(ctx, r, p.Class, p.Err.Error(), attempts, p); err != nil {
		return err
	}
	parked[p.Index] = true
	var also func(e *outbox.Event) bool
	if s.l.blocks != nil {
		also = func(e *outbox.Event) bool {
			return e.AggregateType == r.AggregateType && e.AggregateID == r.AggregateID
		}
	}
	for _, i := range d.Skip(also) {
		if err := s.park(ctx, rows[i], poison.ClassBlocked, poison.WaitsFor(r.ID.String()), 0, nil); err != nil {
			return err
		}
		parked[i] = true
	}
	return nil
}

// park moves a row to outbox_dead, waiting until it is visible. cause is nil for a row that only waits for another.
func (s *stream) park(ctx context.Context, r *outbox.Row, class, reason string, attempts int, cause error) error {
	bo := backoff{first: 10 * time.Millisecond, most: 500 * time.Millisecond}
	began := time.Now()
	s.sinkFailing.Store(false) // if the stream stands still now, it is not for the sink
	for {
		found, err := s.l.o.Store.Park(ctx, s.gates.owner, r, class, reason, attempts)
		if errors.Is(err, outbox.ErrSuperseded) {
			return err
		}
		if err != nil && time.Since(began) > patience && s.l.health.fail(conditionPark, err.Error()) {
			s.l.log.Warn("a refused event cannot be parked; the stream waits for it", "event_id", r.ID, "err", err)
		}
		if err == nil && (found.Rows[0] || found.Snapshot.Visible(r.XID)) {
			s.l.health.clear(conditionPark)
			if cause == nil {
				cause = errors.New(reason)
			}
			s.l.parked(&r.Event, cause)
			return nil
		}
		bo.wait(ctx)
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
	}
}
