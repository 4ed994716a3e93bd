package sinktest

import (
	"context"
	"errors"
	"slices"
	"time"

	"posthaste/outbox"
	"posthaste/relay/stream"
)

func inOrder(f *fixture) {
	l := f.lane(f.adopted(1))
	events := Events(1500)
	first := f.Publish(l, events[:2]...)
	second := f.Publish(l, events[2:]...)
	if second.Number <= first.Number || outbox.CompareIDs(second.Last, first.Last) <= 0 {
		f.Errorf("receipts %+v, %+v; want a higher number and a later entry", first, second)
	}
	if r := f.Publish(l); r.Number != second.Number {
		f.Errorf("receipt of nothing: %+v", r)
	}
	f.want(events...)
	tail, err := f.sink.Tail(f.Context(), order, first.Last)
	f.Must(err)
	var got []*outbox.Record
	for _, e := range tail {
		got = append(got, &outbox.Record{ID: e.ID})
	}
	if !slices.Equal(IDs(got), IDs(events[2:])) || tail[len(tail)-1].String() != second.Last {
		f.Errorf("%d events after %s, the last at %v; want 1498 and %s", len(tail), first.Last, tail[len(tail)-1],
			second.Last)
	}
}

// lost loses up to four batches or replies in a row. Each event is there once, also if its delivery is given up and a
// later owner publishes it again.
func lost(f *fixture) {
	o := f.adopted(1)
	l := f.lane(o)
	var all []*outbox.Record
	for n := 1; n <= 4; n++ {
		for _, arrive := range []bool{true, false} {
			events := Events(20)
			all = append(all, events...)
			f.Lose(n, arrive)
			if r, last := f.retry(l.Deliver(events)); last == nil || r.Suppressed > 0 || r.Number < int64(len(all)/20) {
				f.Errorf("%d lost, arrive %v: receipt %+v after %v", n, arrive, r, last)
			}
			f.want(all...)
		}
	}
	events := Events(2)
	f.Lose(1, true)
	if _, err := l.Deliver(events).Publish(f.Context()); err == nil {
		f.Error("a lost reply is no error")
	}
	all = append(all, events...)
	f.Again(f.lane(f.adopted(2)), len(all), all...)
	f.want(all...)
}

// late lets a batch arrive that was given up: after its repetition, after the next batch, after another adoption, and
// when stream and gate are gone.
func late(f *fixture) {
	l := f.lane(f.adopted(1))
	events := Events(4)
	arrive := f.Late()
	d := l.Deliver(events[:2])
	if _, err := d.Publish(f.Context()); err == nil {
		f.Fatal("a batch that did not arrive was published")
	}
	f.want()
	_, _ = f.retry(d)
	arrive()
	f.want(events[:2]...)
	f.Publish(l, events[2])
	arrive()
	f.want(events[:3]...)
	l = f.lane(f.adopted(2))
	arrive()
	f.Again(l, 3, events...)
	arrive()
	f.want(events...)
	f.Must(f.sink.Check(f.Context(), f.adopted(3), []string{order}))
	f.DropGate(order, f.Source)
	arrive()
	f.want(events...)
	f.Drop(order)
	arrive()
	f.want()
}

// half stops a batch after some of its events. Its repetition continues there, and so does another owner.
func half(f *fixture) {
	for _, adopt := range []bool{false, true} {
		l := f.lane(f.adopted(map[bool]int64{false: 1, true: 2}[adopt]))
		events := Events(7)
		lift := f.Half(order, 3)
		before := len(f.Stored(order))
		d := l.Deliver(events)
		for range 2 {
			if _, err := d.Publish(f.Context()); !outbox.Alone(err) {
				f.Fatalf("got %v, want the stream to refuse", err)
			}
			if got := f.Stored(order)[before:]; !slices.Equal(got, IDs(events[:3])) {
				f.Fatalf("stored %v, want three of %v", got, IDs(events))
			}
		}
		if adopt {
			l = f.lane(f.adopted(3))
			lift()
			f.Again(l, 3, events...)
		} else {
			lift()
			if r, err := d.Publish(f.Context()); err != nil || r.Number != 1 {
				f.Errorf("receipt %+v, %v", r, err)
			}
		}
		if got := f.Stored(order); !slices.Equal(got[len(got)-4:], IDs(events[3:])) {
			f.Fatalf("stored %v, want the rest of %v", got, IDs(events))
		}
	}
}

// poison has events that the sink refuses. They are skipped, and so are those for which a filter returns true.
func poison(f *fixture) {
	l := f.lane(f.adopted(1))
	events := Events(9)
	f.Poison(events[2])
	f.Poison(events[7])
	d := l.Deliver(events)
	var at []int
	for range 100 {
		_, err := d.Publish(f.Context())
		if err == nil {
			break
		}
		var refused *outbox.PoisonError
		if !errors.As(err, &refused) {
			continue
		}
		if refused.All || refused.ID != events[refused.Index].ID || refused.Class == "" {
			f.Fatalf("refused %+v", refused)
		}
		at = append(at, refused.Index)
		if refused.Index == 2 && len(at) == 1 {
			continue // it is tried again first
		}
		also := d.Skip(func(e *outbox.Record) bool { return e == events[4] })
		if want := []int{4}; refused.Index == 2 && !slices.Equal(also, want) {
			f.Errorf("skipped with the event: %v, want %v", also, want)
		}
	}
	if !slices.Equal(at, []int{2, 2, 7}) {
		f.Fatalf("refused at %v, want 2 twice and 7", at)
	}
	rest := []*outbox.Record{events[0], events[1], events[3], events[5], events[6], events[8]}
	f.want(rest...)
	next := Events(2)
	f.Publish(l, next...)
	f.want(append(rest, next...)...)
}

