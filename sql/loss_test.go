package sql_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	"posthaste/internal/lab/testenv"
	"posthaste/outbox"
	"posthaste/sql"
)

// delivered inserts an event of a stream, and a mark that settles it some time ago, with its entry unless that is "".
func delivered(tb testing.TB, d *testenv.Database, stream, entry string, ago time.Duration) {
	tb.Helper()
	d.Exec(tb, `INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload)
		VALUES ($1, 'a', 'order.changed', '{}')`, strings.TrimPrefix(stream, "outbox."))
	marked(tb, d, -1, time.Now().Add(-ago))
	d.Exec(tb, `UPDATE outbox_mark SET entries = jsonb_build_object($1::text, $2::text)
		WHERE id = (SELECT max(id) FROM outbox_mark) AND $2 <> ''`, stream, entry)
}

// timeline is a log that begins at a time: in each of five minutes orders and an invoice are settled.
type timeline struct{ begun time.Time }

func (l timeline) minute(n int) time.Time { return l.begun.Add(time.Duration(n) * time.Minute) }

// entry is the entry id of a minute.
func (l timeline) entry(n int) string { return fmt.Sprintf("%d-0", l.minute(n).UnixMilli()) }

// write returns the events of each minute, the invoice last. The marks have the entries of streams.
func (l timeline) write(tb testing.TB, d *testenv.Database, orders int, streams ...string) [][]uuid.UUID {
	tb.Helper()
	events := make([][]uuid.UUID, 6)
	for n := 1; n < len(events); n++ {
		for i := range orders + 1 {
			id, typ := uuid.New(), "order"
			if i == orders {
				typ = "invoice"
			}
			d.Exec(tb, `INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload, created_at)
				VALUES ($1, $2, $3, 'order.changed', '{}', $4)`, id, typ, fmt.Sprint(i), l.minute(n).Add(-time.Second))
			events[n] = append(events[n], id)
		}
		marked(tb, d, -1, l.minute(n))
		d.Exec(tb, `UPDATE outbox_mark SET entries = (SELECT jsonb_object_agg(s, $1::text) FROM unnest($2::text[]) s)
			WHERE id = (SELECT max(id) FROM outbox_mark)`, l.entry(n), streams)
	}
	return events
}

// adoptWith adopts with streams that may lack something.
func adoptWith(tb testing.TB, s *sql.Store, states ...outbox.StreamState) outbox.Owner {
	tb.Helper()
	a := after(owner(tb, s))
	a.Sink, a.Suspects, a.Delivered = "run/history", states, true
	if ok, err := s.Adopt(tb.Context(), a); err != nil || !ok {
		tb.Fatalf("adopt: %v, %v", ok, err)
	}
	return a.To
}

// nothing is the Tail of a stream that has lost everything.
func nothing(context.Context, string, string) ([]outbox.Entry, error) { return nil, nil }

// suspect adopts with streams that may lack something, of which none is restored.
func suspect(tb testing.TB, s *sql.Store, states ...outbox.StreamState) {
	tb.Helper()
	o := adoptWith(tb, s, states...)
	repairs, err := s.Repairs(tb.Context(), 0)
	must(tb, err)
	for _, r := range repairs {
		must(tb, s.Repaired(tb.Context(), o, r, outbox.Repaired{}))
	}
}

// wantMissing counts what streams lack, and checks the counts that it reports.
func wantMissing(tb testing.TB, s *sql.Store, tail func(context.Context, string, string) ([]outbox.Entry, error),
	want ...int64,
) {
	tb.Helper()
	found, err := s.CountMissing(tb.Context(), tail)
	must(tb, err)
	var got []int64
	for _, r := range found {
		got = append(got, r.Missing)
	}
	if !slices.Equal(got, want) {
		tb.Errorf("missing are %v, want %v: %+v", got, want, found)
	}
}

// losses lists the reports of streams that lack events.
func losses(ctx context.Context, d *testenv.Database) (list []outbox.Report, err error) {
	all, _, err := sql.Reports(ctx, d.Pool)
	for _, r := range all {
		if r.Missing != 0 {
			list = append(list, r)
		}
	}
	return list, err
}

