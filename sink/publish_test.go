package sink_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"posthaste/internal/testenv"
	"posthaste/outbox"
	"posthaste/sink"
)

func TestEntryHasTheContractsFields(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	o := f.adopted(1)
	plain, traced := makeEvent(), makeEvent()
	traced.Headers = []byte(`{"traceparent":"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01","tenant":"x"}`)
	traced.Time = time.Date(2026, 1, 2, 3, 4, 5, 60000, time.FixedZone("", 3600))
	r := f.publish(f.lane(o), plain, traced)
	f.wantEntries(r, plain, traced)
	entries, err := f.server.Client.XRange(t.Context(), stream, "-", "+").Result()
	f.must(err)
	want := []map[string]any{
		{
			"id": plain.ID.String(), "type": "order.created", "source": "/posthaste/test", "subject": "o-0",
			"time": "2026-11-20T12:00:00.123456Z", "data": `{"n":0}`,
		},
		{
			"id": traced.ID.String(), "type": "order.created", "source": "/posthaste/test", "subject": "o-0",
			"time": "2026-01-02T02:04:05.000060Z", "data": `{"n":0}`,
			"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
		},
	}
	for i, w := range want {
		got, _ := json.Marshal(entries[i].Values)
		expected, _ := json.Marshal(w)
		if !bytes.Equal(got, expected) {
			t.Errorf("entry %d is %s, want %s", i, got, expected)
		}
	}
}

func TestYearsBeyondFourDigitsKeepTheirWidth(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	events := makeEvents(3)
	events[0].Time = time.Date(-43, 3, 15, 0, 0, 0, 0, time.UTC)
	events[1].Time = time.Date(294276, 1, 1, 0, 0, 0, 0, time.UTC)
	f.publish(f.lane(f.adopted(1)), events...)
	f.wantStored(events...)
	entries, err := f.server.Client.XRange(t.Context(), stream, "-", "+").Result()
	f.must(err)
	for i, want := range []string{"0001-01-01T00:00:00.000000Z", "9999-12-31T23:59:59.999999Z", "2026-11-20T12:00:00.123456Z"} {
		if got := entries[i].Values["time"]; got != want {
			t.Errorf("time %d is %v, want %s", i, got, want)
		}
	}
}

func TestNumbersGoOnFromDeliveryToDelivery(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	l := f.lane(f.adopted(1))
	events := makeEvents(6)
	for i := range 3 {
		if r := f.publish(l, events[2*i], events[2*i+1]); r.Number != int64(i+1) || r.Suppressed != 0 {
			t.Fatalf("receipt %+v, want number %d", r, i+1)
		}
	}
	if r := f.publish(l); r.Number != 3 || len(r.EntryIDs) != 0 {
		t.Fatalf("receipt of nothing: %+v", r)
	}
	f.wantStored(events...)
	if n := f.metric("outbox_publish_seconds"); n != 3 {
		t.Errorf("%v calls observed, want 3", n)
	}
}

func TestAFinishedDeliveryAnswersAgainWithoutACall(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	d := f.lane(f.adopted(1)).Deliver(makeEvents(3))
	first, err := d.Publish(t.Context())
	f.must(err)
	f.must(f.server.Kill())
	again, err := d.Publish(t.Context())
	f.must(err)
	if again.Number != first.Number || again.EntryIDs[2] != first.EntryIDs[2] {
		t.Errorf("got %+v, want %+v", again, first)
	}
}

func TestPubSubGetsThePayload(t *testing.T) {
	t.Parallel()
	f := on(t, testenv.Redis(t), sink.Options{PubSub: true})
	sub := f.server.Client.Subscribe(t.Context(), "order.created")
	defer sub.Close()
	if _, err := sub.Receive(t.Context()); err != nil {
		t.Fatal(err)
	}
	l := f.lane(f.adopted(1))
	events := makeEvents(3)
	f.publish(l, events...)
	for _, e := range events {
		m, err := sub.ReceiveMessage(t.Context())
		f.must(err)
		if m.Payload != string(e.Payload) {
			t.Fatalf("message %q, want %q", m.Payload, e.Payload)
		}
	}
}

func TestARefusedPublishIsCountedAndTheEntryStays(t *testing.T) {
	t.Parallel()
	server := testenv.Redis(t, "user default on nopass ~* resetchannels +@all")
	f := on(t, server, sink.Options{PubSub: true})
	events := makeEvents(4)
	f.publish(f.lane(f.adopted(1)), events...)
	f.wantStored(events...)
	if n := f.metric("outbox_pubsub_failed_total"); n != 4 {
		t.Errorf("%v failed, want 4", n)
	}
}

