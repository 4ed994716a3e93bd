package relay

import (
	"context"
	"slices"

	"posthaste/outbox"
	"posthaste/relay/stream"
	"posthaste/relay/sweep"
)

// sweepRows and sweepList are small, so that a pass takes several batches, and several lists.
const sweepRows, sweepList = 4, 7

// sweeper returns a sweeper of an instance that publishes to sink, over the world's table.
func (i *instance) sweeper(sink stream.Publisher) *sweep.Sweeper {
	return sweep.New(sweep.Options{
		Open: func(context.Context) (sweep.Conn, error) {
			c := &sweepConn{i: i, seen: map[int]outbox.Settled{}}
			i.w.do(func() { i.conns[c] = true; i.opened++ })
			return c, nil
		},
		BatchRows: sweepRows, Sink: sink,
	})
}

// sweepConn is the connection of a worker. Guarded by world.mu.
type sweepConn struct {
	i      *instance
	closed bool
	// owner is that of the last claim, seen has the rows that the passes cover, by part.
	owner outbox.Owner
	seen  map[int]outbox.Settled
	// parks are the events that the claim parks when it commits.
	parks []outbox.Refused
}

var _ sweep.Conn = (*sweepConn)(nil)

// end gives back the connection's claim.
func (c *sweepConn) end() {
	c.closed = true
	delete(c.i.conns, c)
	c.release()
}

func (c *sweepConn) release() {
	c.parks = nil
	for p, by := range c.i.w.pg.claimer {
		if by == c {
			c.i.w.pg.claimer[p] = nil
		}
	}
}

func (c *sweepConn) Closed() (closed bool) {
	c.i.w.do(func() { closed = c.closed })
	return closed
}

func (c *sweepConn) Close() {
	c.i.awake()
	c.i.w.do(func() {
		if !c.i.isDead() {
			c.end()
		}
	})
}

// sweepCall is one statement on the connection.
func sweepCall[T any](ctx context.Context, c *sweepConn, name string, effect func(pg *postgres) (T, error)) (T, error) {
	return call(ctx, c.i, name, func() (v T, err error) {
		if c.closed {
			return v, errGone
		}
		return effect(c.i.w.pg)
	})
}

func sweepCommand(ctx context.Context, c *sweepConn, name string, effect func(pg *postgres) error) error {
	_, err := sweepCall(ctx, c, name, func(pg *postgres) (struct{}, error) { return struct{}{}, effect(pg) })
	return err
}

// mine returns an error unless the connection holds the part for the present owner.
func (c *sweepConn) mine(pg *postgres, part int) error {
	switch {
	case pg.claimer[part] != c:
		return errGone
	case pg.state.Owner != c.owner:
		return outbox.ErrSuperseded
	}
	return nil
}

func (c *sweepConn) Partitions(ctx context.Context) ([]int, error) {
	return sweepCall(ctx, c, "Sweep.Parts", func(pg *postgres) (parts []int, err error) {
		for p := range pg.parts {
			if pg.newest(p).cursor > 0 || slices.ContainsFunc(pg.parts[p], pg.waits) {
				parts = append(parts, p)
			}
		}
		return parts, nil
	})
}

func (c *sweepConn) Reached(ctx context.Context, part int, pass outbox.Pass) (bool, error) {
	return sweepCall(ctx, c, "Sweep.Reached", func(pg *postgres) (bool, error) {
		return !slices.ContainsFunc(pg.parts[part], func(r *tableRow) bool {
			return holds(&pass.Settled, r) && pg.waits(r)
		}), nil
	})
}

func (c *sweepConn) Claim(ctx context.Context, parts []int, o outbox.Owner) (
	part int, claim int64, ok bool, err error,
) {
	part, err = sweepCall(ctx, c, "Sweep.Claim", func(pg *postgres) (int, error) {
		if pg.state.Owner != o {
			return -1, outbox.ErrSuperseded
		}
		i := slices.IndexFunc(parts, func(p int) bool { return pg.claimer[p] == nil })
		if i < 0 {
			return -1, nil
		}
		c.release()
		pg.claimer[parts[i]], c.owner = c, o
		pg.claims++
		claim = pg.claims
		return parts[i], nil
	})
	return part, claim, err == nil && part >= 0, err
}

