package jetstream_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/nats-io/nats.go"

	"posthaste/internal/lab/testenv"
	"posthaste/outbox"
	"posthaste/sink/jetstream"
)

func (f *fixture) want(events ...*outbox.Record) {
	f.Helper()
	if got := f.stored(order); !slices.Equal(got, ids(events)) {
		f.Fatalf("stored %d events %v, want %d %v", len(got), got, len(events), ids(events))
	}
}

// adopted returns a sink and a lane of an owner that has the gate.
func (f *fixture) adopted(epoch int64, o jetstream.Options) (*jetstream.Sink, outbox.Owner, outbox.LanePublisher) {
	f.Helper()
	s, owner := f.open(o), f.Owner(epoch)
	f.Must(s.Adopt(f.Context(), order, owner, false))
	return s, owner, s.Lane(order, owner, streamLane(owner))
}

// TestDeletedStream deletes the JetStream stream, with the gate. Only an adoption makes the gate again. A late batch
// for the deleted stream is not accepted although its sequences exist again.
func TestDeletedStream(t *testing.T) {
	t.Parallel()
	for _, remade := range []bool{false, true} {
		f := newFixture(t)
		s, o, l := f.adopted(1, jetstream.Options{})
		events := makeEvents(4)
		f.hold.Store(1)
		d := l.Deliver(events[:2])
		wantErr(t, second(d.Publish(t.Context())), errLost)
		_, err := d.Publish(t.Context())
		f.Must(err)
		f.call("STREAM.DELETE."+jetstream.StreamName(order), nil, nil)
		if remade {
			f.create(order, nil)
		}
		for what, err := range map[string]error{
			"publish": second(l.Deliver(events[2:]).Publish(t.Context())),
			"check":   s.Check(t.Context(), o, []string{order}),
			"intact":  s.Adopt(t.Context(), order, f.Owner(2), true),
			"settled": s.Settled(t.Context(), o, []outbox.Mark{{Stream: order, Lane: streamLane(o), Number: 1}}),
		} {
			t.Log(what)
			wantErr(t, err, outbox.ErrGap)
		}
		_, _, l = f.adopted(1, jetstream.Options{}) // writes the same sequences as the first adoption
		f.arrive()
		f.want()
		f.Publish(l, events...)
		f.arrive()
		f.want(events...)
	}
}

// TestRemadeStream deletes a stream, and another process makes it again, with as many events and fewer messages. The
// process that knew the deleted stream finds it lost: an adoption of an intact gate would be refused for ever.
func TestRemadeStream(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	s, _, _ := f.adopted(1, jetstream.Options{})
	o := f.Owner(2)
	f.Must(s.Adopt(t.Context(), order, o, true))
	events := makeEvents(2)
	f.Publish(s.Lane(order, o, streamLane(o)), events[0])
	f.call("STREAM.DELETE."+jetstream.StreamName(order), nil, nil)
	_, _, l := f.adopted(3, jetstream.Options{})
	f.Publish(l, events...)
	st := f.look(s, "")
	if err := s.Adopt(t.Context(), order, f.Owner(4), true); !errors.Is(err, outbox.ErrGap) || st.Intact() {
		t.Errorf("got the state %+v and %v, want that events are lost, and a gap", st, err)
	}
	f.Must(s.Adopt(t.Context(), order, f.Owner(4), false))
}

// look returns the state of the stream, of which the table has an entry if noted is not "".
func (f *fixture) look(s *jetstream.Sink, noted string) outbox.StreamState {
	f.Helper()
	states, err := s.Look(f.Context(), source, []string{order}, map[string]string{order: noted})
	f.Must(err)
	return states[0]
}

func wantErr(tb testing.TB, err, want error) {
	tb.Helper()
	if !errors.Is(err, want) {
		tb.Fatalf("got %v, want %v", err, want)
	}
}

func second[T any](_ T, err error) error { return err }

// TestCrashes kills the server while a lane publishes. Each event is there once, in order.
func TestCrashes(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.survives(12, func(publishes func(n int)) {
		publishes(rand.IntN(200))
		f.server.restart()
	})
}

