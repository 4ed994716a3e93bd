package poll

import (
	"cmp"
	"context"
	crand "crypto/rand"
	"errors"
	"math/rand/v2"
	"slices"
	"time"

	"posthaste/internal/pause"
	"posthaste/internal/poison"
	"posthaste/outbox"
	"posthaste/sql"
)

// worker is one connection that sweeps. It belongs to one goroutine.
type worker struct {
	s     *Sweeper
	scope outbox.Scope
	conn  *sql.Sweep
	nonce outbox.Nonce
	// passes are the passes that the worker has begun and not ended.
	passes [outbox.Partitions]*sql.Pass
	// settled are the newest batches of each part that are settled, by stream; untold those of them that no report to
	// the gates has yet.
	settled [outbox.Partitions]map[string]outbox.Mark
	untold  []outbox.Mark
	// sent are the numbers of events of each part that are published and not settled, because of a blocked stream.
	sent  [outbox.Partitions]map[int64]bool
	last  int // the part claimed last
	idle  pause.Backoff
	fails pause.Backoff
}

func newWorker(s *Sweeper, scope outbox.Scope) *worker {
	w := &worker{
		s: s, scope: scope, idle: pause.Backoff{First: idleFirst, Most: idleMost},
		fails: pause.Backoff{First: failFirst, Most: failMost},
		last:  rand.N(outbox.Partitions), //nolint:gosec // no secret
	}
	for part := range w.settled {
		w.settled[part], w.sent[part] = map[string]outbox.Mark{}, map[int64]bool{}
	}
	return w
}

// stream is where an event goes.
func (w *worker) stream(e *outbox.Event) string {
	return w.scope.Layout.Stream(e.AggregateType, e.AggregateID)
}

func (w *worker) close() {
	if w.conn != nil {
		w.conn.Close()
		w.conn = nil
	}
}

// connect opens the connection, or opens it again.
func (w *worker) connect(ctx context.Context) error {
	if w.conn != nil && !w.conn.Closed() {
		return nil
	}
	w.close()
	conn, err := sql.OpenSweep(ctx, w.s.o.URL, w.s.o.Schema, w.s.o.Name)
	if err != nil {
		return err
	}
	w.conn = conn
	// The server may have lost the snapshot of a pass that no mark has, and numbers of claims.
	w.passes = [outbox.Partitions]*sql.Pass{}
	_, _ = crand.Read(w.nonce[:]) // never fails
	for part := range w.settled {
		clear(w.settled[part])
		clear(w.sent[part])
	}
	return nil
}

// failed waits after a failure and returns the error if it is final. It closes the session, whose state is unknown.
func (w *worker) failed(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return nil //nolint:nilerr // stopping
	}
	w.scope.Outcome(err)
	if end := w.final(ctx, err); end != nil {
		return end
	}
	w.s.metrics.errors.Inc()
	w.s.log.Debug("sweep is repeated", "err", err)
	w.close()
	w.fails.Wait(ctx)
	return nil
}

// final returns the error that ends the scope, or nil if err only ends the claim.
func (w *worker) final(ctx context.Context, err error) error {
	var fenced *outbox.FencedError
	var foreign *outbox.ForeignError
	switch {
	case errors.Is(err, outbox.ErrGap), errors.Is(err, outbox.ErrSuperseded), errors.As(err, &foreign):
		return err
	case !errors.As(err, &fenced):
		return nil
	case fenced.Epoch != w.scope.Owner.Epoch:
		return err
	}
	// A fence of our own epoch is a newer claim's, or that of another holder of the same epoch (a restored or copied
	// database). The gate tells them apart.
	ctx, cancel := context.WithTimeout(ctx, publishTimeout)
	defer cancel()
	err = w.s.o.Sink.Check(ctx, w.scope.Owner, []string{fenced.Stream})
	if errors.Is(err, outbox.ErrGap) || errors.As(err, &foreign) || errors.As(err, &fenced) {
		return err
	}
	return nil
}

// round finds a part with rows that it can publish, and sweeps it for a turn. If there is no such part, it waits. It
// starts after the part swept last, so a part that fails delays the others at most once per cycle. With a random choice
// it could delay them repeatedly.
func (w *worker) round(ctx context.Context) error {
	err := w.connect(ctx)
	var parts []int
	if err == nil {
		parts, err = w.conn.Partitions(ctx)
	}
	if err != nil {
		return w.failed(ctx, err)
	}
	if len(parts) == 0 {
		w.scope.Outcome(nil)
	}
	next := max(slices.IndexFunc(parts, func(part int) bool { return part > w.last }), 0)
	parts = slices.Concat(parts[next:], parts[:next])
	for len(parts) > 0 {
		claimed, progress, err := w.sweep(ctx, parts, nil)
		if err != nil {
			return w.failed(ctx, err)
		}
		if progress {
			w.idle.Reset()
			return nil
		}
		if !claimed {
			break
		}
		parts = parts[1+slices.Index(parts, w.last):]
	}
	w.idle.Wait(ctx)
	return nil
}

