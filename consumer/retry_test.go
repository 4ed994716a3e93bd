package consumer_test

import (
	"crypto/rand"
	"fmt"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/go-redis/v9"

	"posthaste/consumer"
	"posthaste/internal/lab/testenv"
	"posthaste/outbox"
	"posthaste/sink"
)

// publisher publishes to a stream as a relay does.
type publisher struct {
	sink   *sink.Sink
	owner  outbox.Owner
	stream string
	lane   outbox.LanePublisher
	seq    int64
}

func newPublisher(tb testing.TB, r *testenv.RedisServer, stream, name string, shared bool) *publisher {
	tb.Helper()
	client, err := sink.NewClient(r.URL())
	must(tb, err)
	tb.Cleanup(func() { _ = client.Close() })
	p := &publisher{stream: stream, owner: outbox.Owner{Source: uuid.New()}}
	p.sink = sink.New(sink.Options{
		Client: client, Registerer: prometheus.NewRegistry(), Logger: testenv.Logger(tb),
		Source: "/posthaste/" + name, Shared: shared,
	})
	p.adopt(tb)
	return p
}

// adopt begins another leadership.
func (p *publisher) adopt(tb testing.TB) {
	tb.Helper()
	p.owner.Epoch++
	_, _ = rand.Read(p.owner.Nonce[:])
	must(tb, p.sink.Adopt(tb.Context(), p.stream, p.owner, false))
	p.lane = p.sink.Lane(p.stream, p.owner, outbox.Lane{Part: outbox.StreamLane, Nonce: p.owner.Nonce})
}

func (p *publisher) publish(tb testing.TB, n int) {
	tb.Helper()
	events := make([]*outbox.Record, n)
	for i := range events {
		p.seq++
		events[i] = &outbox.Record{
			ID: uuid.Must(uuid.NewV7()), Seq: p.seq, AggregateType: "order", AggregateID: fmt.Sprint(i),
			Type: "order.created", Payload: []byte(`{"n":1}`), Time: time.Now(),
		}
	}
	if _, err := p.lane.Deliver(events).Publish(tb.Context()); err != nil {
		tb.Fatal(err)
	}
}

// A stream is deleted, or put back to an earlier state, and its consumer creates the group again. A retry that added an
// event then would raise the stream's last id, by which the relay recognizes the loss. It is refused until the relay
// has restored the stream.
func TestRetryWaitsForALostStream(t *testing.T) {
	t.Parallel()
	for name, loss := range map[string]struct{ shared, back bool }{
		"deleted": {}, "put back": {back: true}, "shared": {shared: true}, "shared and put back": {true, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			const stream = "outbox.order"
			ctx, r := t.Context(), testenv.Redis(t)
			p := newPublisher(t, r, stream, "a", loss.shared)
			if loss.shared {
				newPublisher(t, r, stream, "b", true).publish(t, 1)
			}
			p.publish(t, 3)
			// One event is dead, and its original entry is trimmed.
			var f failing
			c := start(t, consumer.Options{
				Client:  r.Client,
				Handler: consumer.Handler(f.run),
			})
			settled(t, r.Client, 20*time.Second, "g", stream)
			f.ids.Store("bad", consumer.Permanent(errBoom))
			add(t, r.Client, stream, event{"bad", "s", 1})
			settled(t, r.Client, 20*time.Second, "g", stream)
			must(t, c.stop())
			early := r.Client.Dump(ctx, stream).Val()
			p.publish(t, 100)
			must(t, r.Client.Del(ctx, stream).Err())
			if loss.back {
				must(t, r.Client.Restore(ctx, stream, 0, early).Err())
				must(t, r.Client.XTrimMaxLen(ctx, stream, 0).Err())
			} else {
				must(t, r.Client.XGroupCreateMkStream(ctx, stream, "g", "0").Err())
			}
			before := r.Client.XInfoStream(ctx, stream).Val()
			bad := dead(t, r.Client)[0]
			err := consumer.Retry(ctx, r.Client, bad)
			testenv.ErrorIs(t, "retry on a stream that lacks events", err, consumer.ErrUnrestored)
			after := r.Client.XInfoStream(ctx, stream).Val()
			if after.LastGeneratedID != before.LastGeneratedID || after.Length != before.Length ||
				len(dead(t, r.Client)) != 1 {
				t.Fatalf("the refused retry changed the stream: last id %s, then %s; %d entries, then %d",
					before.LastGeneratedID, after.LastGeneratedID, before.Length, after.Length)
			}

			p.adopt(t) // the relay notices
			p.publish(t, 100)
			testenv.ErrorIs(t, "retry on a stream that is restored", consumer.Retry(ctx, r.Client, bad), nil)
			testenv.Equal(t, "dead events", len(dead(t, r.Client)), 0)
		})
	}
}

// A stream of which a relay has published nothing, or to which no relay publishes, takes the event.
func TestRetryToAStreamWithoutARelay(t *testing.T) {
	t.Parallel()
	ctx, r := t.Context(), testenv.Redis(t)
	for _, stream := range []string{"outbox.a", "outbox.b"} {
		if stream == "outbox.a" {
			newPublisher(t, r, stream, "a", false)
		}
		must(t, r.Client.XGroupCreateMkStream(ctx, stream, "g", "0").Err())
		id, err := r.Client.XAdd(ctx, deadArgs(stream)).Result()
		must(t, err)
		d := consumer.DeadEntry{DeadStream: "dead." + stream, DeadID: id, Stream: stream, EntryID: "1-0", Group: "g"}
		if err := consumer.Retry(ctx, r.Client, d); err != nil || r.Client.XLen(ctx, stream).Val() != 1 {
			t.Errorf("retry on %s: %v", stream, err)
		}
	}
}

func deadArgs(stream string) *redis.XAddArgs {
	return &redis.XAddArgs{Stream: "dead." + stream, Values: []any{
		"id", "1", "dead_stream", stream, "dead_entry", "1-0", "dead_group", "g",
	}}
}
