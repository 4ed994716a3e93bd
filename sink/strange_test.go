package sink_test

import (
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"

	"posthaste/internal/lab/link"
	"posthaste/internal/lab/testenv"
	"posthaste/outbox"
	"posthaste/sink"
)

// strange makes a fixture whose client, bound to one process, goes through a proxy with oddities.
func strange(t *testing.T, odd link.Oddities) (*fixture, *link.Strange) {
	t.Helper()
	server := testenv.Redis(t)
	p := testenv.Strange(t, server, odd)
	return bound(t, "redis://"+p.Addr(), server), p
}

func traced(events []*outbox.Record) []*outbox.Record {
	for _, e := range events {
		e.Headers = []byte(`{"traceparent":"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}`)
	}
	return events
}

// No call has more than 3,900 arguments, however much there is to do.
func TestNoCallHasTooManyArguments(t *testing.T) {
	t.Parallel()
	f, p := strange(t, link.Oddities{MaxArgs: 3999})
	f.bind()
	o := f.adopted(1)
	events := append(traced(makeEvents(995)), traced(makeEvents(3000))...)
	l := f.lane(o)
	f.Publish(l, events[:995]...)
	f.Publish(l, events[995:]...)
	f.wantStored(events...)
	var marks []outbox.Mark
	for range 2500 {
		marks = append(marks, outbox.Mark{Stream: stream, Lane: streamLane(o), Number: 1})
	}
	f.Must(f.sink.Confirm(t.Context(), o, marks))
	f.Must(f.sink.Settled(t.Context(), o, marks))
	var groups []string
	for i := range 5000 {
		groups = append(groups, fmt.Sprint("g", i))
	}
	f.Must(f.sink.Regroup(t.Context(), stream, groups))
	if n := len(f.server.Client.XInfoGroups(t.Context(), stream).Val()); n != len(groups) {
		t.Errorf("%d groups, want %d", n, len(groups))
	}
	f.do("DEL", stream)
	r := f.replay("again", f.client, true)
	f.do("DEL", register)
	f.begin(r, false)
	f.take(r)
	entries := replayEntries(1, 2000)
	f.Must(r.Publish(t.Context(), stream, entries))
	f.Must(r.Publish(t.Context(), stream, entries))
	f.wantReplayed(entries)
	if n := p.Most(); n > 3900 {
		t.Errorf("a call had %d arguments", n)
	}
}

// deliver publishes events and skips those that are refused for their own sake, as a relay does. It returns their
// indexes, and the last other error.
func (f *fixture) deliver(l outbox.LanePublisher, attempts int, events []*outbox.Record) (skipped []int, last error) {
	f.Helper()
	d := l.Deliver(events)
	for range attempts {
		_, err := d.Publish(f.Context())
		if err == nil {
			return skipped, nil
		}
		if poison := (*outbox.PoisonError)(nil); errors.As(err, &poison) {
			skipped = append(skipped, poison.Index)
			d.Skip(nil)
			continue
		}
		last = err
	}
	return skipped, last
}

// A limit of a service that no error of Redis describes is overcome by smaller batches, and costs little afterwards.
func TestAnUnknownLimitIsOvercome(t *testing.T) {
	t.Parallel()
	f, _ := strange(t, link.Oddities{MaxArgs: 400})
	f.bind()
	l := f.lane(f.adopted(1))
	events := makeEvents(2000)
	if skipped, err := f.deliver(l, 100, events[:1000]); err != nil || len(skipped) > 0 {
		t.Fatalf("skipped %v, %v", skipped, err)
	}
	if skipped, err := f.deliver(l, 4, events[1000:]); err != nil || len(skipped) > 0 {
		t.Fatalf("later: skipped %v, %v", skipped, err)
	}
	f.wantStored(events...)
}

// An event for which Redis refuses the call in unknown words is poison, and the others of its batch are published. A
// server that refuses every call refuses the stream, and no event.
func TestAnUnknownReplyToOneEvent(t *testing.T) {
	t.Parallel()
	var all atomic.Bool
	f, _ := strange(t, link.Oddities{Judge: func(args [][]byte) string {
		script := strings.HasPrefix(strings.ToUpper(string(args[0])), "EVAL")
		for _, a := range args {
			if script && (all.Load() || strings.Contains(string(a), "unbearable")) {
				return "ERR the policy of this service forbids it"
			}
		}
		return ""
	}})
	f.bind()
	l := f.lane(f.adopted(1))
	events := makeEvents(100)
	for _, i := range []int{0, 41, 99} {
		events[i].Payload = []byte(`"unbearable"`)
	}
	skipped, err := f.deliver(l, 300, events)
	if err != nil || fmt.Sprint(skipped) != "[0 41 99]" {
		t.Fatalf("skipped %v, %v", skipped, err)
	}
	want := append(append([]*outbox.Record{}, events[1:41]...), events[42:99]...)
	f.wantStored(want...)

	all.Store(true)
	more := makeEvents(3)
	skipped, err = f.deliver(l, 100, more)
	var refused *outbox.StreamError
	if len(skipped) > 0 || !errors.As(err, &refused) {
		t.Fatalf("skipped %v, %v; want the stream refused", skipped, err)
	}
	all.Store(false)
	f.Publish(l, more...)
	f.wantStored(append(want, more...)...)
}