// drain works off the queue.
func (w *worker) drain(ctx context.Context, q *queue, pass outbox.Pass) error {
	for ctx.Err() == nil {
		part, ok, over := q.take()
		if over {
			return nil
		}
		if !ok {
			pause.About(ctx, idleFirst)
			continue
		}
		progress, done, err := w.reach(ctx, part, pass)
		q.give(part, done)
		if err != nil {
			err = w.failed(ctx, err)
		} else if progress || done {
			w.idle.Reset()
		} else {
			w.idle.Wait(ctx)
		}
		if err != nil {
			return err
		}
	}
	return ctx.Err()
}

// reach sweeps a part for one turn unless the part has already reached the pass (done). The next turn checks again.
// There is no progress if another relay holds the part, or a stream is blocked.
func (w *worker) reach(ctx context.Context, part int, pass outbox.Pass) (progress, done bool, err error) {
	if err = w.connect(ctx); err == nil {
		done, err = w.conn.Reached(ctx, part, pass)
	}
	if err == nil && !done {
		_, progress, err = w.sweep(ctx, []int{part}, &pass)
	}
	return progress, done, err
}

// claim is one claim of a part: a transaction, for one page.
type claim struct {
	w       *worker
	part    int
	pass    *sql.Pass
	lane    outbox.Lane
	lanes   map[string]outbox.LanePublisher
	settled map[string]outbox.Mark
	within  *outbox.Pass
	// refused are the events that the claim parks; held are the first of each aggregate.
	refused []sql.Refused
	held    map[[2]string]*outbox.Event
}

// sweep claims the first of parts that is free, and sweeps it for a turn, with a claim for each page. Other workers may
// sweep the part between two of its pages. A new pass covers the rows that within sees, if it is not nil. progress is
// false if a blocked stream kept the part from being settled, and nothing was published.
func (w *worker) sweep(ctx context.Context, parts []int, within *outbox.Pass) (claimed, progress bool, err error) {
	defer w.tell(ctx)
	for n, began := 0, time.Now(); n < turn && time.Since(began) < turnTime && ctx.Err() == nil; n++ {
		part, number, ok, err := w.conn.Claim(ctx, parts, w.scope.Owner)
		if err != nil || !ok {
			return claimed, progress, err
		}
		w.last, parts, claimed = part, []int{part}, true
		w.s.metrics.claims.Inc()
		c := &claim{
			w: w, part: part, lane: outbox.Lane{Part: part, Claim: number, Nonce: w.nonce},
			lanes: map[string]outbox.LanePublisher{}, settled: w.settled[part],
			held: map[[2]string]*outbox.Event{}, within: within,
		}
		if w.scope.Newer {
			c.within = nil
		}
		if err := w.scope.Claimed(ctx); err != nil { // another relay may have parked rows since the last page
			return true, false, err
		}
		sent := len(w.sent[part])
		more, err := c.run(ctx, within)
		if outbox.Alone(err) { // nothing is wrong with the session, or with other streams
			w.scope.Outcome(err)
			w.s.metrics.errors.Inc()
		} else if err != nil {
			return true, false, err
		}
		progress = progress || err == nil || len(w.sent[part]) > sent
		w.fails.Reset()
		if !more {
			break
		}
	}
	return claimed, progress, nil
}

// run sweeps a page, and ends the claim. The next claim continues an unfinished pass. It is correct to continue after
// the last number because the pass keeps its snapshot: rows that become visible later belong to the next pass, whatever
// their number. more is whether there may be another page.
func (c *claim) run(ctx context.Context, within *outbox.Pass) (more bool, err error) {
	w := c.w
	c.pass, w.passes[c.part] = w.passes[c.part], nil
	for {
		if c.pass == nil || !c.pass.Listed() {
			if c.pass, err = w.conn.Begin(ctx, c.part, within); err != nil {
				return false, err
			}
		}
		if c.pass.Idle() {
			return false, w.conn.Drop(ctx)
		}
		err := c.batch(ctx)
		switch {
		case errors.Is(err, sql.ErrPassed):
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
			if !c.pass.Over() {
				w.passes[c.part] = c.pass
			}
			return !c.pass.Over(), nil
		}
	}
}

