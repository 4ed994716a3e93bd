package relay

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"posthaste/internal/poison"
	"posthaste/outbox"
)

const (
	// gulpRows and gulpBytes bound what the publisher takes at once.
	gulpRows  = 2000
	gulpBytes = 4 << 20
	// giantWindows is how many windows a transaction may fill. Nothing of it is settled before its end, so that all of
	// it would be in doubt after a crash; a sweep settles it page by page.
	giantWindows = 20
	// lateTimeout is how long a stream is waited for beside one that is late: beside several, as much less, down to
	// leastTimeout. A server that hangs may have any number of them, and they are met one after the other.
	lateTimeout  = time.Second
	leastTimeout = 100 * time.Millisecond
)

// publisher puts what the reader delivers into its streams, in order, and hands it to the settler. One goroutine owns
// it; begin is called before its first chunk.
type publisher struct {
	*reporter
	store  outbox.Store
	sink   outbox.Sink
	gates  *gates
	blocks *blocks
	window *window
	lanes  *lanes

	chunks  <-chan outbox.Chunk
	flights chan<- *flight

	// settled is what needs not be published: what was settled when the stream began. It holds nothing that was
	// committed behind H, and is of no use there: the ids of a stream that lasts come around.
	settled outbox.Settled
	// handover is H: what was in doubt when the stream began was committed below it. Streams met later raise it, also
	// beside the publisher while they are late.
	handover atomic.Uint64
	// middle is set between the rows of one transaction, and giant is how many of it were published, at least.
	middle  bool
	giant   int
	refused poison.Refusals

	// apart is Options.Apart, and laggards the streams that others do not wait for.
	apart    bool
	laggards map[string]*laggard
	lagging  sync.WaitGroup
	stands   stands

	// What nothing that is published waits for is done beside, and heard gets what is to be done about the answer.
	// telling are the streams that are being told what is settled. forgetting is set while doubt is being forgotten,
	// and forgotten is the H up to which it was.
	beside     sync.WaitGroup
	heard      chan func()
	telling    map[string]bool
	forgetting bool
	forgotten  outbox.LSN

	// passed is the position up to which everything is published, or waits in a flight for its stream's server.
	passed atomic.Uint64
	// failing is set while a publish is being repeated: the stream then stands still for a known reason. waiting is set
	// while the window has no room.
	failing, waiting atomic.Bool
}

// begin names what is settled, and H.
func (p *publisher) begin(settled outbox.Settled, handover outbox.LSN) {
	p.settled = settled
	p.handover.Store(uint64(handover))
}

// meet raises H for a stream that the adoption did not know: a zombie may have published to it in between.
func (p *publisher) meet(ctx context.Context, _ string) error {
	if p.handover.Load() == 0 {
		return nil // still sweeping: H comes later and covers it
	}
	lsn, err := p.store.InsertLSN(ctx)
	if err != nil {
		return err
	}
	for {
		h := p.handover.Load()
		if h >= uint64(lsn) || p.handover.CompareAndSwap(h, uint64(lsn)) {
			return nil
		}
	}
}

// position is how far everything is published or late, and in a flight.
func (p *publisher) position() outbox.LSN { return outbox.LSN(p.passed.Load()) }

// run takes what the reader delivers until the intake ends.
func (p *publisher) run(sp span) error {
	intake, end := context.WithCancelCause(sp.intake)
	defer end(nil)
	p.laggards, p.telling, p.heard = map[string]*laggard{}, map[string]bool{}, make(chan func())
	p.stands.end = end
	err := p.take(span{intake, sp.work})
	end(nil)
	p.lagging.Wait()
	p.beside.Wait()
	if cause := p.stands.over(p.health); cause != nil {
		return cause
	}
	return err
}

func (p *publisher) take(sp span) error {
	flush := time.NewTicker(time.Second)
	defer flush.Stop()
	for {
		var rows []*outbox.Row
		var position outbox.LSN
		select {
		case <-sp.intake.Done():
			return nil
		case <-flush.C:
			p.tellSettled(sp.intake)
			continue
		case hear := <-p.heard:
			hear()
			continue
		case c, ok := <-p.chunks:
			if !ok {
				return nil
			}
			rows, position = p.gulp(c)
		}
		if err := p.processAll(sp, rows); err != nil {
			return err
		}
		if position != 0 {
			p.passed.Store(uint64(position))
		}
		if p.late() > 0 {
			continue
		}
		if h := outbox.LSN(p.handover.Load()); p.position() >= h && p.forgotten < h {
			p.settled = outbox.Settled{}
			p.forgetDoubt(sp.intake, h)
		}
	}
}

