package relay

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"posthaste/internal/pause"
	"posthaste/internal/poison"
	"posthaste/outbox"
)

// memSweeper is an instance's Sweeper: package relay/sweep over the world's table.
type memSweeper struct {
	i       *instance
	refused poison.Refusals
}

var _ outbox.Sweeper = (*memSweeper)(nil)

const (
	sweepWorkers = 2
	// sweepRows and sweepList are small, so that a pass takes several batches, and several lists.
	sweepRows, sweepList = 4, 7
)

func (s *memSweeper) Run(ctx context.Context, scope outbox.Scope) error {
	return s.each(ctx, scope, func(ctx context.Context, w *sweepWorker) error {
		for ctx.Err() == nil {
			if err := w.round(ctx); err != nil {
				return err
			}
		}
		return nil
	})
}

func (s *memSweeper) Drain(ctx context.Context, scope outbox.Scope, pass outbox.Pass) error {
	q := &drainQueue{pass: &pass}
	for part := range outbox.Partitions {
		q.waiting = append(q.waiting, part)
	}
	return s.each(ctx, scope, func(ctx context.Context, w *sweepWorker) error { return w.drain(ctx, q) })
}

// each runs work on every worker. The first error ends all of them, and is returned.
func (s *memSweeper) each(
	ctx context.Context, scope outbox.Scope, work func(context.Context, *sweepWorker) error,
) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var wg sync.WaitGroup
	var once sync.Once
	var first error
	for range sweepWorkers {
		wg.Go(func() {
			w := &sweepWorker{s: s, scope: scope, last: rand.N(outbox.Partitions)}
			defer w.close()
			if err := work(ctx, w); err != nil {
				once.Do(func() { first = err })
				cancel(err)
			}
		})
	}
	wg.Wait()
	return first
}

// drainQueue hands the parts of a Drain to its workers. Guarded by world.mu.
type drainQueue struct {
	pass    *outbox.Pass
	waiting []int
	busy    int
}

// sweepConn is a worker's connection. Guarded by world.mu.
type sweepConn struct {
	i      *instance
	closed bool
}

// end gives back the connection's locks.
func (c *sweepConn) end() {
	c.closed = true
	delete(c.i.conns, c)
	for p, by := range c.i.w.pg.claimer {
		if by == c {
			c.i.w.pg.claimer[p] = nil
		}
	}
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

// sweepWorker is one connection that sweeps.
type sweepWorker struct {
	s     *memSweeper
	scope outbox.Scope
	conn  *sweepConn
	last  int
	idle  time.Duration
	fails time.Duration
}

func (w *sweepWorker) connect() {
	w.s.i.w.do(func() {
		if w.conn == nil || w.conn.closed {
			w.conn = &sweepConn{i: w.s.i}
			w.s.i.conns[w.conn] = true
		}
	})
}

func (w *sweepWorker) close() {
	w.s.i.awake()
	w.s.i.w.do(func() {
		if w.conn != nil && !w.s.i.isDead() {
			w.conn.end()
		}
	})
}

func (w *sweepWorker) failed(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return nil //nolint:nilerr // stopping
	}
	w.scope.Outcome(err)
	if end := w.final(ctx, err); end != nil {
		return end
	}
	w.close()
	w.fails = min(max(w.fails*2, 50*time.Millisecond), 2*time.Second)
	pause.About(ctx, w.fails)
	return nil
}

// final returns the error that ends the scope, or nil if err only ends the claim.
func (w *sweepWorker) final(ctx context.Context, err error) error {
	var fenced *outbox.FencedError
	if errors.Is(err, outbox.ErrSuperseded) {
		return err
	}
	if !finished(err) {
		return nil
	}
	if !errors.As(err, &fenced) || fenced.Epoch != w.scope.Owner.Epoch {
		return err
	}
	if err = (memSink{w.s.i}).Check(ctx, w.scope.Owner, []string{fenced.Stream}); err != nil && finished(err) {
		return err
	}
	return nil
}

func (w *sweepWorker) round(ctx context.Context) error {
	w.connect()
	parts, err := sweepCall(ctx, w.conn, "Sweep.Parts", func(pg *postgres) (parts []int, err error) {
		for p := range pg.parts {
			if len(pg.rows(func(r *tableRow) bool { return r.part == p && pg.waits(r) })) > 0 {
				parts = append(parts, p)
			}
		}
		return parts, nil
	})
	if err != nil {
		return w.failed(ctx, err)
	}
	next := max(slices.IndexFunc(parts, func(p int) bool { return p > w.last }), 0)
	for _, part := range slices.Concat(parts[next:], parts[:next]) {
		w.last = part
		claimed, err := w.sweep(ctx, part, nil)
		if err != nil {
			return w.failed(ctx, err)
		}
		if claimed {
			w.idle, w.fails = 0, 0
			return nil
		}
	}
	if len(parts) == 0 {
		w.scope.Outcome(nil)
	}
	w.idle = min(max(w.idle*2, 20*time.Millisecond), 500*time.Millisecond)
	pause.About(ctx, w.idle)
	return nil
}

