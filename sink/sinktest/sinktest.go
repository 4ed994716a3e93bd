// Package sinktest tests implementations of [stream.Sink]: what a sink must survive for the relay to keep its promises.
//
// The events that a stream has are read without the sink (Target.Stored), so that a sink cannot confirm its own errors.
package sinktest

import (
	"crypto/rand"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/google/uuid"

	"posthaste/outbox"
	"posthaste/relay/stream"
)

// Target is a sink on servers of its own, and what tests do to these. The tests of a function that is nil are skipped:
// the sink has nothing that could fail in this way, or the target does not model it. Functions fail their test
// themselves.
type Target struct {
	// Open returns a sink of another process.
	Open func() stream.Sink
	// Stored lists the events of a stream in order; none if the stream does not exist.
	Stored func(stream string) []uuid.UUID

	// Lose makes the next n batches that are published fail: they arrive and their replies are lost, or they do not
	// arrive.
	Lose func(n int, arrive bool)
	// Late makes the next batch that is published fail and not arrive. The function that it returns lets it arrive.
	Late func() (arrive func())
	// Poison changes e so that the sink refuses it, and no other event.
	Poison func(e *outbox.Record)
	// Refuse makes the sink refuse all events of a stream, until lift is called. It keeps what is there.
	Refuse func(stream string) (lift func())
	// Half makes a stream refuse events after the next n of a batch, until lift is called. What is there may go then.
	Half func(stream string, n int) (lift func())

	// Restart restarts the server, with everything that it has.
	Restart func()
	// Save copies all that the server has, and returns what restores the copy.
	Save func() (restore func())
	// Drop deletes a stream. Its gates stay.
	Drop func(stream string)
	// Add is another program that adds an entry to a stream, or makes it. The entry is younger than all others.
	Add func(stream string)
	// DropGate deletes the gate of a source. The stream stays.
	DropGate func(stream string, source uuid.UUID)
	// SaveGate copies the gate of a source, and returns what restores the copy.
	SaveGate func(stream string, source uuid.UUID) (restore func())

	// Read makes a consumer group read and acknowledge n entries. Sinks trim streams to at most 20 events.
	Read func(stream, group string, n int)
	// Undurable returns a sink that demands a durability that the server does not reach until lift is called.
	Undurable func() (s stream.Sink, lift func())
	// Skip names tests that do not apply, with the reason.
	Skip map[string]string
}

// Run runs the suite. open starts a target, which ends with its test.
func Run(t *testing.T, open func(t *testing.T) Target) {
	t.Helper()
	for _, c := range []struct {
		name  string
		test  func(f *fixture)
		needs func(o Target) bool
	}{
		{"events are published in order, once", inOrder, nil},
		{"batches and replies are lost", lost, nil},
		{"a batch arrives late", late, func(o Target) bool { return o.Late != nil }},
		{"a batch is half published", half, func(o Target) bool { return o.Half != nil }},
		{"one event is refused", poison, nil},
		{"a stream is refused", refused, nil},
		{"an adoption is repeated", adoptedTwice, nil},
		{"only the next number is accepted", nextNumber, nil},
		{"an owner with an older epoch or another nonce", zombies, nil},
		{"an owner that has not adopted", early, nil},
		{"an older claim or another session", claims, nil},
		{"a claim after another of its session", follows, nil},
		{"two owners at once", twoOwners, nil},
		{"another database", foreign, nil},
		{"unsettled events are in doubt", doubt, nil},
		{"doubt lasts until it is emptied", doubtLasts, nil},
		{"all claims of a lane are settled", claimsSettled, nil},
		{"only published batches are confirmed", confirmed, nil},
		{"everything is lost", func(f *fixture) { lostGate(f, f.Drop, f.DropGate) }, nil},
		{"the gate is lost", func(f *fixture) { lostGate(f, nil, f.DropGate) }, nil},
		{"the gate goes back", olderGate, nil},
		{"a stream is deleted", func(f *fixture) { lostStream(f, func() {}) }, nil},
		{"a stream is deleted and a reader makes it", func(f *fixture) {
			lostStream(f, func() { f.Must(f.sink.Regroup(f.Context(), order, []string{"g"})) })
		}, nil},
		{"a stream is deleted and another program makes it", func(f *fixture) {
			lostStream(f, func() { f.Add(order) })
		}, func(o Target) bool { return o.Add != nil }},
		{"the server goes back", wentBack, nil},
		{"the table goes back", tableBack, nil},
		{"recalled events are gone", recalledGone, nil},
		{"the server is restarted", restarted, func(o Target) bool { return o.Restart != nil }},
		{"groups of consumers", groups, nil},
		{"trimming keeps what is not read", trimmed, func(o Target) bool { return o.Read != nil }},
		{"the durability is not reached", undurable, func(o Target) bool { return o.Undurable != nil }},
		{"leaders on two servers", signs, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			o := open(t)
			if why := o.Skip[c.name]; why != "" {
				t.Skip(why)
			}
			if c.needs != nil && !c.needs(o) {
				t.Skip("the target has nothing like it")
			}
			f := &fixture{Fixture: Fixture{t, uuid.New()}, Target: o}
			f.sink = f.open()
			c.test(f)
		})
	}
}

// Fixture is a test and its database.
type Fixture struct {
	testing.TB
	Source uuid.UUID
}

// Must fails the test on an error.
func (f Fixture) Must(err error) {
	f.Helper()
	if err != nil {
		f.Fatal(err)
	}
}

// Owner returns an owner that has not adopted.
func (f Fixture) Owner(epoch int64) outbox.Owner {
	return outbox.Owner{Source: f.Source, Epoch: epoch, Nonce: Nonce()}
}

