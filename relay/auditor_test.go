package relay

import (
	"context"
	"testing"
	"time"

	"posthaste/outbox"
)

// auditing is an auditor over a world's table, of a stream whose progress the test says.
func auditing(t *testing.T, do func(w *world, a *auditor, at func(passed outbox.LSN, known bool))) {
	t.Helper()
	inWorld(t, Options{}, func(w *world) {
		i := w.instance("one")
		i.relay.health.clear(conditionPostgres)
		var passed outbox.LSN
		var known bool
		a := &auditor{reporter: i.relay.reporter, store: memStore{i}}
		a.progress = func() (outbox.LSN, bool) { return passed, known }
		do(w, a, func(p outbox.LSN, k bool) { passed, known = p, k })
	})
}

// A stream that is blocked for a known reason is not stalled, and the mark that was taken before is discarded.
func TestTheAuditForgetsWhatItKnewBeforeAKnownReason(t *testing.T) {
	t.Parallel()
	auditing(t, func(w *world, a *auditor, at func(outbox.LSN, bool)) {
		at(0, true)
		if err := a.once(context.Background()); err != nil || !a.state.taken {
			w.t.Fatalf("%v", err)
		}
		w.do(func() { w.grow(100) })
		at(0, false)
		pass(time.Hour)
		if err := a.once(context.Background()); err != nil || a.state.taken {
			t.Errorf("%v", err)
		}
		at(0, true)
		if err := a.once(context.Background()); err != nil {
			t.Errorf("a stream that goes on counts as stalled: %v", err)
		}
		w.do(func() { w.grow(100) })
		pass(stallLimit)
		if err := a.once(context.Background()); slotReason(err) != outbox.ReasonStalled {
			t.Errorf("a stream that stands still: %v", err)
		}
	})
}

// A single failed audit is ignored. Repeated failures are reported, and the report is cleared when an audit succeeds.
func TestAnAuditWithoutAnAnswerIsSaid(t *testing.T) {
	t.Parallel()
	auditing(t, func(w *world, a *auditor, at func(outbox.LSN, bool)) {
		for n, want := range []int{0, 1, 1} {
			a.answered(context.Background(), errRefused)
			if bad, _ := a.health.lists(); len(bad) != want {
				t.Errorf("after %d audits without an answer: %v", n+1, bad)
			}
		}
		at(1<<40, true)
		if err := a.once(context.Background()); err != nil {
			w.t.Fatal(err)
		}
		if bad, _ := a.health.lists(); len(bad) > 0 || a.unanswered != 0 {
			t.Errorf("afterwards: %v", bad)
		}
		stopping, stop := context.WithCancel(context.Background())
		stop()
		a.answered(stopping, errRefused)
		if a.unanswered != 0 {
			t.Error("an audit that was cut short counts as one without an answer")
		}
	})
}
