package relay

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"posthaste/outbox"
)

// goSettle runs the settler on what the publisher hands on; the channel gets what ends it.
func (r *rig) goSettle() <-chan error {
	done := make(chan error, 1)
	go func() { done <- r.s.settler.run(r.span, func(err error) { r.end(err) }) }()
	return done
}

// stream publishes and settles one transaction.
func (r *rig) stream(rows []outbox.Row) (publishing, settling <-chan error) {
	publishing, settling = r.goPublish(), r.goSettle()
	r.s.chunks <- chunk(rows...)
	return publishing, settling
}

func (w *world) table() (n int) {
	w.do(func() { n = w.pg.rows(func(*tableRow) bool { return true }) })
	return n
}

// First the sink confirms, then the rows go, then the slot is told: that is what makes a crash in between harmless.
func TestSettlingHasAnOrder(t *testing.T) {
	t.Parallel()
	inRig(t, Options{}, func(r *rig) {
		rows := r.commit("done", "done")
		r.stream(rows)
		pass(3 * time.Second)
		got := r.calls(0, "Store.NoteStream", "Sink.Adopt", "Sink.ForgetDoubt", "Store.Lookup")
		if want := []string{"Sink.Publish", "Sink.Confirm", "Store.Settle", "Sink.Settled"}; !slices.Equal(got, want) {
			t.Errorf("calls %v, want %v", got, want)
		}
		if r.i.settled != rows[1].End || r.table() != 0 {
			t.Errorf("the slot is told %v, want %v; %d rows left", r.i.settled, rows[1].End, r.table())
		}
		if n, b := r.s.window.held(); n != 0 || b != 0 || r.s.settler.taken.has(rows[0].Seq) {
			t.Errorf("%d events of %d bytes are held in the window, or a row counts as in flight", n, b)
		}
	})
}

// Several flights are settled with one statement, and nothing of any of them is forgotten.
func TestCollectMerges(t *testing.T) {
	t.Parallel()
	flights := make(chan *flight, 4)
	s := &settler{flights: flights}
	one := func(n int64) *flight {
		return &flight{
			items: []outbox.Settlement{{Seq: n}}, marks: []outbox.Mark{{Number: n}}, seqs: []int64{n},
			end: outbox.LSN(n), events: 1,
			bytes: 10,
		}
	}
	flights <- one(3)
	flights <- one(2)
	f := s.collect(one(1))
	if len(f.items) != 3 || len(f.marks) != 3 || len(f.seqs) != 3 || f.end != 3 || f.events != 3 || f.bytes != 30 {
		t.Errorf("got %+v", f)
	}
	flights <- one(4)
	if f := s.collect(&flight{items: make([]outbox.Settlement, settleRows)}); len(f.items) != settleRows ||
		len(flights) != 1 {
		t.Errorf("a full statement takes %d items, and leaves %d flights", len(f.items), len(flights))
	}
	close(flights)
	if f := s.collect(one(1)); len(f.items) != 2 {
		t.Errorf("the last statement takes %d items, want both", len(f.items))
	}
}

// A row that is published before anybody sees it is asked for until it is visible: only then can it be deleted.
func TestSettlingWaitsUntilTheRowIsVisible(t *testing.T) {
	t.Parallel()
	inRig(t, Options{}, func(r *rig) {
		tx := r.begin()
		tx.insert("order", "a", "done")
		tx.write()
		r.stream(tx.delivered())
		pass(10 * time.Second)
		if r.i.settled != 0 || r.count("Store.DeleteAnywhere") != 0 || r.count("Store.Settle") < 10 {
			t.Errorf("the slot is told %v, %d last looks, %d looks", r.i.settled, r.count("Store.DeleteAnywhere"),
				r.count("Store.Settle"))
		}
		tx.show()
		soon()
		if r.i.settled != tx.end || r.table() != 0 {
			t.Errorf("then the slot is told %v, want %v; %d rows left", r.i.settled, tx.end, r.table())
		}
	})
}

