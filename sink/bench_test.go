package sink_test

import (
	"context"
	"encoding/binary"
	"fmt"
	"testing"

	"github.com/google/uuid"

	"posthaste/internal/testenv"
	"posthaste/outbox"
	"posthaste/sink"
)

// BenchmarkPublish measures events of about 300 bytes through the gate, each batch settled with the next.
func BenchmarkPublish(b *testing.B) {
	for _, size := range []int{1, 100, 500, 1000, 2000} {
		for _, mode := range []string{"plain", "pubsub", "doubt"} {
			if mode != "plain" && size != 1000 {
				continue
			}
			b.Run(fmt.Sprintf("%s/%d", mode, size), func(b *testing.B) {
				f := on(b, testenv.Redis(b), sink.Options{PubSub: mode == "pubsub", MaxLen: 100000})
				o := f.adopted(1)
				if mode == "doubt" { // some event that never comes back keeps the doubt from being empty
					f.publish(f.lane(o), makeEvent())
					o = f.adopted(2)
				}
				l, events := f.lane(o), benchEvents(size)
				b.ReportAllocs()
				b.ResetTimer()
				for n := 0; n < b.N; n += size {
					for i := range events {
						events[i].Seq = int64(n + i)
						binary.BigEndian.PutUint32(events[i].ID[12:], uint32(n+i))
					}
					r := f.publish(l, events...)
					l.Settled(r.Number)
					if n%200000 < size {
						b.StopTimer()
						f.must(f.sink.Trim(context.WithoutCancel(b.Context()), stream))
						b.StartTimer()
					}
				}
				b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "events/s")
			})
		}
	}
}

func benchEvents(n int) []*outbox.Event {
	events := makeEvents(n)
	for i, e := range events {
		e.AggregateID = uuid.NewString()
		e.Payload = fmt.Appendf(nil, `{"id":"%s","user_id":"%s","amount":%d,"currency":"USD","status":"PENDING","created_at":"2026-11-20T12:00:00.123456Z"}`,
			e.AggregateID, uuid.NewString(), 1000+i)
	}
	return events
}
