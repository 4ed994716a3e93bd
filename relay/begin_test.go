package relay

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"posthaste/outbox"
)

// hookedSource is a source whose start a test changes.
type hookedSource struct {
	outbox.Source
	start func(started func(context.Context) error) (func(context.Context) error, error)
}

func (h *hookedSource) Run(ctx context.Context, started func(context.Context) error, out chan<- outbox.Chunk) error {
	started, err := h.start(started)
	if err != nil {
		return err
	}
	return h.Source.Run(ctx, started, out)
}

func (w *world) startHooked(h *hookedSource) *instance {
	i := w.instance("one")
	h.Source = memSource{i}
	i.relay.o.Source = h
	ctx, cancel := context.WithCancel(context.Background())
	w.do(func() {
		i.cancel, i.done = cancel, make(chan struct{})
		w.instances = append(w.instances, i)
	})
	go func() { defer close(i.done); i.err = i.relay.Run(ctx) }()
	return i
}

// A slot that another program moves while a stream is about to begin is noticed, even if that stream never does: the
// next one waits for what the move has passed.
func TestASlotMovedBeforeAStartThatFails(t *testing.T) {
	t.Parallel()
	inWorld(t, Options{}, func(w *world) {
		var tx *transaction
		var armed atomic.Bool
		i := w.startHooked(&hookedSource{start: func(s func(context.Context) error) (func(context.Context) error,
			error,
		) {
			if !armed.CompareAndSwap(true, false) {
				return s, nil
			}
			tx.write()
			w.do(w.moveSlot)
			pass(600 * time.Millisecond)
			return nil, slotTrouble(outbox.ReasonConnection)
		}})
		w.event("order", "x")
		pass(3 * time.Second)
		w.do(func() { w.pg.state.Desired = outbox.ModePoll })
		pass(6 * time.Second)
		tx = w.begin()
		tx.insert("order", "x", "first")
		armed.Store(true)
		w.do(func() { w.pg.state.Desired = outbox.ModeAuto })
		w.eventually("the start has failed", 20*time.Second, func() bool { return !armed.Load() })
		pass(12 * time.Second)
		tx.show()
		pass(30 * time.Second)
		missed := value(t, i.relay.metrics.auditFailures.WithLabelValues(outbox.ReasonMissed))
		if missed != 0 {
			t.Errorf("the audit found %v rows that the stream had passed by", missed)
		}
		w.settles(outbox.ModeCDC)
		w.judge()
	})
}

// A toggle to polling just before the last pass of a hand-over ends the hand-over, no matter how long that pass would
// take.
func TestAToggleBeforeTheLastPass(t *testing.T) {
	t.Parallel()
	inWorld(t, Options{}, func(w *world) {
		i := w.startHooked(&hookedSource{start: func(s func(context.Context) error) (func(context.Context) error,
			error,
		) {
			return func(ctx context.Context) error {
				w.event("order", "x")
				w.do(func() { w.rd.down = true; w.pg.state.Desired = outbox.ModePoll })
				return s(ctx)
			}, nil
		}})
		w.event("order", "x")
		pass(time.Minute)
		if p := i.relay.Status().Phase; p == string(phaseStream) {
			t.Errorf("a minute after polling was asked for the relay is in phase %s", p)
		}
		w.do(func() { w.rd.down = false })
		w.settles(outbox.ModePoll)
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
			done := make(chan error, 1)
			go func() { done <- r.s.run(ctx) }()
			soon()
			tx := r.begin()
			tx.insert("order", "a", "done")
			tx.write()
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
