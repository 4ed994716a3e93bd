package sweep

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"posthaste/internal/pause"
	"posthaste/outbox"
	"posthaste/relay/stream"
)

// claim is one claim of a part: a transaction, for one page.
type claim struct {
	w       *worker
	part    int
	pass    *outbox.PartPass
	lane    outbox.Lane
	lanes   map[string]outbox.LanePublisher
	settled map[string]outbox.Mark
	within  *outbox.Pass
	began   time.Time
	// refused are the events that the claim parks; held are the first of each aggregate.
	refused []outbox.Refused
	held    map[[2]string]*outbox.Record
}

// run sweeps a page, and ends the claim. The next claim continues an unfinished pass. It is correct to continue after
// the last number because the pass keeps its snapshot: rows that become visible later belong to the next pass, whatever
// their number. more is whether there may be another page.
func (c *claim) run(ctx context.Context) (more bool, err error) {
	w := c.w
	c.pass, w.passes[c.part] = w.passes[c.part], nil
	for {
		if c.pass == nil || !c.pass.Listed() {
			if c.pass, err = w.conn.Begin(ctx, c.part, c.within); err != nil {
				return false, err
			}
		}
		if c.pass.Idle() {
			return false, w.conn.Drop(ctx)
		}
		err := c.batch(ctx)
		switch {
		case errors.Is(err, outbox.ErrPassed):
			c.pass = nil
		case errors.Is(err, errSmaller):
		case errors.Is(err, errParked):
			w.passes[c.part] = c.pass
			return true, nil
		case outbox.Alone(err):
			if end := w.conn.Drop(ctx); end != nil {
				return false, end
			}
			c.committed()
			return false, err
		case err != nil:
			return false, err
		default:
			if !c.pass.Over {
				w.passes[c.part] = c.pass
			}
			return !c.pass.Over, nil
		}
	}
}

// batch publishes one page, parks the refused events and then writes a mark, which ends the claim. If any step before
// the mark fails, the rows stay unsettled, and the gate keeps the events that were published.
func (c *claim) batch(ctx context.Context) error {
	w := c.w
	rows := int(w.s.rows[c.part].Load())
	events, err := w.conn.Page(ctx, c.pass, rows, batchBytes)
	if cause := (*outbox.UnreadableError)(nil); errors.As(err, &cause) {
		return c.unreadable(ctx, rows, cause.OutOfMemory, err)
	}
	if err != nil {
		return err
	}
	out := &outcome{}
	published := false
	if err = c.publish(ctx, events, out); err == nil {
		published = true
		err = c.settle(ctx, out)
	}
	if outbox.Alone(err) {
		if aerr := c.ahead(ctx, out); aerr != nil {
			err = aerr
		}
	}
	if err != nil {
		poison := (*outbox.PoisonError)(nil)
		if !errors.As(err, &poison) && (!outbox.Alone(err) || outbox.Lost(err) && !published) {
			w.s.shrink(c.part, len(events))
		}
		return err
	}
	w.s.grow(c.part)
	return nil
}

// errSmaller makes run read the page again, in smaller pieces. errParked means that the first row is parked.
var errSmaller, errParked = errors.New("the page is read again"), errors.New("a row is parked")

// unreadable gets past a row whose data cannot be read. It reduces the batch size, and finally parks the row on the
// server.
func (c *claim) unreadable(ctx context.Context, rows int, outOfMemory bool, cause error) error {
	w := c.w
	if rows > 1 {
		w.s.shrink(c.part, rows)
		return errSmaller
	}
	if outOfMemory {
		return cause // the row is not to blame
	}
	e, err := w.conn.ParkRow(ctx, c.pass, w.scope.Owner, cause)
	if err == nil {
		err = w.conn.Drop(ctx)
	}
	if err != nil {
		return err
	}
	if e != nil {
		w.scope.Parked(e, cause)
	}
	return errParked
}

// outcome is the result of publishing a batch: the published parts, the events to park, and the blocked streams.
type outcome struct {
	published []*putting
	parked    []outbox.Refused
	blocked   []string
}

