package relay

import (
	"testing"

	"posthaste/outbox"
)

// What our own stream moves is no surprise, also when nobody has looked at the slot since it began: a barrier that
// nobody needs would keep the next stream from being taken up beside an open transaction.
func TestTheFirstMoveOfAStreamIsNoSurprise(t *testing.T) {
	t.Parallel()
	m := &transactions{status: outbox.SlotStatus{Exists: true, Confirmed: 5}}
	r := New(Options{Store: m, Slots: m})
	r.activity.enter(phaseHandover, "")
	look := func() {
		t.Helper()
		if _, err := r.keeper.look(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	look()
	r.activity.enter(phaseStream, "")
	r.keeper.onExhausted(func() {})
	m.status.Active, m.status.Confirmed = true, 6
	look()
	if m.barrier != 0 {
		t.Errorf("barrier %d, want none", m.barrier)
	}
}
