package sink_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"

	"posthaste/internal/lab/testenv"
	"posthaste/outbox"
	"posthaste/sink"
)

// sharing makes databases that share the streams of one Redis, named a, b, c and so on.
func sharing(t *testing.T, n int) []*fixture {
	t.Helper()
	server := testenv.Redis(t)
	list := make([]*fixture, n)
	for i := range list {
		list[i] = on(t, server, sink.Options{Shared: true, Source: "/posthaste/" + string(rune('a'+i))})
	}
	return list
}

// set returns the same database with streams that are shared, or not.
func (f *fixture) set(name string, shared bool) *fixture {
	again := *f
	again.sink, again.reg = newSink(f, f.client, sink.Options{Shared: shared, Source: name})
	return &again
}

// refused checks that an error is foreign, and says what to do.
func refused(t testing.TB, err error, texts ...string) {
	t.Helper()
	var foreign *outbox.ForeignError
	if !errors.As(err, &foreign) || foreign.Stream != stream || sink.Class(err) != "foreign" {
		t.Fatalf("got %v, want a ForeignError", err)
	}
	for _, text := range texts {
		if !strings.Contains(err.Error(), text) {
			t.Errorf("%v: want %q in it", err, text)
		}
	}
}

func (f *fixture) look() outbox.StreamState {
	f.Helper()
	states, err := f.sink.Look(f.Context(), f.Source, []string{stream}, nil)
	f.Must(err)
	return states[0]
}

// Each database has a gate of its own, with independent numbers, epochs and doubt. A database that does not share its
// streams is refused with an error that names the others.
func TestSharedStreams(t *testing.T) {
	t.Parallel()
	all := sharing(t, 2)
	a, b := all[0], all[1]
	oa, ob := a.adopted(7), b.adopted(3)
	la, lb := a.lane(oa), b.lane(ob)
	events := makeEvents(9)
	for i := 0; i < 6; i += 2 {
		a.wantLast(a.Publish(la, events[i]))
		b.wantLast(b.Publish(lb, events[i+1]))
	}
	a.wantStored(events[:6]...)
	a.Must(a.sink.Check(t.Context(), oa, []string{stream}))
	mark := []outbox.Mark{{Stream: stream, Lane: streamLane(ob), Number: 3}}
	b.Must(b.sink.Confirm(t.Context(), ob, mark))
	b.Must(b.sink.Settled(t.Context(), ob, mark))
	// A new leader of b does not affect a.
	old, before := lb, b.adopted(4)
	wantFenced(t, second(old.Deliver(events[6:7]).Publish(t.Context())), 4)
	b.Again(b.lane(before), 0, events[1], events[6])
	oa = a.adopted(8)
	a.Again(a.lane(oa), 3, events[0], events[2], events[4], events[7])

	alone := on(t, a.server, sink.Options{Source: "/posthaste/c"})
	o := alone.Owner(1)
	refused(t, alone.sink.Adopt(t.Context(), stream, o, false), "/posthaste/a, /posthaste/b", "--shared-streams",
		"posthaste adopt")
	wantGap(t, alone.sink.Check(t.Context(), o, []string{stream}))
	wantGap(t, alone.sink.Confirm(t.Context(), o, firstMark(o)))
	wantGap(t, second(alone.lane(o).Deliver(events[8:]).Publish(t.Context())))
	_, err := alone.sink.Look(t.Context(), o.Source, []string{stream}, nil)
	refused(t, err, "/posthaste/a, /posthaste/b", "--shared-streams", "posthaste adopt")
	a.Publish(a.lane(a.adopted(9)), events[8]) // nobody was harmed
	if n := a.server.Client.XLen(t.Context(), stream).Val(); n != 10 {
		t.Errorf("%d entries, want 10", n)
	}
	got, err := sink.Sharing(t.Context(), a.client, []string{stream, "outbox.other"})
	want := map[string]string{"/posthaste/a": a.Source.String(), "/posthaste/b": b.Source.String()}
	if err != nil || len(got) != 1 || fmt.Sprint(got[stream]) != fmt.Sprint(want) {
		t.Errorf("shared by %v, %v; want %v", got, err, want)
	}
}

