package relay

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"posthaste/internal/pause"
	"posthaste/outbox"
	"posthaste/relay/stream"
)

const (
	// deliveryRows and deliveryBytes bound what a worker takes at once.
	deliveryRows  = 2000
	deliveryBytes = 4 << 20
)

// worker publishes the rows of one stream, in their order. It owns the lane, the retries and the refusals of the
// stream, and repeats what fails without a limit: no other stream waits for it. One goroutine runs it.
type worker struct {
	*router
	stream  string
	lane    outbox.LanePublisher // nil until the stream is ready
	refused stream.Refusals

	mu     sync.Mutex
	queue  []*portion
	closed bool
	signal chan struct{} // has room for one

	// settledTo is the last batch that a mark holds, told the last one that the gate was given.
	settledTo, told atomic.Int64
	// flush is set when the gate should be given it even if nothing is published.
	flush atomic.Bool
}

func (w *worker) add(p *portion) {
	w.mu.Lock()
	w.queue = append(w.queue, p)
	w.mu.Unlock()
	signal(w.signal)
}

// close ends the worker when it has published what it was given.
func (w *worker) close() {
	w.mu.Lock()
	w.closed = true
	w.mu.Unlock()
	signal(w.signal)
}

// next waits for portions, and takes as many as one delivery may have. None means that settled batches are to be
// reported, or, if the worker is closed, that it ends.
func (w *worker) next(ctx context.Context) (taken []*portion, closed bool) {
	for {
		w.mu.Lock()
		rows, bytes := 0, 0
		n := 0
		for n < len(w.queue) && (n == 0 || rows < deliveryRows && bytes < deliveryBytes) {
			rows, bytes = rows+w.queue[n].events, bytes+w.queue[n].bytes
			n++
		}
		taken, w.queue, closed = w.queue[:n:n], w.queue[n:], w.closed
		w.mu.Unlock()
		if n > 0 || closed || w.flush.Load() {
			return taken, closed
		}
		select {
		case <-w.signal:
		case <-ctx.Done():
			return nil, true
		}
	}
}

func (w *worker) run(sp span) error {
	for {
		portions, closed := w.next(sp.work)
		switch {
		case len(portions) > 0:
			if err := w.publish(sp, portions); err != nil {
				return err
			}
		case closed:
			return nil
		default:
			w.flush.Store(false)
			w.report(sp.work)
		}
	}
}

// report gives the gate the last settled batch. If it fails, the next publish or report does that.
func (w *worker) report(ctx context.Context) {
	number := w.settledTo.Load()
	if number <= w.told.Load() {
		return // a publish has
	}
	ctx, cancel := context.WithTimeout(ctx, publishTimeout)
	defer cancel()
	mark := outbox.Mark{Stream: w.stream, Lane: w.gates.streamLane(), Number: number}
	if w.sink.Settled(ctx, w.gates.owner, []outbox.Mark{mark}) == nil {
		w.told.Store(number)
		w.lane.Settled(number)
	}
}

// publish publishes portions with one delivery.
func (w *worker) publish(sp span, portions []*portion) error {
	err := w.ready(sp.intake)
	taken := (*outbox.TakenError)(nil)
	if err != nil && !errors.As(err, &taken) {
		return err
	}
	count, bytes := 0, 0
	for _, p := range portions {
		count, bytes = count+p.events, bytes+p.bytes
	}
	events, parked := make([]*outbox.Record, 0, count), map[*outbox.Record]bool{}
	for _, p := range portions {
		for i := range p.rows {
			e := &p.rows[i].Record
			blocker := w.blocks.blocker(e)
			if blocker == "" {
				events = append(events, e)
				continue
			}
			// At once: later events of the aggregate wait for this one.
			if err := w.park(sp.intake, &p.rows[i], stream.Waits(e, blocker)); err != nil {
				return err
			}
			parked[e] = true
		}
	}
	if taken != nil {
		if err := w.giveUp(sp.intake, portions, parked, stream.Taken(events, taken)); err != nil {
			return err
		}
		events = nil
	}
	var receipt outbox.Receipt
	if len(events) > 0 {
		if receipt, err = w.deliver(sp, portions, events, parked); err != nil {
			return err
		}
	}
	w.window.published(count, bytes, len(parked)) // first: once the portions are complete, they may be settled
	w.tracker.complete(portions, receipt.Number, receipt.Last, parked)
	return nil
}

// ready makes the stream ready for its first publish. *outbox.TakenError: it is a stream of another type.
func (w *worker) ready(intake context.Context) error {
	if w.lane != nil {
		return nil
	}
	bo := pause.Backoff{First: 50 * time.Millisecond, Most: 2 * time.Second}
	for {
		began := time.Now()
		actx, cancel := context.WithTimeout(intake, publishTimeout)
		err := w.gates.Ensure(actx, w.stream)
		cancel()
		isTaken := errors.As(err, new(*outbox.TakenError))
		if (err == nil || isTaken) && bo.Waited() {
			w.blocked.note(w.reporter, w.stream, began, nil)
		}
		if err == nil {
			w.lane = w.sink.Lane(w.stream, w.gates.owner, w.gates.streamLane())
			return nil
		}
		if finished(err) || superseded(err) || isTaken {
			return err
		}
		w.blocked.note(w.reporter, w.stream, began, err)
		bo.Wait(intake)
		if intake.Err() != nil {
			return context.Cause(intake)
		}
	}
}

