package sink_test

import (
	"strconv"
	"testing"

	"github.com/google/uuid"

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
	f.Publish(l, events[:2]...)
	other := outbox.Owner{Source: uuid.New(), Epoch: 1, Nonce: nonce()}
	ctx := t.Context()
	refused(t, f.sink.Adopt(ctx, stream, other, false), f.Source.String())
	f.Must(f.sink.TakeOver(ctx, stream, other))
	f.Must(f.sink.TakeOver(ctx, stream, other))
	// A clone still has the rows; what its origin had published unsettled is not published again.
	r := f.Publish(f.lane(other), events...)
	f.wantStored(events...)
	f.wantLast(r)
	if r.Suppressed != 2 {
		t.Errorf("%d suppressed, want 2", r.Suppressed)
	}
	wantGap(t, f.sink.Check(ctx, o, []string{stream}))
	wantGap(t, second(l.Deliver(makeEvents(1)).Publish(ctx)))
	refused(t, f.sink.Adopt(ctx, stream, f.Owner(51), false), other.Source.String())
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
		r := f.Publish(l, e...)
		l.Settled(r.Number) // reaches the gate with the next publish
		if n := len(f.fields("u:")); n > 1 {
			t.Fatalf("%d unsettled batches, want 1", n)
		}
	}
	f.Must(f.sink.Settled(t.Context(), o, []outbox.Mark{{Stream: stream, Lane: streamLane(o), Number: 1000}}))
	if n := len(f.fields("")); n != 7 {
		t.Errorf("%d fields in the gate, want its owner and register, the numbers of events and of other entries, the "+
			"length, the last of the events and one lane: %q", n, f.fields(""))
	}
	f.adopted(2)
	f.wantDoubt(0)
	f.wantStored(events...)
}
