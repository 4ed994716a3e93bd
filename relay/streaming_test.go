package relay

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"posthaste/outbox"
)

// running is a stream on a world: the whole of streaming, without the leadership around it.
type running struct {
	*rig
	ctx    context.Context
	cancel context.CancelCauseFunc
	done   <-chan error
	begun  int
	// why ends the stream when the guard is asked next.
	why error
}

// inStream runs do while a stream is running.
func inStream(t *testing.T, o Options, do func(s *running)) {
	t.Helper()
	inRig(t, o, func(r *rig) {
		s := &running{rig: r}
		s.ctx, s.cancel = context.WithCancelCause(context.Background())
		defer bound(s.cancel)()
		r.pg.slot = &slot{w: r.world, confirmed: r.pg.wal, restart: r.pg.wal}
		r.i.relay.activity.enter(phaseStream, "")
		begin := func(context.Context) (outbox.Pass, error) {
			s.begun++
			return r.here(), nil
		}
		guard := func(context.Context, bool) (err error) {
			r.do(func() { err = s.why })
			return err
		}
		r.s = r.i.relay.newStream(r.gates, begin, guard)
		s.done = background(func() error { return r.s.run(s.ctx) })
		soon()
		do(s)
	})
}

// ends ends the stream with why, and returns how long that took, and the cause it names.
func (s *running) ends(why error) (took time.Duration, cause error) {
	began := time.Now()
	s.cancel(why)
	cause = <-s.done
	return time.Since(began), cause
}

// A stop takes nothing new, and ends when what was taken is published, settled, and confirmed to the slot.
func TestAStopSettlesWhatWasTaken(t *testing.T) {
	t.Parallel()
	inStream(t, Options{}, func(s *running) {
		tx := s.writes("order a")
		row := tx.rows[0]
		soon() // published; nobody sees it, so it cannot be settled
		why := errors.New("stopping")
		s.after(2*time.Second, tx.over)
		if took, err := s.ends(why); !errors.Is(err, why) || took < 2*time.Second || took > 3*time.Second {
			t.Errorf("ended with %v after %v; want %v, when the row was settled", err, took, why)
		}
		if s.pg.slot.confirmed < tx.end || s.pg.owed(row) || s.pg.slot.active != nil {
			t.Errorf("confirmed %v, want %v; row owed: %v", s.pg.slot.confirmed, tx.end, s.pg.owed(row))
		}
		if s.begun != 1 {
			t.Errorf("the hand-over was ended %d times", s.begun)
		}
	})
}

// Events that do not settle are abandoned within the drain timeout, and the window is empty afterwards.
func TestAStopIsBounded(t *testing.T) {
	t.Parallel()
	inStream(t, Options{DrainTimeout: 6 * time.Second}, func(s *running) {
		tx := s.writes("order a")
		row := tx.rows[0]
		soon()
		s.after(time.Minute, tx.over) // or it would take forever
		took, _ := s.ends(errors.New("stopping"))
		if took < 3*time.Second || took > 5*time.Second || !s.pg.owed(row) {
			t.Errorf("took %v of a timeout of 6 s; row owed: %v", took, s.pg.owed(row))
		}
		if n, _ := s.s.window.inflight(); n != 0 {
			t.Errorf("%d events are held in the window of the next stream", n)
		}
		if s.pg.slot.confirmed >= tx.end {
			t.Error("what is not settled was confirmed")
		}
		tx.show()
	})
}

// If this owner can no longer settle anything, the stop does not wait.
func TestAHopelessStreamEndsAtOnce(t *testing.T) {
	t.Parallel()
	for _, why := range []error{
		errLockLost, outbox.ErrSuperseded, outbox.ErrGap, outbox.ErrMoved,
		&outbox.FencedError{Stream: "outbox.order", Epoch: 9},
	} {
		inStream(t, Options{}, func(s *running) {
			tx := s.writes("order a")
			soon()
			if took, err := s.ends(why); !errors.Is(err, why) || took > time.Second {
				t.Errorf("%v: ended with %v after %v", why, err, took)
			}
			tx.show()
		})
	}
}

// Whatever part ends, all end, and the cause is the first one's.
func TestAnyPartEndsTheStream(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		disturb func(s *running)
		reason  string
	}{
		"the source":  {func(s *running) { s.dropSlot() }, outbox.ReasonConnection},
		"the guard":   {func(s *running) { s.why = errToggled }, outbox.ReasonConnection},
		"the sink":    {func(s *running) { s.rd.flush() }, outbox.ReasonGap},
		"the settler": {func(s *running) { s.pg.unpublished = true }, outbox.ReasonMissed},
	} {
		inStream(t, Options{}, func(s *running) {
			s.event("order", "a")
			soon()
			s.do(func() { c.disturb(s) })
			s.event("order", "a")
			err := <-s.done
			if slotReason(err) != c.reason {
				t.Errorf("%s: ended with %v, want reason %s", name, err, c.reason)
			}
			if ctx := s.ctx.Err(); ctx != nil {
				t.Errorf("the caller's context ended: %v", ctx)
			}
		})
	}
}