// Settled events after the last id of a stream are lost: ids are compared as numbers, not as text, and the report has
// the range to replay.
func TestLosses(t *testing.T) {
	t.Parallel()
	s, d := newStore(t)
	ctx := t.Context()
	now := time.Now()
	ms := func(ago time.Duration) string { return fmt.Sprint(now.Add(-ago).UnixMilli()) }
	last := ms(time.Minute) + "-9"
	delivered(t, d, "outbox.order", ms(2*time.Minute)+"-0", 2*time.Minute)
	delivered(t, d, "outbox.order", last, time.Minute)
	delivered(t, d, "outbox.order", ms(time.Minute)+"-10", 50*time.Second) // as text it is less
	delivered(t, d, "outbox.order", ms(30*time.Second)+"-0", 30*time.Second)
	delivered(t, d, "outbox.order", "", 20*time.Second) // its entry is unknown
	delivered(t, d, "outbox.other", ms(time.Second)+"-0", time.Second)
	delivered(t, d, "outbox.gone", "1-1", time.Hour)
	suspect(t, s,
		outbox.StreamState{Stream: "outbox.order", Gate: true, Last: last, Now: now},
		outbox.StreamState{Stream: "outbox.other", Gate: true, Last: ms(time.Second) + "-0", Now: now},
		outbox.StreamState{Stream: "outbox.gone", Now: now},
		outbox.StreamState{Stream: "outbox.never", Now: now})
	// published after the adoption
	delivered(t, d, "outbox.order", fmt.Sprint(now.Add(time.Minute).UnixMilli())+"-0", -time.Minute)
	delivered(t, d, "outbox.order", ms(time.Second)+"-0", -time.Minute) // settled late by the old owner
	if n, _, err := s.Missing(ctx); err != nil || n != 0 {
		t.Errorf("%d lost before they are counted, %v", n, err)
	}
	broken := errors.New("the stream cannot be read")
	refuse := func(context.Context, string, string) ([]outbox.Entry, error) { return nil, broken }
	wantErr(t, fails(s.CountMissing(ctx, refuse)), broken)
	found, err := s.CountMissing(ctx, nothing)
	must(t, err)
	counts := map[string]int64{}
	for _, l := range found {
		counts[l.Stream] = l.Missing
	}
	if len(found) != 2 || counts["outbox.order"] != 3 || counts["outbox.gone"] != 1 {
		t.Errorf("lost %v, want 3 of outbox.order and 1 of outbox.gone", counts)
	}
	wantMissing(t, s, nothing)
	list, err := losses(ctx, d)
	must(t, err)
	if n, _, err := s.Missing(ctx); err != nil || n != 4 || len(list) != 2 {
		t.Errorf("%d lost in %d streams, %v; want 4 in 2", n, len(list), err)
	}
	order := list[slices.IndexFunc(list, func(l outbox.Report) bool { return l.Stream == "outbox.order" })]
	if ago := now.Sub(*order.First); order.First.After(*order.Last) || ago < 40*time.Second || ago > 55*time.Second {
		t.Errorf("from %v to %v", order.First, order.Last)
	}
	// The next adoption has the same suspicion: the stream got no events since.
	suspect(t, s, outbox.StreamState{Stream: "outbox.order", Gate: true, Last: last, Now: now},
		outbox.StreamState{Stream: "outbox.gone", Now: now})
	wantMissing(t, s, nothing)
	// Replaying a part of the range, or another stream, does not restore it.
	must(t, sql.BroughtBack(ctx, d.Pool, order.First.Add(time.Microsecond), *order.Last, "outbox.order"))
	must(t, sql.BroughtBack(ctx, d.Pool, *order.First, *order.Last, "outbox.other"))
	if n, _, _ := s.Missing(ctx); n != 4 {
		t.Errorf("%d lost, want 4 still", n)
	}
	must(t, sql.BroughtBack(ctx, d.Pool, *order.First, *order.Last, "outbox.order"))
	if n, _, _ := s.Missing(ctx); n != 1 {
		t.Errorf("%d lost, want 1 still", n)
	}
	must(t, sql.BroughtBack(ctx, d.Pool, time.Time{}, time.Now(), ""))
	if list, err := losses(ctx, d); err != nil || len(list) != 0 {
		t.Errorf("lost still: %+v, %v", list, err)
	}
	d.Exec(t, "UPDATE outbox_reconcile SET done_at = done_at - interval '100 days'")
	must(t, fails(s.CountMissing(ctx, nothing)))
	wantRows(t, d, 0, "outbox_reconcile")
}