func (w *sweepWorker) drain(ctx context.Context, q *drainQueue) error {
	for ctx.Err() == nil {
		w.connect()
		over, part := false, -1
		w.s.i.w.do(func() {
			if len(q.waiting) > 0 {
				part, q.waiting = q.waiting[0], q.waiting[1:]
				q.busy++
			}
			over = part < 0 && q.busy == 0
		})
		switch {
		case over:
			return nil
		case part < 0:
			pause.About(ctx, 20*time.Millisecond)
		default:
			if err := w.drainPart(ctx, q, part); err != nil {
				return err
			}
		}
	}
	return ctx.Err()
}

func (w *sweepWorker) drainPart(ctx context.Context, q *drainQueue, part int) error {
	reached := func() (bool, error) {
		return sweepCall(ctx, w.conn, "Sweep.Reached", func(pg *postgres) (bool, error) {
			return len(pg.rows(func(r *tableRow) bool {
				return r.part == part && holds(&q.pass.Settled, r) && pg.waits(r)
			})) == 0, nil
		})
	}
	claimed := false
	done, err := reached()
	if err == nil && !done {
		if claimed, err = w.sweep(ctx, part, q.pass); err == nil {
			done, err = reached()
		}
	}
	w.s.i.w.do(func() {
		q.busy--
		if !done {
			q.waiting = append(q.waiting, part)
		}
	})
	if err != nil {
		return w.failed(ctx, err)
	}
	if !claimed && !done {
		pause.About(ctx, 20*time.Millisecond)
	}
	return nil
}

// sweepClaim is one holding of a part.
type sweepClaim struct {
	w     *sweepWorker
	part  int
	lane  outbox.Lane
	lanes map[string]outbox.LanePublisher
	marks map[string]int64

	// pass covers the rows to settle. begun is set if a mark has recorded the pass. cursor is the last row it has read.
	pass   outbox.Settled
	begun  bool
	cursor int64
	// list are the next rows, more tells whether there may be others behind them.
	list []int64
	more bool
}

// sweep claims the part and makes a pass over it, or continues the current one. A new pass covers the rows that within
// sees, or those visible now.
func (w *sweepWorker) sweep(ctx context.Context, part int, within *outbox.Pass) (claimed bool, err error) {
	number, err := sweepCall(ctx, w.conn, "Sweep.Claim", func(pg *postgres) (int64, error) {
		if pg.state.Owner != w.scope.Owner {
			return 0, outbox.ErrSuperseded
		}
		if by := pg.claimer[part]; by != nil && by != w.conn {
			return 0, nil
		}
		pg.claimer[part] = w.conn
		pg.claims++
		return pg.claims, nil
	})
	if err != nil || number == 0 {
		return false, err
	}
	c := &sweepClaim{
		w: w, part: part, lane: outbox.Lane{Part: part, Claim: number, Nonce: newNonce()},
		lanes: map[string]outbox.LanePublisher{},
		marks: map[string]int64{},
	}
	if err := w.scope.Claimed(ctx); err != nil {
		return true, err
	}
	if err = c.begin(ctx, within); err == nil {
		for n, over := 0, false; n < 10 && !over && err == nil && ctx.Err() == nil; n++ {
			over, err = c.batch(ctx)
		}
	}
	c.tell(ctx)
	if err != nil {
		return true, err
	}
	_, err = sweepCall(ctx, w.conn, "Sweep.Release", func(pg *postgres) (nothing, error) {
		pg.claimer[part] = nil
		return nothing{}, nil
	})
	w.fails = 0
	return true, err
}

// begin reads the mark and lists the unsettled rows.
func (c *sweepClaim) begin(ctx context.Context, within *outbox.Pass) error {
	_, err := sweepCall(ctx, c.w.conn, "Sweep.Begin", func(pg *postgres) (nothing, error) {
		c.w.s.i.reads(c.w.scope.Owner)
		switch m := pg.newest(c.part); {
		case m.cursor > 0:
			c.pass, c.begun, c.cursor = m.pass, true, m.cursor
		case within != nil:
			c.pass = within.Settled
		default:
			c.pass = pg.now()
		}
		c.read(pg)
		return nothing{}, nil
	})
	return err
}

// read lists the unsettled rows after the cursor.
func (c *sweepClaim) read(pg *postgres) {
	c.list, c.more = nil, false
	for _, r := range pg.parts[c.part] {
		if r.Seq <= c.cursor || !pg.waits(r) || !holds(&c.pass, r) {
			continue
		}
		if c.more = len(c.list) == sweepList; c.more {
			return
		}
		c.list = append(c.list, r.Seq)
	}
}

// tell reports what is settled to the gates.
func (c *sweepClaim) tell(ctx context.Context) {
	var marks []outbox.Mark
	for stream, n := range c.marks {
		marks = append(marks, outbox.Mark{Stream: stream, Lane: c.lane, Number: n})
	}
	if len(marks) > 0 {
		_ = memSink{c.w.s.i}.Settled(context.WithoutCancel(ctx), c.w.scope.Owner, marks)
	}
}
