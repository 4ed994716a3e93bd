package sink_test

import (
	"context"
	"errors"
	"strconv"
	"testing"

	"github.com/google/uuid"

	"posthaste/internal/testenv"
	"posthaste/outbox"
	"posthaste/sink"
)

func itoa(n uint64) string { return strconv.FormatUint(n, 10) }

func TestAdoptTwiceIsOnce(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	o := f.adopted(5)
	l := f.lane(o)
	events := makeEvents(4)
	f.publish(l, events[:2]...)
	f.must(f.sink.Adopt(t.Context(), stream, o, false)) // a repeat must not end the lane
	f.publish(l, events[2:]...)
	f.wantStored(events...)
	f.wantDoubt(0)
	f.must(f.sink.Check(t.Context(), o, []string{stream}))
}

func TestOlderOwnersAreFenced(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	old := f.adopted(5)
	l := f.lane(old)
	events := makeEvents(2)
	f.publish(l, events[0])
	f.adopted(6)
	d := l.Deliver(events[1:])
	for range 2 { // also the second time
		_, err := d.Publish(t.Context())
		wantFenced(t, err, 6)
	}
	mark := []outbox.Mark{{Stream: stream, Lane: streamLane(old), Number: 1}}
	wantFenced(t, f.sink.Adopt(t.Context(), stream, old, false), 6)
	wantFenced(t, f.sink.Adopt(t.Context(), stream, f.owner(6), false), 6) // same epoch, another nonce
	wantFenced(t, f.sink.TakeOver(t.Context(), stream, f.owner(6)), 6)
	wantFenced(t, f.sink.Check(t.Context(), old, []string{stream}), 6)
	wantFenced(t, f.sink.Check(t.Context(), f.owner(6), []string{stream}), 6)
	wantFenced(t, f.sink.Confirm(t.Context(), old, mark), 6)
	wantFenced(t, f.sink.Settled(t.Context(), old, mark), 6)
	wantFenced(t, f.sink.ForgetDoubt(t.Context(), old, stream), 6)
	same := f.owner(6)
	_, err := f.lane(same).Deliver(events[1:]).Publish(t.Context())
	wantFenced(t, err, 6)
	f.wantStored(events[0])
	f.wantDoubt(1)
	if n := f.metric("outbox_publish_errors_total", "class", "fenced"); n != 10 {
		t.Errorf("%v fenced, want 10", n)
	}
}

func TestALaterOwnerHasToAdoptFirst(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.adopted(5)
	later := f.owner(6)
	_, err := f.lane(later).Deliver(makeEvents(1)).Publish(t.Context())
	wantGap(t, err)
	wantGap(t, f.sink.Check(t.Context(), later, []string{stream}))
	wantGap(t, f.sink.Confirm(t.Context(), later, firstMark(later)))
	f.wantStored()
}

func firstMark(o outbox.Owner) []outbox.Mark {
	return []outbox.Mark{{Stream: stream, Lane: streamLane(o), Number: 1}}
}

func TestAForeignSourceIsRefusedAndTakenOver(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	o := f.adopted(50)
	events := makeEvents(3)
	l := f.lane(o)
	f.publish(l, events[:2]...)
	other := outbox.Owner{Source: uuid.New(), Epoch: 1, Nonce: nonce()}
	ctx := t.Context()
	wantForeign(t, f.sink.Adopt(ctx, stream, other, false), f.source)
	_, err := f.sink.Look(ctx, other.Source, []string{stream}, nil)
	wantForeign(t, err, f.source)
	wantGap(t, f.sink.Check(ctx, other, []string{stream}))
	wantGap(t, f.sink.Confirm(ctx, other, firstMark(other)))
	wantGap(t, f.sink.Settled(ctx, other, firstMark(other)))
	_, err = f.lane(other).Deliver(events[2:]).Publish(ctx)
	wantGap(t, err)
	f.wantStored(events[:2]...)
	f.must(f.sink.Check(ctx, o, []string{stream}))

	f.must(f.sink.TakeOver(ctx, stream, other))
	f.must(f.sink.TakeOver(ctx, stream, other))
	// A clone still has the rows; what its origin had published unsettled is not published again.
	r := f.publish(f.lane(other), events...)
	f.wantStored(events...)
	f.wantLast(r)
	if r.Suppressed != 2 {
		t.Errorf("%d suppressed, want 2", r.Suppressed)
	}
	wantGap(t, f.sink.Check(ctx, o, []string{stream}))
	_, err = l.Deliver(makeEvents(1)).Publish(ctx)
	wantGap(t, err)
	wantForeign(t, f.sink.Adopt(ctx, stream, f.owner(51), false), other.Source)
}