// TestClusterCrashes kills one node after the other while a lane publishes, the leader of the stream among them.
func TestClusterCrashes(t *testing.T) {
	t.Parallel()
	f := newCluster(t, 3)
	n := 0
	f.survives(3, func(publishes func(n int)) {
		n++
		publishes(rand.IntN(300))
		f.server.killNode(n % 3)
		publishes(rand.IntN(300)) // two nodes are enough
		f.server.startNode(n % 3)
		f.led(order)
	})
}

// survives publishes until there were n crashes, and adopts again when the gate demands it. publishes waits until n
// more events are published.
func (f *fixture) survives(n int32, crash func(publishes func(n int))) {
	f.Helper()
	ctx := f.Context()
	s := f.open(jetstream.Options{})
	var events []*outbox.Record
	var crashed atomic.Int32
	var acknowledged atomic.Int64
	var crashes sync.WaitGroup
	defer crashes.Wait()
	crashes.Go(func() {
		for range n {
			crash(func(n int) {
				want := acknowledged.Load() + int64(n)
				testenv.Eventually(f, time.Minute, func() error {
					got := acknowledged.Load()
					return testenv.FailIf(got < want, "%d events are published, want %d", got, want)
				})
			})
			crashed.Add(1)
		}
	})
	epochs, repeated, settled, published := int64(0), 0, 0, 0
	lead := func() error {
		if _, err := s.Bind(ctx); err != nil {
			return err
		}
		epochs++
		o := f.Owner(epochs)
		states, err := s.Look(ctx, source, []string{order}, nil)
		if err != nil {
			return err
		}
		if states[0].Gate && !states[0].Intact() {
			f.Errorf("epoch %d: looked at %+v", epochs, states[0])
		}
		if err := s.Adopt(ctx, order, o, states[0].Intact()); err != nil {
			return err
		}
		l := s.Lane(order, o, streamLane(o))
		for published = settled; crashed.Load() < n || published < len(events); {
			if published == len(events) {
				events = append(events, makeEvents(1+rand.IntN(100))...)
			}
			size := min(1+rand.IntN(40), len(events)-published)
			d := l.Deliver(events[published : published+size])
			var r outbox.Receipt
			for range 20 {
				if r, err = d.Publish(ctx); err == nil || errors.Is(err, outbox.ErrGap) {
					break
				}
				repeated++
				f.led(order)
			}
			if err != nil {
				return err
			}
			published += size
			acknowledged.Add(int64(size))
			if rand.IntN(3) == 0 {
				err := s.Confirm(ctx, o, []outbox.Mark{{Stream: order, Lane: streamLane(o), Number: r.Number}})
				if err != nil {
					return err
				}
				settled = published
				l.Settled(r.Number)
			}
		}
		return nil
	}
	for err := lead(); err != nil; err = lead() {
		f.Logf("epoch %d: %v", epochs, err)
		f.led(order)
		if epochs > 1000 {
			f.Fatal("no progress")
		}
	}
	crashes.Wait()
	f.Logf("%d events, %d epochs, %d attempts repeated", len(events), epochs, repeated)
	f.want(events...)
}

// TestManyLanes publishes over all lanes of a stream at once, while batches are settled and the stream is trimmed, and
// a later owner takes over. Each event is there once, and in order within its lane.
func TestManyLanes(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	s, o, _ := f.adopted(1, jetstream.Options{MaxLen: 1 << 20})
	const each, lanes = 60, 6
	parts := make([][]*outbox.Record, lanes)
	run := func(s *jetstream.Sink, o outbox.Owner) {
		var all sync.WaitGroup
		for part := range parts {
			if parts[part] == nil {
				parts[part] = makeEvents(each)
			}
			all.Go(func() {
				l := outbox.Lane{Part: part, Claim: 1}
				p := s.Lane(order, o, l)
				for some := range slices.Chunk(parts[part], 3) {
					r, err := p.Deliver(some).Publish(t.Context())
					if errors.As(err, new(*outbox.FencedError)) {
						return
					}
					f.Must(err)
					if rand.IntN(2) == 0 && o.Epoch > 1 {
						f.Must(s.Settled(t.Context(), o, []outbox.Mark{{Stream: order, Lane: l, Number: r.Number}}))
						f.Must(s.Trim(t.Context(), order))
					}
				}
			})
		}
		all.Wait()
	}
	var first sync.WaitGroup
	first.Go(func() { run(s, o) })
	testenv.Eventually(t, 20*time.Second, func() error {
		return testenv.FailIf(len(f.stored(order)) == 0, "nothing is published")
	})
	next, later, _ := f.adopted(2, jetstream.Options{MaxLen: 1 << 20})
	first.Wait()
	run(next, later)
	got := f.stored(order)
	if len(got) != each*lanes {
		t.Fatalf("%d events, want %d", len(got), each*lanes)
	}
	for part, events := range parts {
		at := slices.DeleteFunc(slices.Clone(got), func(id uuid.UUID) bool {
			return !slices.Contains(ids(events), id)
		})
		if !slices.Equal(at, ids(events)) {
			t.Errorf("part %d is out of order", part)
		}
	}
}

