package ops_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/google/uuid"

	"posthaste/cdc"
	"posthaste/internal/lab/testenv"
	"posthaste/internal/ops"
	"posthaste/outbox"
	"posthaste/sink"
)

// However many events wait, only the given number is counted, and the answer reports that. The oldest event is also
// found beyond that number: it is the first of its part.
func TestCountingIsBounded(t *testing.T) {
	t.Parallel()
	d := testenv.Postgres(t)
	slots, err := cdc.NewSlots(cdc.Options{Pool: d.Pool, Slot: "posthaste_" + d.Relay})
	must(t, err)
	must(t, ops.SetMode(t.Context(), d.Pool, d.Relay, outbox.ModeAuto))
	look := func(most int64) ops.Backlog {
		t.Helper()
		snap, err := ops.Source{Pool: d.Pool, RelayName: d.Relay, Slots: slots, Most: most}.Look(t.Context())
		must(t, err)
		return snap.Report().Backlog
	}
	testenv.Equal(t, "empty", look(3), ops.Backlog{})
	d.Exec(t, `INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload, created_at)
		SELECT gen_random_uuid(), 'order', 'a-' || i, 'x', '{}', now() - interval '3 days'
		FROM generate_series(1, 7) i`)
	d.Exec(t, `INSERT INTO outbox_mark (part, epoch, settled, hi)
		SELECT -1, 1, pg_current_snapshot(), last_value FROM outbox_seq_seq`)
	for _, most := range []int64{0, 5, 100} {
		testenv.Equal(t, fmt.Sprintf("all is settled, at most %d", most), look(most), ops.Backlog{})
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

// Open repairs come first, with their notes combined; then those that finished within a day and have changed
// something.
func TestRepairsAreShown(t *testing.T) {
	t.Parallel()
	d := testenv.Postgres(t)
	slots, err := cdc.NewSlots(cdc.Options{Pool: d.Pool, Slot: "posthaste_" + d.Relay})
	must(t, err)
	must(t, ops.SetMode(t.Context(), d.Pool, d.Relay, outbox.ModeAuto))
	d.Exec(t, `INSERT INTO outbox_reconcile
			(stream, noticed_at, recall, done_at, expected, restored, recalled, phantoms)
		SELECT s, now() - noticed, false, now() - done, expected, restored, recalled, phantoms
		FROM (VALUES
			('old', interval '3 days', interval '2 days', 5, 5, 0, 3), ('done', '2 hours', '1 hour', 9, 4, 3, 2),
			('last', '2 hours', '1 minute', 9, 1, 0, 0), ('nothing', '2 hours', '1 second', 9, 0, 0, 0),
			('open', '2 minutes', NULL, 0, 0, 0, 0), ('open', '1 minute', NULL, 70, 12, 0, 0)
		) v (s, noticed, done, expected, restored, recalled, phantoms)`)
	d.Exec(t, `INSERT INTO outbox_phantom (stream, entry_id, id, acked_at)
		VALUES ('old', '1-1', gen_random_uuid(), now()), ('done', '1-1', gen_random_uuid(), NULL),
			('done', '1-2', gen_random_uuid(), NULL)`)
	snap, err := ops.Source{Pool: d.Pool, RelayName: d.Relay, Slots: slots}.Look(t.Context())
	must(t, err)
	st := snap.Report().Status
	var got []string
	for _, r := range st.Compared {
		got = append(got, r.Found())
	}
	want := []string{
		"open: 12 restored so far, about 70 to compare", "1 event of last",
		"4 events of done, 3 found there, and not published again, 2 phantoms",
	}
	if !slices.Equal(got, want) || st.Compared[0].Done != nil || st.Phantoms != 2 {
		t.Errorf("%q, %d phantoms; want %q", got, st.Phantoms, want)
	}
	if st.Repaired == nil || time.Since(*st.Repaired) > 30*time.Second {
		t.Errorf("repaired last at %v", st.Repaired)
	}
	if age := time.Since(st.Compared[0].Noticed); age < time.Minute*3/2 || age > 4*time.Minute {
		t.Errorf("under way for %v", age)
	}
}

// A relay of this database adopts while posthaste adopt waits for its confirmation. The gate then has a later epoch,
// and the adoption succeeds because the stream is this database's already.
func TestAdoptBesideARelay(t *testing.T) {
	t.Parallel()
	d, r := testenv.Postgres(t), testenv.Redis(t)
	d.Exec(t, "INSERT INTO outbox_stream (stream, base, adopted_epoch) VALUES ('outbox.order', 'outbox.order', 1)")
	a, err := ops.FindAdoption(t.Context(), d.Pool, "default", false)
	must(t, err)
	owner := outbox.Owner{Epoch: 7, Nonce: outbox.Nonce{1}}
	must(t, d.Pool.QueryRow(t.Context(), "SELECT source FROM relay_state").Scan(&owner.Source))
	relay := sink.New(sink.Options{Client: r.Client, Source: outbox.EntrySource("default")})
	must(t, relay.Adopt(t.Context(), "outbox.order", owner, false))
	testenv.ErrorIs(t, "take over beside a relay", a.TakeOver(t.Context(), d.Pool, r.Client), nil)
	testenv.ErrorIs(t, "the relay's gate", relay.Check(t.Context(), owner, []string{"outbox.order"}), nil)
}

func TestVerdictOfADiagnosis(t *testing.T) {
	t.Parallel()
	ok := ops.Finding{Check: "postgres", Severity: ops.SeverityOK}
	warn := ops.Finding{Check: "history", Severity: ops.SeverityWarn}
	schema := ops.Finding{Check: "schema", Severity: ops.SeverityFail}
	redis := ops.Finding{Check: "redis", Severity: ops.SeverityFail}
	for want, findings := range map[string][]ops.Finding{
		"all is well": {ok, ok},
		"no problems, 1 warning: the relay can run":                                       {ok, warn},
		"no problems, 2 warnings: the relay can run":                                      {warn, warn},
		"1 problem, 0 warnings: the relay cannot run safely before this is fixed: schema": {ok, schema},
		"2 problems, 1 warning: the relay cannot run safely before this is fixed: schema, redis": {
			ok, schema, warn, redis,
		},
	} {
		testenv.Equal(t, "the verdict", (ops.Diagnosis{Findings: findings}).Verdict(), want)
	}
}