func second[T any](_ T, err error) error { return err }

// Entries of two databases with one name cannot be distinguished, so the second is refused until an operator declares
// that it replaces the first.
func TestASecondDatabaseOfTheSameName(t *testing.T) {
	t.Parallel()
	a := sharing(t, 1)[0]
	o := a.adopted(9)
	events := makeEvents(4)
	la := a.lane(o)
	a.Publish(la, events[:2]...)
	moved := a.set("/posthaste/a", true)
	moved.Source = uuid.New()
	first := moved.Owner(1)
	refused(t, moved.sink.Adopt(t.Context(), stream, first, false), "same name", a.Source.String(), "--relay-name",
		"posthaste adopt")
	wantGap(t, second(moved.lane(first).Deliver(events[2:]).Publish(t.Context())))
	a.wantStored(events[:2]...)
	moved.Must(moved.sink.TakeOver(t.Context(), stream, first))
	moved.Must(moved.sink.TakeOver(t.Context(), stream, first))
	moved.Again(moved.lane(first), 2, events[0], events[1], events[2])
	wantGap(t, second(la.Deliver(events[3:]).Publish(t.Context())))
	refused(t, a.sink.Adopt(t.Context(), stream, a.Owner(10), false), "same name", moved.Source.String())
	a.wantStored(events[:3]...)
}

// Sharing of a stream changes with an adoption with a higher epoch. The gate keeps its state, and a relay of the same
// owner with the other setting does not change it.
func TestSharingIsTurnedOnAndOff(t *testing.T) {
	t.Parallel()
	alone := on(t, testenv.Redis(t), sink.Options{Source: "/posthaste/a"})
	shared := alone.set("/posthaste/a", true)
	events := makeEvents(13)
	o := alone.adopted(1)
	l := alone.lane(o)
	alone.Publish(l, events[:3]...)
	b := on(t, alone.server, sink.Options{Shared: true, Source: "/posthaste/b"})
	refused(t, b.sink.Adopt(t.Context(), stream, b.Owner(5), false), "does not share it", alone.Source.String())
	wantGap(t, shared.sink.Adopt(t.Context(), stream, o, false))
	if st := shared.look(); !st.Intact() || st.Epoch != 1 || st.Missing != 0 {
		t.Errorf("looked at before: %+v", st)
	}
	alone.Publish(l, events[3])

	later := shared.Owner(2)
	shared.Must(shared.sink.Adopt(t.Context(), stream, later, true))
	wantGap(t, alone.sink.Adopt(t.Context(), stream, later, true))
	wantFenced(t, second(l.Deliver(events[4:5]).Publish(t.Context())), 2)
	ls := shared.lane(later)
	shared.Again(ls, 4, events[:6]...)
	if n := shared.server.Client.HGet(t.Context(), shared.gate(), "n").Val(); n != "6" {
		t.Errorf("the gate has let %s events through, want 6", n)
	}
	b.Publish(b.lane(b.adopted(5)), events[6])
	refused(t, alone.sink.Adopt(t.Context(), stream, alone.Owner(3), true), "/posthaste/b", "--shared-streams")
	if ok, err := sink.Leave(t.Context(), b.client, stream, "/posthaste/b"); err != nil || !ok {
		t.Errorf("b leaves: %v, %v", ok, err)
	}
	if ok, err := sink.Leave(t.Context(), b.client, stream, "/posthaste/b"); err != nil || ok {
		t.Errorf("b leaves twice: %v, %v", ok, err)
	}
	third := alone.Owner(3)
	if st := alone.look(); !st.Gate || st.Epoch != 2 || st.Missing != 0 {
		t.Errorf("looked at after: %+v", st)
	}
	alone.Must(alone.sink.Adopt(t.Context(), stream, third, true))
	alone.Again(alone.lane(third), 6, slices.Concat(events[:6], events[7:9])...)
	wantFenced(t, second(ls.Deliver(events[9:10]).Publish(t.Context())), 3)
	wantGap(t, b.sink.Check(t.Context(), b.Owner(5), []string{stream}))
	refused(t, b.sink.Adopt(t.Context(), stream, b.Owner(6), false), "does not share it")
	alone.wantStored(events[:9]...)
	if keys := alone.server.Client.Keys(t.Context(), "*gate*").Val(); len(keys) != 2 {
		t.Errorf("keys %v, want the register and one gate", keys)
	}
	// A forced takeover removes all databases that share it, even under an owner that shares it until then.
	fourth := shared.adopted(4)
	ob := b.adopted(6)
	b.Publish(b.lane(ob), events[9])
	lf := shared.lane(fourth)
	shared.Publish(lf, events[10])
	alone.Must(alone.sink.TakeOver(t.Context(), stream, fourth))
	wantGap(t, second(lf.Deliver(events[12:]).Publish(t.Context())))
	wantGap(t, shared.sink.Adopt(t.Context(), stream, fourth, false))
	fifth := alone.adopted(5)
	alone.Again(alone.lane(fifth), 2, events[9], events[10], events[11])
	wantGap(t, second(b.lane(ob).Deliver(events[12:]).Publish(t.Context())))
	refused(t, b.sink.Adopt(t.Context(), stream, b.Owner(7), true), "does not share it")
	// And by force a database that shares it takes it from one that does not.
	ob = b.Owner(8)
	b.Must(b.sink.TakeOver(t.Context(), stream, ob))
	b.Publish(b.lane(ob), events[12])
	alone.wantStored(events...)
	refused(t, alone.sink.Adopt(t.Context(), stream, alone.Owner(6), true), "is shared by /posthaste/b")
	shared.adopted(7)
}

