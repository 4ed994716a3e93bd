package ops_test

import (
	"testing"

	"posthaste/internal/ops"
	"posthaste/internal/testenv"
)

// An aggregate may have any number of events, and whoever answers a trace has a bounded memory.
func TestTraceOfAnAggregateWithManyEvents(t *testing.T) {
	t.Parallel()
	d, r := testenv.Postgres(t), testenv.Redis(t)
	d.Exec(t, `INSERT INTO outbox_history
			(seq, id, aggregate_type, aggregate_id, event_type, payload, created_at, published_at, stream, mode)
		SELECT g, gen_random_uuid(), 'order', 'large', 'order.made', '{}', now(), now() + g * interval '1 second',
			'outbox.order', 'cdc'
		FROM generate_series(1, 1000) g`)
	one := testenv.Value[string](t, d, "SELECT id::text FROM outbox_history WHERE seq = 7")
	for id, want := range map[string]int{"large": 201, one: 1} {
		steps, err := ops.Trace(t.Context(), d.Pool, r.Client, id)
		if err != nil || len(steps) != want {
			t.Fatalf("%s: %d steps, error %v; want %d", id, len(steps), err, want)
		}
		if want == 1 {
			continue
		}
		last := testenv.Value[string](t, d, "SELECT id::text FROM outbox_history WHERE seq = 1000")
		if steps[0].Place != "earlier" || steps[200].ID != last || steps[1].At.After(steps[200].At) {
			t.Errorf("it begins with %+v and ends with %+v", steps[0], steps[200])
		}
	}
}
