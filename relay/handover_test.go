package relay

import (
	"context"
	"errors"
	"slices"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"posthaste/outbox"
)

// inHandOver runs do with a leadership that has adopted and has a usable slot.
func inHandOver(t *testing.T, do func(w *world, l *leadership)) {
	t.Helper()
	inLeadership(t, Options{}, func(w *world, l *leadership) {
		w.pg.slot = &slot{w: w, confirmed: 500, restart: 500}
		if tr, err := l.adopt(context.Background()); err != nil || tr != onWantStream {
			w.t.Fatalf("%s, %v", tr, err)
		}
		l.activity.enter(phaseHandover, "")
		do(w, l)
	})
}

// sweeping are the calls of the sweeper, of the sink and of the state, which are not what a hand-over is about.
var sweeping = []string{
	"Sweep.Parts", "Sweep.Claim", "Sweep.Begin", "Sweep.Page", "Sweep.Settle", "Sweep.Release", "Sweep.Reached",
	"Store.Streams", "Store.NoteStream", "Sink.Look", "Sink.Adopt", "Store.Gated",
	"Sink.Publish", "Sink.Confirm", "Sink.Settled", "Sink.Check", "Store.State",
}

// compact drops repetitions: a drain has two workers.
func compact(calls []string) []string { return slices.Compact(calls) }

// The slot is moved to a place in the WAL only when everything before it is visible, and was swept after that.
func TestTheShortCutComesAfterAPassThatSawEverything(t *testing.T) {
	t.Parallel()
	inHandOver(t, func(w *world, l *leadership) {
		tx := w.writes("order a")
		row := tx.rows[0]
		w.after(2*time.Second, tx.over)
		from := len(w.trace)
		tr, err := l.handOver(context.Background())
		if err != nil || tr != onReady || w.pg.owed(row) || w.pg.slot.confirmed < tx.end ||
			l.noted != w.pg.slot.confirmed {
			t.Errorf("%s, %v; row owed: %v; slot at %v, noted %v, want behind %v", tr, err, w.pg.owed(row),
				w.pg.slot.confirmed, l.noted, tx.end)
		}
		want := []string{
			"Store.BeginPass", "Slots.Status", "Store.Horizon", "Store.VisibleBelow", "Store.BeginPass",
			"Slots.Advance", "Store.LowerBarrier",
		}
		if got := compact(w.calls(from, sweeping...)); !slices.Equal(got, want) {
			t.Errorf("calls\n%v, want\n%v", got, want)
		}
	})
}

// During a long transaction the stream begins at the slot's position. No event is skipped, and the wait is short.
func TestBesideALongTransactionThereIsNoShortCut(t *testing.T) {
	t.Parallel()
	inHandOver(t, func(w *world, l *leadership) {
		tx := w.begin()
		began := time.Now()
		tr, err := l.handOver(context.Background())
		if err != nil || tr != onReady || w.pg.slot.confirmed != 500 || l.noted != 500 {
			t.Errorf("%s, %v; the slot stands at %v, noted %v", tr, err, w.pg.slot.confirmed, l.noted)
		}
		if d := time.Since(began); d < visibleWait || d > visibleWait+time.Second {
			t.Errorf("waited %v", d)
		}
		tx.rollback()
	})
}

// If the slot was moved earlier without waiting, the stream cannot begin while an older transaction is open. The relay
// continues to sweep, reports the reason, and streams when the transaction has ended.
func TestABarrierRefusesTheHandOver(t *testing.T) {
	t.Parallel()
	for _, barrier := range []uint64{0, outbox.BarrierUnknown} {
		inHandOver(t, func(w *world, l *leadership) {
			tx := w.begin()
			if w.pg.state.Barrier = barrier; barrier == 0 {
				w.pg.state.Barrier = tx.xid + 1
			}
			tr, err := l.handOver(context.Background())
			if tr != onNotReady || slotReason(err) != outbox.ReasonTransactionHeld || w.pg.slot.confirmed != 500 {
				t.Errorf("%s, %v; the slot stands at %v", tr, err, w.pg.slot.confirmed)
			}
			if _, degraded := l.health.lists(); len(degraded) != 1 || w.pg.state.Degraded == "" || l.failures != 1 {
				t.Errorf("degraded %v, state %q, %d failures", degraded, w.pg.state.Degraded, l.failures)
			}
			if w.pg.state.Barrier == outbox.BarrierUnknown {
				t.Error("the barrier stays unknown: the next hand-over would wait for what is younger")
			}
			tx.commitNow()
			if tr, err = l.handOver(context.Background()); err != nil || tr != onReady || w.pg.state.Barrier != 0 {
				t.Errorf("afterwards: %s, %v, barrier %d", tr, err, w.pg.state.Barrier)
			}
		})
	}
}

