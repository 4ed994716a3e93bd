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
	r := f.Publish(l, events[:2]...)
	f.Must(f.sink.Confirm(f.Context(), o, mark(StreamLane(o), r.Number)))
	if drop != nil {
		drop(order)
	}
	dropGate(order, f.Source)
	if st := f.look(""); st.Gate || st.Intact() || drop == nil && (!st.Behind || st.Last != r.Last) {
		f.Errorf("looked at: %+v", st)
	}
	for call, err := range f.calls(o) {
		f.Log(call)
		WantGap(f.TB, err)
	}
	d := l.Deliver(events[2:])
	for range 2 {
		_, err := d.Publish(f.Context())
		WantGap(f.TB, err)
	}
	WantGap(f.TB, f.sink.Adopt(f.Context(), order, f.Owner(2), true))
	if drop != nil {
		f.want()
		f.Again(f.lane(f.adopted(2)), 0, events...)
	} else {
		o = f.adopted(2)
		f.Must(f.sink.Recall(f.Context(), o, order, IDs(events[:2]), r.Last))
		f.Again(f.lane(o), 2, events...)
	}
	f.want(events...)
}

// olderGate puts back a gate that has let through less. It must not be taken for the newer one: not by a publish, also
// of a claim that begins to count again, and not by an adoption of another process, which has only looked at it.
func olderGate(f *fixture) {
	ctx, o := f.Context(), f.adopted(1)
	l := f.lane(o)
	events := Events(3)
	first := f.Publish(l, events[0])
	restore := f.SaveGate(order, f.Source)
	r := f.Publish(l, events[1:]...)
	f.Must(f.sink.Confirm(ctx, o, mark(StreamLane(o), r.Number)))
	publisher := f.sink
	f.sink = f.open() // from now on, what has only looked
	if st := f.look(""); !st.Intact() || st.Missing != 0 {
		f.Fatalf("looked at %+v, want it intact", st)
	}
	restore()
	WantGap(f.TB, publisher.Confirm(ctx, o, mark(StreamLane(o), r.Number)))
	WantGap(f.TB, f.refusedBy(l))
	WantGap(f.TB, f.refusedBy(publisher.Lane(order, o, outbox.Lane{Part: 3, Claim: 1, Nonce: Nonce()})))
	WantGap(f.TB, f.sink.Adopt(ctx, order, f.Owner(2), true))
	if st := f.look(""); !st.Behind || st.Missing != 2 || st.Last != first.Last {
		f.Errorf("looked at %+v, want it behind, with 2 missing", st)
	}
	o = f.adopted(3) // of one that knows, and compares
	f.Must(f.sink.Recall(ctx, o, order, IDs(events[1:]), r.Last))
	f.Again(f.lane(o), 3, events...)
	f.want(events...)
	f.Must(f.sink.Adopt(ctx, order, f.Owner(4), true))
}

// lostStream deletes the stream and leaves the gate; remake may make the stream again. Nothing is in doubt then.
func lostStream(f *fixture, remake func()) {
	ctx, o := f.Context(), f.adopted(1)
	l := f.lane(o)
	events := Events(4)
	f.Publish(l, events[:3]...)
	f.Must(f.sink.Check(ctx, o, []string{order}))
	f.Drop(order)
	remake()
	WantGap(f.TB, f.sink.Check(ctx, o, []string{order}))
	WantGap(f.TB, f.refusedBy(l))
	WantGap(f.TB, f.sink.Adopt(ctx, order, f.Owner(2), true))
	if st := f.look(""); !st.Gate || !st.Forgot || st.Last != "" {
		f.Errorf("looked at: %+v", st)
	}
	l = f.lane(f.adopted(2))
	if st := f.look(""); !st.Gate || st.Forgot {
		f.Errorf("noticed again: %+v", st)
	}
	f.Again(l, 0, events...)
	f.want(events...)
}

// wentBack restores stream and gate to an earlier time. A process that has published notices it, and the table's last
// entry shows it to others. Missing events are published on the lane for that, also after a lost reply. Events that are
// there are recalled.
func wentBack(f *fixture) {
	ctx, o := f.Context(), f.adopted(1)
	l := f.lane(o)
	events := Events(6)
	early := f.Publish(l, events[:3]...)
	restore := f.Save()
	last := f.Publish(l, events[3:5]...)
	f.Must(f.sink.Confirm(ctx, o, mark(StreamLane(o), last.Number)))
	l.Settled(last.Number)
	restore()
	WantGap(f.TB, f.sink.Confirm(ctx, o, mark(StreamLane(o), last.Number)))
	WantGap(f.TB, f.refusedBy(l))
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
	f.Must(err)
	var there []uuid.UUID
	for _, e := range tail {
		there = append(there, e.ID)
	}
	if !slices.Equal(there, IDs(events[:3])) {
		f.Errorf("the tail is %v, want %v", there, IDs(events[:3]))
	}
	f.Must(f.sink.Recall(ctx, o, order, there, early.Last))
	restored := outbox.Lane{Part: outbox.RestoreLane, Nonce: o.Nonce}
	f.Lose(1, true)
	r, _ := f.retry(f.sink.Lane(order, o, restored).Deliver(events[3:5]))
	f.Must(f.sink.Confirm(ctx, o, mark(restored, r.Number)))
	f.Must(f.sink.Settled(ctx, o, mark(restored, r.Number)))
	f.Again(f.lane(o), 3, events[0], events[1], events[2], events[5])
	f.want(events...)
}

// tableBack has a table that lacks an entry which is settled. If it lacks an unsettled one, the relay was killed.
func tableBack(f *fixture) {
	l := f.lane(f.adopted(1))
	noted := f.Publish(l, Events(2)...).Last
	unknown := func(want bool) {
		f.Helper()
		if st := f.look(noted); st.Unknown != want {
			f.Errorf("looked at: %+v; want it unknown: %v", st, want)
		}
	}
	unknown(false)
	settled := f.Publish(l, Events(2)...)
	unknown(false)
	l.Settled(settled.Number)
	f.Publish(l, Events(2)...) // reports it
	unknown(true)
	noted = settled.Last
	unknown(false)
	f.adopted(2) // the others are in doubt
	unknown(false)
}

// recalledGone recalls an event that has gone since it was seen.
func recalledGone(f *fixture) {
	events := Events(1)
	r := f.Publish(f.lane(f.adopted(1)), events...)
	f.Drop(order)
	o := f.adopted(2)
	f.Must(f.sink.Recall(f.Context(), o, order, IDs(events), r.Last))
	for range 2 {
		_, err := f.lane(o).Deliver(events).Publish(f.Context())
		WantGap(f.TB, err)
	}
	f.Again(f.lane(f.adopted(3)), 0, events...)
	f.want(events...)
}

// restarted publishes nothing to a restarted server before Bind, also if it has lost nothing.
func restarted(f *fixture) {
	ctx, o := f.Context(), f.adopted(1)
	l := f.lane(o)
	events := Events(3)
	f.Publish(l, events[:2]...)
	server, err := f.sink.Bind(ctx)
	f.Must(err)
	other, err := f.open().Bind(ctx)
	if f.Must(err); server == "" || other != server {
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
		"adopt": f.sink.Adopt(ctx, order, f.Owner(2), false),
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
	f.Again(f.lane(o), 2, events...)
	f.Restart()
	f.sink.Release()
	for range 100 {
		if err = f.sink.Check(ctx, o, []string{order}); err == nil {
			break
		}
	}
	f.Must(err)
	f.want(events...)
}
