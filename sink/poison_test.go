package sink_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"posthaste/internal/lab/testenv"
	"posthaste/outbox"
	"posthaste/sink"
)

func TestWrongTypeIsPoisonUntilMended(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	o := f.adopted(1)
	l := f.lane(o)
	f.do("SET", stream, "not a stream")
	events := makeEvents(3)
	d := l.Deliver(events)
	for i := range 2 {
		_, err := d.Publish(t.Context())
		var poison *outbox.PoisonError
		if !errors.As(err, &poison) || poison.Class != "wrongtype" || !poison.All || poison.Index != i ||
			poison.ID != events[i].ID {
			t.Fatalf("got %#v, want event %d refused for wrongtype", err, i)
		}
		d.Skip(nil)
	}
	_, err := d.Publish(t.Context())
	if sink.Class(err) != "wrongtype" || !strings.Contains(err.Error(), "the key "+stream+" holds a string") {
		t.Fatalf("got %v, want wrongtype, and the key", err)
	}
	f.do("DEL", stream)
	r, err := d.Publish(t.Context()) // no Skip: a retry
	f.Must(err)
	f.wantStored(events[2])
	f.wantLast(r)
	f.wantMetric("outbox_publish_errors_total", 3, "class", "wrongtype")
	next := makeEvent()
	f.Publish(l, next)
	f.wantStored(events[2], next)
	// The gate has lost nothing, so no adoption is needed, and the groups do not count as destroyed.
	f.do("DEL", stream)
	f.do("SET", stream, "not a stream")
	f.Must(f.sink.Check(t.Context(), o, []string{stream}))
	if groups, err := f.sink.Groups(t.Context(), o, []string{stream}); err != nil || len(groups) != 0 {
		t.Errorf("groups %v, %v", groups, err)
	}
}

// A claim fences earlier claims from its first call on, even if the stream refuses that call. The event is then parked,
// and a late call of the previous claim must not publish it.
func TestARefusalFencesEarlierClaims(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	o := f.adopted(1)
	events := makeEvents(3)
	before := f.sink.Lane(stream, o, partLane(3, 1))
	f.Publish(before, events[0])
	f.do("RENAME", stream, "aside")
	f.do("SET", stream, "not a stream")
	after := f.sink.Lane(stream, o, partLane(3, 2))
	d := after.Deliver(events[1:2])
	wantClass(t, second(d.Publish(t.Context())), "wrongtype")
	f.do("RENAME", "aside", stream)
	f.wantDoubt(1) // events that the earlier claim published stay in doubt
	_, err := before.Deliver(events[1:2]).Publish(t.Context())
	wantFenced(t, err, 1)
	d.Skip(nil)
	f.Publish(after, events[2])
	f.wantStored(events[0], events[2])
}

// A batch stops half-way, and then its stream becomes something else: the poison is the event behind those published.
func TestPoisonInAHalfFailedBatch(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	l := f.lane(f.adopted(1))
	f.roomFor(2)
	events := makeEvents(5)
	d := l.Deliver(events)
	wantClass(t, second(d.Publish(t.Context())), "exhausted")
	f.do("SET", stream, "not a stream")
	_, err := d.Publish(t.Context())
	var poison *outbox.PoisonError
	if !errors.As(err, &poison) || poison.Index != 2 || poison.ID != events[2].ID {
		t.Fatalf("got %#v, want event 2 refused", err)
	}
	d.Skip(nil)
	if _, err = d.Publish(t.Context()); !errors.As(err, &poison) || poison.Index != 3 {
		t.Fatalf("got %#v, want event 3 refused", err)
	}
	f.emptied()
	d.Skip(nil)
	d.Skip(nil)
	r, err := d.Publish(t.Context())
	f.Must(err)
	f.wantStored(events[4])
	f.wantLast(r)
	last := makeEvent()
	f.Publish(l, last)
	f.wantStored(events[4], last)
}

func TestAnOversizedEventIsPoisonAndTheRestGoesOn(t *testing.T) {
	t.Parallel()
	for name, config := range map[string]string{
		"query buffer": "client-query-buffer-limit 1mb",
		"bulk length":  "proto-max-bulk-len 1mb",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newFixture(t, config)
			l := f.lane(f.adopted(1))
			events := []*outbox.Record{makeEvent(), makeEvent(), big(3 << 20), makeEvent(), makeEvent()}
			d := l.Deliver(events)
			var poison *outbox.PoisonError
			testenv.Eventually(t, 20*time.Second, func() error {
				_, err := d.Publish(t.Context())
				if errors.As(err, &poison) {
					return nil
				}
				if sink.Class(err) != "connection" {
					t.Fatalf("class %q of %v, want connection", sink.Class(err), err)
				}
				return err
			})
			if poison.Index != 2 || poison.Class != "too_large" || poison.All || poison.ID != events[2].ID {
				t.Fatalf("got %#v, want event 2 refused as too large", poison)
			}
			d.Skip(nil)
			r, err := d.Publish(t.Context())
			f.Must(err)
			rest := []*outbox.Record{events[0], events[1], events[3], events[4]}
			f.wantStored(rest...)
			f.wantLast(r)
			last := makeEvent()
			f.Publish(l, last)
			f.wantStored(append(rest, last)...)
		})
	}
}

func TestAnOversizedEventStaysTransientIfTheLimitsAreUnknown(t *testing.T) {
	t.Parallel()
	f := newFixture(t, "client-query-buffer-limit 1mb", "user default on nopass ~* &* +@all -config")
	d := f.lane(f.adopted(1)).Deliver([]*outbox.Record{big(3 << 20)})
	for range 6 {
		wantClass(t, second(d.Publish(t.Context())), "connection")
	}
}

// The size alone is not enough: the event has to be larger than what the server says it takes.
func TestAFittingEventIsNeverPoison(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	o := f.adopted(1)
	p := testenv.NewLink(t, f.server.Addr())
	l := f.through(p).Lane(stream, o, streamLane(o))
	p.Set(testenv.Trouble{CutRequests: 100000})
	e := big(1 << 20)
	d := l.Deliver([]*outbox.Record{e})
	for range 6 {
		wantClass(t, second(d.Publish(t.Context())), "connection")
	}
	p.Set(testenv.Trouble{})
	retry(t, d, "connection")
	f.wantStored(e)
}