// Rows that the publication left out may belong to a transaction that is still open when the publication is repaired,
// which ends the stream. No stream begins before that transaction has ended.
func TestWhatThePublicationLeftOutIsWaitedFor(t *testing.T) {
	t.Parallel()
	inWorld(t, Options{}, func(w *world) {
		w.start("one")
		w.event("order", "a")
		w.settles(outbox.ModeCDC)
		w.do(func() { w.pg.unpublished = true })
		tx := w.begin("order a")
		w.do(func() { w.pg.unpublished = false; w.pg.publication++ })
		w.event("user", "b")
		pass(time.Minute)
		w.do(func() {
			if w.pg.state.Active != outbox.ModePoll {
				w.wrongly("the mode is %s", w.pg.state.Active)
			}
		})
		tx.commitNow()
		w.event("order", "a")
		w.ends(outbox.ModeCDC)
	})
}

// A leader that begins with a backlog sweeps until there is a slot, stops, and makes the passes of the hand-over, all
// over the same connections: the pages that were begun when it stopped are completed.
func TestAHandOverKeepsTheConnections(t *testing.T) {
	t.Parallel()
	inWorld(t, Options{}, func(w *world) {
		for n := range 1500 {
			w.event("order", strconv.Itoa(n))
		}
		i := w.start("one")
		w.settles(outbox.ModeCDC)
		w.do(func() {
			if i.opened != 2 {
				w.wrongly("the two workers have opened %d connections", i.opened)
			}
		})
		w.ends(outbox.ModeCDC)
	})
}

// A walsender that holds the slot is given half a second to end by itself, and then ended.
func TestTheHandOverFreesTheSlot(t *testing.T) {
	t.Parallel()
	for _, slow := range []bool{false, true} {
		inHandOver(t, func(w *world, l *leadership) {
			ws := &walsender{of: w.instance("two"), slot: w.pg.slot, gone: make(chan struct{})}
			w.pg.slot.active = ws
			if !slow {
				w.after(200*time.Millisecond, ws.end)
			}
			if tr, err := l.handOver(context.Background()); err != nil || tr != onReady {
				t.Errorf("%s, %v", tr, err)
			}
			if n := w.count("Slots.Evict"); (n == 1) != slow {
				t.Errorf("slow %v: ended %d times", slow, n)
			}
		})
	}
}

// A toggle during a hand-over is not a failure of the slot; an error of the slot is.
func TestWhatRefusesAHandOver(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		disturb  func(w *world) // after a second
		plan     fault
		want     transition
		failures int
	}{
		"a toggle": {func(w *world) {
			w.wants(outbox.ModePoll)
		}, fault{}, onOver, 0},
		"a gap":           {func(w *world) { w.do(w.rd.flush); w.event("order", "a") }, fault{}, onOver, 0},
		"a dropped slot":  {func(w *world) { w.do(w.dropSlot) }, fault{}, onNotReady, 1},
		"a lost reply":    {nil, fault{"Slots.Advance", 0, unheard}, onNotReady, 1},
		"no horizon":      {nil, fault{"Store.Horizon", 0, refused}, onNotReady, 1},
		"no pass":         {nil, fault{"Store.BeginPass", 0, refused}, onNotReady, 1},
		"a silent status": {nil, fault{"Slots.Status", 0, late}, onNotReady, 1},
	} {
		inHandOver(t, func(w *world, l *leadership) {
			w.event("order", "a")
			tx := w.begin() // so that it takes a while
			w.plan = c.plan
			if c.disturb != nil {
				time.AfterFunc(time.Second, func() { c.disturb(w) })
			}
			time.AfterFunc(3*time.Second, tx.commitNow)
			ctx, cancel := context.WithCancelCause(context.Background())
			defer bound(cancel)()
			tr, _ := l.handOver(ctx)
			if tr != c.want || l.failures != c.failures {
				t.Errorf("%s: %s with %d failures, want %s with %d", name, tr, l.failures, c.want, c.failures)
			}
		})
	}
}