// A row that is visible nowhere was settled before: it is looked for in every part once, let go, and counted.
func TestAMissingRowIsLetGo(t *testing.T) {
	t.Parallel()
	inRig(t, Options{}, func(r *rig) {
		rows := r.commit("done", "done", "done")
		r.do(func() {
			at := &r.pg.parts[partOf("a")]
			r.pg.remove((*at)[0])
			stray := (*at)[1] // where its aggregate id does not lead
			*at = (*at)[:1]
			stray.part = (stray.part + 1) % outbox.Partitions
			r.pg.parts[stray.part] = append(r.pg.parts[stray.part], stray)
		})
		r.stream(rows)
		soon()
		m := r.i.relay.metrics
		if value(t, m.missing) != 1 || value(t, m.settled) != 2 || r.count("Store.DeleteAnywhere") != 1 ||
			r.table() != 0 {
			t.Errorf("let go %v, settled %v, %d last looks, %d rows left; want 1, 2, 1, 0", value(t, m.missing),
				value(t,
					m.settled),
				r.count("Store.DeleteAnywhere"), r.table())
		}
		if r.i.settled != rows[2].End {
			t.Errorf("the slot is told %v, want %v", r.i.settled, rows[2].End)
		}
	})
}

// Whatever fails is repeated while the intake lasts, step by step; nothing is settled twice.
func TestSettlingIsRepeated(t *testing.T) {
	t.Parallel()
	for _, step := range []string{"Sink.Confirm", "Store.Settle", "Store.DeleteAnywhere"} {
		for k := refused; k <= late; k++ {
			inRig(t, Options{}, func(r *rig) {
				r.plan = fault{step, 0, k}
				rows := r.commit("done", "done")
				r.do(func() { r.pg.remove(r.pg.parts[partOf("a")][0]) })
				r.stream(rows)
				pass(20 * time.Second)
				if r.i.settled != rows[1].End || r.table() != 0 || !r.struck {
					t.Errorf("%s: the slot is told %v, want %v; %d rows left, struck %v", r.plan, r.i.settled,
						rows[1].End, r.table(), r.struck)
				}
			})
		}
	}
}

// When the intake has ended the first failure ends settling: what is left becomes doubt, and nobody waits.
func TestSettlingEndsWithTheFirstFailureAfterTheIntake(t *testing.T) {
	t.Parallel()
	inRig(t, Options{}, func(r *rig) {
		r.plan = fault{"Sink.Confirm", 0, late}
		r.stream(r.commit("done"))
		soon()
		r.end(errors.New("stopping"))
		pass(callLimit)
		if n := r.count("Sink.Confirm"); n != 1 || r.table() != 1 {
			t.Errorf("%d attempts, %d rows left; want the one that was under way", n, r.table())
		}
	})
}

// What cannot be settled is said after a while, and taken back with the first flight that is.
func TestWhatCannotBeSettledIsSaid(t *testing.T) {
	t.Parallel()
	inRig(t, Options{}, func(r *rig) {
		rows := r.commit("done")
		publishing := r.goPublish()
		r.s.chunks <- chunk(rows...)
		soon()
		r.do(func() { r.rd.down = true })
		settling := r.goSettle()
		pass(patience - time.Second)
		if bad, _ := r.i.reasons(); len(bad) > 0 {
			t.Errorf("said too early: %v", bad)
		}
		pass(3 * time.Second)
		if bad, _ := r.i.reasons(); len(bad) != 1 || !strings.HasPrefix(bad[0], "settle: confirm: ") {
			t.Errorf("reasons %v", bad)
		}
		r.do(func() { r.rd.down = false })
		pass(3 * time.Second)
		if bad, _ := r.i.reasons(); len(bad) > 0 || len(publishing)+len(settling) > 0 {
			t.Errorf("afterwards %v, or a part has ended", bad)
		}
	})
}

// A settler that is finished ends the publisher first, which may be waiting for it.
func TestASettlerThatIsFinishedEndsThePublisher(t *testing.T) {
	t.Parallel()
	inRig(t, Options{Window: 2}, func(r *rig) {
		publishing := r.goPublish()
		r.s.chunks <- chunk(r.commit("done", "done", "done")...)
		soon()
		r.do(r.rd.flush)
		settling := r.goSettle()
		if err := <-publishing; !errors.Is(err, outbox.ErrGap) {
			t.Errorf("the publisher ended with %v", err)
		}
		if err := <-settling; !errors.Is(err, outbox.ErrGap) {
			t.Errorf("the settler ended with %v", err)
		}
		if r.table() != 3 {
			t.Errorf("%d rows left, want all: nothing is confirmed", r.table())
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
		_, settling := r.stream(tx.delivered())
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
