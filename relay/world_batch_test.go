package relay

import (
	"context"
	"errors"
	"time"

	"posthaste/internal/poison"
	"posthaste/outbox"
)

// sweptBatch is what becomes of a batch.
type sweptBatch struct {
	rows   []*tableRow
	marks  []outbox.Mark
	groups map[string][]*outbox.Event
	parked map[*outbox.Event]outbox.Dead
	why    map[*outbox.Event]error
	entry  map[*outbox.Event]string
}

// batch sweeps one batch and returns the first seq it met; zero means that there was no row.
func (c *sweepClaim) batch(ctx context.Context) (first int64, err error) {
	w := c.w
	rows, err := sweepCall(ctx, w.conn, "Sweep.Take", func(pg *postgres) ([]*tableRow, error) {
		rows := pg.visible(c.part)
		rows = rows[:min(len(rows), sweepRows)]
		w.s.i.reads(w.scope.Owner)
		for _, r := range rows {
			if r.by != nil && r.by != w.conn {
				return nil, errLocked
			}
		}
		for _, r := range rows {
			r.by = w.conn
		}
		return rows, nil
	})
	defer func() {
		w.s.i.awake()
		w.s.i.w.do(w.conn.rollback)
	}()
	if err != nil || len(rows) == 0 {
		return 0, err
	}
	b := &sweptBatch{
		rows: rows, groups: map[string][]*outbox.Event{}, parked: map[*outbox.Event]outbox.Dead{},
		why:   map[*outbox.Event]error{},
		entry: map[*outbox.Event]string{},
	}
	if err = c.publish(ctx, b); err == nil {
		err = c.commit(ctx, b)
	}
	return rows[0].Seq, err
}

func (b *sweptBatch) park(e *outbox.Event, err error, class string, attempts int) {
	b.parked[e], b.why[e] = outbox.Dead{Class: class, Error: err.Error(), Attempts: attempts}, err
}

func (c *sweepClaim) publish(ctx context.Context, b *sweptBatch) error {
	var order []string
	byStream := map[string][]*outbox.Event{}
	for _, r := range b.rows {
		e := r.Event
		if blocker := c.w.scope.Blocked(&e); blocker != "" {
			b.park(&r.Event, errors.New(poison.WaitsFor(blocker)), poison.ClassBlocked, 0)
			continue
		}
		name := outbox.StreamName("outbox.", e.AggregateType)
		if byStream[name] == nil {
			order = append(order, name)
		}
		byStream[name] = append(byStream[name], &r.Event)
	}
	for _, name := range order {
		if err := c.publishTo(ctx, name, byStream[name], b); err != nil {
			return err
		}
	}
	return nil
}

func (c *sweepClaim) publishTo(ctx context.Context, stream string, events []*outbox.Event, b *sweptBatch) error {
	w := c.w
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	if err := w.scope.Ensure(ctx, stream); err != nil {
		return err
	}
	lane := c.lanes[stream]
	if lane == nil {
		lane = memSink{w.s.i}.Lane(stream, w.scope.Owner, c.lane)
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
		tries, park := w.s.refused.Refused(stream, refused.ID)
		if !park {
			return err
		}
		e := events[refused.Index]
		b.park(e, refused.Err, refused.Class, tries)
		for _, n := range d.Skip(poison.Behind(e, w.scope.BlockKey)) {
			b.park(events[n], errors.New(poison.WaitsFor(e.ID.String())), poison.ClassBlocked, 0)
		}
	}
	for n, e := range events {
		if _, parked := b.parked[e]; !parked {
			b.groups[stream] = append(b.groups[stream], e)
			b.entry[e] = receipt.EntryIDs[n]
		}
	}
	if len(b.groups[stream]) == len(events) {
		w.s.refused.Accepted(stream)
	}
	b.marks = append(b.marks, outbox.Mark{Stream: stream, Lane: c.lane, Number: receipt.Number})
	return nil
}

// commit ends the transaction, when the sink has confirmed what was published.
func (c *sweepClaim) commit(ctx context.Context, b *sweptBatch) error {
	w := c.w
	if len(b.marks) > 0 {
		if err := (memSink{w.s.i}).Confirm(ctx, w.scope.Owner, b.marks); err != nil {
			return err
		}
	}
	_, err := sweepCall(context.WithoutCancel(ctx), w.conn, "Sweep.Commit", func(pg *postgres) (nothing, error) {
		for _, r := range b.rows {
			if r.by != w.conn {
				return nothing{}, errGone // rolled back meanwhile
			}
		}
		for _, r := range b.rows {
			if d, parked := b.parked[&r.Event]; parked {
				pg.park(r, d.Class, d.Error, d.Attempts)
			} else {
				pg.deliver(r, outbox.StreamName("outbox.", r.AggregateType), b.entry[&r.Event])
			}
		}
		w.s.i.w.grow(50)
		return nothing{}, nil
	})
	if err != nil {
		return err
	}
	for _, m := range b.marks {
		c.marks[m.Stream] = m.Number
	}
	for stream, events := range b.groups {
		w.scope.Published(stream, events, 0)
	}
	for e, err := range b.why {
		w.s.refused.Parked(outbox.StreamName("outbox.", e.AggregateType), e.ID)
		w.scope.Parked(e, err)
	}
	w.scope.Outcome(nil)
	return nil
}
