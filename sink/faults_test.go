package sink_test

import (
	"testing"

	"posthaste/internal/lab/testenv"
	"posthaste/outbox"
)

// roomFor leaves the stream room for exactly n more entries.
func (f *fixture) roomFor(n int64) {
	f.Helper()
	if f.server.Client.Exists(f.Context(), stream).Val() == 0 {
		f.do("XADD", stream, "1-1", "id", "filler")
	}
	f.do("XSETID", stream, "18446744073709551615-"+itoa(18446744073709551615-uint64(n)))
}

// emptied replaces the stream by an empty one whose ids begin again. (A deleted stream would be noticed, and so would
// ids that go back.)
func (f *fixture) emptied() {
	f.Helper()
	f.do("DEL", stream)
	f.do("XGROUP", "CREATE", stream, "g", "$", "MKSTREAM")
	f.do("XGROUP", "DESTROY", stream, "g")
	f.do("HDEL", f.gate(), "last", "base")
}

func TestAConnectionCutInMidCommandPublishesOnce(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	o := f.adopted(1)
	p := testenv.NewLink(t, f.server.Addr())
	l := f.through(p).Lane(stream, o, streamLane(o))
	events := makeEvents(1000)
	p.Set(testenv.Trouble{CutRequests: 40000})
	d := l.Deliver(events)
	wantClass(t, second(d.Publish(t.Context())), "connection")
	p.Set(testenv.Trouble{})
	r := retry(t, d, "connection")
	f.wantStored(events...)
	f.wantLast(r)
}

func TestAServerWithASmallBufferGetsSmallerBatches(t *testing.T) {
	t.Parallel()
	f := newFixture(t, "client-query-buffer-limit 1mb")
	l := f.lane(f.adopted(1))
	events := make([]*outbox.Record, 150)
	for i := range events {
		events[i] = big(20 << 10)
	}
	r := retry(t, l.Deliver(events), "connection")
	f.wantStored(events...)
	f.wantLast(r)
	calls := f.metric("outbox_publish_seconds")
	more := make([]*outbox.Record, 150)
	for i := range more {
		more[i] = big(20 << 10)
	}
	// The limit is known now: no connection is lost any more.
	f.Publish(l, more...)
	if n := f.metric("outbox_publish_seconds") - calls; n > 10 {
		t.Errorf("%v calls for 3 MiB, want about 6", n)
	}
	f.wantStored(append(events, more...)...)
}

// A call given up as lost may still arrive: bytes of a closed connection wait in the server's socket. Arriving after
// its half, the whole must not publish the other half too, because that goes under the next number.
func TestALateWholeAfterItsHalfPublishesNothing(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	l := f.lane(f.adopted(1))
	before := makeEvent() // also makes the server learn the script
	f.Publish(l, before)
	h := &faults{}
	h.hold.Store(2)
	f.client.AddHook(h)
	events := makeEvents(20)
	d := l.Deliver(events)
	for range 2 {
		wantClass(t, second(d.Publish(t.Context())), "connection")
	}
	h.hold.Store(1)
	wantClass(t, second(d.Publish(t.Context())), "connection")
	whole, first := h.held[0], h.held[2]
	if len(h.held[1]) != len(whole) || len(first) >= len(whole) {
		t.Fatalf("calls of %d, %d and %d arguments, want two wholes and a half", len(whole), len(h.held[1]), len(first))
	}
	for _, args := range [][]any{first, whole, whole} {
		f.do(args...)
		f.wantStored(append([]*outbox.Record{before}, events[:10]...)...)
	}
	r, err := d.Publish(t.Context())
	f.Must(err)
	f.wantStored(append([]*outbox.Record{before}, events...)...)
	f.wantLast(r)
	f.do(whole...) // no longer the last number
	f.do(first...)
	f.wantStored(append([]*outbox.Record{before}, events...)...)
}
