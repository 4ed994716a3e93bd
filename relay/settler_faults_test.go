package relay

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"posthaste/outbox"
)

// Whatever fails is repeated while the intake lasts, step by step; nothing is settled twice, and what arrives late does
// no harm.
func TestSettlingIsRepeated(t *testing.T) {
	t.Parallel()
	for _, step := range []string{"Sink.Confirm", "Store.Marker", "Marker.Look", "Marker.Move"} {
		for n := range 2 {
			for k := refused; k <= late; k++ {
				inRig(t, Options{}, func(r *rig) {
					r.plan = fault{step, n, k}
					rows := r.commit("done", "done")
					r.stream(rows...)
					pass(2 * time.Second)
					if n > 0 && step == "Store.Marker" { // there is no second one without a reason
						r.do(func() { r.pg.crash() })
					}
					rows = r.commit("done")
					r.s.chunks <- chunk(rows...)
					pass(20 * time.Second)
					if r.i.settled != rows[0].End || r.owedRows() != 0 || !r.struck ||
						value(t, r.i.relay.metrics.settled) != 3 {
						t.Errorf("%s: the slot is told %v, want %v; %d rows are owed, struck %v", r.plan, r.i.settled,
							rows[0].End, r.owedRows(), r.struck)
					}
					if len(r.s.settler.tracker.entries)+len(r.s.settler.tracker.rows) > 0 {
						t.Errorf("%s: the settler remembers something", r.plan)
					}
				})
			}
		}
	}
}

// A server that crashes ends its sessions and assigns the same ids again. Scan results from before the crash are
// invalid.
func TestSettlingAcrossACrash(t *testing.T) {
	t.Parallel()
	inRig(t, Options{}, func(r *rig) {
		r.stream(r.commit("done")...)
		pass(3 * time.Second)
		aborted := r.begin()
		aborted.rollback()
		rows := r.commit("done")
		r.begin().rollback()
		r.s.chunks <- chunk(rows...)
		pass(1500 * time.Millisecond)
		r.begin().rollback()
		pass(3 * time.Second) // a look sees an id that is nowhere written
		r.do(r.pg.crash)
		again := r.begin()
		late := again.insert("order", "b", "done")
		pass(5 * time.Second)
		again.commitNow()
		pass(3 * time.Second)
		if !r.pg.owed(late) || r.owedRows() != 1 {
			t.Errorf("%d rows are owed, want the one that is not delivered", r.owedRows())
		}
		r.s.chunks <- chunk(again.delivered()...)
		pass(3 * time.Second)
		if r.owedRows() != 0 || r.i.settled != again.end {
			t.Errorf("%d rows are owed; the slot is told %v, want %v", r.owedRows(), r.i.settled, again.end)
		}
	})
}

// After the intake has ended, the first failure ends settling. Unsettled events become doubt, and nothing waits for
// them.
func TestSettlingEndsWithTheFirstFailureAfterTheIntake(t *testing.T) {
	t.Parallel()
	for _, step := range []string{"Sink.Confirm", "Store.Marker", "Marker.Look", "Marker.Move"} {
		inRig(t, Options{}, func(r *rig) {
			r.plan = fault{step, 0, late}
			_, settling := r.stream(r.commit("done")...)
			pass(1500 * time.Millisecond)
			r.end(errors.New("stopping"))
			pass(callLimit)
			if n := r.count(step); n != 1 || len(settling) != 1 {
				t.Errorf("%s: %d attempts, want the one that was under way", step, n)
			}
		})
	}
}

// A leader that was succeeded moves no mark, and its stream ends.
func TestASupersededSettlerEnds(t *testing.T) {
	t.Parallel()
	inRig(t, Options{}, func(r *rig) {
		r.do(func() { r.pg.state.Owner.Nonce[0]++ })
		_, settling := r.stream(r.commit("done")...)
		if err := <-settling; !errors.Is(err, outbox.ErrSuperseded) || r.owedRows() != 1 {
			t.Errorf("ended with %v; %d rows are owed", err, r.owedRows())
		}
		if !hopeless(context.Cause(r.intake)) || r.i.settled != 0 || r.count("Sink.Settled") > 0 {
			t.Errorf("the intake ended with %v; the slot is told %v, or the gate", context.Cause(r.intake), r.i.settled)
		}
	})
}