// refused has one stream that takes nothing, while another one does.
func refused(f *fixture) {
	const other = "outbox.user"
	o := f.adopted(1)
	f.Must(f.sink.Adopt(f.Context(), other, o, false))
	l, second := f.lane(o), f.sink.Lane(other, o, StreamLane(o))
	events, others := Events(4), Events(6)
	f.Publish(l, events[:2]...)
	lift := f.Refuse(order)
	d := l.Deliver(events[2:])
	for i := range 3 {
		_, err := d.Publish(f.Context())
		var poison *outbox.PoisonError
		if all := errors.As(err, &poison) && poison.All; !all && !outbox.Alone(err) {
			f.Fatalf("got %v, want the stream to refuse everything", err)
		}
		f.Publish(second, others[2*i:2*i+2]...)
		f.Must(f.sink.Check(f.Context(), o, []string{other}))
		marks := []outbox.Mark{{Stream: other, Lane: StreamLane(o), Number: int64(i + 1)}}
		f.Must(f.sink.Confirm(f.Context(), o, marks))
	}
	lift()
	_, _ = f.retry(d)
	f.want(events...)
	f.wantIn(other, others...)
}

// trimmed shortens a stream, and keeps what a group has not read. Trimmed entries are not lost. The events are settled:
// a sink may keep others.
func trimmed(f *fixture) {
	o := f.adopted(1)
	l := f.lane(o)
	events := Events(300)
	f.Must(f.sink.Regroup(f.Context(), order, []string{"g"}))
	r := f.Publish(l, events...)
	f.Must(f.sink.Settled(f.Context(), o, mark(StreamLane(o), r.Number)))
	for _, c := range []struct{ read, least, most int }{{0, 300, 300}, {100, 200, 299}, {200, 1, 100}} {
		if c.read > 0 {
			f.Read(order, "g", c.read)
		}
		f.Must(f.sink.Trim(f.Context(), order))
		got := f.Stored(order)
		if len(got) < c.least || len(got) > c.most || !slices.Equal(got, IDs(events[300-len(got):])) {
			f.Errorf("%d more are read: %d left, want %d to %d, the youngest", c.read, len(got), c.least, c.most)
		}
		f.Must(f.sink.Check(f.Context(), o, []string{order}))
	}
	f.Publish(l, Events(1)...)
	if st := f.look(""); !st.Intact() {
		f.Errorf("trimmed: %+v", st)
	}
}

// undurable publishes what does not reach the configured durability: it is not confirmed, and that is no gap.
func undurable(f *fixture) {
	s, lift := f.Undurable()
	f.sink = s
	o := f.adopted(1)
	f.Publish(f.lane(o), Events(1)...)
	err := confirmWithin(f, s, o)
	if err == nil || errors.Is(err, outbox.ErrGap) || errors.As(err, new(*outbox.FencedError)) {
		f.Errorf("got %v, want that the durability was not reached", err)
	}
	WantFenced(f.TB, confirmWithin(f, s, f.Owner(1)), 1)
	lift()
	for range 100 {
		if err = confirmWithin(f, s, o); err == nil {
			return
		}
	}
	f.Errorf("not confirmed: %v", err)
}

// groups lists the groups of a stream, for its owner, while it has lost nothing.
func groups(f *fixture) {
	ctx, o := f.Context(), f.adopted(1)
	f.Publish(f.lane(o), Events(1)...)
	want := func(what string, o outbox.Owner, want ...string) {
		f.Helper()
		list, err := f.sink.Groups(ctx, o, []string{order})
		got, listed := list[order]
		slices.Sort(got)
		if err != nil || !slices.Equal(got, want) || listed != (want != nil) {
			f.Errorf("%s: groups %v, %v; want %v", what, list, err, want)
		}
	}
	for range 2 {
		f.Must(f.sink.Regroup(ctx, order, []string{"g", "h"}))
		want("made", o, "g", "h")
	}
	want("another owner", f.Owner(2))
	f.Drop(order)
	want("deleted", o)
	f.Must(f.sink.Regroup(ctx, order, []string{"g", "h"}))
	want("made again", o)
	want("adopted", f.adopted(2), "g", "h")
	const fresh = "outbox.fresh"
	for range 2 {
		f.Must(f.sink.Follow(ctx, fresh, []string{"outbox.missing", order}))
	}
	f.Must(f.sink.Adopt(ctx, fresh, o, false))
	list, err := f.sink.Groups(ctx, o, []string{fresh})
	if slices.Sort(list[fresh]); err != nil || !slices.Equal(list[fresh], []string{"g", "h"}) {
		f.Errorf("a stream that follows has %v, %v", list, err)
	}
}

// confirmWithin confirms the first batch of o within a second.
func confirmWithin(f *fixture, s stream.Publisher, o outbox.Owner) error {
	ctx, cancel := context.WithTimeout(f.Context(), time.Second)
	defer cancel()
	return s.Confirm(ctx, o, mark(StreamLane(o), 1))
}
