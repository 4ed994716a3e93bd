package relay

import (
	"context"
	"testing"
	"time"

	"posthaste/outbox"
)

// following runs do with an instance that does not lead. The leader exists only in the table: mode poll, with gates
// raised. assist runs one round, limited to two minutes so that an endless sweep fails the test.
func following(t *testing.T, do func(w *world, i *instance, assist func() error, locks *lockSession)) {
	t.Helper()
	inWorld(t, Options{}, func(w *world) {
		leader := w.instance("leader").lead(t)
		w.pg.state.Desired = outbox.ModePoll
		leader.adopts(w.t)
		w.pg.state.Active = outbox.ModePoll
		i := w.instance("one")
		s := i.opens()
		do(w, i, func() error {
			ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
			defer cancel()
			return i.relay.assist(ctx, s)
		}, s)
		if len(w.pg.sharing) > 1 || w.pg.sharing[s] > 0 {
			t.Error("the pipe is still held")
		}
	})
}

// An instance that does not lead sweeps along in poll mode, and stops as soon as its owner is not the table's any more,
// the mode changes, or the leader is gone, whose place it takes.
func TestTheFollowerSweepsAlong(t *testing.T) {
	t.Parallel()
	for name, disturb := range map[string]func(w *world, l *lockSession){
		"another owner":      func(w *world, _ *lockSession) { w.pg.state.Owner.Epoch++ },
		"another nonce":      func(w *world, _ *lockSession) { w.pg.state.Owner.Nonce[0]++ },
		"another mode":       func(w *world, _ *lockSession) { w.pg.state.Desired = outbox.ModeAuto },
		"nobody polls":       func(w *world, _ *lockSession) { w.pg.state.Active = outbox.ModeStandby },
		"the leader is gone": func(w *world, _ *lockSession) { w.pg.leader = nil },
	} {
		following(t, func(w *world, i *instance, assist func() error, locks *lockSession) {
			done := background(assist)
			row := w.event("order", "a")
			pass(2 * time.Second)
			if w.pg.owed(row) || w.published("outbox.order") == nil {
				w.t.Fatalf("%s: it does not sweep along", name)
			}
			if st := i.relay.Status(); st.Mode != outbox.ModePoll || st.Leader || st.Epoch != 1 {
				t.Errorf("%s: status %+v", name, st)
			}
			w.do(func() { disturb(w, locks) })
			pass(time.Second)
			select {
			case err := <-done:
				if err != nil {
					t.Errorf("%s: ended with %v", name, err)
				}
			default:
				t.Errorf("%s: it sweeps on", name)
				_ = <-done
			}
			if took := w.pg.leader == locks; took != (name == "the leader is gone") {
				t.Errorf("%s: leads now: %v", name, took)
			}
		})
	}
}

// A follower publishes to the server that the leader has adopted under, and to no other: that one may lack something.
func TestTheFollowerStaysWithTheLeadersServer(t *testing.T) {
	t.Parallel()
	following(t, func(w *world, i *instance, assist func() error, _ *lockSession) {
		w.rd.restart()
		row := w.event("order", "a")
		if err := assist(); err != nil || !w.pg.owed(row) || w.count("Sweep.Parts") > 0 {
			t.Errorf("%v; row owed: %v", err, w.pg.owed(row))
		}
		if !i.anyone {
			t.Error("it stays bound to a server that it does not publish to")
		}
	})
}

// A sweep along that is finished is the leader's to repair: the follower says nothing, and tries again.
func TestAFollowerThatIsFinished(t *testing.T) {
	t.Parallel()
	following(t, func(w *world, i *instance, assist func() error, _ *lockSession) {
		time.AfterFunc(time.Second, func() {
			w.do(w.rd.restart)
			w.event("order", "a")
		})
		if err := assist(); err != nil {
			t.Errorf("ended with %v", err)
		}
		i.relay.health.clear(conditionPostgres)
		i.says(t)
	})
}

// If there is nothing to sweep, a standby waits a little and does not touch the locks.
func TestAStandbyWaits(t *testing.T) {
	t.Parallel()
	following(t, func(w *world, i *instance, assist func() error, _ *lockSession) {
		n := w.count("Locks.TryPipe")
		w.pg.state.Active = outbox.ModeCDC
		began := time.Now()
		if err := assist(); err != nil || time.Since(began) < 300*time.Millisecond {
			t.Errorf("%v after %v", err, time.Since(began))
		}
		if w.count("Locks.TryPipe") != n || i.relay.Status().Phase != "standby" {
			t.Errorf("status %+v", i.relay.Status())
		}
		// A state that was read before the lock was acquired may be outdated.
		w.pg.state.Active = outbox.ModePoll
		w.after(callTime+callTime/2, func() { w.pg.state.Active = outbox.ModeStandby })
		if err := assist(); err != nil || w.count("Sink.Bind") != 1 {
			t.Errorf("it sweeps along nobody, %v", err)
		}
	})
}