// TestTrimKeepsTheGate trims past the messages of lanes that are idle, and past the owner's.
func TestTrimKeepsTheGate(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	s, o, l := f.adopted(1, jetstream.Options{MaxLen: 10})
	idle := outbox.Lane{Part: 5, Claim: 3, Nonce: outbox.Nonce{5}}
	events := makeEvents(200)
	f.Publish(s.Lane(order, o, idle), makeEvents(1)...)
	f.Must(s.Settled(t.Context(), o, []outbox.Mark{{Stream: order, Lane: idle, Number: 1}}))
	for some := range slices.Chunk(events, 10) {
		l.Settled(f.Publish(l, some...).Number)
	}
	f.Must(s.Trim(t.Context(), order))
	if i, _ := f.info(order); i.State.First < 100 || len(f.stored(order)) > 40 {
		t.Errorf("%d events are left, from %d on", len(f.stored(order)), i.State.First)
	}
	f.Must(s.Check(t.Context(), o, []string{order}))
	f.Must(s.Confirm(t.Context(), o, []outbox.Mark{{Stream: order, Lane: idle, Number: 1}}))
	more := makeEvents(3)
	f.Publish(l, more[:2]...)
	again := idle
	again.Claim--
	if err := second(s.Lane(order, o, again).Deliver(more).Publish(t.Context())); !errors.As(err,
		new(*outbox.FencedError)) {
		t.Errorf("got %v, want to be fenced by the idle lane", err)
	}
	other, _, l := f.adopted(2, jetstream.Options{})
	r := f.Publish(l, more...)
	if r.Suppressed != 2 {
		t.Errorf("%d suppressed, want the last batch", r.Suppressed)
	}
	if st := f.look(other, r.Last); !st.Intact() {
		t.Errorf("looked at %+v", st)
	}
}

// TestOvertakenPurge purges the events between the comparison and the commit of a batch. The server refuses the batch:
// behind the purge, it would be older than the events that are restored. Of a claim that has stored nothing yet, the
// batch is accepted, and Confirm notices the loss.
func TestOvertakenPurge(t *testing.T) {
	t.Parallel()
	for _, first := range []bool{true, false} {
		f := newFixture(t)
		s, o, l := f.adopted(1, jetstream.Options{})
		f.Publish(l, makeEvents(2)...)
		if first {
			o = f.Owner(2)
			f.Must(s.Adopt(t.Context(), order, o, true))
			l = s.Lane(order, o, streamLane(o))
		}
		var purge sync.Once
		s.SetFault(func(_ []*nats.Msg, send func() error) error {
			purge.Do(func() { f.purge(order, jetstream.EventsFilter(order)) })
			return send()
		})
		r, err := l.Deliver(makeEvents(2)).Publish(t.Context())
		if first {
			f.Must(err)
			err = s.Confirm(t.Context(), o, []outbox.Mark{{Stream: order, Lane: streamLane(o), Number: r.Number}})
		} else {
			f.want()
		}
		wantErr(t, err, outbox.ErrGap)
		if st := f.look(s, ""); !st.Forgot {
			t.Errorf("looked at %+v", st)
		}
	}
}