// By force, the setting of the owner's relay counts: "posthaste adopt" may run with another one.
func TestTakingOverLeavesTheSettingToTheRelay(t *testing.T) {
	t.Parallel()
	shared := sharing(t, 1)[0]
	alone := shared.set("/posthaste/a", false)
	shared.adopted(1)
	o := shared.Owner(2)
	alone.Must(alone.sink.TakeOver(t.Context(), stream, o))
	shared.Must(shared.sink.TakeOver(t.Context(), stream, o))
	b := on(t, shared.server, sink.Options{Shared: true, Source: "/posthaste/b"})
	refused(t, b.sink.Adopt(t.Context(), stream, b.Owner(1), false), "does not share it")
	wantGap(t, shared.sink.Adopt(t.Context(), stream, o, false))
	shared.adopted(3)
	b.adopted(1)
}

// The first publish to a deleted stream creates it again, and its entries do not show the other databases that theirs
// are gone. They learn it anyway, whichever database noticed the loss, even one without losses, and even afterwards.
func TestALossIsToldToAllWhoShare(t *testing.T) {
	t.Parallel()
	for name, remake := range map[string]func(f *fixture){
		"deleted":               func(*fixture) {},
		"remade by a consumer":  func(f *fixture) { f.do("XGROUP", "CREATE", stream, "g", "0", "MKSTREAM") },
		"back at an older time": func(f *fixture) { f.do("XADD", stream, "5-5", "source", "/posthaste/a") },
		"and by somebody else":  func(f *fixture) { f.do("XADD", stream, "5-5", "somebody", "else") },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			all := sharing(t, 3)
			a, b, c := all[0], all[1], all[2]
			oa, ob, oc := a.adopted(1), b.adopted(1), c.adopted(1)
			events := makeEvents(6)
			a.Publish(a.lane(oa), events[0])
			b.Publish(b.lane(ob), events[1])
			a.do("DEL", stream)
			remake(a)
			lost := ""
			if name == "back at an older time" || name == "and by somebody else" {
				if name == "back at an older time" {
					lost = "5-5"
				}
				a.Must(a.sink.Adopt(t.Context(), stream, oa, true)) // who reads only that it is the owner
			} else {
				wantGap(t, second(c.lane(oc).Deliver(events[2:3]).Publish(t.Context())))
			}
			oc = c.adopted(2)
			c.Publish(c.lane(oc), events[2])
			for _, f := range []*fixture{a, b} {
				o := map[*fixture]outbox.Owner{a: oa, b: ob}[f]
				wantGap(t, f.sink.Check(t.Context(), o, []string{stream}))
				wantGap(t, f.sink.Confirm(t.Context(), o, firstMark(o)))
				wantGap(t, second(f.lane(o).Deliver(events[3:4]).Publish(t.Context())))
				st := f.look()
				if !st.Gate || !st.Forgot || strings.TrimPrefix(st.Last, "0-0") != lost || st.Epoch != 0 {
					t.Errorf("looked at: %+v", st)
				}
				wantGap(t, f.sink.Adopt(t.Context(), stream, o, false)) // it is a call that arrives late
				wantGap(t, f.sink.Adopt(t.Context(), stream, f.Owner(2), true))
				wantFenced(t, f.sink.Adopt(t.Context(), stream, f.Owner(0), true), 0) // somebody's who was replaced
				f.Publish(f.lane(f.adopted(2)), events[map[*fixture]int{a: 0, b: 1}[f]])
				if st := f.look(); !st.Intact() || st.Missing != 0 {
					t.Errorf("noticed again: %+v", st)
				}
			}
			c.Must(c.sink.Check(t.Context(), oc, []string{stream}))
			if st := c.look(); !st.Intact() {
				t.Errorf("c has lost nothing: %+v", st)
			}
			if got := a.stored(stream); !slices.Equal(got[len(got)-3:], []uuid.UUID{
				events[2].ID, events[0].ID, events[1].ID,
			}) {
				t.Errorf("the stream has %v", got)
			}
		})
	}
}

