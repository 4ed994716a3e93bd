package sink_test

import (
	"bytes"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"posthaste/internal/lab/testenv"
	"posthaste/outbox"
	"posthaste/sink"
)

// A time whose year has not four digits becomes the nearest one that has.
func TestEntryHasTheContractsFields(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	const trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
	events := makeEvents(5)
	want := make([]map[string]any, len(events))
	for i, e := range events {
		e.AggregateID = "o-0"
		want[i] = map[string]any{
			"id": e.ID.String(), "type": "order.created", "source": "/posthaste/test", "subject": "o-0",
			"time": "2026-11-20T12:00:00.123456Z", "data": string(e.Payload), "specversion": "1.0",
		}
	}
	events[1].Headers = []byte(`{"traceparent":"` + trace + `","tenant":"x"}`)
	want[1]["traceparent"], want[1]["headers"] = trace, `{"tenant":"x"}`
	events[1].Time = time.Date(2026, 1, 2, 3, 4, 5, 60000, time.FixedZone("", 3600))
	want[1]["time"] = "2026-01-02T02:04:05.000060Z"
	events[2].Headers = []byte(`{"tenant": "acme"}`)
	want[2]["headers"] = `{"tenant": "acme"}`
	events[3].Time = time.Date(-43, 3, 15, 0, 0, 0, 0, time.UTC)
	want[3]["time"] = "0001-01-01T00:00:00.000000Z"
	events[4].Time = time.Date(294276, 1, 1, 0, 0, 0, 0, time.UTC)
	want[4]["time"] = "9999-12-31T23:59:59.999999Z"
	f.wantLast(f.Publish(f.lane(f.adopted(1)), events...))
	entries, err := f.server.Client.XRange(t.Context(), stream, "-", "+").Result()
	f.Must(err)
	for i, e := range entries {
		if !maps.Equal(e.Values, want[i]) {
			t.Errorf("entry %d is %v, want %v", i, e.Values, want[i])
		}
	}
}

func TestAFinishedDeliveryAnswersAgainWithoutACall(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	d := f.lane(f.adopted(1)).Deliver(makeEvents(3))
	first, err := d.Publish(t.Context())
	f.Must(err)
	f.Must(f.server.Kill())
	again, err := d.Publish(t.Context())
	f.Must(err)
	if again.Number != first.Number || again.Last != first.Last {
		t.Errorf("got %+v, want %+v", again, first)
	}
}

func TestARefusedPublishIsCountedAndTheEntryStays(t *testing.T) {
	t.Parallel()
	server := testenv.Redis(t, "user default on nopass ~* resetchannels +@all")
	var log bytes.Buffer
	f := on(t, server, sink.Options{PubSub: true, Logger: slog.New(slog.NewTextHandler(&log, nil))})
	events := makeEvents(6)
	events[0].Type = "__reserved" // is not published, and refused by nothing
	l := f.lane(f.adopted(1))
	f.Publish(l, events[0])
	if log.Len() > 0 {
		t.Errorf("a channel of Redis: %s", &log)
	}
	f.Publish(l, events[1:4]...)
	f.Publish(l, events[4:]...)
	f.wantStored(events...)
	f.wantMetric("outbox_pubsub_failed_total", 6)
	if text := log.String(); strings.Count(text, "\n") != 1 || !strings.Contains(text, "level=WARN") ||
		!strings.Contains(text, "channel") || !strings.Contains(text, "--pubsub=off") {
		t.Errorf("logged: %s", text)
	}
}

// Channels that begin with __ are Redis' own: subscribers would take a message there for one of Redis. Any writer of
// events chooses their types.
func TestNoEventSpeaksOnAChannelOfRedis(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name, prefix string
		types, want  []string
	}{
		{"alone", "", []string{"__keyspace@0__:session"}, nil},
		{
			"among others", "",
			[]string{"order.created", "__keyspace@0__:session", "_x", "__redis__:invalidate", "order.paid"},
			[]string{"order.created", "_x", "order.paid"},
		},
		{"with a prefix", "shop:", []string{"order.created", "__sentinel__:hello"}, []string{"shop:order.created"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			f := on(t, testenv.Redis(t), sink.Options{PubSub: true, ChannelPrefix: c.prefix})
			sub := f.server.Client.PSubscribe(t.Context(), "*")
			defer sub.Close()
			f.Must(second(sub.Receive(t.Context())))
			events := makeEvents(len(c.types))
			for i, e := range events {
				e.Type = c.types[i]
			}
			f.Publish(f.lane(f.adopted(1)), events...)
			f.wantStored(events...)
			f.Must(f.server.Client.Publish(t.Context(), "end", "").Err())
			var got []string
			for {
				m, err := sub.ReceiveMessage(t.Context())
				f.Must(err)
				if m.Channel == "end" {
					break
				}
				got = append(got, m.Channel)
				if !slices.ContainsFunc(events, func(e *outbox.Record) bool {
					return m.Payload == string(e.Payload) && m.Channel == c.prefix+e.Type
				}) {
					t.Errorf("message %q on %q", m.Payload, m.Channel)
				}
			}
			if !slices.Equal(got, c.want) {
				t.Errorf("channels %q, want %q", got, c.want)
			}
			f.wantMetric("outbox_pubsub_failed_total", float64(len(c.types)-len(c.want)))
		})
	}
}