func TestALostGateIsAGap(t *testing.T) {
	t.Parallel()
	for name, lose := range map[string]func(f *fixture, earlier string){
		"flushed": func(f *fixture, _ string) { f.do("FLUSHALL") },
		"deleted": func(f *fixture, _ string) { f.do("DEL", f.gate()) },
		"restored": func(f *fixture, earlier string) {
			f.do("RESTORE", f.gate(), 0, earlier, "REPLACE")
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newFixture(t)
			o := f.adopted(1)
			l := f.lane(o)
			events := makeEvents(4)
			f.publish(l, events[0])
			earlier, err := f.server.Client.Dump(t.Context(), f.gate()).Result()
			f.must(err)
			r := f.publish(l, events[1])
			mark := []outbox.Mark{{Stream: stream, Lane: streamLane(o), Number: r.Number}}
			f.must(f.sink.Confirm(t.Context(), o, mark))
			lose(f, earlier)
			wantGap(t, f.sink.Confirm(t.Context(), o, mark))
			if name != "restored" {
				wantGap(t, f.sink.Check(t.Context(), o, []string{stream}))
			}
			d := l.Deliver(events[2:3])
			for range 2 {
				_, err := d.Publish(t.Context())
				wantGap(t, err)
			}
			// Adopting again fixes it.
			o = f.adopted(2)
			f.publish(f.lane(o), events[3])
			if got := f.stored(); got[len(got)-1] != events[3].ID.String() {
				t.Errorf("stream ends with %s", got[len(got)-1])
			}
		})
	}
}

// An adoption requires the gate that it has seen. An older gate that has replaced it does not know which unsettled
// events are in the stream, and would let them through again.
func TestAGateThatIsOlderThanTheOneSeenIsNotAdopted(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	ctx := t.Context()
	l := f.lane(f.adopted(1))
	events := makeEvents(3)
	f.publish(l, events[0])
	earlier, err := f.server.Client.Dump(ctx, f.gate()).Result()
	f.must(err)
	f.publish(l, events[1:]...)
	fresh, _ := newSink(t, f.client, sink.Options{}) // it has published nothing
	look := func() outbox.StreamState {
		t.Helper()
		states, err := fresh.Look(ctx, f.source, []string{stream}, nil)
		f.must(err)
		return states[0]
	}
	if st := look(); !st.Intact() || st.Missing != 0 {
		t.Fatalf("found %+v, want it intact", st)
	}
	f.do("RESTORE", f.gate(), 0, earlier, "REPLACE")
	wantGap(t, fresh.Adopt(ctx, stream, f.owner(2), true))
	if st := look(); !st.Behind || st.Missing != 2 {
		t.Fatalf("found %+v, want it behind, with 2 missing", st)
	}
	// A caller that knows this and compares the stream may adopt.
	o := f.owner(3)
	f.must(fresh.Adopt(ctx, stream, o, false))
	f.must(fresh.Recall(ctx, o, stream, []uuid.UUID{events[1].ID, events[2].ID}, look().Last))
	if r := f.publish(fresh.Lane(stream, o, streamLane(o)), events...); r.Suppressed != 3 {
		t.Errorf("%d suppressed, want 3", r.Suppressed)
	}
	f.wantStored(events...)
	f.must(fresh.Adopt(ctx, stream, f.owner(4), true))
}

// If an event disappears from the stream before its gate recalls it, the gate reports the gap.
func TestWhatIsRecalledIsGone(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	event := makeEvent()
	receipt := f.publish(f.lane(f.adopted(1)), event)
	f.do("DEL", stream, f.gate())
	o := f.adopted(2)
	f.must(f.sink.Recall(t.Context(), o, stream, []uuid.UUID{event.ID}, receipt.Last))
	f.wantDoubt(1)
	for range 2 {
		_, err := f.lane(o).Deliver([]*outbox.Record{event}).Publish(t.Context())
		wantGap(t, err)
	}
	o = f.adopted(3)
	f.wantDoubt(0)
	f.publish(f.lane(o), event)
	f.wantStored(event)
}

