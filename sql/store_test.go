package sql_test

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"posthaste/internal/testenv"
	"posthaste/outbox"
	"posthaste/sql"
)

// relayPool connects as the relay does.
func relayPool(tb testing.TB, url string) *pgxpool.Pool {
	tb.Helper()
	cfg, err := sql.RelayPoolConfig(url, "public")
	if err != nil {
		tb.Fatal(err)
	}
	pool, err := pgxpool.NewWithConfig(tb.Context(), cfg)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(pool.Close)
	return pool
}

// newStore returns a registered store, which keeps history for a day, and its database.
func newStore(tb testing.TB) (outbox.Store, *testenv.Database) {
	tb.Helper()
	d := testenv.Postgres(tb)
	s := sql.NewStore(relayPool(tb, d.URL), "test", 24*time.Hour)
	must(tb, s.Register(tb.Context()))
	return s, d
}

func must(tb testing.TB, err error) {
	tb.Helper()
	if err != nil {
		tb.Fatal(err)
	}
}

func nonce() (n outbox.Nonce) {
	_, _ = rand.Read(n[:]) // never fails
	return n
}

// insert writes a committed event and returns it as the slot would deliver it.
func insert(tb testing.TB, d *testenv.Database, aggregate string) *outbox.Row {
	tb.Helper()
	row := &outbox.Row{Event: outbox.Event{
		ID: uuid.New(), AggregateType: "order", AggregateID: aggregate,
		Type: "order.changed",
	}}
	err := d.Pool.QueryRow(tb.Context(),
		`INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload, headers)
		VALUES ($1, 'order', $2, 'order.changed', '{"n":1}', '{"h":"x"}')
		RETURNING seq, xmin::text::bigint`, row.ID, aggregate).
		Scan(&row.Seq, &row.XID)
	must(tb, err)
	return row
}

func settlement(r *outbox.Row) outbox.Settlement {
	return outbox.Settlement{
		ID: r.ID, AggregateID: r.AggregateID, Seq: r.Seq, XID: r.XID, Stream: "outbox.order",
		EntryID: "1-1",
	}
}

// met counts the rows that were there.
func met(f outbox.Found) (n int) {
	for _, ok := range f.Rows {
		if ok {
			n++
		}
	}
	return n
}

// owner is who may park now.
func owner(tb testing.TB, s outbox.Store) outbox.Owner {
	tb.Helper()
	st, err := s.State(tb.Context())
	must(tb, err)
	return st.Owner
}

// succeed has another owner adopt.
func succeed(tb testing.TB, s outbox.Store) outbox.Owner {
	tb.Helper()
	old := owner(tb, s)
	ok, err := s.Adopt(tb.Context(),
		outbox.Adoption{
			From: old.Epoch, To: outbox.Owner{Source: old.Source, Epoch: old.Epoch + 1, Nonce: nonce()},
			Holder: "another",
		})
	if err != nil || !ok {
		tb.Fatalf("adopt: %v, %v", ok, err)
	}
	return owner(tb, s)
}

func TestRegister(t *testing.T) {
	t.Parallel()
	d := testenv.Postgres(t)
	ctx := t.Context()
	store := func(name string) outbox.Store { return sql.NewStore(d.Pool, name, 0) }
	must(t, store("first").Register(ctx))
	must(t, store("first").Register(ctx))
	must(t, store("second").Register(ctx)) // nobody ever used the first
	if _, err := store("first").State(ctx); !errors.Is(err, pgx.ErrNoRows) {
		t.Errorf("state of the old name: %v", err)
	}
	st, err := store("second").State(ctx)
	must(t, err)
	if st.Desired != outbox.ModeAuto || st.Active != outbox.ModeStandby || st.Owner.Epoch != 0 ||
		st.Owner.Source == uuid.Nil {
		t.Errorf("fresh state %+v", st)
	}
	if ok, err := store("second").Adopt(ctx, outbox.Adoption{
		From: 0, To: outbox.Owner{Epoch: 1, Nonce: nonce()},
		Holder: "me",
	}); err != nil || !ok {
		t.Fatalf("adopt: %v, %v", ok, err)
	}
	var second *outbox.SecondNameError
	if err := store("third").Register(ctx); !errors.As(err, &second) || second.Existing != "second" ||
		second.Name != "third" {
		t.Errorf("a second name: %v", err)
	}
	must(t, store("second").Register(ctx))
	if err := store("Bad Name").Register(ctx); err == nil {
		t.Error("a bad name is accepted")
	}
}