// gulp merges the chunks that are waiting, up to the gulp's bounds.
func (p *publisher) gulp(c outbox.Chunk) (rows []*outbox.Row, position outbox.LSN) {
	bytes := 0
	for {
		for i := range c.Rows {
			rows = append(rows, &c.Rows[i])
		}
		bytes += c.Bytes
		position = max(position, c.Position)
		if len(rows) >= gulpRows || bytes >= gulpBytes {
			return rows, position
		}
		select {
		case next, ok := <-p.chunks:
			if !ok {
				return rows, position
			}
			c = next
		default:
			return rows, position
		}
	}
}

// later makes a call beside the publisher, which hears of the answer.
func (p *publisher) later(ctx context.Context, call func() error, hear func(err error)) {
	p.beside.Go(func() {
		err := call()
		select {
		case p.heard <- func() { hear(err) }:
		case <-ctx.Done():
		}
	})
}

// forgetDoubt empties the doubt sets: whatever was in doubt was committed below H, and H is passed. A stream that is
// met meanwhile raises H.
func (p *publisher) forgetDoubt(ctx context.Context, upTo outbox.LSN) {
	if p.forgetting {
		return
	}
	p.forgetting = true
	names := p.gates.streams()
	p.later(ctx, func() (failed error) {
		for _, name := range names {
			actx, cancel := context.WithTimeout(ctx, publishTimeout)
			if err := p.sink.ForgetDoubt(actx, p.gates.owner, name); err != nil {
				failed = err
			}
			cancel()
		}
		return failed
	}, func(err error) {
		p.forgetting = false
		if err == nil {
			p.forgotten = upTo
		}
	})
}

// processAll publishes a gulp in pieces that fit half the window, so that one piece is settled while the next is
// published. The rest of a transaction is a piece of its own, which waits for nobody.
func (p *publisher) processAll(sp span, rows []*outbox.Row) error {
	maxRows, maxBytes := max(p.window.maxEvents/2, 1), max(p.window.maxBytes/2, 1)
	for len(rows) > 0 {
		n, bytes, rest := 0, 0, p.middle
		for n < len(rows) && n < maxRows && (n == 0 || bytes+rows[n].Size() <= maxBytes) {
			bytes += rows[n].Size()
			p.middle = rows[n].End == 0
			if n++; rest && !p.middle {
				break
			}
		}
		if err := p.process(sp, rows[:n], rest); err != nil {
			return err
		}
		rows = rows[n:]
		if p.middle && p.giant > giantWindows*p.window.maxEvents {
			return &outbox.SlotError{
				Reason: outbox.ReasonGiant,
				Err:    fmt.Errorf("a transaction has more than %d events", giantWindows*p.window.maxEvents),
				Remedy: "nothing needs to be done: it is swept; smaller transactions are streamed",
			}
		}
	}
	return nil
}

// process publishes one piece and hands it to the settler. rest: it is the rest of a transaction, or a part of that.
func (p *publisher) process(sp span, rows []*outbox.Row, rest bool) error {
	f := &flight{entries: outbox.Entries{}}
	owed := rows[:0:0]
	for _, r := range rows {
		f.end = max(f.end, r.End)
		if r.Marker() {
			continue
		}
		f.events++
		f.bytes += r.Size()
		if !p.settled.Holds(r.XID, r.Seq) {
			owed = append(owed, r)
		}
	}
	if !rest {
		p.giant = 0
	}
	p.giant += len(owed)
	if f.events > 0 {
		if err := p.reserve(sp.intake, f, rest); err != nil {
			return err
		}
		if err := p.publish(sp, owed, f); err != nil {
			return err
		}
	}
	if f.end == 0 && f.events == 0 {
		return nil
	}
	return p.hand(sp, f)
}

// reserve waits until a flight has room in the window.
func (p *publisher) reserve(ctx context.Context, f *flight, rest bool) error {
	if p.window.try(f.events, f.bytes, rest) {
		return nil
	}
	p.waiting.Store(true)
	p.stands.wait(p.health, true)
	err := p.window.acquire(ctx, f.events, f.bytes, rest)
	p.stands.wait(p.health, false)
	p.waiting.Store(false)
	if err != nil {
		return context.Cause(ctx)
	}
	return nil
}