// TestRefusals has streams that refuse everything, or one event, for a reason that the server tells only of one
// message.
func TestRefusals(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	s, _, l := f.adopted(1, jetstream.Options{})
	f.update(order, map[string]any{"max_msg_size": 2000})
	events := makeEvents(900)
	large := map[int]bool{2: true, 400: true, 401: true, 899: true}
	for i := range large {
		events[i].Payload = []byte(`"` + strings.Repeat("x", 3000) + `"`)
	}
	d := l.Deliver(slices.Clone(events))
	batches := f.batches.Load()
	for len(large) > 0 {
		var poison *outbox.PoisonError
		if _, err := d.Publish(t.Context()); !errors.As(err, &poison) || !large[poison.Index] ||
			poison.Class != "too_large" {
			t.Fatalf("got %v, want that an event is too large", err)
		}
		delete(large, poison.Index)
		events[poison.Index] = nil
		d.Skip(nil)
	}
	f.Must(second(d.Publish(t.Context())))
	if n := f.batches.Load() - batches; n > 90 {
		t.Errorf("%d batches were necessary", n)
	}
	f.want(slices.DeleteFunc(events, func(e *outbox.Record) bool { return e == nil })...)
	f.update(order, map[string]any{"sealed": true})
	err := second(l.Deliver(makeEvents(1)).Publish(t.Context()))
	if !outbox.Alone(err) || !strings.Contains(err.Error(), "sealed") {
		t.Errorf("got %v, want that the stream is sealed", err)
	}
	f.call("STREAM.CREATE.OTHER", map[string]any{"name": "OTHER", "subjects": []string{"outbox.user.*"}}, nil)
	if err := s.Adopt(t.Context(), "outbox.user", f.Owner(1), false); !outbox.Alone(err) ||
		!strings.Contains(err.Error(), "overlap") {
		t.Errorf("got %v, want that another stream has the subjects", err)
	}
}

// TestLongSubjects publishes after an event with a long subject, which the next batch expects. An event that is too
// large with that is refused as such, and does not block the stream.
func TestLongSubjects(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	_, _, l := f.adopted(1, jetstream.Options{})
	const limit = 1 << 20
	for room := 600; room < 1800; room += 60 {
		long, large := makeEvents(1), makeEvents(1)
		long[0].AggregateID = strings.Repeat("a", 390)
		large[0].Payload = []byte(`"` + strings.Repeat("x", limit-room) + `"`)
		f.Publish(l, long...)
		if _, err := l.Deliver(large).Publish(t.Context()); err != nil && !errors.As(err, new(*outbox.PoisonError)) {
			t.Fatalf("with %d bytes for headers: %v", room, err)
		}
	}
}

// TestPreparedStream adopts a stream that an operator has made, and keeps its settings. Before that, no direct request
// can read it.
func TestPreparedStream(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	s := f.open(jetstream.Options{})
	if tail, err := s.Tail(t.Context(), order, ""); err != nil || len(tail) > 0 {
		t.Errorf("a stream that does not exist has %v, %v", tail, err)
	}
	f.create(order, map[string]any{"description": "orders", "max_age": int64(time.Hour)})
	if tail, err := s.Tail(t.Context(), order, ""); err == nil {
		t.Errorf("a stream without allow_direct has %v", tail)
	}
	foreign, err := f.nc.Request(jetstream.EventSubject(order, "x"), []byte("of before"), time.Second)
	f.Must(err)
	if err := s.Adopt(t.Context(), order, f.Owner(1), false); !outbox.Alone(err) ||
		!strings.Contains(err.Error(), "max_age") {
		t.Errorf("got %v (%s), want that max_age removes the gate", err, foreign.Data)
	}
	f.update(order, map[string]any{"max_age": 0})
	st := f.look(s, "")
	if st.Gate || st.Forgot {
		t.Errorf("looked at %+v", st)
	}
	_, _, l := f.adopted(1, jetstream.Options{})
	events := makeEvents(3)
	f.Publish(l, events...)
	f.want(events...)
	i, _ := f.info(order)
	if c := i.Config; c["description"] != "orders" || c["allow_atomic"] != true {
		t.Errorf("configured %v", i.Config)
	}
}

