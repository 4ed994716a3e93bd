package relay

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"posthaste/outbox"
	"posthaste/relay/stream"
)

// Events that an earlier owner published stay in doubt until everything it may have read is visible and was swept after
// that.
func TestDoubtOutlivesWhatNobodySees(t *testing.T) {
	t.Parallel()
	inWorld(t, Options{}, func(w *world) {
		w.wants(outbox.ModeCDC)
		w.event("order", "a") // a stream that is met later would ask the table
		first := w.start("first")
		pass(2 * time.Second)
		held := w.writes("order a")
		pass(time.Second)
		w.publishes("outbox.order", 2)
		w.do(func() { first.die(true); w.pg.state.Desired = outbox.ModePoll })
		w.start("second")
		pass(time.Minute)
		w.called("Sink.ForgetDoubt", 1) // the first owner's
		held.show()
		pass(5 * time.Second)
		w.called("Sink.ForgetDoubt", 2) // once when all is visible
		if n := len(w.rd.gates["outbox.order"].doubt); n > 0 {
			t.Errorf("%d events are in doubt", n)
		}
		w.ends(outbox.ModePoll)
	})
}

// Doubt is cleared only after a pass that began when everything was visible: an earlier sweep may already have read
// past the row.
func TestDoubtIsForgottenAfterAPass(t *testing.T) {
	t.Parallel()
	inLeadership(t, Options{}, func(w *world, l *leadership) {
		w.pg.state.Desired = outbox.ModePoll
		l.adopts(w.t)
		row := w.event("order", "a")
		if err := l.forgetDoubt(context.Background(), []string{"outbox.order"}, true); err != nil || w.pg.owed(row) {
			t.Errorf("%v; row owed: %v", err, w.pg.owed(row))
		}
		w.plan = fault{"Sink.ForgetDoubt", w.counts["Sink.ForgetDoubt"], refused}
		if err := l.forgetDoubt(context.Background(), []string{"outbox.order"}, true); err != nil {
			t.Errorf("what costs memory only ended the phase: %v", err)
		}
	})
}

// A stream that was met after the horizon may have in doubt what is younger than it: it is left alone.
func TestDoubtOfStreamsMetLaterStays(t *testing.T) {
	t.Parallel()
	inWorld(t, Options{}, func(w *world) {
		w.pg.state.Desired = outbox.ModePoll
		tx := w.begin() // so that the horizon is not reached
		w.start("one")
		pass(time.Second)
		w.event("user", "b")
		pass(time.Second)
		tx.rollback()
		pass(3 * time.Second)
		w.called("Sink.ForgetDoubt", 0)
		w.called("Store.Horizon", 1)
		w.judge()
	})
}

// A leader that polls takes the pipe for itself as soon as that is wanted and possible, and not before.
func TestPollingEndsWhenThePipeIsFree(t *testing.T) {
	t.Parallel()
	inWorld(t, Options{}, func(w *world) {
		w.pg.state.Desired = outbox.ModePoll
		w.event("order", "a")
		w.start("one")
		pass(time.Second)
		other := w.shares()
		w.wants(outbox.ModeCDC)
		pass(10 * time.Second)
		if w.pg.state.Active != outbox.ModePoll || w.pg.state.Owner.Epoch != 1 {
			t.Errorf("active %s under epoch %d beside another poller", w.pg.state.Active, w.pg.state.Owner.Epoch)
		}
		other.Close()
		w.ends(outbox.ModeCDC)
	})
}

// If the slot cannot be used, the relay retries with growing pauses and continues to sweep. It reports the reason: as a
// fault if cdc is forced, otherwise as degraded.
func TestASlotThatCannotBeUsed(t *testing.T) {
	t.Parallel()
	for _, mode := range []outbox.Mode{outbox.ModeCDC, outbox.ModeAuto} {
		inWorld(t, Options{}, func(w *world) {
			w.pg.state.Desired = mode
			tx := w.begin()
			i := w.start("one") // no slot can be made beside an open transaction
			pass(20 * time.Second)
			row := w.event("order", "a")
			pass(time.Second)
			bad, degraded := i.reasons()
			if mode == outbox.ModeCDC {
				bad, degraded = degraded, bad
			}
			if len(bad) > 0 || len(degraded) != 1 || !strings.HasPrefix(degraded[0], "slot: transaction_held") ||
				w.pg.owed(row) {
				t.Errorf("%s: reasons %v, the other ones %v; row owed: %v", mode, degraded, bad, w.pg.owed(row))
			}
			if n := w.count("Slots.Ensure"); n < 3 || n > 6 {
				t.Errorf("tried %d times in 20 s", n)
			}
			if h := i.relay.Health(); h.Ready != (mode == outbox.ModeAuto) || h.Role != "leader" {
				t.Errorf("health %+v", h)
			}
			tx.rollback()
			w.ends(outbox.ModeCDC)
		})
	}
}

