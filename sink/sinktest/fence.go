package sinktest

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"

	"github.com/google/uuid"

	"posthaste/outbox"
	"posthaste/relay/stream"
)

// adoptedTwice repeats an adoption, as after a lost reply. The lane continues.
func adoptedTwice(f *fixture) {
	o := f.adopted(5)
	l := f.lane(o)
	events := Events(4)
	f.Publish(l, events[:2]...)
	f.Must(f.sink.Adopt(f.Context(), order, o, false))
	f.Must(f.open().Adopt(f.Context(), order, o, true))
	f.Publish(l, events[2:]...)
	f.want(events...)
	f.Must(f.sink.Check(f.Context(), o, []string{order}))
}

// nextNumber has a second publisher of one lane, which is an error of the caller.
func nextNumber(f *fixture) {
	o := f.adopted(1)
	ahead, behind := f.lane(o), f.lane(o)
	events := Events(2)
	f.Publish(ahead, events[0])
	WantGap(f.TB, f.refusedBy(f.lane(o))) // its number is taken by another event
	f.Publish(ahead, events[1])
	d := behind.Deliver(Events(1))
	for range 2 {
		_, err := d.Publish(f.Context())
		WantGap(f.TB, err)
	}
	f.want(events...)
}

// zombies are fenced by every gate, and change nothing.
func zombies(f *fixture) {
	old := f.adopted(5)
	events := Events(2)
	before := f.lane(old)
	f.Publish(before, events[0])
	o := f.adopted(6)
	WantFenced(f.TB, f.refusedBy(before), 6)
	for name, zombie := range map[string]outbox.Owner{"epoch": old, "nonce": f.Owner(6)} {
		for call, err := range f.calls(zombie) {
			f.Log(name, call)
			WantFenced(f.TB, err, 6)
		}
		WantFenced(f.TB, f.sink.Adopt(f.Context(), order, zombie, false), 6)
	}
	f.want(events[0])
	st := f.look("")
	if st.Epoch != 6 || st.Nonce != o.Nonce.String() || !st.Intact() || !st.Beyond(old) || st.Beyond(o) {
		f.Errorf("looked at: %+v", st)
	}
	f.Again(f.lane(o), 1, events...)
	f.want(events...)
	WantFenced(f.TB, f.sink.Adopt(f.Context(), order, f.Owner(3), false), 6) // of a database that was restored
}

// early is an owner that the gate does not have yet, or whose stream has no gate.
func early(f *fixture) {
	for call, err := range f.calls(f.Owner(5)) {
		f.Log("no gate", call)
		WantGap(f.TB, err)
	}
	f.adopted(5)
	for call, err := range f.calls(f.Owner(6)) {
		f.Log("an older gate", call)
		WantGap(f.TB, err)
	}
	f.want()
	o := f.Owner(5)
	WantGap(f.TB, f.sink.Check(f.Context(), o, []string{"outbox.missing"}))
	f.Must(f.sink.Check(f.Context(), o, nil))
}

// claims fence the earlier claims of their part, and inherit what these left unsettled.
func claims(f *fixture) {
	ctx, o := f.Context(), f.adopted(1)
	events := Events(8)
	five, mine := f.part(o, 5)
	f.Publish(five, events[:2]...)
	f.Publish(five, events[2:4]...)
	five.Settled(1)
	f.Publish(five, events[4])
	for _, claim := range []int64{5, 4} { // the same with another nonce, and an older one
		l, _ := f.part(o, claim)
		WantFenced(f.TB, f.refusedBy(l), 1)
	}
	six, its := f.part(o, 6)
	if r := f.Publish(six, events[2], events[5]); r.Number != 1 || r.Suppressed != 1 {
		f.Errorf("receipt %+v, want number 1, and one of three inherited events suppressed", r)
	}
	WantFenced(f.TB, f.refusedBy(five), 1)
	WantFenced(f.TB, f.sink.Confirm(ctx, o, mark(mine, 1)), 1)
	f.Must(f.sink.Confirm(ctx, o, mark(its, 1)))
	f.Must(f.sink.ForgetDoubt(ctx, o, order)) // concerns the doubt of adoptions
	f.Publish(f.sink.Lane(order, o, outbox.Lane{Part: 4, Claim: 1, Nonce: Nonce()}), events[6])
	f.Again(six, 1, events[3], events[7])
	f.want(events[0], events[1], events[2], events[3], events[4], events[5], events[6], events[7])
	f.Must(f.sink.Settled(ctx, o, mark(mine, 3))) // reaches what a later claim has inherited: 4
	f.Again(six, 0, events[4])
}