// roomFor leaves the stream room for exactly n more entries.
func (f *fixture) roomFor(n int64) {
	f.Helper()
	f.do("XADD", stream, "1-1", "id", "filler")
	f.do("XSETID", stream, "18446744073709551615-"+itoa(18446744073709551615-uint64(n)))
}

func TestAHalfFailedScriptGoesOnWhereItStopped(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	l := f.lane(f.adopted(1))
	f.roomFor(3)
	events := makeEvents(7)
	d := l.Deliver(events)
	_, err := d.Publish(t.Context())
	if sink.Class(err) != "exhausted" {
		t.Fatalf("class %q of %v, want exhausted", sink.Class(err), err)
	}
	f.do("XDEL", stream, "1-1")
	f.wantStored(events[:3]...)
	// The gate knows how far it came, so asking again adds nothing.
	if _, err = d.Publish(t.Context()); sink.Class(err) != "exhausted" {
		t.Fatalf("class %q of %v, want exhausted", sink.Class(err), err)
	}
	f.wantStored(events[:3]...)
	// The stream's ids can only go back if it is empty; what is in it moves on to its consumer.
	entries, err := f.server.Client.XRange(t.Context(), stream, "-", "+").Result()
	f.must(err)
	f.do("DEL", stream)
	r, err := d.Publish(t.Context())
	f.must(err)
	f.wantStored(events[3:]...)
	if r.Number != 1 {
		t.Errorf("number %d, want 1: it is still the same batch", r.Number)
	}
	for i, e := range entries {
		if r.EntryIDs[i] != e.ID {
			t.Errorf("entry id %d is %s, want %s", i, r.EntryIDs[i], e.ID)
		}
	}
	f.wantEntries(outbox.Receipt{EntryIDs: r.EntryIDs[3:]}, events[3:]...)
}

func TestAnAdoptionKnowsHowFarAHalfFailedScriptCame(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	l := f.lane(f.adopted(1))
	f.roomFor(2)
	events := makeEvents(5)
	if _, err := l.Deliver(events).Publish(t.Context()); err == nil {
		t.Fatal("a full stream took five events")
	}
	o := f.adopted(2)
	f.wantDoubt(2)
	f.do("DEL", stream)
	r := f.publish(f.lane(o), events...)
	f.wantStored(events[2:]...)
	if r.Suppressed != 2 {
		t.Errorf("%d suppressed, want 2", r.Suppressed)
	}
}

func TestALostReplyPublishesOnce(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	o := f.adopted(1)
	p := testenv.NewProxy(t, f.server.Addr())
	s := f.through(p)
	l := s.Lane(stream, o, streamLane(o))
	first, events := makeEvents(2), makeEvents(50)
	f.publish(l, first...)
	p.Toxic(`{"name":"lost","type":"timeout","stream":"downstream","attributes":{"timeout":0}}`)
	d := l.Deliver(events)
	ctx, cancel := context.WithTimeout(t.Context(), 150*time.Millisecond)
	defer cancel()
	if _, err := d.Publish(ctx); sink.Class(err) != "timeout" {
		t.Fatalf("class %q of %v, want timeout", sink.Class(err), err)
	}
	f.wantStored(append(first, events...)...)
	p.Remove("lost")
	r := retry(t, d, "timeout", "connection")
	f.wantStored(append(first, events...)...)
	f.wantEntries(r, events...)
	if r.Number != 2 {
		t.Errorf("number %d, want 2", r.Number)
	}
}

func TestAConnectionLostBeforeTheCallPublishesOnce(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	o := f.adopted(1)
	p := testenv.NewProxy(t, f.server.Addr())
	l := f.through(p).Lane(stream, o, streamLane(o))
	events := makeEvents(10)
	f.publish(l, events[:5]...)
	p.Down()
	d := l.Deliver(events[5:])
	if _, err := d.Publish(t.Context()); sink.Class(err) != "connection" {
		t.Fatalf("class %q of %v, want connection", sink.Class(err), err)
	}
	p.Up()
	retry(t, d, "connection")
	f.wantStored(events...)
}