func TestRegisterFromManyPlaces(t *testing.T) {
	t.Parallel()
	d := testenv.Postgres(t)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			if err := sql.Register(context.Background(), d.Pool, "one"); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if n := testenv.Value[int](t, d, "SELECT count(*) FROM relay_state"); n != 1 {
		t.Errorf("%d rows", n)
	}
}

func TestRegisterChecksTheSchema(t *testing.T) {
	t.Parallel()
	d := testenv.Empty(t)
	if err := sql.NewStore(d.Pool, "x", 0).Register(t.Context()); !errors.Is(err, sql.ErrSchemaMissing) {
		t.Errorf("got %v, want ErrSchemaMissing", err)
	}
}

func TestAdoptAndSetActiveCompareTheEpoch(t *testing.T) {
	t.Parallel()
	s, d := newStore(t)
	ctx := t.Context()
	before, err := s.State(ctx)
	must(t, err)
	wins := make(chan outbox.Owner, 8)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			o := outbox.Owner{Epoch: 1, Nonce: nonce()}
			if ok, err := s.Adopt(context.Background(), outbox.Adoption{From: 0, To: o, Holder: "host-1"}); err != nil {
				t.Error(err)
			} else if ok {
				wins <- o
			}
		})
	}
	wg.Wait()
	if len(wins) != 1 {
		t.Fatalf("%d adoptions of one epoch", len(wins))
	}
	winner := <-wins
	must1 := func(ok bool, err error) bool { t.Helper(); must(t, err); return ok }
	if must1(s.SetActive(ctx, 0, outbox.ModeCDC, 1, "")) || !must1(s.SetActive(ctx, 1, outbox.ModeCDC, 0x16B3748,
		"why")) {
		t.Error("SetActive does not compare the epoch")
	}
	st, err := s.State(ctx)
	must(t, err)
	if st.Owner.Nonce != winner.Nonce || st.Owner.Source != before.Owner.Source || st.Active != outbox.ModeCDC ||
		st.Handover != 0x16B3748 || st.Degraded != "why" || st.Holder != "host-1" || st.System == 0 ||
		st.Timeline != 1 {
		t.Errorf("state %+v", st)
	}
	if !must1(s.SetActive(ctx, 1, outbox.ModePoll, 0, "")) {
		t.Error("SetActive")
	}
	if st, err = s.State(ctx); err != nil || st.Handover != 0x16B3748 || st.Degraded != "" {
		t.Errorf("a zero hand-over erases the last one: %+v, %v", st, err)
	}
	must(t, sql.SetDesired(ctx, d.Pool, "test", outbox.ModePoll))
	if sql.SetDesired(ctx, d.Pool, "nobody", outbox.ModePoll) == nil ||
		sql.SetDesired(ctx, d.Pool, "test", "fast") == nil {
		t.Error("SetDesired takes a wrong name or mode")
	}
	if st, err = s.State(ctx); err != nil || st.Desired != outbox.ModePoll {
		t.Errorf("desired %q, %v", st.Desired, err)
	}
}

func TestNoteStreamKeepsTheHighestEpoch(t *testing.T) {
	t.Parallel()
	s, d := newStore(t)
	for _, n := range []struct {
		stream string
		epoch  int64
	}{{"b", 3}, {"a", 1}, {"b", 2}, {"a", 4}} {
		must(t, s.NoteStream(t.Context(), n.stream, n.epoch))
	}
	if got, err := s.Streams(t.Context()); err != nil || fmt.Sprint(got) != "[a b]" {
		t.Errorf("streams %v, %v", got, err)
	}
	if got := testenv.Value[string](t, d,
		"SELECT string_agg(stream || adopted_epoch, ' ' ORDER BY stream) FROM outbox_stream"); got != "a4 b3" {
		t.Errorf("epochs %s", got)
	}
	insert(t, d, "x")
	if got, err := sql.KnownStreams(t.Context(), d.Pool, "p."); err != nil || fmt.Sprint(got) != "[a b p.order]" {
		t.Errorf("known streams %v, %v", got, err)
	}
}