// Events that marks have settled after the last id of a stream, up to the adoption, and that are not in the stream, are
// lost. Each is counted once by id, and the report has the range to replay.
func TestLossesOfTheLog(t *testing.T) {
	t.Parallel()
	s, d := newStore(t)
	ctx := t.Context()
	pool := replayPool(t, d)
	log := timeline{time.Now().Add(-time.Hour).Truncate(time.Second)}
	minute, entry := log.minute, log.entry
	events := log.write(t, d, 3, "outbox.order", "outbox.invoice")
	there := map[string][]uuid.UUID{"outbox.order": events[2][:1]} // of the others, none after the entry is left
	have := func(_ context.Context, stream, after string) (tail []outbox.Entry, _ error) {
		if want := fmt.Sprintf("%d-0", minute(0).UnixMilli()); after > want || after == "" {
			t.Errorf("the ids behind %q of %s are asked for, want those from before %s on", after, stream, want)
		}
		for _, id := range there[stream] {
			tail = append(tail, outbox.Entry{ID: id})
		}
		return tail, nil
	}
	state := outbox.StreamState{Stream: "outbox.order", Gate: true, Last: entry(1), Now: time.Now()}
	whole := outbox.StreamState{Stream: "outbox.invoice", Gate: true, Last: entry(9), Now: time.Now()}
	suspect(t, s, state, whole)
	insert(t, d, "later")
	marked(t, d, -1, time.Now().Add(time.Minute)) // settled after the adoption
	found, err := s.CountMissing(ctx, have)
	must(t, err)
	if len(found) != 1 || found[0].Stream != "outbox.order" || found[0].Missing != 11 ||
		!found[0].First.Equal(minute(2)) || !found[0].Last.Equal(minute(5)) {
		t.Fatalf("lost: %+v, want 11 orders from %v to %v", found, minute(2), minute(5))
	}
	sel := sql.Selection{Since: *found[0].First, Until: *found[0].Last, Stream: "outbox.order"}
	if got := readAll(t, pool, sel, 5); len(got) != 12 {
		t.Errorf("the replay brings %d events, want 12", len(got))
	}
	// The same suspicion again, then another loss.
	suspect(t, s, state)
	wantMissing(t, s, have)
	there["outbox.order"] = nil
	suspect(t, s, state)
	wantMissing(t, s, have, 1)
	must(t, sql.BroughtBack(ctx, d.Pool, minute(2), minute(5), "outbox.order"))
	if n, _, err := s.Missing(ctx); err != nil || n != 0 {
		t.Errorf("%d lost, %v, after all was brought back", n, err)
	}
	// A second loss includes the replayed events.
	suspect(t, s, state)
	wantMissing(t, s, have, 12)
}

// Without history, losses cannot be counted: the report has the gates' own counts, and a deleted stream has an unknown
// number.
func TestLossesWithoutHistory(t *testing.T) {
	t.Parallel()
	_, d := newStore(t)
	s := sql.NewStore(relayPool(t, d.URL), "test", 0)
	suspect(t, s,
		outbox.StreamState{Stream: "a", Gate: true, Last: "5-1"},
		outbox.StreamState{Stream: "b", Gate: true, Last: "5-1", Missing: 7}, outbox.StreamState{Stream: "c"},
		outbox.StreamState{Stream: "d", Gate: true, Forgot: true})
	found, err := s.CountMissing(t.Context(), nothing)
	must(t, err)
	if len(found) != 3 || found[0].Stream != "b" || found[0].Missing != 7 || found[1].Stream != "c" ||
		found[1].Missing != -1 || found[2].Stream != "d" {
		t.Errorf("lost: %+v", found)
	}
}

// A database that has gone back is reported once, even after several adoptions. An adoption that comes too late notes
// nothing.
func TestGoneBackInTime(t *testing.T) {
	t.Parallel()
	s, d := newStore(t)
	ctx := t.Context()
	is(t, false)(s.Adopt(ctx, outbox.Adoption{
		From: 7, To: outbox.Owner{Epoch: 8}, Suspects: []outbox.StreamState{{Stream: "s"}}, WentBack: true,
	}))
	wantRows(t, d, 0, "outbox_reconcile")
	succeed(t, s)
	wantMissing(t, s, nothing)
	d.Exec(t, "UPDATE relay_state SET timeline = 7")
	for range 2 {
		a := after(owner(t, s))
		a.WentBack = true
		must(t, fails(s.Adopt(ctx, a)))
	}
	if found, err := s.CountMissing(ctx, nothing); err != nil || len(found) != 1 || found[0].Stream != "" ||
		found[0].Missing != -1 {
		t.Errorf("told: %+v, %v", found, err)
	}
}