// A stream loses more before all databases that share it have noticed the first loss: they also notice the second one.
func TestASecondLossIsTold(t *testing.T) {
	t.Parallel()
	for name, noticed := range map[string]func(a *fixture, o outbox.Owner){
		"by an adoption": func(a *fixture, _ outbox.Owner) { a.adopted(3) },
		"by nobody":      func(*fixture, outbox.Owner) {},
		"by a publish": func(a *fixture, o outbox.Owner) {
			wantGap(t, second(a.lane(o).Deliver(makeEvents(1)).Publish(t.Context())))
			a.adopted(3)
		},
	} {
		all := sharing(t, 2)
		a, b := all[0], all[1]
		oa, ob := a.adopted(1), b.adopted(1)
		lb := b.lane(ob)
		events := makeEvents(5)
		b.Publish(lb, events[0], events[1])
		dump := a.client.Dump(t.Context(), stream).Val()
		b.Publish(lb, events[2])
		a.Publish(a.lane(oa), events[3])
		a.Must(a.client.RestoreReplace(t.Context(), stream, 0, dump).Err())
		oa = a.adopted(2)
		if st := b.look(); !st.Forgot || st.Last == "" {
			t.Errorf("%s: after the first loss %+v", name, st)
		}
		a.Must(a.client.Del(t.Context(), stream).Err())
		noticed(a, oa)
		if st := b.look(); !st.Forgot || st.Last != "" || st.Epoch != 0 {
			t.Errorf("%s: after the second loss %+v", name, st)
		}
		if name != "by nobody" {
			a.Publish(a.lane(a.adopted(4)), events[4])
		}
		if st := b.look(); !st.Forgot || st.Last != "" {
			t.Errorf("%s: after another publish %+v", name, st)
		}
		wantGap(t, b.sink.Adopt(t.Context(), stream, ob, false)) // it is a call that arrives late
		b.Publish(b.lane(b.adopted(2)), events[0])
		if st := b.look(); !st.Intact() {
			t.Errorf("%s: noticed again: %+v", name, st)
		}
	}
}

// A database that does not share its streams is not listed among those that do. When it has left one, another database
// may have the stream.
func TestLeavingAStreamThatIsNotShared(t *testing.T) {
	t.Parallel()
	a := newFixture(t)
	a.Publish(a.lane(a.adopted(1)), makeEvent())
	if got, err := sink.Sharing(t.Context(), a.client, []string{stream}); err != nil || len(got) > 0 {
		t.Errorf("shared by %v, %v", got, err)
	}
	b := on(t, a.server, sink.Options{Shared: true, Source: "/posthaste/b"})
	refused(t, b.sink.Adopt(t.Context(), stream, b.Owner(1), false), "does not share it")
	if ok, err := sink.Leave(t.Context(), a.client, stream, "/posthaste/test"); err != nil || !ok {
		t.Errorf("a leaves: %v, %v", ok, err)
	}
	if st := on(t, a.server, sink.Options{Source: "/posthaste/c"}).look(); st.Gate {
		t.Errorf("looked at: %+v; want no gate of any database", st)
	}
	b.Publish(b.lane(b.adopted(1)), makeEvent())
	a.Must(a.set("/posthaste/test", true).sink.Adopt(t.Context(), stream, a.Owner(2), false))
}

