package sql_test

import (
	"math"
	"testing"

	"posthaste/internal/testenv"
)

// BenchmarkMark measures the settling of one event, streamed in a transaction of its own, with 1,000 events per mark.
func BenchmarkMark(b *testing.B) {
	s, d := newStore(b)
	o := succeed(b, s)
	m, err := s.Marker(b.Context())
	must(b, err)
	defer m.Close()
	look, err := m.Look(b.Context(), settle(b, s), math.MaxInt64)
	must(b, err)
	for left := b.N; left > 0; left -= 1000 {
		b.StopTimer()
		for range min(left, 1000) {
			testenv.Value[int64](b, d, `INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload)
				VALUES (gen_random_uuid(), 'order', 'a-' || random(), 'order.changed', '{}') RETURNING seq`)
		}
		b.StartTimer()
		look, err = m.Look(b.Context(), look.Settled, math.MaxInt64)
		must(b, err)
		if n := len(look.Owed); n != min(left, 1000) {
			b.Fatalf("%d transactions are owed", n)
		}
		must(b, m.Move(b.Context(), o, look.Settled, nil))
	}
}
