package relay

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"posthaste/outbox"
)

const (
	// goodStream is how long a stream must have run for the next hand-over to come without delay.
	goodStream = 10 * time.Second
	// guardInterval is how often a leader that streams looks whether it still may.
	guardInterval = 400 * time.Millisecond
)

// span is the two contexts of an orderly stop: while intake lasts, new work is taken; while work lasts, what was taken is
// finished. Work never ends before intake has, and neither ends without a cause.
type span struct{ intake, work context.Context }

// stream is one run of the slot reader: reader, publisher, settler and auditor, each a goroutine, are joined here and nowhere
// else.
type stream struct {
	source    outbox.Source
	publisher *publisher
	settler   *settler
	auditor   *auditor
	keeper    *slotKeeper
	drain     time.Duration
	// begin is the end of the hand-over: it runs when nobody else can move the slot any more, and returns H.
	begin func(ctx context.Context) (outbox.LSN, error)
	// guard returns, when it does before ctx ends, why the leader may not stream any more.
	guard func(ctx context.Context, s *stream) error

	chunks  chan outbox.Chunk
	flights chan *flight
	// running is set when H is known and the stream is being read, since then.
	running atomic.Bool
	since   time.Time // written before running
}

var errSourceEnded = errors.New("the source ended")

// stream streams until something ends it, then settles what was published, as far as that is possible.
func (l *leadership) stream(ctx context.Context) (transition, error) {
	began := time.Now()
	s := l.newStream()
	l.gates.fresh = s.publisher.meet
	err := s.run(ctx)
	l.gates.fresh = nil
	l.health.clear(conditionSettle)
	l.health.clear(conditionPark)
	l.health.clear(conditionAudit)
	if n, b := l.window.held(); n > 0 {
		l.window.release(n, b) // what was not settled is in doubt now, and nobody waits for it
	}
	if time.Since(began) < goodStream {
		l.failures++
	} else {
		l.failures = 0
	}
	l.reason = slotReason(err)
	if fenced := (*outbox.FencedError)(nil); errors.As(err, &fenced) {
		l.fence = fenced.Epoch
	}
	switch {
	case errors.Is(err, errToggled):
		l.reason, l.failures = outbox.ReasonToggle, 0
		return onOver, nil
	case errors.Is(err, outbox.ErrSuperseded):
		return onLost, err
	case ctx.Err() != nil:
		return onOver, nil // run knows better
	}
	l.log.Warn("the stream ended; sweeping", "reason", l.reason, "err", err)
	var se *outbox.SlotError
	if errors.As(err, &se) {
		l.unusable(ctx, err)
	}
	return onOver, nil
}

// newStream joins the parts.
func (l *leadership) newStream() *stream {
	chunks, flights := make(chan outbox.Chunk, 4), make(chan *flight, 4096)
	rows, lanes := newTaken(), newLanes(l.o.Sink, l.gates.owner)
	s := &stream{
		source: l.o.Source, keeper: l.keeper, drain: l.o.DrainTimeout, begin: l.endHandOver, guard: l.guard, chunks: chunks, flights: flights,
		publisher: &publisher{
			reporter: l.reporter, store: l.o.Store, sink: l.o.Sink, prefix: l.o.Prefix, gates: l.gates, blocks: l.blocks, window: l.window,
			taken: rows, lanes: lanes, chunks: chunks, flights: flights, handoverOf: map[string]outbox.LSN{},
		},
		settler: &settler{
			reporter: l.reporter, store: l.o.Store, sink: l.o.Sink, source: l.o.Source, owner: l.gates.owner, window: l.window,
			taken: rows, lanes: lanes, flights: flights,
		},
	}
	s.auditor = &auditor{reporter: l.reporter, store: l.o.Store, taken: rows, progress: s.progress}
	return s
}

// progress is how far everything is published; known is false while the stream stands still for a known reason.
func (s *stream) progress() (passed outbox.LSN, known bool) {
	return outbox.LSN(s.publisher.passed.Load()), s.running.Load() && !s.publisher.failing.Load()
}

// run returns the cause of the stream's end.
func (s *stream) run(ctx context.Context) error {
	intake, fail := context.WithCancelCause(ctx)
	defer fail(nil)
	work, stopWork := context.WithCancelCause(context.WithoutCancel(ctx))
	defer stopWork(nil)
	source, stopSource := context.WithCancel(context.WithoutCancel(ctx))
	defer stopSource()
	s.keeper.onExhausted(func() {
		fail(&outbox.SlotError{Reason: outbox.ReasonBudget, Err: errors.New("the WAL budget is exhausted")})
	})
	defer s.keeper.onExhausted(nil)

	sp := span{intake, work}
	var reading, working sync.WaitGroup
	reading.Go(func() {
		defer close(s.chunks)
		err := s.source.Run(source, s.started, s.chunks)
		if err == nil {
			err = errSourceEnded
		}
		fail(err)
	})
	working.Go(func() {
		defer close(s.flights)
		if err := s.publisher.run(sp); err != nil {
			fail(err)
		}
	})
	working.Go(func() {
		if err := s.settler.run(sp, fail); err != nil {
			stopWork(err) // without settling there is no use in publishing on
		}
	})
	for _, watch := range []func(context.Context) error{s.auditor.run, func(ctx context.Context) error { return s.guard(ctx, s) }} {
		working.Go(func() {
			if err := watch(intake); err != nil {
				fail(err)
			}
		})
	}

	<-intake.Done()
	cause := context.Cause(intake)
	if hopeless(cause) {
		stopWork(cause)
	} else {
		// The rest of the timeout is for what follows: confirming, standing down, closing.
		deadline := time.AfterFunc(max(s.drain-2*time.Second, s.drain/2), func() { stopWork(errors.New("drain timeout")) })
		defer deadline.Stop()
	}
	working.Wait()
	stopSource()         // only now, so that the last settled position is confirmed
	for range s.chunks { //nolint:revive // let the reader finish its hand-over
	}
	reading.Wait()
	return cause
}

// hopeless reports whether nothing of ours can be published or settled any more.
func hopeless(cause error) bool {
	var fenced *outbox.FencedError
	return errors.Is(cause, errLockLost) || errors.Is(cause, outbox.ErrSuperseded) || errors.Is(cause, outbox.ErrGap) || errors.As(cause, &fenced)
}

// started is called by the source when nobody else can move the slot any more.
func (s *stream) started(ctx context.Context) error {
	handover, err := s.begin(ctx)
	if err != nil {
		return err
	}
	s.publisher.begin(handover)
	s.since = time.Now()
	s.running.Store(true)
	return nil
}

// ranWell reports whether the stream has run for long enough to forget why it did not before.
func (s *stream) ranWell() bool { return s.running.Load() && time.Since(s.since) > goodStream }
