package sql_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/google/uuid"

	"posthaste/internal/lab/testenv"
	"posthaste/outbox"
	"posthaste/sql"
)

// Repairs finds the marks that may have settled lost events after the stream's last entry, within the time to restore.
// Log lists their events in order, and Events reads them. If the stream loses restored events, the next repair begins
// at the same mark, up to twice that time back.
func TestRepairs(t *testing.T) {
	t.Parallel()
	s, d := newStore(t)
	ctx := t.Context()
	log := timeline{time.Now().Add(-10 * time.Minute).Truncate(time.Second)}
	minute, entry := log.minute, log.entry
	var ids []uuid.UUID // of orders, two in each mark
	for _, some := range log.write(t, d, 2, "outbox.order")[1:] {
		ids = append(ids, some[:2]...)
	}
	adopt := func(states ...outbox.StreamState) outbox.Owner {
		t.Helper()
		return adoptWith(t, s, states...)
	}
	repairs := func(within time.Duration, want int) []outbox.Repair {
		t.Helper()
		list, err := s.Repairs(ctx, within)
		if err != nil || len(list) != want {
			t.Fatalf("%d repairs, %v; want %d: %+v", len(list), err, want, list)
		}
		return list
	}
	missing := func(r outbox.Repair) (list []uuid.UUID) {
		t.Helper()
		must(t, s.Log(ctx, r, func(page []outbox.Logged) error {
			for len(page) > 0 {
				events, used, err := s.Events(ctx, page)
				if err != nil || used == 0 {
					t.Fatalf("read %d of %d events, %v", used, len(page), err)
				}
				for i, e := range events {
					if e.ID != page[i].ID || e.AggregateType != "order" || len(e.Payload) == 0 || e.Time.IsZero() {
						t.Errorf("event %+v", e)
					}
					if page[i].Mark > r.Missing {
						list = append(list, e.ID)
					}
				}
				page = page[used:]
			}
			return nil
		}))
		return list
	}
	byPart := func(ids ...uuid.UUID) []uuid.UUID { // the log is ordered by part within a mark
		out := slices.Clone(ids)
		for i := 0; i+1 < len(out); i += 2 {
			if testenv.Value[bool](t, d, `SELECT (SELECT part FROM outbox_rows WHERE id = $1) >
				(SELECT part FROM outbox_rows WHERE id = $2)`, out[i], out[i+1]) {
				out[i], out[i+1] = out[i+1], out[i]
			}
		}
		return out
	}
	same := func(what string, got, want []uuid.UUID) {
		t.Helper()
		if !slices.Equal(got, want) {
			t.Errorf("%s: %d events %v, want %d %v", what, len(got), got, len(want), want)
		}
	}

	last := func(n int) outbox.StreamState {
		return outbox.StreamState{Stream: "outbox.order", Gate: true, Last: entry(n), Now: time.Now()}
	}
	adopt(last(3), outbox.StreamState{Stream: "outbox.invoice", Gate: true, Last: entry(9), Now: time.Now()})
	list := repairs(time.Hour, 2)
	if r := list[1]; r.Stream != "outbox.invoice" || r.To != 0 || r.Recall || r.Back {
		t.Errorf("a stream that has everything: %+v", r)
	}
	r := list[0]
	same("behind the third mark", missing(r), byPart(ids[6:]...))
	at := fmt.Sprintf("%d-0", minute(3).Add(-5*time.Minute).UnixMilli())
	if r.After != at || r.Expected != 4 || r.Recall {
		t.Errorf("%+v, want it to be compared behind %s", r, at)
	}
	if r := repairs(6*time.Minute-30*time.Second, 2)[0]; len(missing(r)) != 2 {
		t.Errorf("within five and a half minutes %d events may be missing, want 2", len(missing(r)))
	}
	if r := repairs(0, 2)[0]; r.To != 0 {
		t.Errorf("nothing is to be restored: %+v", r)
	}
	wantMissing(t, s, nothing)

	o := adopt(last(3))
	if r := repairs(time.Hour, 2)[0]; len(r.IDs) != 1 {
		t.Errorf("an adoption that notes the same: notes %v, want one", r.IDs)
	}
	// Another relay has adopted since; its list has the same repair and more.
	stranger := o
	o = adopt(last(4))
	wantErr(t, s.Repaired(ctx, stranger, r, outbox.Repaired{}), outbox.ErrSuperseded)
	if r = repairs(time.Hour, 2)[0]; len(r.IDs) != 2 {
		t.Errorf("notes %v, want two", r.IDs)
	}
	same("of two adoptions", missing(r), byPart(ids[6:]...))
	must(t, s.Restoring(ctx, r, 1))
	if r := repairs(time.Hour, 2)[0]; !r.Begun || r.Restored != 1 || list[0].Begun {
		t.Errorf("before %+v, after %+v", list[0], r)
	}
	must(t, s.Repaired(ctx, o, r, outbox.Repaired{Restored: 4, Last: entry(20)}))
	must(t, s.Repaired(ctx, o, list[1], outbox.Repaired{}))
	repairs(time.Hour, 0)

	// Restored events are lost again: their entries are after those in their marks.
	adopt(last(10))
	same("restored, and lost again", missing(repairs(time.Hour, 1)[0]), byPart(ids[6:]...))
	same("settled not longer ago than twice --restore", missing(repairs(165*time.Second, 1)[0]), byPart(ids[8:]...))
	if n := len(missing(repairs(2*time.Minute, 1)[0])); n != 0 {
		t.Errorf("all of it was settled longer ago than twice --restore: %d events are missing", n)
	}
	o = adopt(last(21))
	if r := repairs(time.Hour, 1)[0]; len(missing(r)) != 4 {
		t.Errorf("the earlier note is forgotten: %+v", r)
	}
	must(t, s.Repaired(ctx, o, repairs(time.Hour, 1)[0], outbox.Repaired{}))
	adopt(last(21))
	if r := repairs(time.Hour, 1)[0]; r.To != 0 {
		t.Errorf("behind all that was restored: %+v", r)
	}

	// The whole stream is gone; then an operator declares that this was intended.
	adopt(outbox.StreamState{Stream: "outbox.order", Now: time.Now()})
	r = repairs(time.Hour, 1)[0]
	same("of a stream that is gone", missing(r), byPart(ids...))
	if !r.Recall {
		t.Error("a gate that is gone knows what is in the stream")
	}
	if _, known, err := sql.DropStream(ctx, d.Pool, "outbox.order"); err != nil || known {
		t.Errorf("dropped: %v, %v, want that nobody knows it", known, err)
	}
	must(t, fails(s.NoteStream(ctx, "outbox.order", "outbox.order", owner(t, s).Epoch)))
	if source, known, err := sql.DropStream(ctx, d.Pool, "outbox.order"); err != nil || !known ||
		source != owner(t, s).Source {
		t.Errorf("dropped: %v, %v, of %v", known, err, source)
	}
	if r := repairs(time.Hour, 1)[0]; len(missing(r)) != 0 {
		t.Errorf("of a stream that was dropped %d events are missing", len(missing(r)))
	}
}