// putting is the part of a batch that goes to one stream. The receipt is final when it is published.
type putting struct {
	stream   string
	events   []*outbox.Record
	delivery *stream.Delivery
	receipt  outbox.Receipt
}

// publish puts the events into their streams in order, with one bounded attempt per stream. If a stream refuses an
// event, its next attempt follows the attempts of the other streams. A blocked stream does not keep the others from
// getting their attempts, except for events that are sent. If no stream is blocked, sent events are published again:
// the gate has them in doubt, and drops them.
func (c *claim) publish(ctx context.Context, events []*outbox.Record, out *outcome) error {
	var order []string
	byStream := map[string][]*outbox.Record{}
	blockers := c.w.scope.Blockers(events)
	for i, e := range events {
		if blocker := cmp.Or(blockers[i], c.blocker(e)); blocker != "" {
			out.parked = append(out.parked, stream.Waits(e, blocker))
			continue
		}
		name := c.w.stream(e)
		if byStream[name] == nil {
			order = append(order, name)
		}
		byStream[name] = append(byStream[name], e)
	}
	slices.SortStableFunc(order, c.w.s.blocked.order)
	begun := map[string]*putting{}
	for _, name := range order {
		begun[name] = &putting{stream: name, events: byStream[name]}
	}
	var stands error
	for n := 1; len(order) > 0; n++ {
		var again []string
		for _, name := range order {
			if stands != nil && !c.unsent(begun[name]) {
				continue
			}
			err := c.publishTo(ctx, begun[name], out)
			refused := (*outbox.PoisonError)(nil)
			switch {
			case errors.As(err, &refused) && n < stream.Attempts:
				again = append(again, name)
			case outbox.Alone(err):
				stands = err
				out.blocked = append(out.blocked, name)
			case err != nil:
				return err
			}
		}
		if order = again; len(order) > 0 {
			pause.About(ctx, failFirst)
		}
	}
	return stands
}

// blocker returns the event, parked by the claim, that e has to wait for, "" for none.
func (c *claim) blocker(e *outbox.Record) string {
	if p := c.held[[2]string{e.AggregateType, e.AggregateID}]; c.w.scope.BlockKey && p != nil && p.Seq < e.Seq {
		return p.ID.String()
	}
	return ""
}

// publishTo makes one attempt, unless the stream was blocked a moment ago.
func (c *claim) publishTo(ctx context.Context, p *putting, out *outcome) error {
	err := c.w.s.blocked.why(p.stream, time.Since(c.began) > claimTime)
	if err == nil {
		if err = c.attempt(ctx, p, out); err == nil || outbox.Alone(err) {
			c.w.s.blocked.note(p.stream, err)
		}
	}
	return err
}

// unsent drops the events that are sent, and reports whether there are others.
func (c *claim) unsent(p *putting) bool {
	if p.delivery == nil {
		p.events = slices.DeleteFunc(p.events, func(e *outbox.Record) bool { return c.w.sent[c.part][e.Seq] })
	}
	return len(p.events) > 0
}

// ahead publishes events of the part behind those of the blocked streams of out, as far as it may, and parks what is
// refused. It writes no mark: the first event of a blocked stream is in front of them.
func (c *claim) ahead(ctx context.Context, out *outcome) error {
	w, sent, blocked, within := c.w, c.w.sent[c.part], out.blocked, c.within
	if w.scope.Newer {
		within = nil
	}
	c.passed(out)
	rows, err := w.conn.Ahead(ctx, c.pass, within, blocked, sent)
	if err != nil {
		return err
	}
	began := time.Now()
	for rows.Listed() && len(sent) < aheadRows && time.Since(began) < aheadTime && ctx.Err() == nil {
		events, err := w.conn.Page(ctx, rows, w.s.o.BatchRows, batchBytes)
		if errors.As(err, new(*outbox.UnreadableError)) { // a page of the pass will show which row it is
			break
		}
		if err != nil {
			return err
		}
		// A stream that is blocked since is left out, even if it takes events again: earlier ones of it wait.
		events = slices.DeleteFunc(events, func(e *outbox.Record) bool { return slices.Contains(blocked, w.stream(e)) })
		out := &outcome{}
		if err := c.publish(ctx, events, out); err != nil && !outbox.Alone(err) {
			return err
		}
		c.passed(out)
		blocked = append(blocked, out.blocked...)
		rows.Next()
	}
	return c.park(ctx)
}