// follows claims a part again in one session, which reports what is settled of the claim before.
func follows(f *fixture) {
	o := f.adopted(1)
	events := Events(5)
	first, l := f.part(o, 1)
	f.Publish(first, events[0])
	f.Publish(first, events[1])
	f.Publish(first, events[2])
	l.Claim = 2
	second := f.sink.Lane(order, o, l)
	second.Follows(1, 2)
	f.Again(second, 1, events[2], events[3]) // 0 and 1 are settled
	f.Again(second, 0, events[4], events[0])
	f.want(append(slices.Clone(events), events[0])...)
	l.Claim = 3
	third := f.open().Lane(order, o, l)
	third.Follows(2, 9) // the gate lacks what this session knows to be settled
	WantGap(f.TB, f.refusedBy(third))
}

// twoOwners has owners that publish the whole table until the next one fences them. Each event is there once, in order.
func twoOwners(f *fixture) {
	events := Events(120)
	var owners sync.WaitGroup
	for epoch := int64(1); epoch <= 6; epoch++ {
		s := f.open()
		o := f.Owner(epoch)
		f.Must(s.Adopt(f.Context(), order, o, false))
		owners.Go(func() {
			l := s.Lane(order, o, StreamLane(o))
			for some := range slices.Chunk(events, 4) {
				if _, err := l.Deliver(some).Publish(f.Context()); err != nil {
					if !errors.As(err, new(*outbox.FencedError)) {
						f.Errorf("epoch %d: %v", epoch, err)
					}
					return
				}
			}
		})
	}
	owners.Wait()
	f.want(events...)
}

// foreign is another database, which does not share the stream.
func foreign(f *fixture) {
	o := f.adopted(50)
	events := Events(2)
	l := f.lane(o)
	f.Publish(l, events[0])
	other := outbox.Owner{Source: uuid.New(), Epoch: 60, Nonce: Nonce()}
	_, looked := f.sink.Look(f.Context(), other.Source, []string{order}, nil)
	for _, err := range []error{
		looked, f.sink.Adopt(f.Context(), order, other, false), f.sink.Adopt(f.Context(), order, other, true),
	} {
		var foreign *outbox.ForeignError
		if !errors.As(err, &foreign) || foreign.Stream != order || foreign.Source != f.Source.String() {
			f.Errorf("got %v, want that the stream is %s's", err, f.Source)
		}
	}
	for call, err := range f.calls(other) {
		f.Log(call)
		WantGap(f.TB, err)
	}
	f.Must(f.sink.Check(f.Context(), o, []string{order}))
	f.Publish(l, events[1])
	f.want(events...)
}

// doubt has what lanes left unsettled, and suppresses each event once.
func doubt(f *fixture) {
	o := f.adopted(1)
	s := f.lane(o)
	p, _ := f.part(o, 7)
	events := Events(10)
	f.Publish(s, events[:3]...)
	f.Publish(p, events[3:6]...)
	settled := f.Publish(s, events[6:8]...)
	f.Must(f.sink.Settled(f.Context(), o, mark(StreamLane(o), settled.Number)))
	last := f.Publish(s, events[8])

	s = f.lane(f.adopted(2))
	r := f.Publish(s, events[3], events[4], events[5], events[8])
	if r.Suppressed != 4 || r.Last != last.Last {
		f.Errorf("receipt %+v, want 4 suppressed and the last entry %s", r, last.Last)
	}
	f.want(events[:9]...)
	f.Again(s, 0, events[9], events[3], events[0]) // once, and settled ones never
	f.want(append(slices.Clone(events), events[3], events[0])...)
}