// In an orderly stop the mark continues to move until everything is settled, without waiting for the next second.
func TestTheLastFlightsAreSettled(t *testing.T) {
	t.Parallel()
	inRig(t, Options{}, func(r *rig) {
		_, settling := r.stream(r.commit("done")...)
		pass(3 * time.Second)
		tx := r.begin()
		tx.insert("order", "b", "done")
		tx.write()
		r.s.chunks <- chunk(tx.delivered()...)
		pass(10 * time.Millisecond)
		r.end(errors.New("stopping"))
		pass(5 * time.Second)
		if len(settling) > 0 {
			t.Fatal("it ended, and something is not settled")
		}
		tx.show()
		pass(100 * time.Millisecond)
		if len(settling) != 1 || r.owedRows() != 0 || r.i.settled != tx.end {
			t.Errorf("%d rows are owed; the slot is told %v, want %v", r.owedRows(), r.i.settled, tx.end)
		}
	})
}

// noMarkers is a Store that opens no markers while it is broken.
type noMarkers struct {
	Marks
	w      *world
	broken bool // guarded by world.mu, and tries
	tries  int
}

func (n *noMarkers) Marker(ctx context.Context) (outbox.Marker, error) {
	var broken bool
	n.w.do(func() { broken, n.tries = n.broken, n.tries+1 })
	if broken {
		return nil, errRefused
	}
	return n.Marks.Marker(ctx)
}

// A failure to settle is reported after a while, and the report is cleared when settling works again.
func TestWhatCannotBeSettledIsSaid(t *testing.T) {
	t.Parallel()
	for step, broken := range map[string]func(r *rig) *bool{
		"confirm": func(r *rig) *bool { return &r.rd.down },
		"open": func(r *rig) *bool {
			n := &noMarkers{Marks: r.s.settler.store, w: r.world}
			r.s.settler.store = n
			return &n.broken
		},
	} {
		inRig(t, Options{}, func(r *rig) {
			down := broken(r)
			r.from(1)
			publishing := r.goPublish()
			r.s.chunks <- chunk(r.commit("done")...)
			soon()
			r.do(func() { *down = true })
			settling := r.goSettle()
			pass(patience - time.Second)
			if bad, _ := r.i.reasons(); len(bad) > 0 {
				t.Errorf("%s: said too early: %v", step, bad)
			}
			pass(4 * time.Second)
			if bad, _ := r.i.reasons(); len(bad) != 1 || !strings.HasPrefix(bad[0], "settle: "+step+": ") {
				t.Errorf("%s: reasons %v", step, bad)
			}
			r.do(func() { *down = false })
			pass(3 * time.Second)
			if bad, _ := r.i.reasons(); len(bad) > 0 || len(publishing)+len(settling) > 0 || r.owedRows() > 0 {
				t.Errorf("%s: afterwards %v, or a part has ended", step, bad)
			}
		})
	}
}

// A settler that is finished ends the publisher first, which may be waiting for it.
func TestASettlerThatIsFinishedEndsThePublisher(t *testing.T) {
	t.Parallel()
	inRig(t, Options{Window: 2}, func(r *rig) {
		r.from(1)
		publishing := r.goPublish()
		r.s.chunks <- chunk(r.transactions(3)...)
		soon()
		r.do(r.rd.flush)
		settling := r.goSettle()
		if err := <-publishing; err != nil {
			t.Errorf("the router ended with %v", err)
		}
		if err := <-settling; !errors.Is(err, outbox.ErrGap) {
			t.Errorf("the settler ended with %v", err)
		}
		if r.owedRows() != 3 {
			t.Errorf("%d rows are owed, want all: nothing is confirmed", r.owedRows())
		}
	})
}

// Work that ends while a row is not visible ends the wait for it.
func TestSettlingEndsWithTheWork(t *testing.T) {
	t.Parallel()
	inRig(t, Options{}, func(r *rig) {
		tx := r.begin()
		tx.insert("order", "a", "done")
		tx.write()
		_, settling := r.stream(tx.delivered()...)
		soon()
		why := errors.New("drain timeout")
		r.end(why)
		r.stopWork(why)
		if err := <-settling; !errors.Is(err, why) && !errors.Is(err, context.Canceled) {
			t.Errorf("ended with %v", err)
		}
		tx.show()
	})
}
