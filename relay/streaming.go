package relay

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"posthaste/internal/pause"
	"posthaste/outbox"
)

const (
	// goodStream is how long a stream must have run for the next hand-over to come without delay.
	goodStream = 10 * time.Second
	// guardInterval is how often a leader that streams looks whether it still may.
	guardInterval = 500 * time.Millisecond
)

// span holds the two contexts of an orderly stop. While intake lasts, new work is taken; while work lasts, the work
// that was taken is finished. Work never ends before intake has, and each ends with a cause.
type span struct{ intake, work context.Context }

// streaming is one run of the slot reader: reader, router, settler and auditor, each a goroutine, are joined here
// and nowhere else.
type streaming struct {
	*Relay
	router  *router
	settler *settler
	auditor *auditor
	// begin is the end of the hand-over: it runs when nobody else can move the slot any more, and returns what is
	// settled, and H as its end.
	begin func(ctx context.Context) (outbox.Pass, error)
	// guard is called every guardInterval, and returns why the leader may not stream any more, if that is so. well: the
	// stream has run for long enough to forget why it did not before.
	guard func(ctx context.Context, well bool) error

	chunks chan outbox.Chunk
	// owner is held while begin or guard runs: the reader calls begin, and guard waits for it.
	owner callLock
	// running is set when H is known and the stream is being read, since then.
	running atomic.Bool
	since   time.Time
}

// progress is how far everything is routed; known is false while the router waits for a stream that is blocked.
func (s *streaming) progress() (passed outbox.LSN, known bool) {
	full := s.router.waiting.Load() && (s.router.blocked.any() || s.settler.unconfirmable() != nil)
	return s.router.tracker.position(), s.running.Load() && !full
}

// run returns the cause of the stream's end.
func (s *streaming) run(ctx context.Context) error {
	intake, fail := context.WithCancelCause(ctx)
	defer fail(nil)
	work, stopWork := context.WithCancelCause(context.WithoutCancel(ctx))
	defer stopWork(nil)
	source, stopSource := context.WithCancel(context.WithoutCancel(ctx))
	defer stopSource()
	exhausted := func() {
		fail(&outbox.SlotError{Reason: outbox.ReasonBudget, Err: errors.New("the WAL budget is exhausted")})
	}
	s.keeper.exhausted.Store(&exhausted)
	defer s.keeper.exhausted.Store(nil)

	sp := span{intake, work}
	var reading, working sync.WaitGroup
	reading.Go(func() {
		defer close(s.chunks)
		err := s.o.Source.Run(source, func(ctx context.Context) error { return s.started(ctx, intake) }, s.chunks)
		if err == nil {
			err = errSourceEnded
		}
		fail(err)
	})
	working.Go(func() {
		defer close(s.settler.ended)
		_ = s.router.run(sp, fail) // it has called fail
	})
	working.Go(func() {
		if err := s.settler.run(sp); err != nil {
			fail(err)
			stopWork(err) // without settling, publishing has no use
		}
	})
	working.Go(func() {
		if err := s.auditor.run(intake); err != nil {
			fail(err)
		}
	})
	go func() {
		<-intake.Done()
		if cause := context.Cause(intake); hopeless(cause) {
			stopWork(cause)
			return
		}
		// The rest of the timeout is for what follows: confirming, standing down, closing.
		drain := s.o.DrainTimeout
		if pause.For(work, max(drain-2*time.Second, drain/2)) == nil {
			stopWork(errors.New("drain timeout"))
		}
	}()
	if err := s.watch(intake); err != nil {
		fail(err)
	}
	working.Wait()
	stopSource()         // only now, so that the last settled position is confirmed
	for range s.chunks { //nolint:revive // let the reader finish its hand-over
	}
	reading.Wait()
	s.keeper.streams(false)
	s.window.reset() // what was not settled is in doubt now, and nobody waits for it
	return context.Cause(intake)
}

// started is called by the source when nobody else can move the slot any more. It ends the hand-over.
func (s *streaming) started(ctx, intake context.Context) error {
	s.owner.Lock()
	defer s.owner.Unlock()
	intake, cancel := context.WithCancel(intake)
	defer cancel()
	defer context.AfterFunc(ctx, cancel)() // the connection of the source may be lost meanwhile
	at, err := s.begin(intake)
	if err != nil {
		return err
	}
	s.router.begin(at.Settled, at.End)
	s.settler.begin(at)
	s.since = time.Now()
	s.running.Store(true)
	return nil
}

// watch guards the stream until the intake ends or there is a reason to end it.
func (s *streaming) watch(intake context.Context) error {
	for pause.Tick(intake, guardInterval) == nil {
		select {
		case s.owner <- struct{}{}:
		default:
			continue // the hand-over checks the same
		}
		err := s.guard(intake, s.running.Load() && time.Since(s.since) > goodStream)
		s.owner.Unlock()
		if err != nil {
			return err
		}
	}
	return nil
}