// A restored database has older numbers than the gate.
func TestARestoredDatabaseIsFencedByTheGatesEpoch(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.publish(f.lane(f.adopted(40)), makeEvent())
	err := f.sink.Adopt(t.Context(), stream, f.owner(12), false)
	wantFenced(t, err, 40)
	o := f.adopted(41)
	f.publish(f.lane(o), makeEvent())
}

func TestOnlyTheNextNumberIsAccepted(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	o := f.adopted(1)
	ahead, behind := f.lane(o), f.lane(o)
	events := makeEvents(4)
	f.publish(ahead, events[0])
	f.publish(ahead, events[1])
	// A second publisher of the same lane is a bug of the caller; the gate must not let it through.
	_, err := behind.Deliver(events[2:3]).Publish(t.Context())
	wantGap(t, err)
	f.wantStored(events[:2]...)
}

func TestAnEqualNumberWithOtherEventsIsAGap(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	o := f.adopted(1)
	f.publish(f.lane(o), makeEvent())
	_, err := f.lane(o).Deliver(makeEvents(1)).Publish(t.Context())
	wantGap(t, err)
}

func TestAdoptionTurnsTheUnsettledIntoDoubt(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	o := f.adopted(1)
	s, p := f.lane(o), f.sink.Lane(stream, o, partLane(4, 7))
	events := makeEvents(10)
	first := f.publish(s, events[:3]...)
	f.publish(p, events[3:6]...)
	f.publish(s, events[6:8]...)
	f.must(f.sink.Settled(t.Context(), o, []outbox.Mark{{Stream: stream, Lane: streamLane(o), Number: 2}}))
	f.publish(s, events[8])
	f.wantDoubt(0)

	o = f.adopted(2)
	f.wantDoubt(4) // 3, 4, 5 of the part, 8 of the stream
	if left := append(f.fields("l:"), f.fields("u:")...); len(left) != 0 {
		t.Errorf("left in the gate: %q", left)
	}
	before := f.stored()
	l := f.lane(o)
	again := append(append([]*outbox.Record{}, events[3:6]...), events[8], events[9])
	r := f.publish(l, again...)
	if r.Suppressed != 4 {
		t.Errorf("%d suppressed, want 4", r.Suppressed)
	}
	f.wantLast(r)
	if got := f.stored(); len(got) != len(before)+1 {
		t.Fatalf("%d entries, want %d", len(got), len(before)+1)
	}
	f.wantDoubt(0)
	// Each is suppressed once: from now on they are events like any other.
	if r := f.publish(l, events[3]); r.Suppressed != 0 {
		t.Errorf("suppressed again")
	}
	if n := f.metric("outbox_suppressed_total", "reason", "doubt"); n != 4 {
		t.Errorf("counted %v suppressed, want 4", n)
	}
	if first.Number != 1 {
		t.Errorf("number %d", first.Number)
	}
}

// Suppressed events that are not settled stay in doubt after the next adoption.
func TestDoubtSurvivesAdoptionAfterAdoption(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	events := makeEvents(700)
	r := f.publish(f.lane(f.adopted(1)), events...)
	f.wantLast(r)
	for epoch := int64(2); epoch <= 4; epoch++ {
		o := f.adopted(epoch)
		f.wantDoubt(len(events))
		// The first half is taken out of doubt and comes back unsettled, the other half is not touched.
		got := f.publish(f.lane(o), events[:350]...)
		if got.Suppressed != 350 || got.Last != r.Last {
			t.Fatalf("epoch %d: %d suppressed", epoch, got.Suppressed)
		}
		f.wantDoubt(350)
	}
	f.wantStored(events...)
}

func TestForgetDoubt(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	o := f.adopted(1)
	events := makeEvents(1200)
	f.publish(f.lane(o), events...)
	o = f.adopted(2)
	f.wantDoubt(1200)
	f.must(f.sink.ForgetDoubt(t.Context(), o, stream))
	f.wantDoubt(0)
	f.must(f.sink.ForgetDoubt(t.Context(), o, stream))
	if n := len(f.fields("")); n != 5 {
		t.Errorf("%d fields left, want its owner and register, the numbers of events and of other entries, and the "+
			"last of the events", n)
	}
}