func TestSettleDeletesAndKeepsHistory(t *testing.T) {
	t.Parallel()
	s, d := newStore(t)
	ctx := t.Context()
	var rows []*outbox.Row
	for i := range 10 {
		rows = append(rows, insert(t, d, fmt.Sprint("o-", i)))
	}
	d.Exec(t, "CREATE TABLE before AS SELECT * FROM outbox")
	gone := settlement(rows[0])
	gone.Seq += 1000
	unknown := settlement(rows[1])
	unknown.EntryID = ""
	timed := settlement(rows[0])
	timed.Time = time.Date(2026, 3, 1, 12, 0, 0, 123456000, time.UTC)
	f, err := s.Settle(ctx, []outbox.Settlement{timed, unknown, gone})
	must(t, err)
	for id, want := range map[uuid.UUID]bool{rows[0].ID: true, rows[1].ID: false} {
		if kept := testenv.Value[bool](t, d,
			"SELECT event_time IS NOT DISTINCT FROM $2 FROM outbox_history WHERE id = $1",
			id, timed.Time); kept != want {
			t.Errorf("the time of event %s is kept: %v, want %v", id, kept, want)
		}
	}
	if met(f) != 2 {
		t.Errorf("settled %v", f.Rows)
	}
	if f, err = s.Settle(ctx, []outbox.Settlement{settlement(rows[0])}); err != nil || met(f) != 0 {
		t.Errorf("settled again: %v, %v", f.Rows, err)
	}
	// A row under another aggregate's name is in another part: only the hunt finds it.
	lost := settlement(rows[2])
	for i := 0; lost.AggregateID == rows[2].AggregateID; i++ {
		name := fmt.Sprint("other-", i)
		if testenv.Value[bool](t, d, "SELECT hashtextextended($1, 0) & 15 <> hashtextextended($2, 0) & 15", name,
			rows[2].AggregateID) {
			lost.AggregateID = name
		}
	}
	if f, err = s.Settle(ctx, []outbox.Settlement{lost}); err != nil || met(f) != 0 {
		t.Errorf("settled in the wrong part: %v, %v", f.Rows, err)
	}
	if f, err = s.DeleteAnywhere(ctx, []outbox.Settlement{lost}); err != nil || met(f) != 1 {
		t.Errorf("hunted: %v, %v", f.Rows, err)
	}
	if f, err = s.Lookup(ctx, rows); err != nil || met(f) != 7 || f.Rows[0] {
		t.Errorf("looked up: %v, %v", f.Rows, err)
	}
	same := testenv.Value[int](t, d, `SELECT count(*) FROM outbox_history h JOIN before b
		USING (seq, id, aggregate_type, aggregate_id, event_type, payload, headers, created_at)
		WHERE stream = 'outbox.order' AND mode = 'cdc'
			AND entry_id IS NOT DISTINCT FROM CASE WHEN id = $1 THEN NULL ELSE '1-1' END`, rows[1].ID)
	if n := testenv.Value[int](t, d, "SELECT count(*) FROM outbox_history"); same != 3 || n != 3 {
		t.Errorf("%d rows of history, %d as they should be; want 3", n, same)
	}
	without := sql.NewStore(d.Pool, "test", 0)
	if f, err = without.Settle(ctx, []outbox.Settlement{settlement(rows[3])}); err != nil || met(f) != 1 {
		t.Errorf("settled without history: %v, %v", f.Rows, err)
	}
	if n := testenv.Value[int](t, d, "SELECT count(*) FROM outbox_history"); n != 3 {
		t.Errorf("%d rows of history, want 3", n)
	}
}

