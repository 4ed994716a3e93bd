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

// memSweeper is an instance's Sweeper: poll/worker.go over the world's table.
type memSweeper struct {
	i       *instance
	refused poison.Refusals
}

var _ outbox.Sweeper = (*memSweeper)(nil)

const (
	sweepWorkers = 2
	// sweepRows is small, so that parts take several batches.
	sweepRows = 4
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

func (s *memSweeper) Drain(ctx context.Context, scope outbox.Scope) error {
	q := &drainQueue{}
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
	known   bool
	waiting []int
	busy    int
	targets [outbox.Partitions]int64
}

// sweepConn is a worker's connection. Guarded by world.mu.
type sweepConn struct {
	i      *instance
	closed bool
}

// end aborts what is under way on the connection, and gives back its locks.
func (c *sweepConn) end() {
	c.closed = true
	delete(c.i.conns, c)
	c.rollback()
	for p, by := range c.i.w.pg.claimer {
		if by == c {
			c.i.w.pg.claimer[p] = nil
		}
	}
}

func (c *sweepConn) rollback() {
	c.i.w.pg.rows(func(r *tableRow) bool {
		if r.by == c {
			r.by = nil
		}
		return false
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
			if len(pg.visible(p)) > 0 {
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
		claimed, _, err := w.sweep(ctx, part, 0)
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

// fill reads the targets of a Drain, once for all workers.
func (w *sweepWorker) fill(ctx context.Context, q *drainQueue) error {
	_, err := sweepCall(ctx, w.conn, "Sweep.Targets", func(pg *postgres) (nothing, error) {
		for p := range pg.parts {
			if rows := pg.visible(p); len(rows) > 0 && !q.known {
				q.targets[p] = rows[len(rows)-1].Seq
				q.waiting = append(q.waiting, p)
			}
		}
		q.known = true
		return nothing{}, nil
	})
	return err
}

func (w *sweepWorker) drain(ctx context.Context, q *drainQueue) error {
	for ctx.Err() == nil {
		w.connect()
		known, over, part := false, false, -1
		w.s.i.w.do(func() {
			if known = q.known; known && len(q.waiting) > 0 {
				part, q.waiting = q.waiting[0], q.waiting[1:]
				q.busy++
			}
			over = known && part < 0 && q.busy == 0
		})
		switch {
		case over:
			return nil
		case !known:
			if err := w.fill(ctx, q); err != nil {
				if err = w.failed(ctx, err); err != nil {
					return err
				}
			}
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
	claimed, done, err := w.sweep(ctx, part, q.targets[part])
	if err == nil && !claimed {
		done, err = sweepCall(ctx, w.conn, "Sweep.Reached", func(pg *postgres) (bool, error) {
			rows := pg.visible(part)
			return len(rows) == 0 || rows[0].Seq > q.targets[part], nil
		})
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
}

// sweep claims the part and sweeps it until it is empty or, with a target, no row up to it is left (done).
func (w *sweepWorker) sweep(ctx context.Context, part int, target int64) (claimed, done bool, err error) {
	number, err := sweepCall(ctx, w.conn, "Sweep.Claim", func(pg *postgres) (int64, error) {
		if by := pg.claimer[part]; by != nil && by != w.conn {
			return 0, nil
		}
		pg.claimer[part] = w.conn
		pg.claims[part]++
		return pg.claims[part], nil
	})
	if err != nil || number == 0 {
		return false, false, err
	}
	c := &sweepClaim{
		w: w, part: part, lane: outbox.Lane{Part: part, Claim: number, Nonce: newNonce()},
		lanes: map[string]outbox.LanePublisher{},
		marks: map[string]int64{},
	}
	if err := w.scope.Claimed(ctx); err != nil {
		return true, false, err
	}
	for n := 0; n < 10 && !done && err == nil && ctx.Err() == nil; n++ {
		var first int64
		if first, err = c.batch(ctx); err == nil {
			done = first == 0 || target > 0 && first > target
		}
	}
	c.tell(ctx)
	if err != nil {
		return true, done, err
	}
	_, err = sweepCall(ctx, w.conn, "Sweep.Release", func(pg *postgres) (nothing, error) {
		pg.claimer[part] = nil
		return nothing{}, nil
	})
	w.fails = 0
	return true, done, err
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
