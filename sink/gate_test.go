package sink_test

import (
	"errors"
	"strconv"
	"testing"

	"github.com/google/uuid"

	"posthaste/internal/testenv"
	"posthaste/outbox"
)

func itoa(n uint64) string { return strconv.FormatUint(n, 10) }

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