// The WAL budget ends a stream, by name; and it ends none that has ended already.
func TestTheBudgetEndsAStream(t *testing.T) {
	t.Parallel()
	inStream(t, Options{}, func(s *running) {
		(*s.i.relay.keeper.exhausted.Load())()
		if err := <-s.done; slotReason(err) != outbox.ReasonBudget {
			t.Errorf("ended with %v", err)
		}
		if s.i.relay.keeper.exhausted.Load() != nil {
			t.Error("the budget would end the next stream for this one")
		}
	})
}

// A hand-over that cannot be ended ends the source, and nothing of it is read.
func TestAStreamThatCannotBegin(t *testing.T) {
	t.Parallel()
	inRig(t, Options{}, func(r *rig) {
		why := errors.New("the slot was moved")
		r.pg.slot = &slot{w: r.world, confirmed: r.pg.wal, restart: r.pg.wal}
		r.event("order", "a")
		s := r.i.relay.newStream(r.gates, func(context.Context) (outbox.Pass, error) { return outbox.Pass{}, why },
			func(context.Context, bool) error { return nil })
		if err := s.run(r.intake); !errors.Is(err, why) || len(r.published("outbox.order")) > 0 {
			t.Errorf("ended with %v, and published %v", err, r.published("outbox.order"))
		}
		if s.running.Load() || r.pg.slot.active != nil {
			t.Error("it counts as running, or the slot is still streamed")
		}
	})
}

// The guard learns that all is well when the stream has run for long enough, and not before.
func TestTheGuardLearnsThatAllIsWell(t *testing.T) {
	t.Parallel()
	inRig(t, Options{}, func(r *rig) {
		r.pg.slot = &slot{w: r.world, confirmed: r.pg.wal, restart: r.pg.wal}
		var began, well time.Time
		ctx, cancel := context.WithCancel(r.intake)
		s := r.i.relay.newStream(r.gates, func(context.Context) (outbox.Pass, error) {
			pass(time.Minute) // a long last pass is no good stream
			began = time.Now()
			return r.here(), nil
		}, func(_ context.Context, ok bool) error {
			if ok {
				well = time.Now()
				cancel()
			}
			return nil
		})
		_ = s.run(ctx)
		if d := well.Sub(began); d < goodStream || d > goodStream+2*guardInterval {
			t.Errorf("well after %v, want %v", d, goodStream)
		}
	})
}

// hookedSource is a source that calls hook before it starts.
type hookedSource struct {
	outbox.Source
	hook func() error
}

func (h *hookedSource) Run(ctx context.Context, started func(context.Context) error, out chan<- outbox.Chunk) error {
	if err := h.hook(); err != nil {
		return err
	}
	return h.Source.Run(ctx, started, out)
}

// A slot that another program moves while a stream is about to begin is noticed, even if that stream never does: the
// next one waits for what the move has passed.
func TestASlotMovedBeforeAStartThatFails(t *testing.T) {
	t.Parallel()
	inWorld(t, Options{}, func(w *world) {
		var tx *transaction
		var armed atomic.Bool
		i := w.instance("one")
		i.relay.o.Source = &hookedSource{memSource{i}, func() error {
			if !armed.CompareAndSwap(true, false) {
				return nil
			}
			tx.write()
			w.do(w.moveSlot)
			pass(600 * time.Millisecond)
			return slotTrouble(outbox.ReasonConnection)
		}}
		w.launch(i)
		w.event("order", "x")
		pass(3 * time.Second)
		w.wants(outbox.ModePoll)
		pass(6 * time.Second)
		tx = w.begin("order x first")
		armed.Store(true)
		w.wants(outbox.ModeAuto)
		w.eventually("the start has failed", 20*time.Second, func() bool { return !armed.Load() })
		pass(12 * time.Second)
		tx.show()
		pass(30 * time.Second)
		missed := value(t, i.relay.metrics.auditFailures.WithLabelValues(outbox.ReasonMissed))
		if missed != 0 {
			t.Errorf("the audit found %v rows that the stream had passed by", missed)
		}
		w.ends(outbox.ModeCDC)
	})
}

// A stop is as short as it may be while the guard hangs in a call that does not end with its context.
func TestAStopWhileTheGuardHangs(t *testing.T) {
	t.Parallel()
	for _, why := range []error{errors.New("stopping"), errLockLost} {
		inRig(t, Options{DrainTimeout: 6 * time.Second}, func(r *rig) {
			r.pg.slot = &slot{w: r.world, confirmed: r.pg.wal, restart: r.pg.wal}
			r.i.relay.activity.enter(phaseStream, "")
			var hang atomic.Bool
			r.s = r.i.relay.newStream(r.gates, func(context.Context) (outbox.Pass, error) { return r.here(), nil },
				func(ctx context.Context, _ bool) error {
					if hang.Load() && ctx.Err() == nil {
						pass(publishTimeout)
					}
					return nil
				})
			ctx, cancel := context.WithCancelCause(context.Background())
			done := background(func() error { return r.s.run(ctx) })
			soon()
			tx := r.writes("order a")
			soon()
			hang.Store(true)
			pass(guardInterval + 10*time.Millisecond)
			began := time.Now()
			cancel(why)
			_ = <-done
			if took := time.Since(began); took > 6*time.Second {
				t.Errorf("%v: the stop took %v of a drain timeout of 6s", why, took)
			}
			tx.show()
		})
	}
}