func TestClaimsOfAPart(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	ctx := t.Context()
	o := f.adopted(1)
	events := makeEvents(9)
	five := f.sink.Lane(stream, o, partLane(3, 5))
	f.publish(five, events[:2]...)
	f.publish(five, events[2:4]...)
	five.Settled(1)
	f.publish(five, events[4])

	// Same claim, another nonce; an older claim.
	_, err := f.sink.Lane(stream, o, partLane(3, 5)).Deliver(events[8:]).Publish(ctx)
	wantFenced(t, err, 1)
	_, err = f.sink.Lane(stream, o, partLane(3, 4)).Deliver(events[8:]).Publish(ctx)
	wantFenced(t, err, 1)

	// A later claim inherits what claim 5 left unsettled: its batches 2 and 3, events 2, 3, 4.
	six := f.sink.Lane(stream, o, partLane(3, 6))
	r := f.publish(six, events[2], events[5])
	if r.Number != 1 || r.Suppressed != 1 {
		t.Fatalf("receipt %+v, want event 2 suppressed under number 1", r)
	}
	f.wantDoubt(2)
	_, err = five.Deliver(events[8:]).Publish(ctx)
	wantFenced(t, err, 1)
	// Other parts are not concerned.
	if r := f.publish(f.sink.Lane(stream, o, partLane(4, 1)), events[6]); r.Number != 1 {
		t.Fatalf("receipt %+v", r)
	}
	f.wantStored(events[0], events[1], events[2], events[3], events[4], events[5], events[6])
	r = f.publish(six, events[3], events[4], events[7])
	if r.Suppressed != 2 {
		t.Fatalf("receipt %+v, want 2 suppressed", r)
	}
	f.wantDoubt(0)
}

// A worker that claims a part again says which of its batches are settled: the gate puts the others in doubt. A gate
// without the settled ones has gone back.
func TestAClaimFollowsAnother(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	o := f.adopted(1)
	events := makeEvents(12)
	mine := partLane(3, 5)
	claim := func(number, after, settled int64) outbox.LanePublisher {
		mine.Claim = number
		l := f.sink.Lane(stream, o, mine)
		l.Follows(after, settled)
		return l
	}
	first := f.sink.Lane(stream, o, mine)
	f.publish(first, events[0])
	f.publish(first, events[1])
	f.publish(first, events[2])
	l := claim(6, 5, 2)
	f.publish(l, events[3]) // 2 is in doubt, 0 and 1 are settled
	f.wantDoubt(1)
	f.publish(l, events[4])
	l.Settled(1)
	f.publish(l, events[5])
	f.wantDoubt(1)
	f.publish(f.sink.Lane(stream, o, partLane(3, 7)), events[6]) // inherits 4 and 5
	f.wantDoubt(3)
	f.publish(claim(8, 6, 3), events[7]) // and this 6: the settled batches are not those of claim 7
	f.wantDoubt(4)
	old, err := f.server.Client.Dump(t.Context(), f.gate()).Result()
	f.must(err)
	f.publish(claim(9, 8, 1), events[8])
	f.publish(claim(10, 9, 1), events[9])
	restored := func() {
		f.do("DEL", f.gate())
		f.must(f.server.Client.Restore(t.Context(), f.gate(), 0, old).Err())
	}
	restored()
	// This one does not know how many events the gate has let through.
	other := f.through(testenv.NewLink(t, f.server.Addr()))
	mine.Claim = 11
	lane := other.Lane(stream, o, mine)
	lane.Follows(10, 1)
	if _, err := lane.Deliver(events[10:]).Publish(t.Context()); !errors.Is(err, outbox.ErrGap) {
		t.Errorf("an older gate: %v", err)
	}
	restored()
	mine.Claim = 12
	lane = other.Lane(stream, o, mine)
	lane.Follows(8, 2)
	if _, err := lane.Deliver(events[10:]).Publish(t.Context()); !errors.Is(err, outbox.ErrGap) {
		t.Errorf("a gate without the last batch: %v", err)
	}
}