func TestAuditMark(t *testing.T) {
	t.Parallel()
	s, d := newStore(t)
	if m, err := s.Audit(t.Context()); err != nil || len(m.First) != 0 || m.LSN == 0 {
		t.Errorf("of an empty table: %+v, %v", m, err)
	}
	first, second := insert(t, d, "x"), insert(t, d, "x")
	tx := begin(t, d)
	_, err := tx.Exec(t.Context(), "DELETE FROM outbox WHERE seq = $1", second.Seq)
	must(t, err)
	flushed, err := s.InsertLSN(t.Context())
	must(t, err)
	m, err := s.Audit(t.Context())
	must(t, err)
	part := testenv.Value[int16](t, d, "SELECT part FROM outbox LIMIT 1")
	if len(m.First) != 1 || m.First[part] != first.Seq || m.LSN < flushed {
		t.Errorf("mark %+v, want seq %d of part %d behind %v", m, first.Seq, part, flushed)
	}
	if n, oldest, err := s.Backlog(t.Context()); err != nil || n != 2 || oldest < 0 || oldest > time.Minute {
		t.Errorf("backlog %d, %v, %v", n, oldest, err)
	}
}

// waiting waits until so many statements wait for a lock.
func waiting(tb testing.TB, d *testenv.Database, n int) {
	tb.Helper()
	testenv.Eventually(tb, 20*time.Second, func() error {
		const query = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type " +
			"= 'Lock'"
		if now := testenv.Value[int](tb, d, query); now != n {
			return fmt.Errorf("%d statements wait, want %d", now, n)
		}
		return nil
	})
}

// What the next stream has to wait for outlives who noted it, and is another's to forget only under the present epoch.
func TestBarrier(t *testing.T) {
	t.Parallel()
	s, _ := newStore(t)
	ctx := t.Context()
	epoch := succeed(t, s).Epoch
	barrier := func(want uint64) {
		t.Helper()
		st, err := s.State(ctx)
		must(t, err)
		if st.Barrier != want {
			t.Errorf("barrier %d, want %d", st.Barrier, want)
		}
	}
	barrier(0)
	must(t, s.LowerBarrier(ctx, epoch, 10)) // there is none
	must(t, s.RaiseBarrier(ctx, epoch, 10, false))
	must(t, s.RaiseBarrier(ctx, epoch, 7, false))
	barrier(10)
	must(t, s.LowerBarrier(ctx, epoch, 9))
	barrier(10)
	must(t, s.RaiseBarrier(ctx, epoch, outbox.BarrierUnknown, false))
	must(t, s.RaiseBarrier(ctx, epoch, 12, false)) // taken before, perhaps
	barrier(outbox.BarrierUnknown)
	must(t, s.RaiseBarrier(ctx, epoch, 14, true))
	barrier(14)
	for _, err := range []error{s.RaiseBarrier(ctx, epoch-1, 20, false), s.RaiseBarrier(ctx, epoch+1, 20, true)} {
		if !errors.Is(err, outbox.ErrSuperseded) {
			t.Errorf("under another epoch: %v", err)
		}
	}
	must(t, s.LowerBarrier(ctx, epoch-1, 20))
	barrier(14)
	must(t, s.LowerBarrier(ctx, epoch, 14))
	barrier(0)
	must(t, s.RaiseBarrier(ctx, epoch, outbox.BarrierUnknown, false))
	must(t, s.LowerBarrier(ctx, epoch, 20))
	barrier(0)
}

// After a failover transaction ids may be given out again: what was known is not any more.
func TestABarrierOfAnotherTimelineIsUnknown(t *testing.T) {
	t.Parallel()
	s, d := newStore(t)
	ctx := t.Context()
	epoch := succeed(t, s).Epoch
	must(t, s.RaiseBarrier(ctx, epoch, 10, false))
	succeed(t, s)
	if st, err := s.State(ctx); err != nil || st.Barrier != 10 || st.Timeline != 1 {
		t.Errorf("barrier %d, timeline %d, %v; want 10 on timeline 1", st.Barrier, st.Timeline, err)
	}
	d.Exec(t, "UPDATE relay_state SET timeline = 7")
	succeed(t, s)
	if st, err := s.State(ctx); err != nil || st.Barrier != outbox.BarrierUnknown || st.Timeline != 1 {
		t.Errorf("barrier %d, timeline %d, %v; want an unknown one", st.Barrier, st.Timeline, err)
	}
}