func (c *sweepConn) Begin(ctx context.Context, part int, within *outbox.Pass) (*outbox.PartPass, error) {
	return sweepCall(ctx, c, "Sweep.Begin", func(pg *postgres) (*outbox.PartPass, error) {
		c.i.reads(c.owner)
		m, now := pg.newest(part), pg.now()
		seen := now
		if m.cursor > 0 {
			seen = m.pass
		} else if within != nil {
			given := &mark{settled: &within.Settled}
			if !pg.sees(m, given) && !pg.sees(given, &mark{settled: &now}) {
				seen = within.Settled
				seen.High = max(seen.High, m.settled.High)
			}
		}
		c.seen[part] = seen
		p := &outbox.PartPass{Part: part, Mark: pg.id(m), UnderWay: m.cursor > 0}
		for _, r := range pg.parts[part] {
			if r.Seq > m.cursor && pg.waits(r) && holds(&seen, r) && len(p.Seqs) < sweepList {
				p.Seqs = append(p.Seqs, r.Seq)
			}
		}
		p.Full = len(p.Seqs) == sweepList
		return p, nil
	})
}

func (c *sweepConn) Page(ctx context.Context, p *outbox.PartPass, limit, _ int) ([]*outbox.Record, error) {
	p.Page = min(limit, len(p.Seqs))
	return sweepCall(ctx, c, "Sweep.Page", func(pg *postgres) (events []*outbox.Record, err error) {
		c.i.reads(c.owner)
		if pg.id(pg.newest(p.Part)) != p.Mark {
			return nil, outbox.ErrPassed
		}
		for _, r := range pg.parts[p.Part] {
			if slices.Contains(p.Seqs[:p.Page], r.Seq) && pg.waits(r) {
				events = append(events, &r.Record)
			}
		}
		return events, nil
	})
}

func (c *sweepConn) Ahead(ctx context.Context, p *outbox.PartPass, within *outbox.Pass, blocked []string,
	sent map[int64]bool,
) (*outbox.PartPass, error) {
	return sweepCall(ctx, c, "Sweep.Ahead", func(pg *postgres) (*outbox.PartPass, error) {
		ahead := &outbox.PartPass{Part: p.Part, Mark: p.Mark}
		for _, r := range pg.parts[p.Part] {
			if pg.waits(r) && !sent[r.Seq] && !slices.Contains(blocked, pg.stream(r)) &&
				(within == nil || within.Snapshot.Sees(r.tx.xid)) {
				ahead.Seqs = append(ahead.Seqs, r.Seq)
			}
		}
		return ahead, nil
	})
}

func (c *sweepConn) Park(ctx context.Context, p *outbox.PartPass, _ outbox.Owner, events []outbox.Refused) error {
	return sweepCommand(ctx, c, "Sweep.Park", func(pg *postgres) error {
		c.parks = events
		return c.mine(pg, p.Part)
	})
}

func (*sweepConn) ParkRow(context.Context, *outbox.PartPass, outbox.Owner, error) (*outbox.Record, error) {
	panic("every row can be read")
}

// commit ends the claim.
func (c *sweepConn) commit(pg *postgres) {
	for _, e := range c.parks {
		for _, r := range pg.parts[outbox.PartOf(e.Event.AggregateID)] {
			if r.Seq == e.Event.Seq {
				pg.park(r, e.Class, e.Err.Error(), e.Attempts)
			}
		}
	}
	c.release()
}

func (c *sweepConn) Settle(ctx context.Context, p *outbox.PartPass, o outbox.Owner, _ outbox.Entries) error {
	id, err := sweepCall(ctx, c, "Sweep.Settle", func(pg *postgres) (int64, error) {
		if err := c.mine(pg, p.Part); err != nil {
			return 0, err
		}
		seen, before := c.seen[p.Part], pg.newest(p.Part)
		if pg.id(before) != p.Mark {
			return 0, outbox.ErrPassed
		}
		m := &mark{part: p.Part, settled: &seen}
		if !p.Ends() {
			m = &mark{part: p.Part, settled: before.settled, pass: seen, cursor: p.Seqs[p.Page-1]}
		}
		c.commit(pg)
		err := pg.mark(o, m)
		return pg.id(m), err
	})
	if err == nil {
		p.Mark = id
		p.Turn()
	}
	return err
}

func (c *sweepConn) Drop(ctx context.Context) error {
	return sweepCommand(context.WithoutCancel(ctx), c, "Sweep.Release", func(pg *postgres) error {
		if len(c.parks) > 0 && pg.state.Owner != c.owner {
			return errGone
		}
		c.commit(pg)
		return nil
	})
}