// Without its register a gate does not count, also if no other database uses the stream.
func TestALostRegisterOfOneDatabase(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	o := f.adopted(1)
	event := makeEvent()
	r := f.Publish(f.lane(o), event)
	old := f.client.Dump(t.Context(), register).Val()
	f.do("DEL", register)
	wantGap(t, f.sink.Check(t.Context(), o, []string{stream}))
	if st := f.look(); st.Gate || st.Last != r.Last {
		t.Errorf("looked at: %+v", st)
	}
	wantGap(t, f.sink.Adopt(t.Context(), stream, f.Owner(2), true))
	o = f.adopted(2)
	f.Must(f.sink.Recall(t.Context(), o, stream, []uuid.UUID{event.ID}, r.Last))
	f.Must(f.sink.Check(t.Context(), o, []string{stream}))
	f.Must(f.client.RestoreReplace(t.Context(), register, 0, old).Err()) // nor does it count under an older one
	wantGap(t, f.sink.Check(t.Context(), o, []string{stream}))
	f.do("XTRIM", stream, "MAXLEN", "0")
	wantGap(t, second(f.lane(o).Deliver(makeEvents(1)).Publish(t.Context())))
}

// A lost register invalidates all gates, with or without the stream: losses that others noticed since cannot be known.
func TestALostRegister(t *testing.T) {
	t.Parallel()
	all := sharing(t, 2)
	a, b := all[0], all[1]
	oa, ob := a.adopted(1), b.adopted(1)
	events := makeEvents(4)
	a.Publish(a.lane(oa), events[0])
	b.Publish(b.lane(ob), events[1])
	a.do("DEL", stream, register)
	wantGap(t, second(a.lane(oa).Deliver(events[2:3]).Publish(t.Context())))
	oa = a.adopted(2)
	a.Publish(a.lane(oa), events[2])
	wantGap(t, b.sink.Check(t.Context(), ob, []string{stream}))
	if st := b.look(); st.Gate || st.Last != "" || st.Missing != 1 {
		t.Errorf("looked at: %+v", st)
	}
	wantGap(t, b.sink.Adopt(t.Context(), stream, b.Owner(2), true))
	// Its doubt is not believed, either.
	b.Again(b.lane(b.adopted(2)), 0, events[1])
	a.Must(a.sink.Check(t.Context(), oa, []string{stream}))
	a.wantStored(events[2], events[1])
}

// Only a database's own entries count: in the tail, and if its gate is older than the stream.
func TestTheTailOfASharedStream(t *testing.T) {
	t.Parallel()
	all := sharing(t, 2)
	a, b := all[0], all[1]
	oa, ob := a.adopted(1), b.adopted(1)
	la, lb := a.lane(oa), b.lane(ob)
	events := makeEvents(3)
	first := a.Publish(la, events[0])
	old, err := a.server.Client.Dump(t.Context(), a.gate()).Result()
	a.Must(err)
	b.Publish(lb, makeEvents(1200)...)
	if st := a.look(); !st.Intact() || st.Last != first.Last {
		t.Errorf("behind others: %+v", st)
	}
	middle := a.Publish(la, events[1])
	b.Publish(lb, makeEvents(1200)...)
	a.do("XADD", stream, "*", "id", uuid.NewString(), "source", "/posthaste/a", "replayed", "1")
	tail, err := a.sink.Tail(t.Context(), stream, "")
	want := []outbox.Entry{outbox.NewEntry(events[0].ID, first.Last), outbox.NewEntry(events[1].ID, middle.Last)}
	if err != nil || !slices.Equal(tail, want) {
		t.Errorf("tail of %d, %v; want %v", len(tail), err, want)
	}
	if tail, err = b.sink.Tail(t.Context(), stream, middle.Last); err != nil || len(tail) != 1200 {
		t.Errorf("tail of %d, %v; want 1200", len(tail), err)
	}
	if st := a.look(); !st.Intact() || st.Last != middle.Last {
		t.Errorf("behind others: %+v", st)
	}
	a.Must(a.server.Client.RestoreReplace(t.Context(), a.gate(), 0, old).Err())
	if st := a.look(); !st.Behind || st.Last != first.Last || st.Missing != 1 {
		t.Errorf("with an old gate: %+v", st)
	}
	a.do("DEL", a.gate())
	if st := a.look(); st.Gate || st.Last != "" {
		t.Errorf("without a gate, among others: %+v", st)
	}
	if st := b.look(); !st.Intact() {
		t.Errorf("b: %+v", st)
	}
	// Recalled events are the database's own, and only in its own doubt.
	oa = a.adopted(2)
	a.Must(a.sink.Recall(t.Context(), oa, stream, []uuid.UUID{events[0].ID, events[1].ID}, middle.Last))
	a.Again(a.lane(oa), 2, events...)
	b.Again(b.lane(b.adopted(2)), 0, events[0])
}

