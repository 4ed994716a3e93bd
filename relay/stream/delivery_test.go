package stream

import (
	"context"
	"errors"
	"slices"
	"testing"

	"github.com/google/uuid"

	"posthaste/outbox"
)

// fussy is a lane and its delivery, which refuses the events of an aggregate.
type fussy struct {
	outbox.LanePublisher
	refuses string
	all     bool // whether it says that the stream takes no event
	events  []*outbox.Record
	skipped outbox.Skipped
}

func (f *fussy) Deliver(events []*outbox.Record) outbox.Delivery {
	f.events, f.skipped = events, nil
	return f
}

func (f *fussy) next() int {
	for i, e := range f.events {
		if e.AggregateID == f.refuses && !f.skipped[i] {
			return i
		}
	}
	return -1
}

func (f *fussy) Publish(context.Context) (outbox.Receipt, error) {
	if i := f.next(); i >= 0 {
		return outbox.Receipt{}, &outbox.PoisonError{
			Index: i, ID: f.events[i].ID, Class: "too_large", Err: errLarge, All: f.all,
		}
	}
	return outbox.Receipt{Number: 1}, nil
}

func (f *fussy) Skip(also func(*outbox.Record) bool) []int {
	return f.skipped.Skip(f.events, f.next(), also)
}

var errLarge = errors.New("it is too large")

// A stream that takes no event has all of them given up with the first, also with block-key, and for its reason.
func TestAStreamThatTakesNothingIsNotAskedForEach(t *testing.T) {
	t.Parallel()
	events := []*outbox.Record{{ID: uuid.New(), AggregateID: "a"}, {ID: uuid.New(), AggregateID: "b"}}
	d := Deliver(&fussy{refuses: "a", all: true}, "s", events, new(Refusals), true)
	for range Attempts {
		_, given, _ := d.Publish(t.Context())
		if len(given) == 0 {
			continue
		}
		if len(given) != 2 || given[1].Event != events[1] || given[1].Class != "too_large" {
			t.Errorf("given up: %+v", given)
		}
		return
	}
	t.Error("nothing is given up")
}

// With block-key the events after a refused one of the aggregate are given up with it; otherwise each gets attempts of
// its own. What is given up is not sent.
func TestDelivery(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		blockKey bool
		classes  []string
		attempts []int
	}{
		{true, []string{"too_large", "blocked"}, []int{Attempts, 0}},
		{false, []string{"too_large", "too_large"}, []int{Attempts, 1}}, // the stream has refused one already
	} {
		var events []*outbox.Record
		for _, aggregate := range []string{"a", "bad", "b", "bad"} {
			events = append(events, &outbox.Record{ID: uuid.New(), AggregateID: aggregate})
		}
		var refusals Refusals
		d := Deliver(&fussy{refuses: "bad"}, "s", events, &refusals, c.blockKey)
		var given []outbox.Refused
		refused := 0
		for done := false; !done; {
			receipt, some, err := d.Publish(t.Context())
			given = append(given, some...)
			if errors.As(err, new(*outbox.PoisonError)) {
				refused++
			}
			done = receipt.Number > 0
		}
		var classes []string
		var attempts []int
		for i, g := range given {
			classes, attempts = append(classes, g.Class), append(attempts, g.Attempts)
			if g.Event != events[1+2*i] {
				t.Errorf("block-key %v: %v is given up", c.blockKey, g.Event)
			}
		}
		if !slices.Equal(classes, c.classes) || !slices.Equal(attempts, c.attempts) || refused != Attempts-1 {
			t.Errorf("block-key %v: %v after %v attempts, refused %d times", c.blockKey, classes, attempts, refused)
		}
		if sent := d.Sent(); !slices.Equal(sent, []*outbox.Record{events[0], events[2]}) {
			t.Errorf("block-key %v: sent %v", c.blockKey, sent)
		}
	}
}

func TestRefusals(t *testing.T) {
	t.Parallel()
	var r Refusals
	a, b := uuid.New(), uuid.New()
	refused := func(stream string, id uuid.UUID, attempts int, park bool) {
		t.Helper()
		if n, p := r.Refused(stream, &outbox.PoisonError{ID: id}); n != attempts || p != park {
			t.Errorf("refused: attempt %d, to be parked %v; want %d, %v", n, p, attempts, park)
		}
	}
	refused("s", a, 1, false)
	refused("s", a, 2, false)
	refused("s", a, 3, true)
	refused("s", a, 4, true) // it was rolled back
	r.Parked("s", a)
	refused("s", b, 1, true) // the stream refuses everything
	refused("t", b, 1, false)
	r.Accepted("s")
	refused("s", b, 1, false)
	for n := range 3 { // for any event
		if _, park := r.Refused("u", &outbox.PoisonError{ID: uuid.New(), All: true}); park != (n == 2) {
			t.Errorf("refusal %d of all events: to be parked %v", n+1, park)
		}
	}
	r.Accepted("never")
	r.Parked("never", a)
}