// A Redis that refuses whatever is not needed is published to.
func TestRefusedCommands(t *testing.T) {
	t.Parallel()
	f, _ := strange(t, link.Oddities{Refuse: link.Refusals})
	if id := f.bind(); id != "" {
		t.Errorf("the server is %q", id)
	}
	f.Must(f.sink.Ready(t.Context()))
	events := makeEvents(3)
	f.Publish(f.lane(f.adopted(1)), events...)
	f.wantStored(events...)
	f.Must(f.sink.Observe(t.Context(), []string{stream}))
	for _, durable := range []sink.Durability{{AOF: true}, {Replicas: 1}} {
		s, _ := newSink(t, f.client, sink.Options{Durability: durable})
		f.Must(s.Ready(t.Context()))
	}
	unknown, err := f.sink.Unknown(t.Context())
	if text := strings.Join(unknown, ". "); err != nil || !strings.Contains(text, "refuses INFO") ||
		!strings.Contains(text, "refuses CONFIG GET") || len(unknown) != 2 {
		t.Errorf("unknown: %q, %v", unknown, err)
	}
}

// Run ids that differ between connections identify nothing: the sink stays bound, and still notices a restart by the
// replication id.
func TestAnIdentityForEachConnection(t *testing.T) {
	t.Parallel()
	for _, noHistory := range []bool{false, true} {
		t.Run(fmt.Sprint("no history ", noHistory), func(t *testing.T) {
			t.Parallel()
			f, p := strange(t, link.Oddities{Identities: true, NoHistory: noHistory})
			id := f.bind()
			l := f.lane(f.adopted(1))
			if (id == "") != noHistory {
				t.Errorf("the server is %q", id)
			}
			for range 10 {
				other := bound(t, "redis://"+p.Addr(), f.server) // another relay agrees
				if got := other.bind(); got != id {
					t.Fatalf("the server is %q, and %q for another relay", id, got)
				}
				f.Must(f.sink.Ready(t.Context()))
				f.Publish(l, makeEvent())
				f.do("CLIENT", "KILL", "TYPE", "normal") // new connections, new identities
				testenv.Eventually(t, 20*time.Second, func() error { return f.sink.Ready(t.Context()) })
			}
			if again := f.bind(); again != id {
				t.Errorf("the server is %q, and was %q", again, id)
			}
			unknown, err := f.sink.Unknown(t.Context())
			if err != nil || len(unknown) != 1 || !strings.Contains(unknown[0], "on each connection") {
				t.Errorf("unknown: %q, %v", unknown, err)
			}
			if noHistory {
				return
			}
			f.Must(f.server.Kill())
			f.Must(f.server.Start(t.Context()))
			f.moved(l)
		})
	}
}

// All scripts declare their keys, also those of databases that share a stream, and use no name that Lua 5.4 lacks.
func TestScriptsDeclareTheirKeys(t *testing.T) {
	t.Parallel()
	server := testenv.Redis(t)
	p := testenv.Strange(t, server, link.Oddities{Strict: true})
	var all []*fixture
	for _, name := range []string{"/posthaste/a", "/posthaste/b", "/posthaste/c"} {
		f := on(t, server, sink.Options{})
		f.client = dial(t, "redis://"+p.Addr())
		f.sink, f.reg = newSink(t, f.client, sink.Options{Shared: true, Source: name, MaxLen: 100})
		all = append(all, f)
	}
	ctx := t.Context()
	for i, f := range all {
		o := f.adopted(int64(i + 1))
		l := f.lane(o)
		events := makeEvents(300)
		f.Publish(l, events...)
		f.Must(f.sink.Regroup(ctx, stream, []string{"g", "h"}))
		f.do("XGROUP", "SETID", stream, "g", "$")
		f.do("XGROUP", "SETID", stream, "h", "$")
		f.Must(f.sink.Trim(ctx, stream)) // the next publish compares the gates
		f.Publish(l, makeEvents(3)...)
		f.Must(f.sink.Recall(ctx, o, stream, []uuid.UUID{events[0].ID}, ""))
		f.Must(f.sink.ForgetDoubt(ctx, o, stream))
		f.Must(f.sink.Check(ctx, o, []string{stream}))
		mark := []outbox.Mark{{Stream: stream, Lane: streamLane(o), Number: 1}}
		f.Must(f.sink.Confirm(ctx, o, mark))
		f.Must(f.sink.Settled(ctx, o, mark))
		f.Must(f.sink.Observe(ctx, []string{stream}))
		for _, call := range []func() error{
			func() error { _, err := f.sink.Tail(ctx, stream, ""); return err },
			func() error { _, err := f.sink.Look(ctx, f.Source, []string{stream}, nil); return err },
			func() error { _, err := f.sink.Groups(ctx, o, []string{stream}); return err },
			func() error { _, err := f.sink.Unread(ctx, f.Source, []string{stream}); return err },
			func() error { _, err := f.sink.Alive(ctx, f.Source, outbox.Member{ID: "m"}, nil); return err },
			func() error { return sink.DropGroup(ctx, f.client, stream, "h", 0, true) },
		} {
			f.Must(call())
		}
	}
	f := all[2]
	r := f.replay("again", f.client, false)
	f.begin(r, false)
	f.take(r)
	f.Must(r.Publish(ctx, stream, replayEntries(1, 3)))
	f.Must(r.Note(ctx, "1.1", 1, time.Time{}))
	if left, err := sink.Leave(ctx, f.client, stream, "/posthaste/a"); err != nil || !left {
		t.Errorf("leave: %v, %v", left, err)
	}
	if n := f.server.Client.Exists(ctx, all[0].gate()).Val(); n != 0 {
		t.Error("a database that has left has a gate")
	}
	if _, err := sink.Drop(ctx, f.client, stream, f.Source); err != nil {
		t.Error(err)
	}
}