// TestKnownBugs has what servers have got wrong in expectations within batches, and what the gate depends on:
// nats-server issues 8376 (subjects of the same length are mixed up) and 7361 (the sequence is compared with that of
// the stream).
func TestKnownBugs(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.call("STREAM.CREATE.X", map[string]any{"name": "X", "subjects": []string{"x.*"}, "allow_atomic": true}, nil)
	on := func(subject string, expected int, of string) *nats.Msg {
		m := nats.NewMsg(subject)
		m.Header.Set("Nats-Expected-Last-Subject-Sequence", fmt.Sprint(expected))
		if of != "" {
			m.Header.Set("Nats-Expected-Last-Subject-Sequence-Subject", of)
		}
		return m
	}
	for n, c := range []struct {
		messages []*nats.Msg
		accepted bool
	}{
		{[]*nats.Msg{on("x.a", 0, ""), on("x.b", 0, ""), on("x.c", 0, ""), on("x.d", 0, "")}, true},
		// As an adoption: the messages of all lanes, each with an expectation. Those of other lanes are newer (7361).
		{[]*nats.Msg{on("x.a", 1, ""), on("x.b", 2, ""), on("x.c", 3, ""), on("x.d", 4, "")}, true},
		{[]*nats.Msg{on("x.a", 5, ""), on("x.b", 6, ""), on("x.c", 3, ""), on("x.d", 8, "")}, false},
		{[]*nats.Msg{on("x.a", 8, "")}, false}, // the stream's last sequence
		{[]*nats.Msg{on("x.a", 5, "")}, true},
		// 8376: the expectations concern other subjects of the same length.
		{[]*nats.Msg{on("x.e", 9, "x.a"), on("x.f", 6, "x.b"), on("x.g", 7, "x.c")}, true},
		{[]*nats.Msg{on("x.h", 9, "x.a"), on("x.i", 5, "x.b"), on("x.j", 7, "x.c")}, false},
		// A subject without messages fails every expectation but 0.
		{[]*nats.Msg{on("x.z", 1, "")}, false},
		{[]*nats.Msg{on("x.y", 12, "")}, false},
	} {
		if err := f.nc.Batch(t.Context(), c.messages); (err == nil) != c.accepted {
			t.Errorf("batch %d: %v", n, err)
		}
	}
}

// TestMessage checks the subject and the headers of an event.
func TestMessage(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	_, _, l := f.adopted(1, jetstream.Options{Source: "/posthaste/shop"})
	e := &outbox.Record{
		ID: uuid.Must(uuid.NewV7()), AggregateType: "order", AggregateID: "a.b *>ü%", Type: "order créé",
		Payload: []byte(`{"n":1}`), Time: time.Unix(1700000000, 123456789),
		Headers: []byte("{\"traceparent\": \"00-ab-cd-01\",\n \"tenant\": \"ü\"}"),
	}
	empty := &outbox.Record{ID: uuid.Must(uuid.NewV7()), AggregateType: "order", Type: "x", Payload: []byte("1")}
	long := &outbox.Record{
		ID: uuid.Must(uuid.NewV7()), AggregateType: "order", AggregateID: strings.Repeat("ü", 3000), Type: "x",
		Payload: []byte("1"),
	}
	f.Publish(l, e, empty, long)
	var got []*nats.RawStreamMsg
	f.each(order, func(m *nats.RawStreamMsg) {
		if m.Header.Get("ce-id") != "" {
			got = append(got, m)
		}
	})
	if len(got) != 3 || got[1].Subject != "outbox.order.%" || len(got[2].Subject) > 500 {
		t.Fatalf("stored %v", got)
	}
	m := got[0]
	want := map[string]string{
		"ce-id": e.ID.String(), "ce-source": "/posthaste/shop", "ce-type": "order%20cr%C3%A9%C3%A9",
		"ce-subject": "a.b%20*>%C3%BC%25", "ce-time": "2023-11-14T22:13:20.123456Z", "ce-specversion": "1.0",
		"content-type": "application/json", "traceparent": "00-ab-cd-01",
	}
	for k, v := range want {
		if got := m.Header.Get(k); got != v {
			t.Errorf("%s is %q, want %q", k, got, v)
		}
	}
	var others map[string]string
	if err := json.Unmarshal([]byte(m.Header.Get("ce-headers")), &others); err != nil || others["tenant"] != "ü" {
		t.Errorf("headers %q: %v", m.Header.Get("ce-headers"), err)
	}
	if m.Subject != "outbox.order.a%2Eb%20%2A%3E%C3%BC%25" || string(m.Data) != `{"n":1}` {
		t.Errorf("stored %s: %s", m.Subject, m.Data)
	}
}

