package sink_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"

	"posthaste/internal/lab/testenv"
	"posthaste/outbox"
	"posthaste/sink"
)

// BenchmarkPublish measures events of about 300 bytes through the gate, each batch settled with the next. It also
// reports the CPU time of the server, which does not depend on other load; "bare" adds the same entries by a minimal
// script.
func BenchmarkPublish(b *testing.B) {
	for _, c := range []struct {
		mode string
		size int
	}{
		{"bare", 100},
		{"bare", 1000},
		{"gate", 1},
		{"gate", 100},
		{"gate", 500},
		{"gate", 1000},
		{"gate", 2000},
		{"pubsub", 1000},
		{"doubt", 1000},
	} {
		b.Run(fmt.Sprintf("%s/%d", c.mode, c.size), func(b *testing.B) {
			f := on(b, testenv.Redis(b), sink.Options{PubSub: c.mode == "pubsub", MaxLen: 100000})
			o := f.adopted(1)
			if c.mode == "doubt" { // an event that never repeats keeps the doubt from being empty
				f.Publish(f.lane(o), makeEvent())
				o = f.adopted(2)
			}
			events := benchEvents(c.size)
			publish := f.gated(o, events)
			if c.mode == "bare" {
				publish = f.bare(events)
			}
			cpu := f.cpu()
			b.ReportAllocs()
			b.ResetTimer()
			for n := 0; n < b.N; n += c.size {
				for i := range events {
					binary.BigEndian.PutUint32(events[i].ID[12:], uint32(n+i))
				}
				publish()
				if n%200000 < c.size {
					f.Must(f.sink.Trim(b.Context(), stream))
				}
			}
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "events/s")
			b.ReportMetric((f.cpu()-cpu)*1e6/float64(b.N), "redis-us/event")
		})
	}
}

func (f *fixture) gated(o outbox.Owner, events []*outbox.Record) func() {
	l := f.lane(o)
	return func() { l.Settled(f.Publish(l, events...).Number) }
}

func (f *fixture) bare(events []*outbox.Record) func() {
	script := redis.NewScript(`for i = 1, #ARGV, 6 do
		redis.call('XADD', KEYS[1], '*', 'id', ARGV[i], 'type', ARGV[i + 1], 'source', ARGV[i + 2],
			'subject', ARGV[i + 3], 'time', ARGV[i + 4], 'data', ARGV[i + 5], 'specversion', '1.0')
	end`)
	return func() {
		args := make([]any, 0, 6*len(events))
		for _, e := range events {
			args = append(args, e.ID.String(), e.Type, "/posthaste/test", e.AggregateID,
				e.Time.Format(time.RFC3339Nano),
				e.Payload)
		}
		if err := script.Run(f.Context(), f.client, []string{stream}, args...).Err(); err != nil &&
			!errors.Is(err, redis.Nil) {
			f.Fatal(err)
		}
	}
}

// cpu returns the seconds of processor time that the server has used.
func (f *fixture) cpu() float64 {
	info, err := f.server.Client.Info(f.Context(), "cpu").Result()
	f.Must(err)
	var sum float64
	for line := range strings.SplitSeq(info, "\r\n") {
		if k, v, _ := strings.Cut(line, ":"); k == "used_cpu_sys" || k == "used_cpu_user" {
			s, err := strconv.ParseFloat(v, 64)
			f.Must(err)
			sum += s
		}
	}
	return sum
}

func benchEvents(n int) []*outbox.Record {
	events := makeEvents(n)
	for i, e := range events {
		e.AggregateID = uuid.NewString()
		e.Payload = fmt.Appendf(nil,
			`{"id":"%s","user_id":"%s","amount":%d,"currency":"USD","status":"PENDING",`+
				`"created_at":"2026-11-20T12:00:00.123456Z"}`,
			e.AggregateID, uuid.NewString(), 1000+i)
	}
	return events
}