// The server may take long to move the slot, for the hand-over or the keeper: it waits for standbys, and one of them
// may be dead. Events are swept meanwhile, and a toggle is heard.
func TestEventsDoNotWaitForTheSlotToBeMoved(t *testing.T) {
	t.Parallel()
	slow := func(w *world, _ *leadership) { w.plan = fault{"Slots.Advance", 0, late} }
	for name, c := range map[string]struct {
		disturb  func(w *world, l *leadership)
		toggled  bool
		want     transition
		failures int
	}{
		"by the hand-over": {slow, false, onNotReady, 1},
		"toggled":          {slow, true, onOver, 0},
		"by the keeper": {func(_ *world, l *leadership) {
			l.keeper.mu.Lock()
			time.AfterFunc(callLimit, l.keeper.mu.Unlock)
		}, false, onReady, 0},
	} {
		inHandOver(t, func(w *world, l *leadership) {
			c.disturb(w, l)
			var published atomic.Int64
			time.AfterFunc(2*time.Second, func() {
				w.event("order", "a")
				if c.toggled {
					w.wants(outbox.ModePoll)
				}
			})
			time.AfterFunc(callLimit-time.Second, func() { published.Store(int64(len(w.published("outbox.order")))) })
			began := time.Now()
			tr, err := l.handOver(context.Background())
			took := time.Since(began)
			if tr != c.want || l.failures != c.failures || c.toggled && took > callLimit-time.Second {
				t.Errorf("%s: %s after %v, %v, %d failures; want %s and %d", name, tr, took, err, l.failures, c.want,
					c.failures)
			}
			if n := published.Load(); !c.toggled && n != 1 {
				t.Errorf("%s: %d events were published meanwhile, want 1", name, n)
			}
		})
	}
}

// Once no other program can move the slot, the hand-over makes one more pass, writes it as the mark of every part,
// reads H and records the mode. Everything committed until then is swept and not streamed again.
func TestTheEndOfAHandOver(t *testing.T) {
	t.Parallel()
	inHandOver(t, func(w *world, l *leadership) {
		l.noted = 500
		row := w.event("order", "a")
		from := len(w.trace)
		at, err := l.endHandOver(context.Background())
		h, st, m := at.End, w.pg.state, w.pg.marks[len(w.pg.marks)-1]
		if err != nil || h < row.tx.end || st.Handover != h || st.Active != outbox.ModeCDC || l.mode != outbox.ModeCDC {
			t.Errorf("H is %v, %v; state %+v", h, err, st)
		}
		if m.part != -1 || m.settled == nil || !equal(*m.settled, at.Settled) || !holds(&at.Settled, row) {
			t.Errorf("the last mark is %+v, and the stream begins with %+v", m, at)
		}
		want := []string{"Slots.Status", "Store.BeginPass", "Store.SettleAll", "Store.InsertLSN", "Store.SetActive"}
		if got := compact(w.calls(from, sweeping...)); !slices.Equal(got, want) {
			t.Errorf("calls %v, want %v", got, want)
		}
	})
}

// If another program moves the slot during a hand-over, the slot may have passed commits that are not visible. The
// relay records that and starts the hand-over again.
func TestASlotMovedDuringTheHandOver(t *testing.T) {
	t.Parallel()
	inHandOver(t, func(w *world, l *leadership) {
		l.noted = 500
		w.do(w.moveSlot)
		_, err := l.endHandOver(context.Background())
		if slotReason(err) != outbox.ReasonSlotActive || w.pg.state.Barrier != outbox.BarrierUnknown ||
			w.count("Store.BeginPass") > 0 {
			t.Errorf("%v, barrier %d", err, w.pg.state.Barrier)
		}
		w.plan = fault{"Store.RaiseBarrier", 1, refused}
		if _, err = l.endHandOver(context.Background()); !errors.Is(err, errRefused) {
			t.Errorf("a barrier that cannot be noted: %v", err)
		}
	})
}

// Readiness does not flicker: the reason why the slot was not streamed is cleared at once only if no stream has failed
// before.
func TestReadinessDoesNotFlicker(t *testing.T) {
	t.Parallel()
	for _, failures := range []int{0, 1} {
		inHandOver(t, func(w *world, l *leadership) {
			l.noted, l.failures, l.degraded = 500, failures, "slot_lost"
			l.health.degrade(conditionSlot, "slot_lost")
			_, err := l.endHandOver(context.Background())
			w.must(err)
			_, degraded := l.health.lists()
			if (len(degraded) > 0) != (failures > 0) || (w.pg.state.Degraded != "") != (failures > 0) {
				t.Errorf("after %d failures: degraded %v, state %q", failures, degraded, w.pg.state.Degraded)
			}
			guard := l.guard()
			if err := guard(context.Background(), true); err != nil || w.pg.state.Degraded != "" {
				t.Errorf("a stream that runs well: %v, state %q", err, w.pg.state.Degraded)
			}
			n := w.count("Store.SetActive")
			if err := guard(context.Background(), true); err != nil || w.count("Store.SetActive") != n {
				t.Errorf("it is recorded again, %v", err)
			}
		})
	}
}