// TestNames checks that names never collide, and that groups have theirs back.
func TestNames(t *testing.T) {
	t.Parallel()
	names := []string{
		"outbox.order", "outbox.Order", "OUTBOX.ORDER", "outbox_order", "outbox-order", "outbox order", "outbox..order",
		"outbox.order.", ".outbox.order", "outbox.order.0", "outbox.*", "outbox.>", "outbox.%2E", "outbox./\\",
		"outbox.ü",
		strings.Repeat("x", 500), strings.Repeat("x", 501), strings.Repeat("x.", 300),
	}
	streams, subjects := map[string]string{}, map[string]string{}
	for _, name := range names {
		stream, subject := jetstream.StreamName(name), jetstream.EventsFilter(name)
		if streams[stream] != "" || subjects[subject] != "" {
			t.Errorf("%q has the names of %q and %q", name, streams[stream], subjects[subject])
		}
		streams[stream], subjects[subject] = name, name
		if strings.ContainsAny(stream, ".*> /\\") || len(stream) > 255 ||
			strings.ContainsAny(strings.TrimSuffix(subject, ".*"), "*> ") ||
			strings.Contains(subject, "..") || strings.HasPrefix(subject, ".") {
			t.Errorf("%q has %q and %q", name, stream, subject)
		}
		if got := jetstream.GroupName(jetstream.ConsumerName(name)); got != name {
			t.Errorf("group %q became %q", name, got)
		}
	}
	if got := jetstream.StreamName("outbox.order"); got != "OUTBOX_ORDER" {
		t.Errorf("got %s", got)
	}
}

// TestRecallSurvives recalls events, and another process has them in doubt, also under a later owner that has read
// only the stream, and after a trim.
func TestRecallSurvives(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	_, _, l := f.adopted(1, jetstream.Options{MaxLen: 1})
	events := makeEvents(30)
	last := f.Publish(l, events...)
	i, _ := f.info(order)
	f.purge(order, i.gate())
	s, o, l := f.adopted(2, jetstream.Options{MaxLen: 1})
	f.Must(s.Recall(t.Context(), o, order, ids(events[:10]), ""))
	f.Must(s.Recall(t.Context(), o, order, ids(events[10:]), last.Last))
	if r := f.Publish(f.open(jetstream.Options{}).Lane(order, o, streamLane(o)), events[:5]...); r.Suppressed != 5 ||
		r.Last != last.Last {
		t.Errorf("receipt %+v, want five suppressed", r)
	}
	wantErr(t, second(l.Deliver(events[5:6]).Publish(t.Context())), outbox.ErrGap)
	s, o, l = f.adopted(3, jetstream.Options{MaxLen: 1})
	f.Must(s.Trim(t.Context(), order))
	f.Again(l, 30, events...)
	f.Must(s.ForgetDoubt(t.Context(), o, order))
	f.want(events[29])
}

// TestUndurable has streams whose settings rule out the durability.
func TestUndurable(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	for n, storage := range []string{"memory", "file"} {
		name := fmt.Sprint("outbox.", storage)
		f.create(name, map[string]any{"storage": storage})
		s, o := f.open(jetstream.Options{Fsync: true}), f.Owner(1)
		f.Must(s.Adopt(t.Context(), name, o, false))
		l := s.Lane(name, o, streamLane(o))
		r := f.Publish(l, makeEvents(1)...)
		err := s.Confirm(t.Context(), o, []outbox.Mark{{Stream: name, Lane: streamLane(o), Number: r.Number}})
		if errors.As(err, new(*jetstream.DurabilityError)) != (n == 0) {
			t.Errorf("%s: got %v", storage, err)
		}
	}
}

// A claim reads the batches that it inherits, and not the events after them: a stream may have a gigabyte of those.
func TestInheritedIsReadAlone(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	connected := make(chan *nats.Conn, 10)
	noted := nats.ConnectHandler(func(c *nats.Conn) { connected <- c })
	s, o, l := f.adopted(1, jetstream.Options{Connection: []nats.Option{noted}})
	conn := <-connected
	claim := func(n int64) outbox.LanePublisher {
		return s.Lane(order, o, outbox.Lane{Part: 3, Claim: n, Nonce: outbox.Nonce{byte(n)}})
	}
	events := makeEvents(1500)
	f.Publish(claim(1), events[0])
	f.Publish(l, events[1:]...)
	before := conn.Stats().InBytes
	f.Again(claim(2), 1, events[0])
	if read := conn.Stats().InBytes - before; read == 0 || read > 50<<10 {
		t.Errorf("%d bytes were read for an event", read)
	}
	f.want(events...)
}