// A gate that is lost, or another's, is noticed within about a second without an event; trouble in asking is no answer.
func TestGatesAreWatched(t *testing.T) {
	t.Parallel()
	inLeadership(t, Options{}, func(w *world, l *leadership) {
		w.pg.streams = streamsOf("outbox.order")
		l.adopts(w.t)
		watch := func() error { return l.watchGates(context.Background()) }
		for range 10 {
			w.must(watch())
			pass(200 * time.Millisecond)
		}
		w.called("Sink.Check", 2)
		owner := &w.rd.gates["outbox.order"].owner
		for name, c := range map[string]struct {
			disturb, restore func()
			fatal            bool
		}{
			"down":    {func() { w.rd.down = true }, func() { w.rd.down = false }, false},
			"foreign": {func() { owner.Source[0]++ }, func() { owner.Source[0]-- }, true},
			"fenced":  {func() { owner.Epoch++ }, func() { owner.Epoch-- }, true},
			"moved":   {w.rd.restart, func() { w.rd.run-- }, true},
		} {
			w.do(c.disturb)
			pass(time.Second)
			if err := watch(); (err != nil) != c.fatal {
				t.Errorf("%s: %v", name, err)
			}
			w.do(c.restore)
		}
	})
}

// A pass that takes long ends when another instance has adopted or another mode is desired. A state that cannot be read
// does not end it.
func TestALongPass(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		disturb func(w *world)
		want    error
	}{
		"nothing happens": {func(*world) {}, nil},
		"superseded":      {func(w *world) { w.pg.state.Owner.Epoch++ }, outbox.ErrSuperseded},
		"toggled":         {func(w *world) { w.pg.state.Desired = outbox.ModePoll }, errToggled},
		"cdc for auto":    {func(w *world) { w.pg.state.Desired = outbox.ModeCDC }, nil},
		"no answer":       {func(w *world) { w.plan = fault{"Store.State", w.counts["Store.State"], refused} }, nil},
	} {
		inLeadership(t, Options{}, func(w *world, l *leadership) {
			l.adopts(w.t)
			w.event("order", "a")
			w.rd.down = true
			w.after(time.Second, func() { c.disturb(w) })
			w.after(5*time.Second, func() { w.rd.down = false })
			if _, err := l.drain(context.Background(), false); !errors.Is(err, c.want) {
				t.Errorf("%s: %v, want %v", name, err, c.want)
			}
		})
	}
}

// A state that cannot be read is said after a while, by a leader that keeps its locks, and taken back.
func TestAStateThatCannotBeReadIsSaid(t *testing.T) {
	t.Parallel()
	inLeadership(t, Options{}, func(_ *world, l *leadership) {
		ctx, gone := context.Background(), errors.New("no answer")
		l.answered(ctx, gone)
		pass(patience)
		l.answered(ctx, gone)
		l.health.says(t)
		pass(time.Second)
		stopping, stop := context.WithCancel(ctx)
		stop()
		l.answered(stopping, gone)
		l.health.says(t)
		l.answered(ctx, gone)
		l.health.says(t, "postgres_state: no answer")
		l.answered(ctx, nil)
		l.health.says(t)
	})
}

// A leader whose phases all fail before they begin to work is reported after a while; the report is cleared when one
// works.
func TestALeaderThatDoesNotComeToItsWork(t *testing.T) {
	t.Parallel()
	inLeadership(t, Options{}, func(_ *world, l *leadership) {
		why := errors.New("the pipe cannot be asked for")
		l.failing(why)
		pass(patience + time.Second)
		l.failing(why)
		l.health.says(t, "lead: "+why.Error())
		l.working()
		l.failing(why)
		l.health.says(t)
	})
}