// passed notes what the claim has published ahead of a mark, and what it parks.
func (c *claim) passed(out *outcome) {
	sent := c.w.sent[c.part]
	for _, p := range out.published {
		for _, e := range p.delivery.Sent() {
			sent[e.Seq] = true
		}
	}
	for _, p := range out.parked {
		sent[p.Event.Seq] = true
	}
	c.hold(out.parked)
}

// hold notes that the claim parks events.
func (c *claim) hold(refused []outbox.Refused) {
	c.refused = append(c.refused, refused...)
	for _, p := range refused {
		if k := [2]string{p.Event.AggregateType, p.Event.AggregateID}; c.held[k] == nil {
			c.held[k] = p.Event
		}
	}
}

// park makes the refused events dead when the claim commits. An adoption waits for that, so the claim ends right after.
func (c *claim) park(ctx context.Context) error {
	if len(c.refused) == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), settleTimeout)
	defer cancel()
	return c.w.conn.Park(ctx, c.pass, c.w.scope.Owner, c.refused)
}

// committed reports the events that the claim has parked.
func (c *claim) committed() {
	for _, p := range c.refused {
		c.w.s.refused.Parked(c.w.stream(p.Event), p.Event.ID)
		c.w.scope.Parked(p.Event, p.Err)
	}
}

func (c *claim) attempt(ctx context.Context, p *putting, out *outcome) error {
	actx, cancel := context.WithTimeout(ctx, publishTimeout)
	defer cancel()
	if p.delivery == nil {
		lane, err := c.open(actx, p.stream)
		if taken := (*outbox.TakenError)(nil); errors.As(err, &taken) {
			out.parked = append(out.parked, stream.Taken(p.events, taken)...)
			return nil
		}
		if err != nil {
			return err
		}
		p.delivery = stream.Deliver(lane, p.stream, p.events, &c.w.s.refused, c.w.scope.BlockKey)
	}
	receipt, given, err := attempt(actx, p.delivery)
	for ; len(given) > 0; receipt, given, err = attempt(actx, p.delivery) {
		out.parked = append(out.parked, given...)
	}
	if err == nil {
		p.receipt = receipt
		out.published = append(out.published, p)
	}
	return err
}

// open returns the claim's lane into a stream, after ensuring that the stream's gate is raised.
func (c *claim) open(ctx context.Context, stream string) (outbox.LanePublisher, error) {
	if err := c.w.scope.Ensure(ctx, stream); err != nil {
		return nil, err
	}
	lane := c.lanes[stream]
	if lane == nil {
		lane = c.w.s.o.Sink.Lane(stream, c.w.scope.Owner, c.lane)
		if m, ok := c.settled[stream]; ok {
			lane.Follows(m.Lane.Claim, m.Number)
		}
		c.lanes[stream] = lane
	}
	return lane, nil
}

// unknownCalls bounds the calls after replies of an unknown kind. Halving a batch of 999 events to one takes 30, and
// trying that event again 4.
const unknownCalls = 40

// attempt publishes, and repeats a failed call once at once. A connection that was idle during a restart of Redis fails
// only the first time. If an event itself breaks connections, the second attempt shows it. After a reply of an unknown
// kind it repeats the call until the delivery has found a size or an event: the next claim makes another delivery.
func attempt(ctx context.Context, d *stream.Delivery) (outbox.Receipt, []outbox.Refused, error) {
	for n := 1; ; n++ {
		r, given, err := d.Publish(ctx)
		if poison := (*outbox.PoisonError)(nil); err == nil || errors.As(err, &poison) || ctx.Err() != nil {
			return r, given, err
		}
		of := (*outbox.StreamError)(nil)
		if unknown := errors.As(err, &of) && of.Unknown; n >= 2 && !unknown || n >= unknownCalls {
			return r, nil, err
		}
	}
}

