// Package sweep settles the unsettled rows of the outbox table without the stream. A worker sweeps one page of one of
// the table's parts in a transaction that holds the lock of the part (FOR UPDATE SKIP LOCKED); other workers take other
// parts. A pass has a snapshot; its pages are the rows that are visible in it and not covered by the part's mark. After
// each page the worker writes a mark, and after the last page the snapshot becomes the mark. A worker that claims the
// part later resumes an interrupted pass with the same snapshot. No snapshot is held while Redis is called, and settled
// rows are not read, so old transactions do not slow it down.
//
// Publishing is safe to repeat even if the mark is not written afterwards: the gate keeps the events that a claim has
// published and no mark covers yet, and suppresses them when a later claim of the same part publishes them again. So
// after any unclear outcome (a lost reply, a lost session) a worker simply claims the part again.
package sweep

import (
	"cmp"
	"context"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"posthaste/internal/pause"
	"posthaste/outbox"
	"posthaste/relay/stream"
)

const (
	// publishTimeout bounds publishing one batch into one stream.
	publishTimeout = 2 * time.Second
	// settleTimeout bounds parking, and writing a mark.
	settleTimeout = 10 * time.Second
	// batchBytes bounds the payload of one batch.
	batchBytes = 4 << 20
	// turn and turnTime bound the batches and the time that a worker spends on one part before it continues with the
	// next part, so that a large backlog in one part does not delay the others.
	turn, turnTime = 25, 5 * time.Second
	// idleFirst and idleMost bound the wait when nothing was found.
	idleFirst, idleMost = 20 * time.Millisecond, 500 * time.Millisecond
	// failFirst and failMost bound the wait after a failure.
	failFirst, failMost = 50 * time.Millisecond, 2 * time.Second
	// pageTime is how much longer than the sweep its last pages may last.
	pageTime = 200 * time.Millisecond
	// claimTime is how long a claim tries blocked streams: the server ends a session that is idle for 15 seconds.
	claimTime = 6 * time.Second
	// blockedFirst and blockedMost bound the wait before the next attempt to publish to a blocked stream.
	blockedFirst, blockedMost = 200 * time.Millisecond, 2 * time.Second
	// aheadRows bounds the rows of a part that are published and cannot be settled, because rows of a blocked stream
	// come before them. aheadTime bounds the time for them in a turn.
	aheadRows, aheadTime = 20_000, time.Second
)

// Options are what a Sweeper needs.
type Options struct {
	// Open opens the connection of a worker.
	Open func(ctx context.Context) (Conn, error)
	// Workers is how many connections sweep at once. Default 2.
	Workers int
	// BatchRows bounds the rows of one batch. Default 999, which each sink takes at once.
	BatchRows int
	Sink      stream.Publisher
	// Logger may be nil.
	Logger *slog.Logger
}

// Conn is the connection of one worker, implemented by posthaste/sql. It belongs to one goroutine.
type Conn interface {
	Partitions(ctx context.Context) ([]int, error)
	Reached(ctx context.Context, part int, pass outbox.Pass) (bool, error)
	Claim(ctx context.Context, parts []int, o outbox.Owner) (part int, claim int64, ok bool, err error)
	Begin(ctx context.Context, part int, within *outbox.Pass) (*outbox.PartPass, error)
	Page(ctx context.Context, p *outbox.PartPass, limit, bytes int) ([]*outbox.Record, error)
	Ahead(ctx context.Context, p *outbox.PartPass, within *outbox.Pass, blocked []string,
		sent map[int64]bool) (*outbox.PartPass, error)
	Park(ctx context.Context, p *outbox.PartPass, o outbox.Owner, events []outbox.Refused) error
	ParkRow(ctx context.Context, p *outbox.PartPass, o outbox.Owner, cause error) (*outbox.Record, error)
	Settle(ctx context.Context, p *outbox.PartPass, o outbox.Owner, entries outbox.Entries) error
	Drop(ctx context.Context) error
	Closed() bool
	Close()
}

// Host is the relay that sweeps. Its methods are safe for concurrent use.
type Host interface {
	// Ensure records a stream and adopts its gate before the first publish. *outbox.TakenError: it is a stream of
	// another type.
	Ensure(ctx context.Context, stream string) error
	// Refresh reloads the events that others have parked. It is called after a part was claimed and before its rows are
	// read.
	Refresh(ctx context.Context) error
	// Blockers returns which parked event blocks each of events, "" for none.
	Blockers(events []*outbox.Record) []string
	// Published is called with published and settled events.
	Published(stream string, events []*outbox.Record)
	// Parked is called for each event moved to outbox_dead.
	Parked(e *outbox.Record, err error)
	// Outcome is called with nil after every settled batch and when there is nothing to sweep, and with every error in
	// between, whatever its cause. Readiness depends on it.
	Outcome(err error)
}

// Scope is the context of a sweep.
type Scope struct {
	Host
	Owner outbox.Owner
	// Layout is how streams are named.
	Layout outbox.Layout
	// BlockKey makes the sweep park events after a parked one of their aggregate.
	BlockKey bool
	// Newer lets a drain publish events that are newer than its pass ahead of a blocked stream. One that ends with a
	// mark of every part must not: the stream publishes them again.
	Newer bool
}

