package relay

import (
	"context"
	"errors"
	"slices"
	"time"

	"posthaste/internal/poison"
	"posthaste/outbox"
)

// sweptBatch is what becomes of a batch.
type sweptBatch struct {
	rows   []*tableRow
	marks  []outbox.Mark
	groups map[string][]*outbox.Record
	parked map[*outbox.Record]outbox.Dead
	why    map[*outbox.Record]error
}

// batch sweeps one page, and reports whether the pass is over.
func (c *sweepClaim) batch(ctx context.Context) (over bool, err error) {
	w := c.w
	rows, err := sweepCall(ctx, w.conn, "Sweep.Page", func(pg *postgres) (rows []*tableRow, err error) {
		w.s.i.reads(w.scope.Owner)
		if len(c.list) == 0 && c.more {
			c.read(pg)
		}
		page := c.list[:min(len(c.list), sweepRows)]
		for _, r := range pg.parts[c.part] {
			if slices.Contains(page, r.Seq) {
				rows = append(rows, r)
			}
		}
		if c.list = c.list[len(page):]; len(page) > 0 {
			c.cursor = page[len(page)-1]
		}
		return rows, nil
	})
	over = len(c.list) == 0 && !c.more
	if err != nil || len(rows) == 0 && !c.begun {
		return over, err
	}
	b := &sweptBatch{
		rows: rows, groups: map[string][]*outbox.Record{}, parked: map[*outbox.Record]outbox.Dead{},
		why: map[*outbox.Record]error{},
	}
	if err = c.publish(ctx, b); err == nil {
		err = c.settle(ctx, b, over)
	}
	return over, err
}

func (b *sweptBatch) park(e *outbox.Record, err error, class string, attempts int) {
	b.parked[e], b.why[e] = outbox.Dead{Class: class, Error: err.Error(), Attempts: attempts}, err
}

func (c *sweepClaim) publish(ctx context.Context, b *sweptBatch) error {
	var order []string
	byStream := map[string][]*outbox.Record{}
	for _, r := range b.rows {
		e := r.Record
		if blocker := c.w.scope.Blocked(&e); blocker != "" {
			b.park(&r.Record, errors.New(poison.WaitsFor(blocker)), poison.ClassBlocked, 0)
			continue
		}
		name := c.w.scope.Layout.Stream(e.AggregateType, e.AggregateID)
		if byStream[name] == nil {
			order = append(order, name)
		}
		byStream[name] = append(byStream[name], &r.Record)
	}
	for _, name := range order {
		if err := c.publishTo(ctx, name, byStream[name], b); err != nil {
			return err
		}
	}
	return nil
}

func (c *sweepClaim) publishTo(ctx context.Context, stream string, events []*outbox.Record, b *sweptBatch) error {
	w := c.w
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	if err := w.scope.Ensure(ctx, stream); err != nil {
		return err
	}
	lane := c.lanes[stream]
	if lane == nil {
		lane = w.scope.Lane(stream, c.lane)
		c.lanes[stream] = lane
	}
	if n := c.marks[stream]; n > 0 {
		lane.Settled(n)
	}
	d := lane.Deliver(events)
	receipt, err := d.Publish(ctx)
	for refused := (*outbox.PoisonError)(nil); err != nil; receipt, err = d.Publish(ctx) {
		if !errors.As(err, &refused) {
			return err
		}
		tries, park := w.s.refused.Refused(stream, refused)
		if !park {
			return err
		}
		e := events[refused.Index]
		b.park(e, refused.Err, refused.Class, tries)
		also, class, why := poison.Behind(refused, e, w.scope.BlockKey)
		for _, n := range d.Skip(also) {
			b.park(events[n], why, class, 0)
		}
	}
	for _, e := range events {
		if _, parked := b.parked[e]; !parked {
			b.groups[stream] = append(b.groups[stream], e)
		}
	}
	if len(b.groups[stream]) == len(events) {
		w.s.refused.Accepted(stream)
	}
	b.marks = append(b.marks, outbox.Mark{Stream: stream, Lane: c.lane, Number: receipt.Number})
	return nil
}

// settle parks what is refused, and moves the mark when the sink has confirmed what was published.
func (c *sweepClaim) settle(ctx context.Context, b *sweptBatch, over bool) error {
	w := c.w
	mine := func(pg *postgres) error {
		if pg.claimer[c.part] != w.conn {
			return errGone
		}
		if pg.state.Owner != w.scope.Owner {
			return outbox.ErrSuperseded
		}
		return nil
	}
	if len(b.parked) > 0 {
		_, err := sweepCall(ctx, w.conn, "Sweep.Park", func(pg *postgres) (nothing, error) {
			if err := mine(pg); err != nil {
				return nothing{}, err
			}
			for _, r := range b.rows {
				if d, parked := b.parked[&r.Record]; parked && !r.deleted {
					pg.park(r, d.Class, d.Error, d.Attempts)
				}
			}
			return nothing{}, nil
		})
		if err != nil {
			return err
		}
	}
	if len(b.marks) > 0 {
		if err := (memSink{w.s.i}).Confirm(ctx, w.scope.Owner, b.marks); err != nil {
			return err
		}
	}
	_, err := sweepCall(context.WithoutCancel(ctx), w.conn, "Sweep.Settle", func(pg *postgres) (nothing, error) {
		if err := mine(pg); err != nil {
			return nothing{}, err
		}
		m := &mark{part: c.part, settled: &c.pass}
		if !over {
			m = &mark{part: c.part, settled: pg.newest(c.part).settled, pass: c.pass, cursor: c.cursor}
		}
		return nothing{}, pg.mark(w.scope.Owner, m)
	})
	if err != nil {
		return err
	}
	c.begun = true
	for _, m := range b.marks {
		c.marks[m.Stream] = m.Number
	}
	for stream, events := range b.groups {
		w.scope.Published(stream, events, 0)
	}
	for e, err := range b.why {
		w.s.refused.Parked(w.scope.Layout.Stream(e.AggregateType, e.AggregateID), e.ID)
		w.scope.Parked(e, err)
	}
	w.scope.Outcome(nil)
	return nil
}