func doubtLasts(f *fixture) {
	events := Events(700)
	f.Publish(f.lane(f.adopted(1)), events...)
	var o outbox.Owner
	for epoch := int64(2); epoch <= 4; epoch++ { // a half is suppressed and unsettled again, the other is not touched
		o = f.adopted(epoch)
		f.Again(f.lane(o), 350, events[:350]...)
	}
	f.want(events...)
	o = f.adopted(5)
	for range 2 {
		f.Must(f.sink.ForgetDoubt(f.Context(), o, order))
	}
	f.Again(f.lane(o), 0, events[0])
	f.want(append(slices.Clone(events), events[0])...)
}

// claimsSettled reports to the gate that the batches of all claims of a lane are settled, as the end of a repair does.
func claimsSettled(f *fixture) {
	o, events := f.adopted(1), Events(2)
	var marks []outbox.Mark
	for i := range events {
		lane := outbox.Lane{Part: outbox.RestoreLane, Claim: int64(i + 1), Nonce: o.Nonce}
		f.Publish(f.sink.Lane(order, o, lane), events[i])
		marks = append(marks, outbox.Mark{Stream: order, Lane: lane, Number: math.MaxInt32})
	}
	f.Must(f.sink.Settled(f.Context(), o, marks))
	f.Again(f.lane(f.adopted(2)), 0, events...)
}

// confirmed is the barrier before a mark.
func confirmed(f *fixture) {
	ctx, o := f.Context(), f.adopted(1)
	WantGap(f.TB, f.sink.Confirm(ctx, o, mark(StreamLane(o), 1)))
	f.Must(f.sink.Confirm(ctx, o, mark(StreamLane(o), 0)))
	f.Publish(f.lane(o), Events(1)...)
	l, five := f.part(o, 5)
	f.Publish(l, Events(1)...)
	both := func(l outbox.Lane, n int64) []outbox.Mark { return append(mark(StreamLane(o), 1), mark(l, n)...) }
	lane := func(part int, claim int64) outbox.Lane { return outbox.Lane{Part: part, Claim: claim, Nonce: Nonce()} }
	f.Must(f.sink.Confirm(ctx, o, nil))
	f.Must(f.sink.Confirm(ctx, o, both(five, 1)))
	for what, marks := range map[string][]outbox.Mark{
		"a later batch": both(five, 2), "a part without a claim": both(lane(7, 1), 1),
		"a later claim":           both(lane(3, 6), 1),
		"a stream without a gate": append(both(five, 1), outbox.Mark{Stream: "outbox.other", Lane: five, Number: 1}),
	} {
		f.Log(what)
		WantGap(f.TB, f.sink.Confirm(ctx, o, marks))
	}
	WantFenced(f.TB, f.sink.Confirm(ctx, o, both(lane(3, 5), 1)), 1) // of another session
	WantFenced(f.TB, f.sink.Confirm(ctx, o, both(lane(3, 4), 1)), 1)
	for range 2 { // a lost report only costs memory; what is not published is not settled by it
		f.Must(f.sink.Settled(ctx, o, both(five, 9)))
	}
}

// signs has leaders of one database on two servers of Postgres.
func signs(f *fixture) {
	alive := func(s stream.Servers, id, server string, before *outbox.Sign) *outbox.Sign {
		f.Helper()
		m := outbox.Member{ID: id, Server: server, Holder: "of " + id}
		other, err := s.Alive(f.Context(), f.Source, m, before)
		f.Must(err)
		return other
	}
	another := f.open()
	for _, m := range [][2]string{{"a", "1"}, {"a", "2"}, {"b", "2"}} { // another server, another process
		if other := alive(f.sink, m[0], m[1], nil); other != nil {
			f.Errorf("%s on %s: %+v", m[0], m[1], other)
		}
	}
	first := alive(another, "c", "3", nil)
	if first == nil || fmt.Sprint(first.Member) != fmt.Sprint(outbox.Member{ID: "b", Server: "2", Holder: "of b"}) {
		f.Fatalf("seen %+v", first)
	}
	if again := alive(another, "c", "3", first); again == nil || again.Text != first.Text {
		f.Errorf("seen %+v, then %+v", first, again)
	}
	alive(f.sink, "b", "2", nil)
	if again := alive(another, "c", "3", first); again == nil || again.Text == first.Text {
		f.Errorf("seen %+v, then %+v", first, again)
	}
}
