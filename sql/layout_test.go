package sql_test

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"posthaste/internal/lab/testenv"
	"posthaste/outbox"
	"posthaste/sql"
)

// Go and the table compute the same part for each aggregate id.
func TestPartsAreThoseOfTheTable(t *testing.T) {
	t.Parallel()
	d := testenv.Postgres(t)
	r := rand.New(rand.NewPCG(1, 2))
	letters := []rune("abcXYZ019-_.: /äßéœ…ёлка日本語🚀\u0301")
	ids := []string{"", strings.Repeat("x", 1024), strings.Repeat("🚀", 256)}
	for range 3000 {
		var b strings.Builder
		for range r.IntN(60) {
			b.WriteRune(letters[r.IntN(len(letters))])
		}
		ids = append(ids, b.String())
	}
	for range 1000 {
		ids = append(ids, uuid.NewString())
	}
	_, err := d.Pool.CopyFrom(t.Context(), pgx.Identifier{"outbox"},
		[]string{"id", "aggregate_type", "aggregate_id", "event_type", "payload"},
		pgx.CopyFromSlice(len(ids), func(i int) ([]any, error) {
			return []any{uuid.New(), "order", ids[i], "x", "{}"}, nil
		}))
	must(t, err)
	rows, err := d.Pool.Query(t.Context(), "SELECT part, aggregate_id FROM outbox_rows")
	must(t, err)
	var part, wrong, used int
	var id string
	seen := map[int]bool{}
	_, err = pgx.ForEachRow(rows, []any{&part, &id}, func() error {
		used++
		seen[part] = true
		if outbox.PartOf(id) != part {
			wrong++
			t.Logf("%q is in part %d, not in %d", id, part, outbox.PartOf(id))
		}
		return nil
	})
	if err != nil || wrong > 0 || used != len(ids) || len(seen) != outbox.Partitions {
		t.Errorf("%d of %d aggregates in %d parts are elsewhere, %v", wrong, used, len(seen), err)
	}
}

// of returns a layout with the prefix outbox.
func of(shards int) outbox.Layout { return outbox.Layout{Prefix: "outbox.", Shards: shards} }

// layouts is a table whose events were published under several layouts in turn.
type layouts struct {
	t  *testing.T
	s  *sql.Store
	d  *testenv.Database
	at map[uuid.UUID]string // where each event was published
}

// publish commits events, and settles them under the current layout if settled is set.
func (l *layouts) publish(n int, settled bool) {
	l.t.Helper()
	ctx := l.t.Context()
	st, err := l.s.State(ctx)
	must(l.t, err)
	for range n {
		row := insert(l.t, l.d, fmt.Sprint(len(l.at)))
		l.at[row.ID] = st.Stream(row.AggregateType, row.AggregateID)
	}
	if settled {
		settle(l.t, l.s)
	}
}

// change changes the layout as a leader does after settling everything.
func (l *layouts) change(shards int) {
	l.t.Helper()
	must(l.t, l.s.ChangeLayout(l.t.Context(), owner(l.t, l.s), of(shards)))
	succeed(l.t, l.s)
}

func (l *layouts) in(stream string) (ids []uuid.UUID) {
	for id, at := range l.at {
		if at == stream {
			ids = append(ids, id)
		}
	}
	return ids
}

