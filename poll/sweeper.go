package poll

import (
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"posthaste/outbox"
)

const (
	// publishTimeout bounds the one attempt to publish within a transaction.
	publishTimeout = 2 * time.Second
	// batchBytes bounds the payload of one batch.
	batchBytes = 4 << 20
	// turn is how many batches a worker takes from one part before it lets others have it.
	turn = 50
	// idleFirst and idleMost bound the wait when nothing was found.
	idleFirst, idleMost = 20 * time.Millisecond, 500 * time.Millisecond
	// failFirst and failMost bound the wait after a failure, outside any transaction.
	failFirst, failMost = 50 * time.Millisecond, 2 * time.Second
	// poisonAttempts is how often an event refused for its own sake is tried before it is parked.
	poisonAttempts = 3
)

// Options are what a Sweeper needs.
type Options struct {
	// URL and Schema say where the table is.
	URL, Schema string
	// Prefix names the streams.
	Prefix string
	// Workers is how many connections sweep at once. Default 2.
	Workers int
	// BatchRows bounds the rows of one transaction. Default 500.
	BatchRows int
	// History tells whether delivered events are kept.
	History bool
	Sink    outbox.Sink
	// Registerer takes the metrics; nil for none.
	Registerer prometheus.Registerer
	// Logger may be nil.
	Logger *slog.Logger
}

// Sweeper is the SKIP LOCKED poller. Its methods may be called one at a time.
type Sweeper struct {
	o       Options
	log     *slog.Logger
	metrics *metrics

	// refused remembers, over transactions, what the sink refuses.
	refused refusals
}

var _ outbox.Sweeper = (*Sweeper)(nil)

// New returns a sweeper; it connects when it is run.
func New(o Options) *Sweeper {
	if o.Workers <= 0 {
		o.Workers = 2
	}
	if o.BatchRows <= 0 {
		o.BatchRows = 500
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	return &Sweeper{o: o, log: o.Logger.With("component", "poll"), metrics: newMetrics(o.Registerer)}
}

// Run sweeps with all workers until ctx ends (nil) or the scope's ownership does: outbox.ErrGap, *outbox.FencedError,
// *outbox.ForeignError.
func (s *Sweeper) Run(ctx context.Context, scope outbox.Scope) error {
	return s.each(ctx, scope, func(ctx context.Context, w *worker) error {
		for ctx.Err() == nil {
			if err := w.round(ctx); err != nil {
				return err
			}
		}
		return nil
	})
}

// Drain makes one pass that reaches, in every part, the highest seq visible when it began. It returns nil only then.
func (s *Sweeper) Drain(ctx context.Context, scope outbox.Scope) error {
	q := &queue{}
	return s.each(ctx, scope, func(ctx context.Context, w *worker) error { return w.drain(ctx, q) })
}

// each runs work on every worker and ends all when one fails. A cancelled context is no failure of Run, but it is one of
// Drain: the work says which by what it returns.
func (s *Sweeper) each(ctx context.Context, scope outbox.Scope, work func(ctx context.Context, w *worker) error) error {
	wctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var wg sync.WaitGroup
	for range s.o.Workers {
		wg.Go(func() {
			w := &worker{s: s, scope: scope, limit: s.o.BatchRows}
			defer w.close()
			if err := work(wctx, w); err != nil {
				cancel(err)
			}
		})
	}
	wg.Wait()
	if ctx.Err() != nil {
		return nil //nolint:nilerr // the caller ended it and knows
	}
	return context.Cause(wctx)
}

// final reports whether err ends the scope. A fence of the scope's own epoch is another worker's newer claim: it ends
// the claim, not the scope.
func final(err error, o outbox.Owner) bool {
	var fenced *outbox.FencedError
	var foreign *outbox.ForeignError
	if errors.As(err, &fenced) {
		return fenced.Epoch != o.Epoch
	}
	return errors.Is(err, outbox.ErrGap) || errors.As(err, &foreign)
}

// queue hands the parts of a Drain to its workers.
type queue struct {
	mu      sync.Mutex
	known   bool
	waiting []int
	busy    int
	targets map[int]int64
}

// fill reads the targets, once for all workers.
func (q *queue) fill(read func() (map[int]int64, error)) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.known {
		return nil
	}
	targets, err := read()
	if err != nil {
		return err
	}
	q.known, q.targets = true, targets
	for p := range targets {
		q.waiting = append(q.waiting, p)
	}
	return nil
}

// take returns a part to work on; ok is false when none waits, and over when none is being worked on either.
func (q *queue) take() (part int, target int64, ok, over bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.waiting) == 0 {
		return 0, 0, false, q.busy == 0
	}
	part = q.waiting[0]
	q.waiting = q.waiting[1:]
	q.busy++
	return part, q.targets[part], true, false
}

// give returns a part, done or not.
func (q *queue) give(part int, done bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.busy--
	if !done {
		q.waiting = append(q.waiting, part)
	}
}

// refusals counts how often events were refused, and knows the streams that refuse every event.
type refusals struct {
	mu      sync.Mutex
	tries   map[[16]byte]int
	streams map[string]bool
}

// park reports whether an event that was refused again is to be parked now, and after how many attempts.
func (r *refusals) park(stream string, p *outbox.PoisonError) (int, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.tries == nil {
		r.tries, r.streams = map[[16]byte]int{}, map[string]bool{}
	}
	r.tries[p.ID]++
	n := r.tries[p.ID]
	if n < poisonAttempts && !r.streams[stream] {
		return n, false
	}
	delete(r.tries, p.ID)
	r.streams[stream] = true
	return n, true
}

// fine forgets that a stream refused events.
func (r *refusals) fine(stream string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.streams, stream)
}

// wait sleeps for d, give or take a quarter, or until ctx ends.
func wait(ctx context.Context, d time.Duration) {
	t := time.NewTimer(time.Duration(float64(d) * (0.75 + rand.Float64()/2)))
	defer t.Stop()
	select {
	case <-ctx.Done():
	case <-t.C:
	}
}

type metrics struct {
	batches prometheus.Counter
	rows    prometheus.Counter
	claims  prometheus.Counter
	errors  prometheus.Counter
}

func newMetrics(reg prometheus.Registerer) *metrics {
	c := func(name, help string) prometheus.Counter {
		return prometheus.NewCounter(prometheus.CounterOpts{Name: name, Help: help})
	}
	m := &metrics{
		batches: c("outbox_sweep_batches_total", "Batches swept and committed."),
		rows:    c("outbox_sweep_rows_total", "Rows swept and committed."),
		claims:  c("outbox_sweep_claims_total", "Parts claimed by sweep workers."),
		errors:  c("outbox_sweep_errors_total", "Sweep batches rolled back or unclear; the part is claimed anew. A steady rise means Redis or Postgres refuses."),
	}
	if reg != nil {
		reg.MustRegister(m.batches, m.rows, m.claims, m.errors)
	}
	return m
}