// hand gives a flight to the settler.
func (p *publisher) hand(sp span, f *flight) error {
	select {
	case p.flights <- f:
		return nil
	case <-sp.work.Done():
		return context.Cause(sp.work)
	}
}

// lets reports whether the others go on without a task that has failed.
func (p *publisher) lets(t *task, err error) bool { return !t.late && (p.apart || outbox.Alone(err)) }

// limit is how long one attempt at a stream may take. Where streams live apart, its server may be that of those that
// are late, and all wait for this one, unless it is late itself.
func (p *publisher) limit(t *task) time.Duration {
	if t.late || !p.apart {
		return publishTimeout
	}
	n := p.late()
	if n == 0 {
		return publishTimeout
	}
	return max(lateTimeout/time.Duration(n), leastTimeout)
}

// ensure makes a task's stream ready, repeating what fails for the moment, or is errLate.
func (p *publisher) ensure(ctx context.Context, t *task) error {
	bo := backoff{first: 50 * time.Millisecond, most: 2 * time.Second}
	for {
		actx, cancel := context.WithTimeout(ctx, p.limit(t))
		err := p.gates.ensure(actx, t.name)
		cancel()
		if err == nil {
			return nil
		}
		final := finished(err) || errors.Is(err, outbox.ErrSuperseded)
		if p.lets(t, err) && !final && ctx.Err() == nil {
			t.why = err
			return errLate
		}
		p.told(t, err)
		if final {
			return err
		}
		bo.wait(ctx)
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
	}
}

// publish puts rows into their streams, in order, and notes in f what there is to settle.
func (p *publisher) publish(sp span, rows []*outbox.Row, f *flight) error {
	var order []string
	byStream := map[string][]*outbox.Row{}
	for _, r := range rows {
		if blocker := p.blocks.blocker(&r.Event); blocker != "" {
			if err := p.park(sp.intake, r, poison.ClassBlocked, poison.WaitsFor(blocker), 0, nil); err != nil {
				return err
			}
			f.add(r)
			continue
		}
		name := p.gates.layout.Stream(r.AggregateType, r.AggregateID)
		if byStream[name] == nil {
			order = append(order, name)
		}
		byStream[name] = append(byStream[name], r)
	}
	for _, name := range order {
		if err := p.publishTo(sp, name, byStream[name], f); err != nil {
			return err
		}
	}
	return nil
}

// publishTo publishes the rows of one stream. What cannot be published now, and needs not hold up others, is late.
func (p *publisher) publishTo(sp span, name string, rows []*outbox.Row, f *flight) error {
	if l := p.laggards[name]; l != nil {
		if joined, err := p.join(sp, l, rows, f); joined || err != nil {
			return err
		}
		delete(p.laggards, name)
	}
	t := &task{name: name, rows: rows}
	err := p.ensure(sp.intake, t)
	if err == nil {
		ln := p.lanes.of(name)
		ln.tell()
		t = newTask(name, ln, rows)
		err = p.deliver(sp, t)
	}
	if errors.Is(err, errLate) {
		return p.lag(sp, t, f)
	}
	if err != nil {
		return err
	}
	if !p.apart {
		p.done(t, f)
		return nil
	}
	own := f.part(rows)
	p.done(t, own)
	return p.hand(sp, own)
}

// done notes in f what a task has published.
func (p *publisher) done(t *task, f *flight) {
	sent := t.events
	if len(t.parked) > 0 {
		sent = sent[:0:0]
	}
	for i, e := range t.events {
		if len(t.parked) > 0 && !t.parked[i] {
			sent = append(sent, e)
		}
	}
	f.add(t.rows...)
	f.entries.Raise(t.name, t.receipt.Last)
	f.published += len(sent)
	f.marks = append(f.marks, outbox.Mark{Stream: t.name, Lane: p.lanes.id, Number: t.receipt.Number})
	p.published(outbox.ModeCDC, t.name, p.gates.layout.Shards, sent)
}

// tellSettled reports what was settled while nothing was published. Streams that live apart are told each for itself.
func (p *publisher) tellSettled(ctx context.Context) {
	marks := p.lanes.untold(func(stream string) bool { return p.telling[stream] || p.isLate(stream) })
	for len(marks) > 0 {
		n := len(marks)
		if p.apart {
			n = 1
		}
		p.tell(ctx, marks[:n])
		marks = marks[n:]
	}
}