// After several changes, each event is found in the stream that it was published to: by history, by replay, by the
// counting and restoring of losses, in the backlog, and by a trace.
func TestAnEventIsInTheStreamOfItsLayout(t *testing.T) {
	t.Parallel()
	s, d := newStore(t)
	ctx := t.Context()
	succeed(t, s)
	l := &layouts{t, s, d, map[uuid.UUID]string{}}
	begun := time.Now().Add(-time.Minute)
	l.publish(40, true)
	for _, shards := range []int{4, 1, 16, 2} {
		// A transaction that took a number long before the layout changes: its event belongs to the next layout.
		tx := begin(t, d)
		id := insertBy(t, tx, "late").ID
		l.publish(30, true)
		l.change(shards)
		must(t, tx.Commit(ctx))
		l.at[id] = of(shards).Stream("order", "late")
		l.publish(20, true)
	}
	l.publish(10, false)
	owed := map[uuid.UUID]bool{}
	for _, id := range testenv.Value[[]uuid.UUID](t, d, "SELECT array_agg(id) FROM outbox_backlog") {
		owed[id] = true
	}
	if len(owed) != 10 {
		t.Fatalf("%d events are owed", len(owed))
	}

	for _, stream := range slices.Compact(slices.Sorted(maps.Values(l.at))) {
		var want, open []uuid.UUID
		for _, id := range l.in(stream) {
			if owed[id] {
				open = append(open, id)
			} else {
				want = append(want, id)
			}
		}
		compare := func(what string, got, want []uuid.UUID) {
			t.Helper()
			if !same(got, want) {
				t.Errorf("%s: %d events of %s, want %d", what, len(got), stream, len(want))
			}
		}
		compare("history", testenv.Value[[]uuid.UUID](t, d,
			"SELECT coalesce(array_agg(id), '{}') FROM outbox_history WHERE stream = $1", stream), want)
		sel := sql.Selection{Since: begun, Until: time.Now().Add(time.Minute), Stream: stream}
		compare("replay", readAll(t, d.Pool, sel, 7), want)
		n := int64(0)
		counts, err := sql.CountHistory(ctx, d.Pool, sel)
		must(t, err)
		for _, c := range counts {
			n += c.Events
			if c.Stream != stream {
				t.Errorf("counted as of %s: %s", stream, c.Stream)
			}
		}
		if n != int64(len(want)) {
			t.Errorf("%d events of %s are counted, want %d", n, stream, len(want))
		}
		var logged, waiting []uuid.UUID
		must(t, s.Log(ctx, outbox.Repair{Stream: stream, To: 1 << 40}, func(page []outbox.Logged) error {
			for _, e := range page {
				logged = append(logged, e.ID)
			}
			return nil
		}))
		compare("what is restored", logged, want)
		must(t, s.Owed(ctx, stream, func(id uuid.UUID) { waiting = append(waiting, id) }))
		compare("what is owed", waiting, open)
		if len(want) > 0 {
			one := want[0]
			h := sql.NewHistory(d.Pool, sql.Selection{ID: &one, Until: time.Now().Add(time.Minute)})
			page, _, _, err := h.Read(ctx, sql.Place{Mark: 1}, 10, 1<<20)
			if err != nil || len(page) != 1 || page[0].Stream != stream {
				t.Errorf("an event of %s by its id: %+v, %v", stream, page, err)
			}
		}
	}
	known, err := sql.KnownStreams(ctx, d.Pool)
	must(t, err)
	for id := range owed {
		if !slices.Contains(known, l.at[id]) {
			t.Errorf("what is owed goes to %s, which is not among %v", l.at[id], known)
		}
	}
}

// Only the owner can change the layout, only when all published events are settled, and only if no type has the name of
// another one's stream.
func TestALayoutChangesWhenAllIsSettled(t *testing.T) {
	t.Parallel()
	s, d := newStore(t)
	ctx := t.Context()
	old := succeed(t, s)
	insert(t, d, "a")
	settle(t, s)
	o := succeed(t, s)
	shards := func() int { return testenv.Value[int](t, d, "SELECT shards FROM outbox_layout") }
	wantErr(t, s.ChangeLayout(ctx, old, of(4)), outbox.ErrSuperseded)
	if err := s.ChangeLayout(ctx, o, of(4)); err == nil || errors.Is(err, outbox.ErrSuperseded) {
		t.Errorf("with the mark of an earlier owner: %v", err)
	}
	settle(t, s)
	d.Exec(t, `INSERT INTO outbox_mark (part, epoch, settled, hi, mode)
		SELECT 3, $1, pg_current_snapshot(), last_value, 'poll' FROM outbox_seq_seq`, o.Epoch)
	if err := s.ChangeLayout(ctx, o, of(4)); err == nil {
		t.Error("although a part has another mark")
	}
	settle(t, s)
	// The first event of a type may be published after the check of names.
	note := func(stream string) {
		t.Helper()
		must(t, fails(s.NoteStream(ctx, stream, stream, o.Epoch)))
	}
	note("outbox.order")
	must(t, s.CheckLayout(ctx, 4))
	note("outbox.order.3")
	wantErr(t, s.ChangeLayout(ctx, o, of(4)), outbox.ErrLayout)
	if n := shards(); n != 1 {
		t.Fatalf("%d streams per type", n)
	}
	d.Exec(t, "DELETE FROM outbox_stream")
	must(t, s.ChangeLayout(ctx, o, of(4)))
	if n := shards(); n != 4 {
		t.Errorf("%d streams per type", n)
	}
}