// A leader whose work fails repeatedly is not ready, even if each attempt begins well; it is degraded if events still
// flow. It is ready again when nothing has failed for a while.
func TestWorkThatFailsAgainAndAgain(t *testing.T) {
	t.Parallel()
	inLeadership(t, Options{}, func(_ *world, l *leadership) {
		fails := func(d time.Duration, moves int64) (bad, degraded []string) {
			for end := time.Now().Add(d); time.Now().Before(end); pass(time.Second) {
				l.moved.Add(moves)
				l.recurs(conditionPhase, errors.New("a part has a later mark"), false)
			}
			return l.health.lists()
		}
		if bad, degraded := fails(steady-time.Second, 0); len(bad)+len(degraded) > 0 {
			t.Errorf("at first not ready %v, degraded %v", bad, degraded)
		}
		if bad, _ := fails(3*time.Second, 0); len(bad) != 1 || bad[0] != "phase: a part has a later mark" {
			t.Errorf("not ready %v", bad)
		}
		pass(steady + time.Second)
		l.health.says(t)
		if bad, degraded := fails(steady+2*time.Second, 1); len(bad) > 0 || len(degraded) != 1 {
			t.Errorf("not ready %v, degraded %v while events flow", bad, degraded)
		}
	})
}

// gappy is a sink whose gates are never found as they were left.
type gappy struct{ stream.Sink }

// Check implements stream.Sink.
func (gappy) Check(context.Context, outbox.Owner, []string) error { return outbox.ErrGap }

// A leader that adopts again and again is not ready.
func TestALeaderThatAdoptsAgainAndAgain(t *testing.T) {
	t.Parallel()
	inLeadership(t, Options{}, func(w *world, l *leadership) {
		l.o.Sink = gappy{l.o.Sink}
		ctx, cancel := context.WithTimeout(context.Background(), steady+20*time.Second)
		defer cancel()
		go func() {
			pass(steady + 15*time.Second)
			l.health.says(t, conditionPhase)
		}()
		_ = l.run(ctx)
	})
}

// Hand-overs that keep failing come slower and slower, and never slower than about ten seconds.
func TestFailingHandOversSlowDown(t *testing.T) {
	t.Parallel()
	l := &leadership{}
	if d := l.delay(); d != 0 {
		t.Errorf("the first waits %v", d)
	}
	for failures, want := range map[int]time.Duration{
		1: 200 * time.Millisecond, 3: 800 * time.Millisecond, 100: 10 * time.Second,
	} {
		l.failures = failures
		if d := l.delay(); d < want*3/4 || d > want*5/4 {
			t.Errorf("after %d failures: %v, want about %v", failures, d, want)
		}
	}
}

// A sweep that waits for the slot ends when polling is wanted: the others may sweep along then.
func TestASweepEndsWhenPollingIsWanted(t *testing.T) {
	t.Parallel()
	inWorld(t, Options{}, func(w *world) {
		tx := w.begin() // no slot can be made beside it
		i := w.start("one")
		pass(3 * time.Second)
		if p := i.relay.Status().Phase; p != string(phaseSweep) || w.pg.alone == nil {
			t.Errorf("it is in %s", p)
		}
		w.wants(outbox.ModePoll)
		pass(5 * time.Second)
		if p := i.relay.Status().Phase; p != string(phasePoll) || w.pg.alone != nil {
			t.Errorf("it is in %s, and the pipe is held alone: %v", p, w.pg.alone != nil)
		}
		tx.rollback()
		w.event("order", "a")
		w.ends(outbox.ModePoll)
	})
}

// A pass that failed on the way and then reached its end with nothing to publish leaves no reason behind: nothing else
// would take it back before the next event.
func TestADrainThatReachesItsEndIsWell(t *testing.T) {
	t.Parallel()
	inLeadership(t, Options{}, func(w *world, l *leadership) {
		l.adopts(w.t)
		l.outcome(errRefused)
		if _, err := l.drain(context.Background(), false); err != nil {
			t.Error(err)
		}
		l.health.says(t)
	})
}