// A batch has a thousand events at most, and 4 MiB unless one event is larger.
func TestBatchesAreBounded(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	l := f.lane(f.adopted(1))
	// {1, 2 MiB}, {2 MiB}, {8 MiB} alone, {small}
	large := []*outbox.Record{big(1 << 20), big(2 << 20), big(2 << 20), big(8 << 20), makeEvent()}
	events := makeEvents(3500)
	for _, c := range []struct {
		events []*outbox.Record
		number int64
	}{{events[:1000], 1}, {events[1000:], 4}, {large, 8}} {
		r := f.Publish(l, c.events...)
		if r.Number != c.number {
			t.Errorf("number %d, want %d", r.Number, c.number)
		}
		f.wantLast(r)
	}
	f.wantStored(append(events, large...)...)
}

func TestWorksInACluster(t *testing.T) {
	t.Parallel()
	server := testenv.Redis(t, "cluster-enabled yes")
	testenv.Must(t, server.Client.ClusterAddSlotsRange(t.Context(), 0, 16383).Err())
	testenv.Eventually(t, 20*time.Second, func() error {
		return server.Client.Set(t.Context(), "up", "", 0).Err()
	})
	c := redis.NewClusterClient(&redis.ClusterOptions{Addrs: []string{server.Addr()}, MaxRedirects: 3})
	defer c.Close()
	for _, name := range []string{"outbox.order", "{tag}outbox.order"} {
		everyCall(t, c, sink.Options{MaxLen: 1}, name)
	}
	for _, name := range []string{"outbox.user", "{tag}outbox.user"} {
		everyCall(t, c, sink.Options{MaxLen: 1, Shared: true}, name)
	}
	s, _ := newSink(t, c, sink.Options{})
	o := outbox.Owner{Source: [16]byte{1}, Epoch: 1, Nonce: nonce()}
	wantClass(t, second(s.Lane("a}b", o, streamLane(o)).Deliver(makeEvents(1)).Publish(t.Context())), "crossslot")
}

// everyCall uses every method once.
func everyCall(t *testing.T, c redis.UniversalClient, o sink.Options, name string) {
	ctx := t.Context()
	s, _ := newSink(t, c, o)
	owner := outbox.Owner{Source: [16]byte{1}, Epoch: 1, Nonce: nonce()}
	testenv.Must(t, s.Ready(ctx))
	testenv.Must(t, s.Adopt(ctx, name, owner, false))
	l := outbox.Lane{Part: 3, Claim: 9, Nonce: nonce()}
	events := makeEvents(2)
	testenv.Must(t, second(s.Lane(name, owner, l).Deliver(events).Publish(ctx)))
	marks := []outbox.Mark{{Stream: name, Lane: l, Number: 1}}
	testenv.Must(t, s.Check(ctx, owner, []string{name}))
	testenv.Must(t, second(s.Bind(ctx)))
	states, err := s.Look(ctx, owner.Source, []string{name}, nil)
	testenv.Must(t, err)
	if st := states[0]; !st.Gate || st.Last == "" || st.Missing != 0 || time.Since(st.Now).Abs() > time.Minute {
		t.Errorf("looked at: %+v", st)
	}
	s.Release()
	testenv.Must(t, s.Confirm(ctx, owner, marks))
	testenv.Must(t, s.Settled(ctx, owner, marks))
	testenv.Must(t, s.ForgetDoubt(ctx, owner, name))
	testenv.Must(t, s.Trim(ctx, name))
	testenv.Must(t, s.Observe(ctx, []string{name}))
	testenv.Must(t, s.TakeOver(ctx, name, outbox.Owner{Source: [16]byte{2}, Epoch: 1, Nonce: nonce()}))
	if n := c.XLen(ctx, name).Val(); n != 2 {
		t.Fatalf("%d entries, want 2", n)
	}
}