// An impossible number of streams is refused with a reason.
func TestCheckLayout(t *testing.T) {
	t.Parallel()
	s, _ := newStore(t)
	ctx := t.Context()
	st := owner(t, s)
	note := func(stream, base string) {
		t.Helper()
		must(t, fails(s.NoteStream(ctx, stream, base, st.Epoch)))
	}
	note("outbox.order", "outbox.order")
	note("outbox.order.7", "outbox.order.7")
	note("outbox.user.2", "outbox.user")
	for _, n := range []int{1, 2, 4} {
		must(t, s.CheckLayout(ctx, n))
	}
	for _, n := range []int{8, 16} {
		err := s.CheckLayout(ctx, n)
		if !errors.Is(err, outbox.ErrLayout) || !strings.Contains(err.Error(), "outbox.order.7") {
			t.Errorf("%d streams although a type has the name of one: %v", n, err)
		}
	}
	note("outbox.user.2.1", "outbox.user.2")
	wantErr(t, s.CheckLayout(ctx, 1), outbox.ErrLayout)

	// A server with another encoding hashes other bytes than Go.
	latin := registered(t, testenv.Encoded(t, "LATIN1"), time.Hour)
	wantErr(t, latin.CheckLayout(ctx, 4), outbox.ErrLayout)
	must(t, latin.CheckLayout(ctx, 1))
}

// The owner can change the prefix at once as long as nothing was published. Later, events keep the names of their
// streams.
func TestThePrefixOfStreams(t *testing.T) {
	t.Parallel()
	s, d := newStore(t)
	ctx := t.Context()
	old := succeed(t, s)
	o := succeed(t, s)
	first := func(o outbox.Owner, prefix string) bool {
		t.Helper()
		done, err := s.FirstLayout(ctx, o, prefix)
		if err != nil && !errors.Is(err, outbox.ErrSuperseded) {
			t.Fatal(err)
		}
		return done
	}
	row := insert(t, d, "x")
	if first(old, "a.") || !first(o, "b.") || layout(t, s) != (outbox.Layout{Prefix: "b.", Shards: 1}) {
		t.Errorf("streams are named %+v", layout(t, s))
	}
	must(t, fails(s.NoteStream(ctx, "b.order", "b.order", o.Epoch)))
	if first(o, "c.") || layout(t, s).Prefix != "b." {
		t.Errorf("after the first event streams are named %+v", layout(t, s))
	}
	settle(t, s)
	must(t, s.ChangeLayout(ctx, o, outbox.Layout{Prefix: "c.", Shards: 1}))
	later := insert(t, d, "y")
	settle(t, s)
	for id, want := range map[uuid.UUID]string{row.ID: "b.order", later.ID: "c.order"} {
		if got := testenv.Value[string](t, d, "SELECT stream FROM outbox_history WHERE id = $1", id); got != want {
			t.Errorf("an event is in %s, want %s", got, want)
		}
	}
}

// A stream belongs to the type that it was recorded for until it is dropped and nothing more is published to it.
func TestAStreamBelongsToOneType(t *testing.T) {
	t.Parallel()
	s, d := newStore(t)
	ctx := t.Context()
	o := succeed(t, s)
	note := func(base string) error {
		t.Helper()
		_, err := s.NoteStream(ctx, "outbox.order.1", base, o.Epoch)
		return err
	}
	const order, other = "outbox.order", "outbox.order.1"
	must(t, fails(s.NoteStream(ctx, order, order, o.Epoch)))
	must(t, note(other))
	refused := func(what string) {
		t.Helper()
		var taken *outbox.TakenError
		if err := note(order); !errors.As(err, &taken) || taken.Base != other {
			t.Errorf("%s: %v", what, err)
		}
		wantErr(t, s.CheckLayout(ctx, 4), outbox.ErrLayout)
		must(t, note(other))
	}
	published := func() {
		d.Exec(t, `INSERT INTO outbox_mark (part, epoch, settled, hi, mode, entries)
			SELECT -1, $1, pg_current_snapshot(), last_value, 'cdc', '{"outbox.order.1": "1-1"}' FROM outbox_seq_seq`,
			o.Epoch)
	}
	published()
	refused("it is in use")
	drop := func() {
		t.Helper()
		_, known, err := sql.DropStream(ctx, d.Pool, other)
		if must(t, err); !known {
			t.Fatal("it is not known")
		}
	}
	drop()
	published()
	refused("it was dropped, and is in use again")
	drop()
	must(t, s.CheckLayout(ctx, 4))
	must(t, note(order))
	if base := testenv.Value[string](t, d, "SELECT base FROM outbox_stream WHERE stream = $1", other); base != order {
		t.Errorf("it is one of those of %s", base)
	}
}