// A stream that has lost something gets the groups that its owner recorded last. A complete stream gets none, nor does
// a dropped one until the next adoption.
func TestGroupsAreNoted(t *testing.T) {
	t.Parallel()
	s, d := newStore(t)
	ctx := t.Context()
	o := succeed(t, s)
	for _, stream := range []string{"gone", "intact"} {
		must(t, fails(s.NoteStream(ctx, stream, stream, o.Epoch)))
	}
	note := func(epoch int64, groups ...string) {
		t.Helper()
		must(t, s.NoteGroups(ctx, epoch, map[string][]string{"gone": groups, "intact": groups, "other": groups}))
	}
	note(o.Epoch, "g", "destroyed")
	note(o.Epoch, "h", "g")
	note(o.Epoch-1, "of an earlier owner")
	lost := func(want ...string) {
		t.Helper()
		adoptWith(t, s, outbox.StreamState{Stream: "gone", Now: time.Now()},
			outbox.StreamState{Stream: "intact", Gate: true, Last: "9-9", Now: time.Now()})
		must(t, s.Gated(ctx, []string{"gone", "intact"}))
		list, err := s.Repairs(ctx, time.Hour)
		if err != nil || len(list) != 2 {
			t.Fatalf("%d repairs, %v", len(list), err)
		}
		for _, r := range list {
			if r.Stream == "intact" && len(r.Groups) > 0 || r.Stream == "gone" && !slices.Equal(r.Groups, want) {
				t.Errorf("%q gets %q, want %q", r.Stream, r.Groups, want)
			}
			must(t, s.Repaired(ctx, owner(t, s), r, outbox.Repaired{}))
		}
	}
	lost("h", "g")
	_, _, err := sql.DropStream(ctx, d.Pool, "gone")
	must(t, err)
	note(owner(t, s).Epoch, "while it is dropped")
	lost()
	note(owner(t, s).Epoch, "later")
	lost("later")
}

