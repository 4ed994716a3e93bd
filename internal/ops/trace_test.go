package ops_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"

	"posthaste/internal/lab/testenv"
	"posthaste/internal/ops"
)

// Settled and unsettled events are traced, whatever their age.
func TestTraceOfAnyTime(t *testing.T) {
	t.Parallel()
	d, r := testenv.Postgres(t), testenv.Redis(t)
	const at = "('infinity'), ('-infinity'), ('10000-01-01'), ('4713-01-01 BC')"
	for range 2 {
		d.Exec(t, `INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload, created_at)
			SELECT 'order', 'any', 'order.made', '{}', t::timestamptz FROM (VALUES `+at+`) v(t)`)
		steps, err := ops.Trace(t.Context(), d.Pool, r.Client, "any")
		must(t, err)
		if _, err := json.Marshal(steps); err != nil || len(steps) < 8 {
			t.Errorf("%d steps: %v", len(steps), err)
		}
		d.Exec(t, `INSERT INTO outbox_mark (part, epoch, settled, hi, mode)
			SELECT -1, 1, pg_current_snapshot(), high, 'cdc' FROM outbox_high`)
	}
}

// An aggregate may have any number of events, and the process that answers a trace has a bounded memory.
func TestTraceOfAnAggregateWithManyEvents(t *testing.T) {
	t.Parallel()
	d, r := testenv.Postgres(t), testenv.Redis(t)
	for n, events := range []int{999, 1} {
		d.Exec(t, `INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload)
			SELECT 'order', 'large', 'order.made', '{}' FROM generate_series(1, $1::int) g`, events)
		d.Exec(t, `INSERT INTO outbox_mark (part, epoch, settled, hi, at, mode)
			SELECT -1, 1, pg_current_snapshot(), high, now() + $1::int * interval '1 second', 'cdc'
			FROM outbox_high`, n)
	}
	one := testenv.Value[string](t, d, "SELECT id::text FROM outbox_history WHERE seq = 7")
	for id, want := range map[string]int{"large": 401, one: 2} {
		steps, err := ops.Trace(t.Context(), d.Pool, r.Client, id)
		if err != nil || len(steps) != want {
			t.Fatalf("%s: %d steps, error %v; want %d", id, len(steps), err, want)
		}
		if want == 2 {
			continue
		}
		last := testenv.Value[string](t, d, "SELECT id::text FROM outbox_history WHERE seq = 1000")
		if steps[0].Place != "earlier" || steps[400].ID != last || steps[1].At.After(steps[400].At) {
			t.Errorf("it begins with %+v and ends with %+v", steps[0], steps[400])
		}
	}
}

// An event of the log is unsettled, published or parked. The mark that settled it leads to its entry. It is found by
// its aggregate and by its own id.
func TestTraceInTheLog(t *testing.T) {
	t.Parallel()
	d, r := testenv.Postgres(t), testenv.Redis(t)
	d.Exec(t, "INSERT INTO relay_state (name) VALUES ('"+d.Relay+"')")
	events := map[string]string{}
	for _, name := range []string{"one", "two", "parked", "waits"} {
		if name == "waits" {
			d.Exec(t, `INSERT INTO outbox_mark (part, epoch, settled, hi, at, mode, entries)
				SELECT -1, 1, pg_current_snapshot(), last_value, to_timestamp(9100000000), 'cdc',
					'{"outbox.order": "9000000000000-7"}'
				FROM outbox_seq_seq`)
		}
		events[name] = testenv.Value[string](t, d, `
			INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload)
			VALUES (gen_random_uuid(), 'order', $1, 'order.made', '{}') RETURNING id::text`, name)
	}
	d.Exec(t, `INSERT INTO outbox_dead (id, seq, row_seq, aggregate_type, aggregate_id, event_type, created_at, error,
			class, attempts)
		SELECT id, seq, seq, aggregate_type, aggregate_id, event_type, created_at, 'too large', 'x', 1 FROM outbox
		WHERE aggregate_id = 'parked'`)
	for n, name := range []string{"two", "one", "one"} {
		values := []string{"id", events[name]}
		if n == 0 {
			values = append(values, "replayed", "1")
		}
		must(t, r.Client.XAdd(t.Context(), &redis.XAddArgs{
			Stream: "outbox.order", ID: fmt.Sprintf("9000000000000-%d", n+6), Values: values,
		}).Err())
	}
	for _, command := range [][]any{
		{"xgroup", "create", "outbox.order", "first", "$"},
		{"xgroup", "create", "outbox.order", "other", "0"},
		{"xgroup", "create", "outbox.order", "third", "0"},
		{"xreadgroup", "group", "other", "c", "streams", "outbox.order", ">"},
	} {
		must(t, r.Client.Do(t.Context(), command...).Err())
	}
	for name, want := range map[string][]string{
		"one": {
			"inserted order.made", "in stream outbox.order 9000000000000-7", "settled by cdc, ",
			"group first acknowledged", "group other pending: delivered to c 1 time, not acknowledged",
			"group third not delivered yet",
		},
		"two":    {"inserted order.made", "settled by cdc, ", "in stream outbox.order (not found"},
		"parked": {"inserted order.made", "dead too large"},
		"waits":  {"inserted order.made", "waiting not published yet"},
	} {
		for _, id := range []string{name, events[name]} {
			steps, err := ops.Trace(t.Context(), d.Pool, r.Client, id)
			if err != nil || len(steps) != len(want) {
				t.Fatalf("%s: %+v, %v", name, steps, err)
			}
			if text, err := json.Marshal(steps); err != nil || strings.Contains(string(text), "0001-") {
				t.Errorf("%s: %s, %v", name, text, err)
			}
			for i, s := range steps {
				if i > 0 && !s.At.IsZero() && s.At.Before(steps[i-1].At) {
					t.Errorf("%s: step %+v is before the previous one", name, s)
				}
				if !strings.HasPrefix(s.Place+" "+s.Detail, want[i]) || s.ID != events[name] {
					t.Errorf("%s: step %+v, want %q", name, s, want[i])
				}
			}
		}
	}
	if steps, err := ops.Trace(t.Context(), d.Pool, r.Client, uuid.NewString()); !errors.Is(err, ops.ErrUnknownID) ||
		steps != nil {
		t.Errorf("of an unknown id: %+v, %v", steps, err)
	}
}
