package relay

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	"posthaste/internal/poison"
	"posthaste/outbox"
)

// Streams may live on different servers, and one of these may be down; or the server refuses what goes to one stream.
// What such streams get is late then: the publisher goes on with the others, and a laggard, a goroutine of its own,
// repeats what one stream waits for, in its order, and until it has caught up. The window bounds how much is late. The
// settler settles around it; the slot is not confirmed beyond.

// errLate means that a stream does not answer, and that nobody has to wait for it.
var errLate = errors.New("the stream is late")

// task is the publication of rows of one stream.
type task struct {
	name     string
	lane     *lane
	rows     []*outbox.Row
	events   []*outbox.Event // of rows
	delivery outbox.Delivery
	parked   map[int]bool
	receipt  outbox.Receipt
	// late is set for what a laggard publishes, into flight; why is the error by which it began to.
	late   bool
	flight *flight
	why    error
}

// newTask begins a delivery. The previous one of the lane is complete.
func newTask(name string, ln *lane, rows []*outbox.Row) *task {
	events := make([]*outbox.Event, len(rows))
	for i, r := range rows {
		events[i] = &r.Event
	}
	return &task{
		name: name, lane: ln, rows: rows, events: events, delivery: ln.pub.Deliver(events), parked: map[int]bool{},
	}
}

// add notes rows that were published or parked, or are late.
func (f *flight) add(rows ...*outbox.Row) {
	for _, r := range rows {
		f.rows = append(f.rows, flown{r.XID, r.Seq})
	}
}

// part moves the room that rows have in the window from f to a flight of their own.
func (f *flight) part(rows []*outbox.Row) *flight {
	own := &flight{entries: outbox.Entries{}, events: len(rows)}
	for _, r := range rows {
		own.bytes += r.Size()
	}
	f.events, f.bytes = f.events-own.events, f.bytes-own.bytes
	return own
}

// laggard is a stream that has fallen behind. It owns the stream's lane until it is over. There is none yet of a stream
// that is not ready for its first publish.
type laggard struct {
	name string
	lane *lane

	mu    sync.Mutex
	queue []*task
	over  bool
}

// next returns what is to be published next; nil when the stream has caught up, and the publisher goes on with it.
func (l *laggard) next() *task {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.queue) == 0 {
		l.over = true
		return nil
	}
	t := l.queue[0]
	l.queue = l.queue[1:]
	return t
}

// postpone takes a task out of f, and hands on a flight of its own, before f. The settler's it is from then on.
func (p *publisher) postpone(sp span, t *task, f *flight) error {
	t.late, t.flight = true, f.part(t.rows)
	t.flight.late = true
	t.flight.add(t.rows...)
	return p.hand(sp, t.flight)
}

// lag begins a laggard with a task that has failed.
func (p *publisher) lag(sp span, t *task, f *flight) error {
	p.log.Warn("a stream stands still; the others go on", "stream", t.name, "err", t.why)
	p.stands.say(p.health, t.name, t.why)
	if err := p.postpone(sp, t, f); err != nil {
		return err
	}
	l := &laggard{name: t.name, lane: t.lane, queue: []*task{t}}
	p.laggards[t.name] = l
	p.lagging.Go(func() { p.catchUp(sp, l) })
	return nil
}

// join puts rows behind what the laggard has to publish, unless it is over.
func (p *publisher) join(sp span, l *laggard, rows []*outbox.Row, f *flight) (bool, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.over {
		return false, nil
	}
	t := &task{name: l.name, rows: rows}
	if err := p.postpone(sp, t, f); err != nil {
		return false, err
	}
	l.queue = append(l.queue, t)
	return true, nil
}

// catchUp publishes what a stream has to get, until there is no more. An error ends the publisher.
func (p *publisher) catchUp(sp span, l *laggard) {
	for t := l.next(); t != nil; t = l.next() {
		landing := &flight{entries: outbox.Entries{}, landed: t.flight}
		err := p.deliverLate(sp, l, t, landing)
		if err == nil {
			err = p.hand(sp, landing)
		}
		if err != nil {
			if sp.intake.Err() == nil {
				p.stands.fail(err)
			}
			return
		}
	}
}

// deliverLate publishes one task, and notes in landing what there is to settle.
func (p *publisher) deliverLate(sp span, l *laggard, t *task, landing *flight) error {
	if l.lane == nil {
		if err := p.ensure(sp.intake, t); err != nil {
			return err
		}
		l.lane = p.lanes.of(l.name)
	}
	if t.delivery == nil {
		free := make([]*outbox.Row, 0, len(t.rows))
		for _, r := range t.rows { // an event before it may have been parked in the meantime
			blocker := p.blocks.blocker(&r.Event)
			if blocker == "" {
				free = append(free, r)
				continue
			}
			if err := p.park(sp.intake, r, poison.ClassBlocked, poison.WaitsFor(blocker), 0, nil); err != nil {
				return err
			}
		}
		if len(free) == 0 {
			return nil
		}
		begun := newTask(t.name, l.lane, free)
		t.rows, t.events, t.delivery, t.parked = free, begun.events, begun.delivery, begun.parked
	}
	if err := p.deliver(sp, t); err != nil {
		return err
	}
	p.done(t, landing)
	return nil
}

// isLate reports whether a stream is a laggard's.
func (p *publisher) isLate(stream string) bool {
	l := p.laggards[stream]
	if l == nil {
		return false
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return !l.over
}

// late counts those that are.
func (p *publisher) late() (n int) {
	for name := range p.laggards {
		if p.isLate(name) {
			n++
		}
	}
	return n
}

// stands knows the streams that stand still, and why. It is safe for concurrent use.
type stands struct {
	mu  sync.Mutex
	why map[string]string
	// full is set while the publisher waits for room in the window.
	full bool
	// cause is the error that has ended a laggard, and end what ends the intake then.
	cause error
	end   context.CancelCauseFunc
}

// say has readiness name the streams that stand still.
func (s *stands) say(h *health, stream string, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var refused *outbox.PoisonError
	if s.why == nil {
		s.why = map[string]string{}
	}
	if err != nil && !errors.As(err, &refused) {
		s.why[stream] = err.Error()
	} else {
		delete(s.why, stream)
	}
	s.tell(h)
}

// wait has readiness say whether the others wait for room in the window, too.
func (s *stands) wait(h *health, full bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.full = full
	s.tell(h)
}

// tell is for one that holds mu.
func (s *stands) tell(h *health) {
	if len(s.why) == 0 {
		h.clear(conditionStreams)
		return
	}
	names, others := slices.Sorted(maps.Keys(s.why)), "the others go on"
	if s.full {
		others = "the others wait, because the window is full of what waits for them"
	}
	h.fail(conditionStreams, fmt.Sprintf("%s stand still, %s: %s", strings.Join(names, ", "), others,
		s.why[names[0]]))
}

// fail ends the publisher.
func (s *stands) fail(err error) {
	s.mu.Lock()
	if s.cause == nil {
		s.cause = err
	}
	s.mu.Unlock()
	s.end(err)
}

// over forgets everything, and returns what has ended the publisher.
func (s *stands) over(h *health) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.why = nil
	h.clear(conditionStreams)
	return s.cause
}