// Publish publishes events in one attempt.
func (f Fixture) Publish(l outbox.LanePublisher, events ...*outbox.Record) outbox.Receipt {
	f.Helper()
	r, err := l.Deliver(events).Publish(f.Context())
	f.Must(err)
	return r
}

// Again publishes events of which some are in doubt, and checks how many.
func (f Fixture) Again(l outbox.LanePublisher, suppressed int, events ...*outbox.Record) {
	f.Helper()
	if r := f.Publish(l, events...); r.Suppressed != suppressed {
		f.Errorf("%d events were suppressed, want %d", r.Suppressed, suppressed)
	}
}

// WantFenced checks the error of an owner that an epoch has fenced.
func WantFenced(tb testing.TB, err error, epoch int64) {
	tb.Helper()
	var fenced *outbox.FencedError
	if !errors.As(err, &fenced) || fenced.Stream != order || fenced.Epoch != epoch {
		tb.Errorf("got %v, want to be fenced by epoch %d of %s", err, epoch, order)
	}
}

// WantGap checks the error of a call that only an adoption can answer.
func WantGap(tb testing.TB, err error) {
	tb.Helper()
	if !errors.Is(err, outbox.ErrGap) {
		tb.Errorf("got %v, want a gap", err)
	}
}

// order is the stream of most tests.
const order = "outbox.order"

// fixture is a target and a sink on it.
type fixture struct {
	Fixture
	Target
	sink stream.Sink
}

// open opens another sink, and binds it.
func (f *fixture) open() stream.Sink {
	f.Helper()
	s := f.Open()
	_, err := s.Bind(f.Context())
	f.Must(err)
	return s
}

// adopted is a new owner that has raised the gate.
func (f *fixture) adopted(epoch int64) outbox.Owner {
	f.Helper()
	o := f.Owner(epoch)
	f.Must(f.sink.Adopt(f.Context(), order, o, false))
	return o
}

func (f *fixture) lane(o outbox.Owner) outbox.LanePublisher {
	return f.sink.Lane(order, o, StreamLane(o))
}

// part opens the lane of a claim of part 3.
func (f *fixture) part(o outbox.Owner, claim int64) (outbox.LanePublisher, outbox.Lane) {
	l := outbox.Lane{Part: 3, Claim: claim, Nonce: Nonce()}
	return f.sink.Lane(order, o, l), l
}

// retry repeats a delivery until it is complete, and returns the last error before.
func (f *fixture) retry(d outbox.Delivery) (r outbox.Receipt, last error) {
	f.Helper()
	for range 100 {
		r, err := d.Publish(f.Context())
		if err == nil {
			return r, last
		}
		if last = err; errors.Is(err, outbox.ErrGap) || errors.As(err, new(*outbox.FencedError)) {
			break
		}
	}
	f.Fatalf("not published: %v", last)
	return r, nil
}

// refusedBy publishes one event, which must be refused.
func (f *fixture) refusedBy(l outbox.LanePublisher) error {
	_, err := l.Deliver(Events(1)).Publish(f.Context())
	return err
}

// want is the oracle: the stream has these events, in this order, once each.
func (f *fixture) want(events ...*outbox.Record) {
	f.Helper()
	f.wantIn(order, events...)
}

func (f *fixture) wantIn(stream string, events ...*outbox.Record) {
	f.Helper()
	if got := f.Stored(stream); !slices.Equal(got, IDs(events)) {
		f.Fatalf("stream %s has %d events %v, want %d %v", stream, len(got), got, len(events), IDs(events))
	}
}

func (f *fixture) look(noted string) outbox.StreamState {
	f.Helper()
	table := map[string]string{}
	if noted != "" {
		table[order] = noted
	}
	states, err := f.sink.Look(f.Context(), f.Source, []string{order}, table)
	f.Must(err)
	return states[0]
}

// calls are all calls of an owner that gates judge, by name. They have no effect if they are refused.
func (f *fixture) calls(o outbox.Owner) map[string]error {
	ctx, marks := f.Context(), mark(StreamLane(o), 1)
	return map[string]error{
		"publish": f.refusedBy(f.lane(o)), "check": f.sink.Check(ctx, o, []string{order}),
		"confirm": f.sink.Confirm(ctx, o, marks), "settled": f.sink.Settled(ctx, o, marks),
		"forget doubt": f.sink.ForgetDoubt(ctx, o, order),
		"recall":       f.sink.Recall(ctx, o, order, []uuid.UUID{uuid.New()}, ""),
	}
}

// StreamLane is the lane of the stream reader of an owner.
func StreamLane(o outbox.Owner) outbox.Lane {
	return outbox.Lane{Part: outbox.StreamLane, Nonce: o.Nonce}
}

func mark(l outbox.Lane, number int64) []outbox.Mark {
	return []outbox.Mark{{Stream: order, Lane: l, Number: number}}
}

// Nonce returns a new nonce.
func Nonce() (n outbox.Nonce) {
	_, _ = rand.Read(n[:])
	return n
}

// Events makes n events of seven aggregates.
func Events(n int) []*outbox.Record {
	events := make([]*outbox.Record, n)
	for i := range events {
		events[i] = &outbox.Record{
			ID: uuid.Must(uuid.NewV7()), Seq: int64(i + 1), AggregateType: "order", AggregateID: fmt.Sprint("o-", i%7),
			Type: "order.created", Payload: fmt.Appendf(nil, `{"n":%d}`, i),
			Time: time.Date(2026, 11, 20, 12, 0, 0, 123456789, time.UTC),
		}
	}
	return events
}

// IDs returns the ids of events.
func IDs(events []*outbox.Record) []uuid.UUID {
	list := make([]uuid.UUID, len(events))
	for i, e := range events {
		list[i] = e.ID
	}
	return list
}
