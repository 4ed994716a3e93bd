package ops_test

import (
	"testing"

	"github.com/google/uuid"

	"posthaste/cdc"
	"posthaste/internal/ops"
	"posthaste/internal/testenv"
	"posthaste/outbox"
)

// However many events wait, no more are counted than were asked for, and the answer says so. The oldest is found beyond
// them, too: it is the first of its part.
func TestCountingIsBounded(t *testing.T) {
	t.Parallel()
	d := testenv.Postgres(t)
	slots, err := cdc.NewSlots(cdc.SlotsOptions{Pool: d.Pool, Slot: "posthaste_" + d.Relay})
	if err != nil {
		t.Fatal(err)
	}
	if err := ops.SetMode(t.Context(), d.Pool, d.Relay, outbox.ModeAuto); err != nil {
		t.Fatal(err)
	}
	look := func(most int64) ops.Backlog {
		t.Helper()
		snap, err := ops.Source{Pool: d.Pool, RelayName: d.Relay, Slots: slots, Most: most}.Look(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return snap.Report().Backlog
	}
	if b := look(3); b != (ops.Backlog{}) {
		t.Errorf("empty: %+v", b)
	}
	d.Exec(t, `INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload, created_at)
		SELECT gen_random_uuid(), 'order', 'a-' || i, 'x', '{}', now() - interval '3 days'
		FROM generate_series(1, 7) i`)
	d.Exec(t, `INSERT INTO outbox_mark (part, epoch, settled, hi)
		SELECT -1, 1, pg_current_snapshot(), last_value FROM outbox_seq_seq`)
	for _, most := range []int64{0, 5, 100} {
		if b := look(most); b != (ops.Backlog{}) {
			t.Errorf("all is settled, at most %d: %+v", most, b)
		}
	}
	for i, age := range []string{"-infinity", "1 second", "2 seconds", "3 seconds", "1 hour"} {
		at := "now() - $2::interval"
		if i == 0 {
			at = "$2::timestamptz"
		}
		d.Exec(t, `INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload, created_at)
			VALUES ($1, 'order', 'a', 'x', '{}', `+at+`)`, uuid.New(), age)
	}
	for most, want := range map[int64]int64{0: 5, 3: 3, 5: 5, 6: 5} {
		b := look(most)
		if b.Rows != want || b.AtLeast != (most == want) {
			t.Errorf("at most %d: %+v", most, b)
		}
		if b.OldestSeconds < 3600 && (most == 0 || most > 3) || b.OldestSeconds < 2 || b.OldestSeconds > 3700 {
			t.Errorf("at most %d: the oldest is %v s old", most, b.OldestSeconds)
		}
	}
}