func (p *publisher) tell(ctx context.Context, marks []outbox.Mark) {
	for _, m := range marks {
		p.telling[m.Stream] = true
	}
	p.later(ctx, func() error {
		ctx, cancel := context.WithTimeout(ctx, publishTimeout)
		defer cancel()
		return p.sink.Settled(ctx, p.gates.owner, marks)
	}, func(err error) {
		for _, m := range marks {
			delete(p.telling, m.Stream)
		}
		if err == nil { // else the next publish carries it, as it does where the lane is a laggard's by now
			p.lanes.told(slices.DeleteFunc(marks, func(m outbox.Mark) bool { return p.isLate(m.Stream) }))
		}
	})
}

// deliver repeats a delivery until it is complete. An event that is refused for its own sake is parked after a few
// attempts; everything else is repeated for as long as the intake lasts, or is errLate.
func (p *publisher) deliver(sp span, t *task) error {
	bo := backoff{first: 50 * time.Millisecond, most: 2 * time.Second}
	for {
		actx, cancel := context.WithTimeout(sp.work, p.limit(t))
		receipt, err := t.delivery.Publish(actx)
		cancel()
		var refused *outbox.PoisonError
		poisoned := errors.As(err, &refused)
		if err != nil && p.lets(t, err) && !poisoned && !finished(err) && sp.intake.Err() == nil {
			t.why = err
			return errLate
		}
		p.told(t, err)
		switch {
		case err == nil:
			if len(t.parked) == 0 {
				p.refused.Accepted(t.name)
			}
			t.receipt = receipt
			return nil
		case finished(err):
			return err
		case poisoned:
			if attempts, park := p.refused.Refused(t.name, refused); park {
				if err := p.giveUp(sp.intake, t, refused, attempts); err != nil {
					return err
				}
				p.refused.Parked(t.name, refused.ID)
				bo.reset()
				continue
			}
		}
		bo.wait(sp.intake)
		// A mode change cancels the repetition: what may have been published becomes doubt.
		if sp.intake.Err() != nil || sp.work.Err() != nil {
			return context.Cause(sp.intake)
		}
	}
}

// told has readiness say what became of an attempt.
func (p *publisher) told(t *task, err error) {
	if t.late {
		p.stands.say(p.health, t.name, err)
		return
	}
	p.outcome(err)
	p.failing.Store(err != nil)
}

// giveUp parks the event that the sink refuses, and those that have to be parked with it.
func (p *publisher) giveUp(ctx context.Context, t *task, refused *outbox.PoisonError, attempts int) error {
	r := t.rows[refused.Index]
	if err := p.park(ctx, r, refused.Class, refused.Err.Error(), attempts, refused); err != nil {
		return err
	}
	t.parked[refused.Index] = true
	also, class, why := poison.Behind(refused, &r.Event, p.blocks != nil)
	for _, i := range t.delivery.Skip(also) {
		if err := p.park(ctx, t.rows[i], class, why.Error(), 0, nil); err != nil {
			return err
		}
		t.parked[i] = true
	}
	return nil
}

// park notes a row in outbox_dead, waiting until it is visible. cause is nil for a row that only waits for another.
func (p *publisher) park(ctx context.Context, r *outbox.Row, class, reason string, attempts int, cause error) error {
	bo := backoff{first: 10 * time.Millisecond, most: 500 * time.Millisecond}
	began := time.Now()
	p.failing.Store(false) // if the stream stands still now, it is not for the sink
	for {
		parked, err := p.store.Park(ctx, p.gates.owner, r, class, reason, attempts)
		if errors.Is(err, outbox.ErrSuperseded) {
			return err
		}
		if err != nil && time.Since(began) > patience && p.health.fail(conditionPark, err.Error()) {
			p.log.Warn("a refused event cannot be parked; the stream waits for it", "event_id", r.ID, "err", err)
		}
		if err == nil && parked {
			p.health.clear(conditionPark)
			if cause == nil {
				cause = errors.New(reason)
			}
			p.blocks.add(&r.Event)
			p.parked(&r.Event, cause)
			return nil
		}
		bo.wait(ctx)
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
	}
}
