package jetstream_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/nats-io/nats.go"

	"posthaste/outbox"
	"posthaste/sink/jetstream"
)

// BenchmarkPublish compares a lane with bare publishing of the same messages, in batches of the same size.
func BenchmarkPublish(b *testing.B) {
	for _, size := range []int{1, 10, 100, 500} {
		b.Run(fmt.Sprintf("sink/%d", size), func(b *testing.B) {
			f := newFixture(b)
			s, o := f.open(jetstream.Options{}), f.owner(1)
			f.must(s.Adopt(b.Context(), order, o, false))
			l := s.Lane(order, o, streamLane(o))
			run(b, size, func(events []*outbox.Record) {
				r, err := l.Deliver(events).Publish(b.Context())
				f.must(err)
				l.Settled(r.Number)
			})
		})
		b.Run(fmt.Sprintf("bare/%d", size), func(b *testing.B) {
			f := newFixture(b)
			f.call("STREAM.CREATE.BARE", map[string]any{
				"name": "BARE", "subjects": []string{"bare.*"}, "storage": "file", "allow_atomic": true,
			}, nil)
			run(b, size, func(events []*outbox.Record) {
				id := uuid.NewString()
				for i, e := range events {
					m := nats.NewMsg(jetstream.EventSubject("bare", e.AggregateID))
					m.Data = e.Payload
					m.Header = nats.Header{
						"ce-id": {e.ID.String()}, "ce-type": {e.Type}, "ce-subject": {e.AggregateID},
						"ce-source": {"/posthaste/test"}, "ce-time": {e.Time.Format(time.RFC3339Nano)},
						"ce-specversion": {"1.0"}, "content-type": {"application/json"},
					}
					if size == 1 {
						_, err := f.nc.RequestMsg(m, 5*time.Second)
						f.must(err)
						return
					}
					m.Header["Nats-Batch-Id"] = []string{id}
					m.Header["Nats-Batch-Sequence"] = []string{fmt.Sprint(i + 1)}
					if i < len(events)-1 {
						f.must(f.nc.PublishMsg(m))
						continue
					}
					m.Header["Nats-Batch-Commit"] = []string{"1"}
					_, err := f.nc.RequestMsg(m, 5*time.Second)
					f.must(err)
				}
			})
		})
	}
}

// run publishes b.N batches.
func run(b *testing.B, size int, publish func(events []*outbox.Record)) {
	b.Helper()
	events := makeEvents(size)
	for b.Loop() {
		for _, e := range events {
			e.ID = uuid.Must(uuid.NewV7())
		}
		publish(events)
	}
	b.ReportMetric(float64(b.N*size)/b.Elapsed().Seconds(), "events/s")
}