// batch publishes one page, parks the refused events and then writes a mark, which ends the claim. If any step before
// the mark fails, the rows stay unsettled, and the gate keeps the events that were published.
func (c *claim) batch(ctx context.Context) error {
	w := c.w
	rows := int(w.s.rows[c.part].Load())
	events, err := w.conn.Page(ctx, c.pass, rows, batchBytes)
	if sql.Unreadable(err) {
		return c.unreadable(ctx, rows, err)
	}
	if err != nil {
		return err
	}
	out := &outcome{entries: outbox.Entries{}}
	if err = c.publish(ctx, events, out); err == nil {
		err = c.settle(ctx, out)
	} else if outbox.Alone(err) {
		if aerr := c.ahead(ctx, out); aerr != nil {
			err = aerr
		}
	}
	if err != nil {
		if poison := (*outbox.PoisonError)(nil); !errors.As(err, &poison) && !outbox.Alone(err) {
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
func (c *claim) unreadable(ctx context.Context, rows int, cause error) error {
	w := c.w
	if rows > 1 {
		w.s.shrink(c.part, rows)
		return errSmaller
	}
	if sql.OutOfMemory(cause) {
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

// outcome is the result of publishing a batch.
type outcome struct {
	entries outbox.Entries
	marks   []outbox.Mark
	groups  []group
	parked  []sql.Refused
	blocked []string
}

type group struct {
	stream     string
	events     []*outbox.Event
	suppressed int
}

// publish puts the events into their streams in order, with one bounded attempt per stream. If a stream refuses an
// event, its next attempt follows the attempts of the other streams. A blocked stream does not keep the others from
// getting their attempts, except for events that are sent. If no stream is blocked, sent events are published again:
// the gate has them in doubt, and drops them.
func (c *claim) publish(ctx context.Context, events []*outbox.Event, out *outcome) error {
	var order []string
	byStream := map[string][]*outbox.Event{}
	for _, e := range events {
		if blocker := c.blocker(e); blocker != "" {
			out.parked = append(out.parked, sql.Refused{
				Event: e, Err: errors.New(poison.WaitsFor(blocker)), Class: poison.ClassBlocked,
			})
			continue
		}
		name := c.w.stream(e)
		if byStream[name] == nil {
			order = append(order, name)
		}
		byStream[name] = append(byStream[name], e)
	}
	slices.SortStableFunc(order, func(a, b string) int { return cmp.Compare(c.w.s.rank(a), c.w.s.rank(b)) })
	begun := map[string]*putting{}
	for _, name := range order {
		begun[name] = &putting{stream: name, events: byStream[name], skipped: map[int]bool{}}
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
			case errors.As(err, &refused) && n < poison.Attempts:
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

// blocker returns the parked event that e has to wait for, "" for none; Scope.Blocked does not know those of the claim.
func (c *claim) blocker(e *outbox.Event) string {
	if id := c.w.scope.Blocked(e); id != "" || !c.w.scope.BlockKey {
		return id
	}
	if p := c.held[[2]string{e.AggregateType, e.AggregateID}]; p != nil && p.Seq < e.Seq {
		return p.ID.String()
	}
	return ""
}

// putting is the part of a batch that goes to one stream.
type putting struct {
	stream   string
	events   []*outbox.Event
	delivery outbox.Delivery
	skipped  map[int]bool
}

// publishTo makes one attempt, unless the stream was blocked a moment ago.
func (c *claim) publishTo(ctx context.Context, p *putting, out *outcome) error {
	err := c.w.s.isBlocked(p.stream)
	if err == nil {
		if err = c.attempt(ctx, p, out); err == nil || outbox.Alone(err) {
			c.w.s.block(p.stream, err)
		}
	}
	return err
}

// unsent drops the events that are sent, and reports whether there are others.
func (c *claim) unsent(p *putting) bool {
	if p.delivery == nil {
		p.events = slices.DeleteFunc(p.events, func(e *outbox.Event) bool { return c.w.sent[c.part][e.Seq] })
	}
	return len(p.events) > 0
}

// ahead publishes events of the part behind those of the blocked streams of out, as far as it may, and parks what is
// refused. It writes no mark: the first event of a blocked stream is in front of them.
func (c *claim) ahead(ctx context.Context, out *outcome) error {
	w, sent, blocked := c.w, c.w.sent[c.part], out.blocked
	for began := time.Now(); ; {
		for _, g := range out.groups {
			for _, e := range g.events {
				sent[e.Seq] = true
			}
		}
		for _, p := range out.parked {
			sent[p.Event.Seq] = true // it is not read again
		}
		c.hold(out.parked)
		if len(sent) >= aheadRows || time.Since(began) > aheadTime || ctx.Err() != nil {
			return c.park(ctx)
		}
		events, err := w.conn.Ahead(ctx, c.pass, c.within, blocked, sent, w.s.o.BatchRows, batchBytes)
		if sql.Unreadable(err) { // a page will show which row it is
			return c.park(ctx)
		}
		if err != nil {
			return err
		}
		if len(events) == 0 {
			return c.park(ctx)
		}
		out = &outcome{entries: outbox.Entries{}}
		if err := c.publish(ctx, events, out); err != nil && !outbox.Alone(err) {
			return err
		}
		blocked = append(blocked, out.blocked...)
	}
}

// hold notes that the claim parks events.
func (c *claim) hold(refused []sql.Refused) {
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
	w := c.w
	actx, cancel := context.WithTimeout(ctx, publishTimeout)
	defer cancel()
	if p.delivery == nil {
		lane, err := c.open(actx, p.stream)
		if err != nil {
			return err
		}
		p.delivery = lane.Deliver(p.events)
	}
	var receipt outbox.Receipt
	for {
		var err error
		receipt, err = attempt(actx, p.delivery)
		if err == nil {
			break
		}
		var refused *outbox.PoisonError
		if !errors.As(err, &refused) {
			return err
		}
		tries, park := w.s.refused.Refused(p.stream, refused)
		if !park {
			return err
		}
		e := p.events[refused.Index]
		out.parked = append(out.parked, sql.Refused{Event: e, Err: refused.Err, Class: refused.Class, Attempts: tries})
		p.skipped[refused.Index] = true
		also, class, why := poison.Behind(refused, e, w.scope.BlockKey)
		for _, i := range p.delivery.Skip(also) {
			out.parked = append(out.parked, sql.Refused{Event: p.events[i], Err: why, Class: class})
			p.skipped[i] = true
		}
	}
	g := group{stream: p.stream, suppressed: receipt.Suppressed}
	for i, e := range p.events {
		if !p.skipped[i] {
			g.events = append(g.events, e)
		}
	}
	out.entries.Raise(p.stream, receipt.Last)
	if len(p.skipped) == 0 {
		w.s.refused.Accepted(p.stream)
	}
	out.groups = append(out.groups, g)
	if receipt.Number > 0 { // not if the stream is another type's, and takes no batch
		out.marks = append(out.marks, outbox.Mark{Stream: p.stream, Lane: c.lane, Number: receipt.Number})
	}
	return nil
}

// open returns the claim's lane into a stream, after ensuring that the stream's gate is raised.
func (c *claim) open(ctx context.Context, stream string) (outbox.LanePublisher, error) {
	if err := c.w.scope.Ensure(ctx, stream); err != nil {
		return nil, err
	}
	lane := c.lanes[stream]
	if lane == nil {
		lane = c.w.scope.Lane(stream, c.lane)
		if m, ok := c.settled[stream]; ok {
			lane.Follows(m.Lane.Claim, m.Number)
		}
		c.lanes[stream] = lane
	}
	return lane, nil
}

// attempt publishes, and repeats a failed call once at once. A connection that was idle during a restart of Redis fails
// only the first time. If an event itself breaks connections, the second attempt shows it.
func attempt(ctx context.Context, d outbox.Delivery) (outbox.Receipt, error) {
	r, err := d.Publish(ctx)
	if poison := (*outbox.PoisonError)(nil); err == nil || errors.As(err, &poison) || ctx.Err() != nil {
		return r, err
	}
	return d.Publish(ctx)
}

// settle parks the refused events, waits for the configured durability and writes the mark. If it is unknown whether
// the mark was written, settle returns an error; the next claim of the part reads the mark that is there.
func (c *claim) settle(ctx context.Context, out *outcome) error {
	w := c.w
	// Settle published events even if ctx has ended since.
	sctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), settleTimeout)
	defer cancel()
	if len(out.marks) > 0 {
		actx, cancel := context.WithTimeout(ctx, 2*publishTimeout)
		err := w.s.o.Sink.Confirm(actx, w.scope.Owner, out.marks)
		cancel()
		if err != nil {
			return err
		}
	}
	c.hold(out.parked)
	if err := c.park(ctx); err != nil {
		return err
	}
	if err := w.conn.Settle(sctx, c.pass, w.scope.Owner, out.entries); err != nil {
		return err
	}
	c.committed()
	clear(w.sent[c.part])
	for _, m := range out.marks {
		c.settled[m.Stream] = m
		w.untold = append(w.untold, m)
	}
	rows := len(out.parked)
	for _, g := range out.groups {
		rows += len(g.events)
		w.scope.Published(g.stream, g.events, g.suppressed)
	}
	w.s.metrics.batches.Inc()
	w.s.metrics.rows.Add(float64(rows))
	w.scope.Outcome(nil)
	return nil
}

// tell reports the settled batches of the part swept last to the gates, so that another worker's claim finds nothing in
// doubt. A lost report only costs a little memory.
func (w *worker) tell(ctx context.Context) {
	if len(w.untold) == 0 {
		return
	}
	marks := w.untold
	w.untold = nil
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), publishTimeout)
	defer cancel()
	_ = w.s.o.Sink.Settled(ctx, w.scope.Owner, marks)
}
