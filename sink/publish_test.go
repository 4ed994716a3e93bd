package sink_test

import (
	"bytes"
	"encoding/json"
	"slices"
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
	headed := makeEvent()
	headed.Headers = []byte(`{"tenant": "acme"}`)
	traced.Time = time.Date(2026, 1, 2, 3, 4, 5, 60000, time.FixedZone("", 3600))
	r := f.publish(f.lane(o), plain, traced, headed)
	f.wantLast(r)
	entries, err := f.server.Client.XRange(t.Context(), stream, "-", "+").Result()
	f.must(err)
	want := []map[string]any{
		{
			"id": plain.ID.String(), "type": "order.created", "source": "/posthaste/test", "subject": "o-0",
			"time": "2026-11-20T12:00:00.123456Z", "data": `{"n":0}`,
			"specversion": "1.0",
		},
		{
			"id": traced.ID.String(), "type": "order.created", "source": "/posthaste/test", "subject": "o-0",
			"time": "2026-01-02T02:04:05.000060Z", "data": `{"n":0}`,
			"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "headers": `{"tenant":"x"}`,
			"specversion": "1.0",
		},
		{
			"id": headed.ID.String(), "type": "order.created", "source": "/posthaste/test", "subject": "o-0",
			"time": "2026-11-20T12:00:00.123456Z", "data": `{"n":0}`, "headers": `{"tenant": "acme"}`,
			"specversion": "1.0",
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
	for i, want := range []string{
		"0001-01-01T00:00:00.000000Z", "9999-12-31T23:59:59.999999Z",
		"2026-11-20T12:00:00.123456Z",
	} {
		if got := entries[i].Values["time"]; got != want {
			t.Errorf("time %d is %v, want %s", i, got, want)
		}
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
	if again.Number != first.Number || again.Last != first.Last {
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
			if _, err := sub.Receive(t.Context()); err != nil {
				t.Fatal(err)
			}
			events := makeEvents(len(c.types))
			for i, e := range events {
				e.Type = c.types[i]
			}
			f.publish(f.lane(f.adopted(1)), events...)
			f.wantStored(events...)
			f.must(f.server.Client.Publish(t.Context(), "end", "").Err())
			var got []string
			for {
				m, err := sub.ReceiveMessage(t.Context())
				f.must(err)
				if m.Channel == "end" {
					break
				}
				got = append(got, m.Channel)
			}
			if !slices.Equal(got, c.want) {
				t.Errorf("channels %q, want %q", got, c.want)
			}
			if n := f.metric("outbox_pubsub_failed_total"); int(n) != len(c.types)-len(c.want) {
				t.Errorf("%v counted, want %d", n, len(c.types)-len(c.want))
			}
		})
	}
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
	f.wantLast(r)
}

func TestBatchesAreBoundedByBytes(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	l := f.lane(f.adopted(1))
	events := []*outbox.Record{big(1 << 20), big(2 << 20), big(2 << 20), big(8 << 20), makeEvent()}
	r := f.publish(l, events...)
	// {1, 2 MiB}, {2 MiB}, {8 MiB} alone, {small}
	if r.Number != 4 {
		t.Errorf("number %d, want 4", r.Number)
	}
	f.wantStored(events...)
}

func TestWorksInACluster(t *testing.T) {
	t.Parallel()
	server := testenv.Redis(t, "cluster-enabled yes")
	if err := server.Client.ClusterAddSlotsRange(t.Context(), 0, 16383).Err(); err != nil {
		t.Fatal(err)
	}
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
	check("adopt", s.Adopt(ctx, name, owner, false))
	l := outbox.Lane{Part: 3, Claim: 9, Nonce: nonce()}
	events := makeEvents(2)
	_, err := s.Lane(name, owner, l).Deliver(events).Publish(ctx)
	check("publish", err)
	marks := []outbox.Mark{{Stream: name, Lane: l, Number: 1}}
	check("check", s.Check(ctx, owner, []string{name}))
	_, err = s.Bind(ctx)
	check("bind", err)
	states, err := s.Look(ctx, owner.Source, []string{name}, nil)
	check("look", err)
	if st := states[0]; !st.Gate || st.Last == "" || st.Missing != 0 || time.Since(st.Now).Abs() > time.Minute {
		t.Errorf("looked at: %+v", st)
	}
	s.Release()
	check("confirm", s.Confirm(ctx, owner, marks))
	check("settled", s.Settled(ctx, owner, marks))
	check("forget", s.ForgetDoubt(ctx, owner, name))
	check("trim", s.Trim(ctx, name))
	check("observe", s.Observe(ctx, []string{name}))
	check("take over", s.TakeOver(ctx, name, outbox.Owner{Source: [16]byte{2}, Epoch: 1, Nonce: nonce()}))
	if n := c.XLen(ctx, name).Val(); n != 2 {
		t.Fatalf("%d entries, want 2", n)
	}
}