// A database that has gone back compares every stream: unsettled events are listed, and events that only the stream has
// are reported as phantoms.
func TestRepairAfterAFailover(t *testing.T) {
	t.Parallel()
	s, d := newStore(t)
	ctx := t.Context()
	succeed(t, s)
	must(t, fails(s.NoteStream(ctx, "outbox.order", "outbox.order", 1)))
	insert(t, d, "a")
	marked(t, d, -1, time.Now().Add(-time.Minute))
	owed := insert(t, d, "b")
	d.Exec(t, "UPDATE relay_state SET timeline = 7")
	o := succeed(t, s)
	list, err := s.Repairs(ctx, time.Hour)
	if err != nil || len(list) != 1 || !list[0].Back || !list[0].Recall || list[0].Missing < list[0].To ||
		list[0].After == "" {
		t.Fatalf("%+v, %v", list, err)
	}
	var got []uuid.UUID
	must(t, s.Owed(ctx, "outbox.order", func(id uuid.UUID) { got = append(got, id) }))
	if !slices.Equal(got, []uuid.UUID{owed.ID}) {
		t.Errorf("owed are %v, want %v", got, owed.ID)
	}
	must(t, s.Owed(ctx, "outbox.other", func(uuid.UUID) { t.Error("something is owed to another stream") }))
	phantoms := []outbox.Entry{
		{ID: uuid.New(), Millis: 9, Number: 1}, {ID: uuid.New(), Millis: 10}, {ID: uuid.New(), Millis: 10, Number: 12},
	}
	must(t, s.Repaired(ctx, o, list[0], outbox.Repaired{Recalled: 1, Phantoms: phantoms}))
	named, err := sql.Phantoms(ctx, d.Pool, 2)
	if err != nil || len(named) != 2 || named[0].ID != phantoms[0].ID || named[0].Entry != "9-1" ||
		named[1].Entry != "10-0" || named[0].Stream != "outbox.order" {
		t.Errorf("phantoms %+v, %v", named, err)
	}
	if n := testenv.Value[int](t, d, "SELECT sum(phantoms)::int FROM outbox_reconcile WHERE back"); n != 3 {
		t.Errorf("%d phantoms are noted, want 3", n)
	}
	// An acknowledgement ends the notices of all of them, once; the list keeps them. A later comparison that finds the
	// same ones again gives no new notice.
	must(t, fails(s.CountMissing(ctx, nothing)))
	for _, want := range []int{3, 0} {
		_, noticed, err := s.Missing(ctx)
		must(t, err)
		acked, back, err := sql.AckPhantoms(ctx, d.Pool)
		must(t, err)
		if noticed != int64(want) || len(acked) != want || back != (want > 0) ||
			want > 0 && acked[0].ID != phantoms[0].ID {
			t.Errorf("%d noticed, acknowledged %+v, %v; want %d", noticed, acked, back, want)
		}
		must(t, s.Repaired(ctx, o, list[0], outbox.Repaired{Phantoms: phantoms}))
	}
	if named, err := sql.Phantoms(ctx, d.Pool, 9); err != nil || len(named) != 3 || named[2].Acked == nil {
		t.Errorf("phantoms %+v, %v", named, err)
	}
	if list, err := losses(ctx, d); err != nil || len(list) > 0 {
		t.Errorf("reported: %+v, %v", list, err)
	}
	// Without history it is unknown which events were committed or settled.
	d.Exec(t, "UPDATE relay_state SET timeline = 7")
	succeed(t, s)
	none := sql.NewStore(relayPool(t, d.URL), "test", 0)
	if list, err := none.Repairs(ctx, time.Hour); err != nil || len(list) != 1 || list[0].Back || !list[0].Recall {
		t.Errorf("without history: %+v, %v", list, err)
	}
}