// A shared stream is deleted once every database that shares it has dropped it.
func TestDropOfASharedStream(t *testing.T) {
	t.Parallel()
	all := sharing(t, 3)
	a, b, c := all[0], all[1], all[2]
	events := makeEvents(5)
	for i, f := range all {
		f.Publish(f.lane(f.adopted(1)), events[i])
	}
	drop := func(f *fixture, want ...string) {
		t.Helper()
		got, err := sink.Drop(t.Context(), f.client, stream, f.Source)
		if slices.Sort(got); err != nil || !slices.Equal(got, want) {
			t.Fatalf("waits for %v, %v; want %v", got, err, want)
		}
	}
	drop(a, "/posthaste/b", "/posthaste/c")
	drop(a, "/posthaste/b", "/posthaste/c")
	drop(c, "/posthaste/b")
	a.wantStored(events[:3]...)
	drop(b)
	a.wantStored()
	b.Publish(b.lane(b.adopted(2)), events[3])
	drop(b, "/posthaste/a", "/posthaste/c") // a drop counts once
	alone := on(t, testenv.Redis(t), sink.Options{})
	alone.Publish(alone.lane(alone.adopted(1)), events[4])
	drop(alone)
	alone.wantStored()
}

// A replay only affects its own database and hides no loss of the others.
func TestAReplayIntoASharedStream(t *testing.T) {
	t.Parallel()
	all := sharing(t, 2)
	a, b := all[0], all[1]
	o := a.adopted(1)
	events := makeEvents(2)
	a.Publish(a.lane(o), events[0])
	replay := func(source uuid.UUID, side bool) error {
		r := sink.NewReplay(sink.ReplayOptions{
			Client: a.client, Name: uuid.NewString(), Source: "/posthaste/x", Database: source, Side: side,
		})
		if _, err := r.Begin(t.Context(), sink.ReplayNote{}, false, []string{stream}); err != nil {
			return err
		}
		if _, err := r.Take(t.Context(), stream); err != nil {
			return err
		}
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		return r.Publish(ctx, stream, []sink.ReplayEntry{{Place: "1", Event: events[1]}})
	}
	a.Must(replay(a.Source, false))
	for source, text := range map[uuid.UUID]string{
		b.Source: "another database (/posthaste/a", a.Source: "a relay publishes to it",
	} {
		if err := replay(source, source == a.Source); err == nil || !strings.Contains(err.Error(), text) {
			t.Errorf("got %v, want %q", err, text)
		}
	}
	b.adopted(1)
	a.do("DEL", stream)
	a.do("XGROUP", "CREATE", stream, "g", "0", "MKSTREAM")
	if err := replay(b.Source, false); !redis.HasErrorPrefix(errors.Unwrap(err), "TRYAGAIN") {
		t.Errorf("a replay over a loss: %v", err)
	}
	b.adopted(2)
	b.Must(replay(b.Source, false))
	wantGap(t, a.sink.Check(t.Context(), o, []string{stream}))
}
