package sinktest

import (
	"errors"
	"slices"

	"github.com/google/uuid"

	"posthaste/outbox"
)

// lostGate loses the gate, and the stream as well if drop is not nil. Only an adoption makes it again.
func lostGate(f *fixture, drop func(stream string), dropGate func(stream string, source uuid.UUID)) {
	o := f.adopted(1)
	l := f.lane(o)
	events := Events(3)
	r := f.publish(l, events[:2]...)
	f.must(f.sink.Confirm(f.Context(), o, mark(StreamLane(o), r.Number)))
	if drop != nil {
		drop(order)
	}
	dropGate(order, f.source)
	if st := f.look(""); st.Gate || st.Intact() || drop == nil && (!st.Behind || st.Last != r.Last) {
		f.Errorf("looked at: %+v", st)
	}
	for call, err := range f.calls(o) {
		f.Log(call)
		f.gap(err)
	}
	d := l.Deliver(events[2:])
	for range 2 {
		_, err := d.Publish(f.Context())
		f.gap(err)
	}
	f.gap(f.sink.Adopt(f.Context(), order, f.owner(2), true))
	if drop != nil {
		f.want()
		f.again(f.lane(f.adopted(2)), 0, events...)
	} else {
		o = f.adopted(2)
		f.must(f.sink.Recall(f.Context(), o, order, IDs(events[:2]), r.Last))
		f.again(f.lane(o), 2, events...)
	}
	f.want(events...)
}

// olderGate puts back a gate that has let through less. It must not be taken for the newer one: not by a publish, also
// of a claim that begins to count again, and not by an adoption of another process, which has only looked at it.
func olderGate(f *fixture) {
	ctx, o := f.Context(), f.adopted(1)
	l := f.lane(o)
	events := Events(3)
	first := f.publish(l, events[0])
	restore := f.SaveGate(order, f.source)
	r := f.publish(l, events[1:]...)
	f.must(f.sink.Confirm(ctx, o, mark(StreamLane(o), r.Number)))
	publisher := f.sink
	f.sink = f.open() // from now on, what has only looked
	if st := f.look(""); !st.Intact() || st.Missing != 0 {
		f.Fatalf("looked at %+v, want it intact", st)
	}
	restore()
	f.gap(publisher.Confirm(ctx, o, mark(StreamLane(o), r.Number)))
	f.gap(f.refusedBy(l))
	f.gap(f.refusedBy(publisher.Lane(order, o, outbox.Lane{Part: 3, Claim: 1, Nonce: Nonce()})))
	f.gap(f.sink.Adopt(ctx, order, f.owner(2), true))
	if st := f.look(""); !st.Behind || st.Missing != 2 || st.Last != first.Last {
		f.Errorf("looked at %+v, want it behind, with 2 missing", st)
	}
	o = f.adopted(3) // of one that knows, and compares
	f.must(f.sink.Recall(ctx, o, order, IDs(events[1:]), r.Last))
	f.again(f.lane(o), 3, events...)
	f.want(events...)
	f.must(f.sink.Adopt(ctx, order, f.owner(4), true))
}

// lostStream deletes the stream and leaves the gate; remake may make the stream again. Nothing is in doubt then.
func lostStream(f *fixture, remake func()) {
	ctx, o := f.Context(), f.adopted(1)
	l := f.lane(o)
	events := Events(4)
	f.publish(l, events[:3]...)
	f.must(f.sink.Check(ctx, o, []string{order}))
	f.Drop(order)
	remake()
	f.gap(f.sink.Check(ctx, o, []string{order}))
	f.gap(f.refusedBy(l))
	f.gap(f.sink.Adopt(ctx, order, f.owner(2), true))
	if st := f.look(""); !st.Gate || !st.Forgot || st.Last != "" {
		f.Errorf("looked at: %+v", st)
	}
	l = f.lane(f.adopted(2))
	if st := f.look(""); !st.Gate || st.Forgot {
		f.Errorf("noticed again: %+v", st)
	}
	f.again(l, 0, events...)
	f.want(events...)
}