func TestAConnectionCutInMidCommandPublishesOnce(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	o := f.adopted(1)
	p := testenv.NewProxy(t, f.server.Addr())
	l := f.through(p).Lane(stream, o, streamLane(o))
	events := makeEvents(1000)
	p.Toxic(`{"name":"cut","type":"limit_data","stream":"upstream","attributes":{"bytes":40000}}`)
	d := l.Deliver(events)
	if _, err := d.Publish(t.Context()); sink.Class(err) != "connection" {
		t.Fatalf("class %q of %v, want connection", sink.Class(err), err)
	}
	p.Remove("cut")
	r := retry(t, d, "connection")
	f.wantStored(events...)
	f.wantEntries(outbox.Receipt{EntryIDs: r.EntryIDs[:3]}, events[:3]...)
}

func TestScriptFlushInMidRun(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	o := f.adopted(1)
	l := f.lane(o)
	events := makeEvents(4)
	f.publish(l, events[:2]...)
	f.do("SCRIPT", "FLUSH")
	f.publish(l, events[2:]...)
	f.do("SCRIPT", "FLUSH")
	f.must(f.sink.Confirm(t.Context(), o, []outbox.Mark{{Stream: stream, Lane: streamLane(o), Number: 2}}))
	f.do("SCRIPT", "FLUSH")
	f.must(f.sink.Settled(t.Context(), o, []outbox.Mark{{Stream: stream, Lane: streamLane(o), Number: 2}}))
	f.wantStored(events...)
}

func TestAThousandEventsAreOneBatchAndMoreAreSeveral(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	l := f.lane(f.adopted(1))
	events := makeEvents(3500)
	if r := f.publish(l, events[:1000]...); r.Number != 1 {
		t.Errorf("number %d, want 1", r.Number)
	}
	r := f.publish(l, events[1000:]...)
	if r.Number != 4 {
		t.Errorf("number %d, want 4", r.Number)
	}
	f.wantStored(events...)
	f.wantEntries(outbox.Receipt{EntryIDs: r.EntryIDs[2490:]}, events[3490:]...)
}

func TestBatchesAreBoundedByBytes(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	l := f.lane(f.adopted(1))
	events := []*outbox.Event{big(1 << 20), big(2 << 20), big(2 << 20), big(8 << 20), makeEvent()}
	r := f.publish(l, events...)
	// {1, 2 MiB}, {2 MiB}, {8 MiB} alone, {small}
	if r.Number != 4 {
		t.Errorf("number %d, want 4", r.Number)
	}
	f.wantStored(events...)
}

func TestAServerWithASmallBufferGetsSmallerBatches(t *testing.T) {
	t.Parallel()
	f := newFixture(t, "client-query-buffer-limit 1mb")
	l := f.lane(f.adopted(1))
	events := make([]*outbox.Event, 150)
	for i := range events {
		events[i] = big(20 << 10)
	}
	r := retry(t, l.Deliver(events), "connection")
	f.wantStored(events...)
	f.wantEntries(r, events...)
	calls := f.metric("outbox_publish_seconds")
	more := make([]*outbox.Event, 150)
	for i := range more {
		more[i] = big(20 << 10)
	}
	// The limit is known now: no connection is lost any more.
	f.publish(l, more...)
	if n := f.metric("outbox_publish_seconds") - calls; n > 10 {
		t.Errorf("%v calls for 3 MiB, want about 6", n)
	}
	f.wantStored(append(events, more...)...)
}

// A whole batch was executed but its reply got lost twice; its first half is then answered with the whole.
func TestAHalvedRepeatIsAnsweredWithTheWhole(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	o := f.adopted(1)
	p := testenv.NewProxy(t, f.server.Addr())
	l := f.through(p).Lane(stream, o, streamLane(o))
	events := makeEvents(100)
	// The reply is longer than this, so each connection ends in the middle of it.
	p.Toxic(`{"name":"cut","type":"limit_data","stream":"downstream","attributes":{"bytes":500}}`)
	d := l.Deliver(events)
	for range 2 {
		if _, err := d.Publish(t.Context()); sink.Class(err) != "connection" {
			t.Fatalf("class %q of %v, want connection", sink.Class(err), err)
		}
	}
	f.wantStored(events...)
	p.Remove("cut")
	r := retry(t, d, "connection")
	f.wantStored(events...)
	f.wantEntries(r, events...)
	if r.Number != 1 {
		t.Errorf("number %d, want 1", r.Number)
	}
	next := makeEvent()
	if r := f.publish(l, next); r.Number != 2 {
		t.Errorf("number %d, want 2", r.Number)
	}
	f.wantStored(append(events, next)...)
}