// deliver repeats the delivery of events until it is complete. An event that is refused for its own sake is parked
// after a few attempts. Everything else is repeated for as long as the intake lasts; then the first failure ends it,
// and what may have been published becomes doubt.
func (w *worker) deliver(sp span, portions []*portion, events []*outbox.Record, parked map[*outbox.Record]bool) (
	outbox.Receipt, error,
) {
	if n := w.settledTo.Load(); n > w.told.Load() {
		w.lane.Settled(n)
		w.told.Store(n)
	}
	publishing := stream.Deliver(w.lane, w.stream, events, &w.refused, w.blocks != nil)
	bo := pause.Backoff{First: 50 * time.Millisecond, Most: 2 * time.Second}
	for {
		began := time.Now()
		actx, cancel := context.WithTimeout(sp.work, publishTimeout)
		receipt, given, err := publishing.Publish(actx)
		cancel()
		w.blocked.note(w.reporter, w.stream, began, err)
		switch {
		case len(given) > 0:
			if err := w.giveUp(sp.intake, portions, parked, given); err != nil {
				return receipt, err
			}
			w.refused.Parked(w.stream, given[0].Event.ID)
			bo.Reset()
			continue
		case err == nil:
			w.published(outbox.ModeCDC, w.stream, w.gates.layout.Shards, publishing.Sent())
			return receipt, nil
		case finished(err):
			return receipt, err
		}
		bo.Wait(sp.intake)
		if sp.intake.Err() != nil || sp.work.Err() != nil {
			return receipt, context.Cause(sp.intake)
		}
	}
}

// giveUp parks events of portions, in order.
func (w *worker) giveUp(ctx context.Context, portions []*portion, parked map[*outbox.Record]bool,
	given []outbox.Refused,
) error {
	rows := map[*outbox.Record]*outbox.Row{}
	for _, p := range portions {
		for i := range p.rows {
			rows[&p.rows[i].Record] = &p.rows[i]
		}
	}
	for _, g := range given {
		if err := w.park(ctx, rows[g.Event], g); err != nil {
			return err
		}
		parked[g.Event] = true
	}
	return nil
}

// park moves a row to outbox_dead, and waits until the row is visible for that.
func (w *worker) park(ctx context.Context, r *outbox.Row, why outbox.Refused) error {
	bo := pause.Backoff{First: 10 * time.Millisecond, Most: 500 * time.Millisecond}
	began, failing := time.Now(), false
	defer func() {
		if failing && w.parking.Add(-1) == 0 {
			w.health.clear(conditionPark)
		}
	}()
	for {
		parked, err := w.dead.Park(ctx, w.gates.owner, r, why.Class, why.Err.Error(), why.Attempts)
		if superseded(err) {
			return err
		}
		if err != nil && !failing && time.Since(began) > patience {
			failing = true
			w.parking.Add(1)
			w.health.fail(conditionPark, err.Error())
			w.log.Warn("a refused event cannot be made dead; the stream waits for it", "event_id", r.ID, "err", err)
		}
		if err == nil && parked {
			w.parked(&r.Record, why.Err)
			return nil
		}
		bo.Wait(ctx)
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
	}
}

// blockedStreams keeps readiness up to date with the streams that cannot be published to. It is safe for concurrent
// use.
type blockedStreams struct {
	mu  sync.Mutex
	why map[string]error
	// since is when the attempt began that has put the first stream into why, published when an attempt at any stream
	// last succeeded.
	since, published time.Time
	// full is set while the router waits for room in the window.
	full bool
}

// note takes the outcome of an attempt at a stream. An event that is refused for its own sake blocks no stream.
func (b *blockedStreams) note(r *reporter, stream string, began time.Time, err error) {
	var refused *outbox.PoisonError
	if errors.As(err, &refused) {
		err = nil
	}
	if finished(err) || errors.Is(err, context.Canceled) {
		return // the stream of the reader ends
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if err == nil {
		news := b.published.IsZero() || len(b.why) > 0
		b.published = time.Now()
		delete(b.why, stream)
		if news { // the first one also ends what a sweep has reported
			r.health.clear(conditionForeign)
			b.show(r)
		}
		return
	}
	if len(b.why) == 0 {
		b.why, b.since = map[string]error{}, began
	}
	if b.why[stream] == nil {
		r.log.Warn("publishing fails; retrying", "stream", stream, "err", err)
	}
	b.why[stream] = err
	b.show(r)
}

// wait notes whether the other streams wait for room in the window.
func (b *blockedStreams) wait(r *reporter, full bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.full = full
	b.show(r)
}

// any reports whether a stream is blocked.
func (b *blockedStreams) any() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.why) > 0
}

// reset ends all conditions, when the stream ends.
func (b *blockedStreams) reset(r *reporter) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.why = nil
	b.show(r)
}

// show sets one of two conditions: the sink cannot be published to, or only some streams cannot. The caller holds mu.
func (b *blockedStreams) show(r *reporter) {
	if len(b.why) == 0 {
		r.health.clear(conditionStreams)
		if r.health.clear(conditionPublish) {
			r.log.Info("publishing again")
		}
		return
	}
	names := slices.Sorted(maps.Keys(b.why))
	first := b.why[names[0]]
	if !b.published.After(b.since) && !outbox.Alone(first) {
		r.health.clear(conditionStreams)
		r.health.fail(conditionPublish, first.Error())
		return
	}
	others := "other streams continue"
	switch {
	case b.full:
		others = "and the other streams wait: the window is full of events for the blocked ones"
	case !b.published.After(b.since):
		others = "and no event was published since then"
	}
	r.health.clear(conditionPublish)
	r.health.fail(conditionStreams, fmt.Sprintf("publishing to %s is blocked, %s: %v", strings.Join(names, ", "),
		others, first))
}