// settle waits for the configured durability, parks the refused events and writes the mark. If it is unknown whether
// the mark was written, settle returns an error; the next claim of the part reads the mark that is there.
func (c *claim) settle(ctx context.Context, out *outcome) error {
	w := c.w
	// Settle published events even if ctx has ended since.
	sctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), settleTimeout)
	defer cancel()
	var marks []outbox.Mark
	entries := outbox.Entries{}
	for _, p := range out.published {
		entries.Raise(p.stream, p.receipt.Last)
		if p.receipt.Number > 0 {
			marks = append(marks, outbox.Mark{Stream: p.stream, Lane: c.lane, Number: p.receipt.Number})
		}
	}
	if len(marks) > 0 {
		actx, cancel := context.WithTimeout(ctx, 2*publishTimeout)
		err := w.s.o.Sink.Confirm(actx, w.scope.Owner, marks)
		cancel()
		if outbox.Alone(err) { // of one of the streams; there may be others
			for _, m := range marks {
				w.s.unconfirmed(ctx, w.scope.Owner, m.Stream, err)
				out.blocked = append(out.blocked, m.Stream)
			}
		}
		if err != nil {
			return err
		}
	}
	c.hold(out.parked)
	if err := c.park(ctx); err != nil {
		return err
	}
	if err := w.conn.Settle(sctx, c.pass, w.scope.Owner, entries); err != nil {
		return err
	}
	c.committed()
	clear(w.sent[c.part])
	for _, m := range marks {
		c.settled[m.Stream] = m
	}
	w.untold = append(w.untold, marks...)
	for _, p := range out.published {
		w.scope.Published(p.stream, p.delivery.Sent())
	}
	w.scope.Outcome(nil)
	return nil
}

// blockades are the streams that cannot be published to, or whose durability is not reached. The workers share them, so
// that attempts are spaced for all parts together. Its methods are safe for concurrent use.
type blockades struct {
	mu      sync.Mutex
	streams map[string]blockade
}

// blockade is why a stream cannot be published to, and the time of the next attempt. While confirming is set, the
// stream is being confirmed, and no attempt is made.
type blockade struct {
	err        error
	confirming bool
	wait       pause.Backoff
	next       time.Time
}

// note records the result of an attempt.
func (b *blockades) note(stream string, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	s, ok := b.streams[stream]
	switch {
	case s.confirming:
	case !outbox.Alone(err):
		delete(b.streams, stream)
	default:
		if !ok {
			s.wait = pause.Backoff{First: blockedFirst, Most: blockedMost}
		}
		s.err, s.next = err, time.Now().Add(s.wait.Next())
		b.streams[stream] = s
	}
}

// confirms records that a stream is being confirmed, and reports whether it was not.
func (b *blockades) confirms(stream string, err error) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	was := b.streams[stream].confirming
	b.streams[stream] = blockade{err: err, confirming: true}
	return !was
}

// confirmed ends confirms.
func (b *blockades) confirmed(stream string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.streams, stream)
}

// why returns why a stream cannot be published to, nil if it is time for an attempt. If late, it is not.
func (b *blockades) why(stream string, late bool) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if s, ok := b.streams[stream]; ok && (late || s.confirming || time.Now().Before(s.next)) {
		return s.err
	}
	return nil
}

// order sorts streams for publishing: the blocked ones first, because what is sent to others depends on them.
func (b *blockades) order(one, other string) int {
	b.mu.Lock()
	defer b.mu.Unlock()
	rank := func(stream string) int {
		if _, ok := b.streams[stream]; ok {
			return 0
		}
		return 1
	}
	return cmp.Compare(rank(one), rank(other))
}