// A claim's doubt is younger than the adoption, so the adoption's end must not end it.
func TestForgetDoubtKeepsWhatAClaimInherited(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	o := f.adopted(1)
	events := makeEvents(4)
	f.publish(f.sink.Lane(stream, o, partLane(2, 1)), events[:2]...)
	two := f.sink.Lane(stream, o, partLane(2, 2))
	f.publish(two, events[2])
	f.wantDoubt(2)
	f.must(f.sink.ForgetDoubt(t.Context(), o, stream))
	f.wantDoubt(2)
	if r := f.publish(two, events[0], events[1], events[3]); r.Suppressed != 2 {
		t.Fatalf("receipt %+v, want 2 suppressed", r)
	}
	f.wantStored(events[0], events[1], events[2], events[3])
}

// The claim that left them may still report its batches settled, and then they are no longer in doubt.
func TestSettledReachesWhatALaterClaimInherited(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	o := f.adopted(1)
	events := makeEvents(6)
	one := partLane(2, 1)
	l := f.sink.Lane(stream, o, one)
	f.publish(l, events[:2]...)
	f.publish(l, events[2:4]...)
	f.publish(f.sink.Lane(stream, o, partLane(2, 2)), events[4])
	f.wantDoubt(4)
	f.must(f.sink.Settled(t.Context(), o, []outbox.Mark{{Stream: stream, Lane: one, Number: 1}}))
	f.wantDoubt(2)
	f.must(f.sink.Settled(t.Context(), o, []outbox.Mark{{Stream: stream, Lane: one, Number: 2}}))
	f.wantDoubt(0)
}

func TestTheGateStaysSmall(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	o := f.adopted(1)
	l := f.lane(o)
	var events []*outbox.Record
	for range 50 {
		e := makeEvents(20)
		events = append(events, e...)
		r := f.publish(l, e...)
		l.Settled(r.Number) // reaches the gate with the next publish
		if n := len(f.fields("u:")); n > 1 {
			t.Fatalf("%d unsettled batches, want 1", n)
		}
	}
	f.must(f.sink.Settled(t.Context(), o, []outbox.Mark{{Stream: stream, Lane: streamLane(o), Number: 1000}}))
	if n := len(f.fields("")); n != 7 {
		t.Errorf("%d fields in the gate, want its owner and register, the numbers of events and of other entries, the "+
			"length, the last of the events and one lane: %q", n, f.fields(""))
	}
	f.adopted(2)
	f.wantDoubt(0)
	f.wantStored(events...)
}

func TestConfirmKnowsItsBatches(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	ctx := t.Context()
	o := f.adopted(1)
	f.publish(f.lane(o), makeEvent())
	five := partLane(3, 5)
	f.publish(f.sink.Lane(stream, o, five), makeEvent())
	mark := func(l outbox.Lane, n int64) []outbox.Mark {
		return []outbox.Mark{{Stream: stream, Lane: streamLane(o), Number: 1}, {Stream: stream, Lane: l, Number: n}}
	}
	f.must(f.sink.Confirm(ctx, o, nil))
	f.must(f.sink.Confirm(ctx, o, mark(five, 1)))
	wantGap(t, f.sink.Confirm(ctx, o, mark(five, 2)))
	wantGap(t, f.sink.Confirm(ctx, o, mark(partLane(7, 1), 1)))
	wantGap(t, f.sink.Confirm(ctx, o, mark(partLane(3, 6), 1)))
	wantFenced(t, f.sink.Confirm(ctx, o, mark(partLane(3, 5), 1)), 1)
	wantFenced(t, f.sink.Confirm(ctx, o, mark(partLane(3, 4), 1)), 1)
	wantGap(t, f.sink.Confirm(ctx, o, append(mark(five, 1), outbox.Mark{
		Stream: "outbox.other", Lane: five,
		Number: 1,
	})))
	f.must(f.sink.Check(ctx, o, nil))
	wantGap(t, f.sink.Check(ctx, o, []string{stream, "outbox.other"}))
	canceled, cancel := context.WithCancel(ctx)
	cancel()
	if err := f.sink.Check(canceled, o, []string{stream}); err == nil {
		t.Error("a canceled check says yes")
	}
}