// wentBack restores stream and gate to an earlier time. A process that has published notices it, and the table's last
// entry shows it to others. Missing events are published on the lane for that, also after a lost reply. Events that are
// there are recalled.
func wentBack(f *fixture) {
	ctx, o := f.Context(), f.adopted(1)
	l := f.lane(o)
	events := Events(6)
	early := f.publish(l, events[:3]...)
	restore := f.Save()
	last := f.publish(l, events[3:5]...)
	f.must(f.sink.Confirm(ctx, o, mark(StreamLane(o), last.Number)))
	l.Settled(last.Number)
	restore()
	f.gap(f.sink.Confirm(ctx, o, mark(StreamLane(o), last.Number)))
	f.gap(f.refusedBy(l))
	f.want(events[:3]...)
	f.sink = f.open()
	if st := f.look(last.Last); !st.Forgot || st.Intact() || st.Last != early.Last {
		f.Errorf("looked at %+v, want that it forgot what was behind %s", st, early.Last)
	}
	if st := f.look(early.Last); !st.Intact() {
		f.Errorf("looked at %+v, with nothing missing", st)
	}
	o = f.adopted(2)
	tail, err := f.sink.Tail(ctx, order, "")
	f.must(err)
	var there []uuid.UUID
	for _, e := range tail {
		there = append(there, e.ID)
	}
	if !slices.Equal(there, IDs(events[:3])) {
		f.Errorf("the tail is %v, want %v", there, IDs(events[:3]))
	}
	f.must(f.sink.Recall(ctx, o, order, there, early.Last))
	restored := outbox.Lane{Part: outbox.RestoreLane, Nonce: o.Nonce}
	f.Lose(1, true)
	r, _ := f.retry(f.sink.Lane(order, o, restored).Deliver(events[3:5]))
	f.must(f.sink.Confirm(ctx, o, mark(restored, r.Number)))
	f.must(f.sink.Settled(ctx, o, mark(restored, r.Number)))
	f.again(f.lane(o), 3, events[0], events[1], events[2], events[5])
	f.want(events...)
}

// tableBack has a table that lacks an entry which is settled. If it lacks an unsettled one, the relay was killed.
func tableBack(f *fixture) {
	l := f.lane(f.adopted(1))
	noted := f.publish(l, Events(2)...).Last
	unknown := func(want bool) {
		f.Helper()
		if st := f.look(noted); st.Unknown != want {
			f.Errorf("looked at: %+v; want it unknown: %v", st, want)
		}
	}
	unknown(false)
	settled := f.publish(l, Events(2)...)
	unknown(false)
	l.Settled(settled.Number)
	f.publish(l, Events(2)...) // reports it
	unknown(true)
	noted = settled.Last
	unknown(false)
	f.adopted(2) // the others are in doubt
	unknown(false)
}

// recalledGone recalls an event that has gone since it was seen.
func recalledGone(f *fixture) {
	events := Events(1)
	r := f.publish(f.lane(f.adopted(1)), events...)
	f.Drop(order)
	o := f.adopted(2)
	f.must(f.sink.Recall(f.Context(), o, order, IDs(events), r.Last))
	for range 2 {
		_, err := f.lane(o).Deliver(events).Publish(f.Context())
		f.gap(err)
	}
	f.again(f.lane(f.adopted(3)), 0, events...)
	f.want(events...)
}

// restarted publishes nothing to a restarted server before Bind, also if it has lost nothing.
func restarted(f *fixture) {
	ctx, o := f.Context(), f.adopted(1)
	l := f.lane(o)
	events := Events(3)
	f.publish(l, events[:2]...)
	server, err := f.sink.Bind(ctx)
	f.must(err)
	other, err := f.open().Bind(ctx)
	if f.must(err); server == "" || other != server {
		f.Errorf("the server is %q, and %q for another process", server, other)
	}
	f.Restart()
	d := l.Deliver(events[2:])
	for range 100 { // the connections may be found broken first
		if _, err = d.Publish(ctx); err == nil || errors.Is(err, outbox.ErrGap) {
			break
		}
	}
	for call, err := range map[string]error{
		"publish": err, "check": f.sink.Check(ctx, o, []string{order}),
		"adopt": f.sink.Adopt(ctx, order, f.owner(2), false),
	} {
		if !errors.Is(err, outbox.ErrMoved) {
			f.Errorf("%s: got %v, want that the server is another one", call, err)
		}
	}
	f.want(events[:2]...)
	if again, err := f.sink.Bind(ctx); err != nil || again == server {
		f.Errorf("the server is %q, %v, and was %q", again, err, server)
	}
	o = f.adopted(2)
	f.again(f.lane(o), 2, events...)
	f.Restart()
	f.sink.Release()
	for range 100 {
		if err = f.sink.Check(ctx, o, []string{order}); err == nil {
			break
		}
	}
	f.must(err)
	f.want(events...)
}