// Sweeper sweeps the outbox table. Its methods may be called one at a time. It keeps its connections from one sweep to
// the next.
type Sweeper struct {
	o   Options
	log *slog.Logger

	// refused counts, across batches, the attempts to publish the events that the sink refuses.
	refused stream.Refusals
	// rows is the number of rows in the next batch of each part. It is reduced after a failed batch.
	rows    [outbox.Partitions]atomic.Int64
	blocked blockades
	// spare has the connections that the workers of the last sweep have left: as many as there are workers at most.
	spare chan Conn
	// confirms are the goroutines that ask for the durability of streams.
	confirms sync.WaitGroup
}

// New returns a sweeper; it connects when it is run.
func New(o Options) *Sweeper {
	o.Workers = max(cmp.Or(o.Workers, 2), 1)
	o.BatchRows = cmp.Or(o.BatchRows, 999)
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	s := &Sweeper{
		o: o, log: o.Logger.With("component", "poll"),
		blocked: blockades{streams: map[string]blockade{}}, spare: make(chan Conn, o.Workers),
	}
	for part := range s.rows {
		s.rows[part].Store(int64(o.BatchRows))
	}
	return s
}

// Run sweeps with all workers until ctx ends (nil) or the scope's ownership does: outbox.ErrGap,
// outbox.ErrSuperseded, *outbox.FencedError, *outbox.ForeignError.
func (s *Sweeper) Run(ctx context.Context, scope Scope) error {
	return s.each(ctx, scope, func(ctx context.Context, w *worker) error {
		for ctx.Err() == nil {
			if err := w.round(ctx); err != nil {
				return err
			}
		}
		return nil
	})
}

// Drain sweeps until every row that pass sees is settled, by this sweeper or by another. It returns nil only then;
// otherwise it returns Run's errors or ctx's.
func (s *Sweeper) Drain(ctx context.Context, scope Scope, pass outbox.Pass) error {
	// The parts that wait for a worker. It has room for all of them, and is closed when none is left.
	parts := make(chan int, outbox.Partitions)
	for part := range outbox.Partitions {
		parts <- part
	}
	var left atomic.Int64
	left.Store(outbox.Partitions)
	return s.each(ctx, scope, func(ctx context.Context, w *worker) error { return w.drain(ctx, parts, &left, pass) })
}

// each runs work on every worker. The first error stops all workers and is returned.
func (s *Sweeper) each(ctx context.Context, scope Scope, work func(ctx context.Context, w *worker) error) error {
	g, ctx := errgroup.WithContext(ctx)
	page, end := pause.Longer(ctx, pageTime)
	for range s.o.Workers {
		g.Go(func() error {
			w := newWorker(page, s, scope)
			err := work(ctx, w)
			if ctx.Err() == nil { // a stop does not wait for the gates again
				w.tell(ctx)
			}
			if w.conn != nil {
				s.spare <- w.conn
			}
			return err
		})
	}
	defer s.confirms.Wait()
	defer end()
	return g.Wait()
}

// open returns a spare connection, or opens one.
func (s *Sweeper) open(ctx context.Context) (Conn, error) {
	for {
		select {
		case conn := <-s.spare:
			if !conn.Closed() {
				return conn, nil
			}
		default:
			return s.o.Open(ctx)
		}
	}
}

// Rest closes the connections, until the next call of Run or Drain.
func (s *Sweeper) Rest() {
	for len(s.spare) > 0 {
		(<-s.spare).Close()
	}
}

// shrink makes the part's next batches smaller after a batch of rows rows has failed. A batch that is too large for
// Redis or for the network then succeeds in pieces, and at a size of one the failing row is known.
func (s *Sweeper) shrink(part, rows int) {
	s.rows[part].Store(int64(max(rows/8, 1)))
}

// grow makes them larger again.
func (s *Sweeper) grow(part int) {
	s.rows[part].Store(min(s.rows[part].Load()*2, int64(s.o.BatchRows)))
}

// unconfirmed blocks a stream whose durability was not reached. A goroutine confirms the stream again and again until
// that succeeds, or the workers end.
func (s *Sweeper) unconfirmed(ctx context.Context, o outbox.Owner, stream string, err error) {
	if s.blocked.confirms(stream, err) {
		s.confirms.Go(func() {
			defer s.blocked.confirmed(stream)
			wait := pause.Backoff{First: blockedFirst, Most: blockedMost}
			for outbox.Alone(s.confirm(ctx, o, stream)) && ctx.Err() == nil {
				wait.Wait(ctx)
			}
		})
	}
}

func (s *Sweeper) confirm(ctx context.Context, o outbox.Owner, stream string) error {
	ctx, cancel := context.WithTimeout(ctx, 2*publishTimeout)
	defer cancel()
	return s.o.Sink.Confirm(ctx, o, []outbox.Mark{{Stream: stream}})
}
