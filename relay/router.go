package relay

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"

	"posthaste/outbox"
	"posthaste/relay/stream"
)

// giantWindows is how many windows a transaction may fill. Nothing of it is settled before its end, so that all of it
// would be in doubt after a crash; a sweep settles it page by page.
const giantWindows = 20

// router gives the rows that the reader delivers to the workers of their streams. One goroutine owns it; begin is
// called before its first chunk.
type router struct {
	*reporter
	horizons Horizons
	dead     DeadEvents
	sink     stream.Publisher
	gates    *gates
	window   *window
	tracker  *tracker
	chunks   <-chan outbox.Chunk

	// settled is what was settled when the stream began, and need not be published. It is dropped after H, because the
	// ids of a stream that lasts wrap around.
	settled outbox.Settled
	// handover is H. Everything that was in doubt when the stream began was committed below it. A worker that finds a
	// stream which the adoption did not know raises it.
	handover atomic.Uint64
	// middle is set while some rows of transaction xid are routed, and not all; giant is how many, at least.
	middle bool
	xid    uint32
	giant  int

	mu      sync.Mutex
	workers map[string]*worker
	working sync.WaitGroup
	span    span
	// fail ends the intake, and failed is the error with which a worker has done so first.
	fail    func(error)
	failed  error
	blocked blockedStreams
	// parking counts the workers that fail to park a row.
	parking atomic.Int32
	// waiting is set while the window has no room.
	waiting atomic.Bool
}

// begin sets what is settled, and H.
func (r *router) begin(settled outbox.Settled, handover outbox.LSN) {
	r.settled = settled
	r.handover.Store(uint64(handover))
}

// meet raises H for a stream that the adoption did not know: a fenced relay may have published to it in between.
func (r *router) meet(ctx context.Context) error {
	if r.handover.Load() == 0 {
		return nil // the sweep still runs: H comes later and covers it
	}
	lsn, err := r.horizons.InsertLSN(ctx)
	if err != nil {
		return err
	}
	for {
		h := r.handover.Load()
		if h >= uint64(lsn) || r.handover.CompareAndSwap(h, uint64(lsn)) {
			return nil
		}
	}
}

// run routes what the reader delivers until the intake ends, and returns when the workers have published what they were
// given, or cannot. It calls fail with the first error, which ends the intake, and returns it.
func (r *router) run(sp span, fail func(error)) error {
	r.span, r.fail = sp, fail
	if err := r.take(sp.intake); err != nil {
		r.end(err)
	}
	if r.middle {
		r.tracker.abandon(r.xid)
	}
	for _, w := range r.all() {
		w.close()
	}
	r.working.Wait()
	r.blocked.reset(r.reporter)
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.failed
}

// end ends the intake with an error, unless it has ended.
func (r *router) end(err error) {
	r.mu.Lock()
	if r.failed == nil && r.span.intake.Err() == nil {
		r.failed = err
	}
	r.mu.Unlock()
	r.fail(err)
}

func (r *router) take(intake context.Context) error {
	for {
		select {
		case <-intake.Done():
			return nil
		case c, ok := <-r.chunks:
			if !ok {
				return nil
			}
			if err := r.route(intake, c.Rows); err != nil {
				return err
			}
			if c.Position != 0 {
				r.tracker.reached(c.Position)
			}
			if c.Position >= outbox.LSN(r.handover.Load()) {
				r.settled = outbox.Settled{}
			}
		}
	}
}