// holdBack keeps the first calls instead of sending them, and reports each as a lost connection.
type holdBack struct {
	faults
	n    int
	held [][]any
	sent []int
}

func (h *holdBack) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		if cmd.Name() != "evalsha" {
			return next(ctx, cmd)
		}
		h.sent = append(h.sent, len(cmd.Args()))
		if len(h.held) >= h.n {
			return next(ctx, cmd)
		}
		var args []any
		for _, a := range cmd.Args() {
			if b, ok := a.([]byte); ok {
				a = bytes.Clone(b) // the lane uses its buffer again
			}
			args = append(args, a)
		}
		h.held = append(h.held, args)
		return io.EOF
	}
}

// A call given up as lost may still arrive: bytes of a closed connection wait in the server's socket. Arriving after its
// half, the whole must not publish the other half too, because that goes under the next number.
func TestALateWholeAfterItsHalfPublishesNothing(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	l := f.lane(f.adopted(1))
	before := makeEvent() // also makes the server learn the script
	f.publish(l, before)
	h := &holdBack{n: 2}
	f.client.AddHook(h)
	events := makeEvents(20)
	d := l.Deliver(events)
	for range 2 {
		if _, err := d.Publish(t.Context()); sink.Class(err) != "connection" {
			t.Fatalf("class %q of %v, want connection", sink.Class(err), err)
		}
	}
	h.n = 3
	if _, err := d.Publish(t.Context()); sink.Class(err) != "connection" {
		t.Fatalf("class %q of %v, want connection", sink.Class(err), err)
	}
	whole, first := h.held[0], h.held[2]
	if len(h.held[1]) != len(whole) || len(first) >= len(whole) {
		t.Fatalf("calls of %v arguments, want two wholes and a half", h.sent)
	}
	for _, args := range [][]any{first, whole, whole} {
		f.do(args...)
		f.wantStored(append([]*outbox.Event{before}, events[:10]...)...)
	}
	r, err := d.Publish(t.Context())
	f.must(err)
	f.wantStored(append([]*outbox.Event{before}, events...)...)
	f.wantEntries(r, events...)
	f.do(whole...) // no longer the last number
	f.do(first...)
	f.wantStored(append([]*outbox.Event{before}, events...)...)
}

func TestWrongTypeIsPoisonUntilMended(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	l := f.lane(f.adopted(1))
	f.do("SET", stream, "not a stream")
	events := makeEvents(3)
	d := l.Deliver(events)
	for i := range 2 {
		_, err := d.Publish(t.Context())
		var poison *outbox.PoisonError
		if !errors.As(err, &poison) || poison.Class != "wrongtype" || poison.Index != i || poison.ID != events[i].ID {
			t.Fatalf("got %#v, want event %d refused for wrongtype", err, i)
		}
		d.Skip()
	}
	_, err := d.Publish(t.Context())
	if sink.Class(err) != "wrongtype" {
		t.Fatalf("got %v, want wrongtype", err)
	}
	f.do("DEL", stream)
	r, err := d.Publish(t.Context()) // no Skip: a retry
	f.must(err)
	f.wantStored(events[2])
	if r.EntryIDs[0] != "" || r.EntryIDs[1] != "" || r.EntryIDs[2] == "" {
		t.Errorf("entry ids %q", r.EntryIDs)
	}
	if n := f.metric("outbox_publish_errors_total", "class", "wrongtype"); n != 3 {
		t.Errorf("%v errors, want 3", n)
	}
	next := makeEvent()
	f.publish(l, next)
	f.wantStored(events[2], next)
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
			events := []*outbox.Event{makeEvent(), makeEvent(), big(3 << 20), makeEvent(), makeEvent()}
			d := l.Deliver(events)
			var poison *outbox.PoisonError
			testenv.Eventually(t, 10*time.Second, func() error {
				_, err := d.Publish(t.Context())
				if errors.As(err, &poison) {
					return nil
				}
				if sink.Class(err) != "connection" {
					t.Fatalf("class %q of %v, want connection", sink.Class(err), err)
				}
				return err
			})
			if poison.Index != 2 || poison.Class != "too_large" || poison.ID != events[2].ID {
				t.Fatalf("got %#v, want event 2 refused as too large", poison)
			}
			d.Skip()
			r, err := d.Publish(t.Context())
			f.must(err)
			rest := []*outbox.Event{events[0], events[1], events[3], events[4]}
			f.wantStored(rest...)
			if r.EntryIDs[2] != "" {
				t.Errorf("the skipped event has entry %q", r.EntryIDs[2])
			}
			f.wantEntries(outbox.Receipt{EntryIDs: append(append([]string{}, r.EntryIDs[:2]...), r.EntryIDs[3:]...)}, rest...)
			last := makeEvent()
			f.publish(l, last)
			f.wantStored(append(rest, last)...)
		})
	}
}

