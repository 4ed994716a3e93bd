package stream

import (
	"testing"

	"github.com/google/uuid"

	"posthaste/outbox"
)

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