// route routes rows in pieces of half the window, so that one piece is settled while the next is published. The rest of
// a transaction is a piece of its own, for which the window has always room.
func (r *router) route(intake context.Context, rows []outbox.Row) error {
	maxRows, maxBytes := max(r.window.maxEvents/2, 1), max(r.window.maxBytes/2, 1)
	for len(rows) > 0 {
		n, bytes, middle := 0, 0, r.middle
		for n < len(rows) && n < maxRows && (n == 0 || bytes+rows[n].Size() <= maxBytes) {
			bytes += rows[n].Size()
			middle = rows[n].End == 0
			if n++; r.middle && !middle {
				break
			}
		}
		if err := r.piece(intake, rows[:n], r.middle); err != nil {
			return err
		}
		r.middle, r.xid = middle, rows[n-1].XID
		rows = rows[n:]
		if r.middle && r.giant > giantWindows*r.window.maxEvents {
			return &outbox.SlotError{
				Reason: outbox.ReasonGiant,
				Err:    fmt.Errorf("a transaction has more than %d events", giantWindows*r.window.maxEvents),
				Remedy: "nothing needs to be done: it is polled; smaller transactions are streamed",
			}
		}
	}
	return nil
}

// piece routes one piece. rest is set for the rest of a transaction, or a part of that.
func (r *router) piece(intake context.Context, rows []outbox.Row, rest bool) error {
	var end outbox.LSN
	var portions []*portion
	events, bytes := 0, 0
	byStream := map[string]*portion{}
	for i := range rows {
		row := &rows[i]
		end = max(end, row.End)
		if row.Marker() || r.settled.Holds(row.XID, row.Seq) {
			continue
		}
		name := r.gates.layout.Stream(row.AggregateType, row.AggregateID)
		p := byStream[name]
		if p == nil {
			p = &portion{stream: name}
			byStream[name] = p
			portions = append(portions, p)
		}
		p.rows = append(p.rows, *row) // a copy: a row that waits must not keep the whole chunk
		p.events, p.bytes = p.events+1, p.bytes+row.Size()
		events, bytes = events+1, bytes+row.Size()
	}
	if !rest {
		r.giant = 0
	}
	r.giant += events
	if events > 0 {
		if err := r.reserve(intake, events, bytes, rest); err != nil {
			return err
		}
	}
	r.tracker.route(portions, end)
	for _, p := range portions {
		r.worker(p.stream).add(p)
	}
	return nil
}

// reserve waits until a piece has room in the window.
func (r *router) reserve(ctx context.Context, events, bytes int, rest bool) error {
	if r.window.try(events, bytes, rest) {
		return nil
	}
	r.waiting.Store(true)
	r.blocked.wait(r.reporter, true)
	err := r.window.acquire(ctx, events, bytes, rest)
	r.blocked.wait(r.reporter, false)
	r.waiting.Store(false)
	if err != nil {
		return context.Cause(ctx)
	}
	return nil
}

// worker returns the worker of a stream, and starts it at the first call.
func (r *router) worker(stream string) *worker {
	r.mu.Lock()
	defer r.mu.Unlock()
	w := r.workers[stream]
	if w == nil {
		w = &worker{router: r, stream: stream, signal: make(chan struct{}, 1)}
		r.workers[stream] = w
		r.working.Go(func() {
			if err := w.run(r.span); err != nil && r.span.intake.Err() == nil {
				r.end(err)
			}
		})
	}
	return w
}

// all lists the workers.
func (r *router) all() []*worker {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Collect(maps.Values(r.workers))
}

// doubtful returns the streams, and H; done is set when everything that was in doubt is published. The streams are
// listed first: each of them has raised H before.
func (r *router) doubtful() (streams []string, handover outbox.LSN, done bool) {
	streams = r.gates.streams()
	handover = outbox.LSN(r.handover.Load())
	return streams, handover, r.tracker.publishedTo(handover)
}

// settledTo notes the last batches that a mark holds.
func (r *router) settledTo(numbers map[string]int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for stream, number := range numbers {
		w := r.workers[stream]
		w.settledTo.Store(max(w.settledTo.Load(), number))
	}
}

// flush has the workers that have nothing to publish report to their gates what is settled.
func (r *router) flush() {
	for _, w := range r.all() {
		if w.settledTo.Load() > w.told.Load() {
			w.flush.Store(true)
			signal(w.signal)
		}
	}
}