func TestAnOversizedEventStaysTransientIfTheLimitsAreUnknown(t *testing.T) {
	t.Parallel()
	f := newFixture(t, "client-query-buffer-limit 1mb", "user default on nopass ~* &* +@all -config")
	d := f.lane(f.adopted(1)).Deliver([]*outbox.Event{big(3 << 20)})
	for range 6 {
		if _, err := d.Publish(t.Context()); sink.Class(err) != "connection" {
			t.Fatalf("class %q of %v, want connection", sink.Class(err), err)
		}
	}
}

// The size alone is not enough: the event has to be larger than what the server says it takes.
func TestAFittingEventIsNeverPoison(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	o := f.adopted(1)
	p := testenv.NewProxy(t, f.server.Addr())
	l := f.through(p).Lane(stream, o, streamLane(o))
	p.Toxic(`{"name":"cut","type":"limit_data","stream":"upstream","attributes":{"bytes":100000}}`)
	e := big(1 << 20)
	d := l.Deliver([]*outbox.Event{e})
	for range 6 {
		if _, err := d.Publish(t.Context()); sink.Class(err) != "connection" {
			t.Fatalf("class %q of %v, want connection", sink.Class(err), err)
		}
	}
	p.Remove("cut")
	retry(t, d, "connection")
	f.wantStored(e)
}

func TestWorksInAClusterAndWithValkey(t *testing.T) {
	t.Parallel()
	t.Run("cluster", func(t *testing.T) {
		t.Parallel()
		server := testenv.Redis(t, "cluster-enabled yes")
		if err := server.Client.ClusterAddSlotsRange(t.Context(), 0, 16383).Err(); err != nil {
			t.Fatal(err)
		}
		testenv.Eventually(t, 10*time.Second, func() error {
			return server.Client.Set(t.Context(), "up", "", 0).Err()
		})
		c := redis.NewClusterClient(&redis.ClusterOptions{Addrs: []string{server.Addr()}, MaxRedirects: 3})
		defer c.Close()
		for _, name := range []string{"outbox.order", "{tag}outbox.order"} {
			everyCall(t, c, sink.Options{MaxLen: 1}, name)
		}
	})
	t.Run("valkey", func(t *testing.T) {
		t.Parallel()
		f := on(t, testenv.Valkey(t), sink.Options{})
		everyCall(t, f.client, sink.Options{MaxLen: 1, Durability: sink.Durability{AOF: true}}, stream)
	})
}

// everyCall uses every method once.
func everyCall(t *testing.T, c redis.UniversalClient, o sink.Options, name string) {
	t.Helper()
	ctx := t.Context()
	s, _ := newSink(t, c, o)
	check := func(step string, err error) {
		t.Helper()
		if err != nil {
			t.Fatalf("%s: %v", step, err)
		}
	}
	owner := outbox.Owner{Source: [16]byte{1}, Epoch: 1, Nonce: nonce()}
	check("ready", s.Ready(ctx))
	check("adopt", s.Adopt(ctx, name, owner))
	l := outbox.Lane{Part: 3, Claim: 9, Nonce: nonce()}
	events := makeEvents(2)
	_, err := s.Lane(name, owner, l).Deliver(events).Publish(ctx)
	check("publish", err)
	marks := []outbox.Mark{{Stream: name, Lane: l, Number: 1}}
	check("check", s.Check(ctx, owner, []string{name}))
	check("confirm", s.Confirm(ctx, owner, marks))
	check("settled", s.Settled(ctx, owner, marks))
	check("forget", s.ForgetDoubt(ctx, owner, name))
	check("trim", s.Trim(ctx, name))
	check("observe", s.Observe(ctx, []string{name}))
	check("take over", s.TakeOver(ctx, name, outbox.Owner{Source: [16]byte{2}, Epoch: 1, Nonce: nonce()}))
	if _, err := s.Warnings(ctx); err != nil {
		t.Fatal(err)
	}
	if n := c.XLen(ctx, name).Val(); n != 2 {
		t.Fatalf("%d entries, want 2", n)
	}
}
