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

	"posthaste/internal/lab/testenv"
	"posthaste/outbox"
	"posthaste/sql"
)

// relayPool connects as the relay does.
func relayPool(tb testing.TB, url string) *pgxpool.Pool {
	tb.Helper()
	cfg, err := sql.RelayPoolConfig(url, "public")
	must(tb, err)
	pool, err := pgxpool.NewWithConfig(tb.Context(), cfg)
	must(tb, err)
	tb.Cleanup(pool.Close)
	return pool
}

// registered returns a registered store that keeps history for a time.
func registered(tb testing.TB, d *testenv.Database, history time.Duration) *sql.Store {
	tb.Helper()
	s := sql.NewStore(relayPool(tb, d.URL), "test", history)
	must(tb, s.Register(tb.Context()))
	return s
}

// newStore returns a registered store, which keeps history for a day, and its database.
func newStore(tb testing.TB) (*sql.Store, *testenv.Database) {
	tb.Helper()
	d := testenv.Postgres(tb)
	return registered(tb, d, 24*time.Hour), d
}

// newStoreAlone is newStore on a server without other transactions, which would be in every snapshot and increase what
// a statement reads.
func newStoreAlone(tb testing.TB) (*sql.Store, *testenv.Database) {
	tb.Helper()
	d := testenv.NewServer(tb).Database(tb)
	return registered(tb, d, 24*time.Hour), d
}

// layout returns the current layout.
func layout(tb testing.TB, s *sql.Store) outbox.Layout {
	tb.Helper()
	st, err := s.State(tb.Context())
	must(tb, err)
	return st.Layout
}

var must = testenv.Must

func nonce() (n outbox.Nonce) {
	_, _ = rand.Read(n[:]) // never fails
	return n
}

// insert writes a committed event and returns it as the slot would deliver it.
func insert(tb testing.TB, d *testenv.Database, aggregate string) *outbox.Row {
	tb.Helper()
	return insertBy(tb, d.Pool, aggregate)
}

// insertBy is insert by a transaction, which commits later.
func insertBy(tb testing.TB, db sql.DB, aggregate string) *outbox.Row {
	tb.Helper()
	row := &outbox.Row{Record: outbox.Record{
		ID: uuid.New(), AggregateType: "order", AggregateID: aggregate,
		Type: "order.changed",
	}}
	err := db.QueryRow(tb.Context(),
		`INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload, headers)
		VALUES ($1, 'order', $2, 'order.changed', '{"n":1}', '{"h":"x"}')
		RETURNING seq, xmin::text::bigint`, row.ID, aggregate).
		Scan(&row.Seq, &row.XID)
	must(tb, err)
	return row
}

func beginPass(tb testing.TB, s *sql.Store, o outbox.Owner) outbox.Pass {
	tb.Helper()
	pass, err := s.BeginPass(tb.Context(), o)
	must(tb, err)
	return pass
}

// settle settles all visible rows in every part, as a sweep does, and returns the mark.
func settle(tb testing.TB, s *sql.Store) outbox.Settled {
	tb.Helper()
	o := owner(tb, s)
	pass := beginPass(tb, s, o)
	must(tb, s.SettleAll(tb.Context(), o, pass))
	return pass.Settled
}

// backlog counts the unsettled rows in two ways.
func backlog(tb testing.TB, s *sql.Store, d *testenv.Database) int64 {
	tb.Helper()
	n, _, err := s.Backlog(tb.Context())
	must(tb, err)
	if v := testenv.Value[int64](tb, d, "SELECT count(*) FROM outbox_backlog"); v != n {
		tb.Errorf("outbox_backlog has %d rows, and %d are owed", v, n)
	}
	return n
}

// wantOwed checks how many rows are unsettled.
func wantOwed(tb testing.TB, s *sql.Store, d *testenv.Database, want int64) {
	tb.Helper()
	if n := backlog(tb, s, d); n != want {
		tb.Errorf("%d rows are owed, want %d", n, want)
	}
}

// wantRows checks how many rows a table, or a query that begins with its name, has.
func wantRows(tb testing.TB, d *testenv.Database, want int, from string, args ...any) {
	tb.Helper()
	if n := testenv.Value[int](tb, d, "SELECT count(*) FROM "+from, args...); n != want {
		tb.Errorf("%d rows, want %d: %s", n, want, from)
	}
}

// is checks the result of a call.
func is[V comparable](tb testing.TB, want V) func(got V, err error) {
	return func(got V, err error) {
		tb.Helper()
		if err != nil || got != want {
			tb.Errorf("got %v, %v; want %v", got, err, want)
		}
	}
}

func wantErr(tb testing.TB, err, want error) {
	tb.Helper()
	if !errors.Is(err, want) {
		tb.Errorf("got %v, want %v", err, want)
	}
}

// run runs a statement in a transaction or session.
func run(tb testing.TB, db sql.DB, stmt string, args ...any) {
	tb.Helper()
	must(tb, fails(db.Exec(tb.Context(), stmt, args...)))
}

// fails returns the error of a call with a result.
func fails[T any](_ T, err error) error { return err }

// role makes a role that may log in and use the schema, with more rights, and returns its name and address.
func role(tb testing.TB, d *testenv.Database, name string, grants ...string) (role, url string) {
	tb.Helper()
	role = name + "_" + d.Name
	d.Exec(tb, "CREATE ROLE "+role+" "+testenv.Login(d.URL))
	tb.Cleanup(func() {
		_, _ = d.Pool.Exec(context.Background(), "DROP OWNED BY "+role+" CASCADE")
		_, _ = d.Pool.Exec(context.Background(), "DROP ROLE "+role)
	})
	for _, grant := range append([]string{"USAGE ON SCHEMA public"}, grants...) {
		d.Exec(tb, "GRANT "+grant+" TO "+role)
	}
	return role, testenv.As(d.URL, role)
}

// owner returns the current owner.
func owner(tb testing.TB, s *sql.Store) outbox.Owner {
	tb.Helper()
	st, err := s.State(tb.Context())
	must(tb, err)
	return st.Owner
}

// succeed makes a new owner adopt.
func succeed(tb testing.TB, s *sql.Store) outbox.Owner {
	tb.Helper()
	if ok, err := s.Adopt(tb.Context(), after(owner(tb, s))); err != nil || !ok {
		tb.Fatalf("adopt: %v, %v", ok, err)
	}
	return owner(tb, s)
}

// after is the adoption of the next owner.
func after(o outbox.Owner) outbox.Adoption {
	return outbox.Adoption{
		From: o.Epoch, To: outbox.Owner{Source: o.Source, Epoch: o.Epoch + 1, Nonce: nonce()}, Holder: "another",
	}
}

func TestRegister(t *testing.T) {
	t.Parallel()
	d := testenv.Postgres(t)
	ctx := t.Context()
	store := func(name string) *sql.Store { return sql.NewStore(d.Pool, name, 0) }
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			if err := sql.Register(context.Background(), d.Pool, "first"); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	wantRows(t, d, 1, "relay_state")
	must(t, store("second").Register(ctx)) // no relay has used the first
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
		From: 0, To: outbox.Owner{Epoch: 1, Nonce: nonce()}, Holder: "me",
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
		d.Exec(t, "UPDATE relay_state SET epoch = $1", n.epoch+1)
		wantErr(t, fails(s.NoteStream(t.Context(), n.stream, n.stream, n.epoch)), outbox.ErrSuperseded)
		d.Exec(t, "UPDATE relay_state SET epoch = $1", n.epoch)
		gated, err := s.NoteStream(t.Context(), n.stream, n.stream, n.epoch)
		if err != nil || gated != (n.epoch == 4) {
			t.Errorf("%s has a gate: %v, %v", n.stream, gated, err)
		}
		if n.stream == "a" {
			must(t, s.Gated(t.Context(), []string{"a"}))
		}
	}
	if got, err := s.Streams(t.Context()); err != nil || fmt.Sprint(outbox.StreamNames(got)) != "[a b]" {
		t.Errorf("streams %v, %v", got, err)
	}
	if got := testenv.Value[string](t, d,
		"SELECT string_agg(stream || adopted_epoch, ' ' ORDER BY stream) FROM outbox_stream"); got != "a4 b3" {
		t.Errorf("epochs %s", got)
	}
	insert(t, d, "x")
	if got, err := sql.KnownStreams(t.Context(), d.Pool); err != nil || fmt.Sprint(got) != "[a b outbox.order]" {
		t.Errorf("known streams %v, %v", got, err)
	}
	succeed(t, s)
	settle(t, s)
	if got, err := sql.KnownStreams(t.Context(), d.Pool); err != nil || fmt.Sprint(got) != "[a b]" {
		t.Errorf("known streams when nothing is owed: %v, %v", got, err)
	}
}

// Settled rows stay in the table and are history.
func TestSettledRowsAreHistory(t *testing.T) {
	t.Parallel()
	s, d := newStore(t)
	ctx := t.Context()
	is(t, false)(s.Delivered(ctx))
	succeed(t, s)
	a, b, c := insert(t, d, "a"), insert(t, d, "b"), insert(t, d, "c")
	must(t, fails(s.Park(ctx, owner(t, s), b, "too_large", "why", 3)))
	if n := testenv.Value[int](t, d, "SELECT count(*) FROM outbox_history"); n != 0 || backlog(t, s, d) != 2 {
		t.Errorf("%d rows of history before the mark", n)
	}
	mark := settle(t, s)
	late := insert(t, d, "a")
	for _, r := range []*outbox.Row{a, b, c, late} {
		if got := mark.Holds(r.XID, r.Seq); got != (r != late) {
			t.Errorf("row %d is held: %v", r.Seq, got)
		}
	}
	if n := testenv.Value[int](t, d, `SELECT count(*) FROM outbox_history h JOIN outbox o
		USING (seq, id, aggregate_type, aggregate_id, event_type, payload, headers, created_at)
		JOIN outbox_mark m ON m.at = published_at WHERE m.settled::text = $1
			AND stream = 'outbox.order' AND h.mode = 'poll' AND o.id IN ($2, $3)`,
		mark.Snapshot.String(), a.ID, c.ID); n != 2 {
		t.Errorf("%d rows of history as they should be, want 2", n)
	}
	if n := testenv.Value[int](t, d, "SELECT count(*) FROM outbox_history"); n != 2 || backlog(t, s, d) != 1 {
		t.Errorf("%d rows of history in all, want 2", n)
	}
	is(t, true)(s.Delivered(ctx))
}

// published_at is the time of the first mark that settles the row, even if its transaction ends late or a pass is
// unfinished.
func TestHistoryKnowsWhen(t *testing.T) {
	t.Parallel()
	s, d := newStore(t)
	succeed(t, s)
	long := begin(t, d)
	id := insertBy(t, long, "late").ID
	at := func(id uuid.UUID) int64 {
		t.Helper()
		return testenv.Value[int64](t, d, `SELECT m.id FROM outbox_history h JOIN outbox_mark m ON m.at = published_at
			WHERE h.id = $1`, id)
	}
	newest := func() int64 {
		t.Helper()
		return testenv.Value[int64](t, d, "SELECT max(id) FROM outbox_mark")
	}
	want := map[uuid.UUID]int64{}
	for range 5 {
		row := insert(t, d, "a")
		settle(t, s)
		want[row.ID] = newest()
		settle(t, s)
	}
	must(t, long.Commit(t.Context()))
	settle(t, s)
	want[id] = newest()
	first, second := insert(t, d, inPart), insert(t, d, inPart)
	w := claimed(t, d, 3)
	pass := next(t, w, 3, nil)
	for _, r := range []*outbox.Row{first, second} {
		page(t, w, pass, 1)
		settled(t, w, pass, owner(t, s), nil)
		want[r.ID] = newest()
	}
	w.Close()
	settle(t, s)
	for id, want := range want {
		if got := at(id); got != want {
			t.Errorf("event %s was settled by mark %d, want %d", id, got, want)
		}
	}
}

func TestAuditMark(t *testing.T) {
	t.Parallel()
	s, d := newStore(t)
	succeed(t, s)
	if m, err := s.Audit(t.Context()); err != nil || len(m.First) != 0 || m.LSN == 0 {
		t.Errorf("of an empty table: %+v, %v", m, err)
	}
	part := func(r *outbox.Row) int16 {
		t.Helper()
		return testenv.Value[int16](t, d, "SELECT part FROM outbox_rows WHERE seq = $1", r.Seq)
	}
	long := begin(t, d)
	late := insertBy(t, long, "x")
	insert(t, d, "x")
	settle(t, s)
	first, second := insert(t, d, "x"), insert(t, d, "x")
	tx := begin(t, d)
	run(t, tx, "DELETE FROM outbox WHERE seq = $1", second.Seq)
	end, err := s.InsertLSN(t.Context())
	must(t, err)
	expect := func(want *outbox.Row) {
		t.Helper()
		m, err := s.Audit(t.Context())
		must(t, err)
		if want == nil && len(m.First) == 0 && m.LSN >= end {
			return
		}
		if len(m.First) != 1 || m.First[part(want)] != want.Seq || m.LSN < end {
			t.Errorf("mark %+v, want seq %d of part %d behind %v", m, want.Seq, part(want), end)
		}
	}
	expect(first)
	if n, oldest, err := s.Backlog(t.Context()); err != nil || n != 2 || oldest < 0 || oldest > time.Minute {
		t.Errorf("backlog %d, %v, %v", n, oldest, err)
	}
	must(t, long.Commit(t.Context())) // its transaction is the older one
	expect(late)
	for _, r := range []*outbox.Row{late, first} {
		must(t, fails(s.Park(t.Context(), owner(t, s), r, "too_large", "why", 1)))
	}
	expect(second)
	must(t, tx.Commit(t.Context()))
	expect(nil)
	wantOwed(t, s, d, 0)
}

// waiting waits until n statements wait for a lock.
func waiting(tb testing.TB, d *testenv.Database, n int) {
	tb.Helper()
	testenv.Eventually(tb, 20*time.Second, func() error {
		const query = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type " +
			"= 'Lock'"
		now := testenv.Value[int](tb, d, query)
		return testenv.FailIf(now != n, "%d statements wait, want %d", now, n)
	})
}

// The barrier outlives the relay that raised it, and only the present epoch may lower it.
func TestBarrier(t *testing.T) {
	t.Parallel()
	s, d := newStore(t)
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
	must(t, s.LowerBarrier(ctx, epoch, 10)) // no barrier
	must(t, s.RaiseBarrier(ctx, epoch, 10, false))
	must(t, s.RaiseBarrier(ctx, epoch, 7, false))
	barrier(10)
	must(t, s.LowerBarrier(ctx, epoch, 9))
	barrier(10)
	must(t, s.RaiseBarrier(ctx, epoch, outbox.BarrierUnknown, false))
	must(t, s.RaiseBarrier(ctx, epoch, 12, false)) // possibly an older transaction
	barrier(outbox.BarrierUnknown)
	must(t, s.RaiseBarrier(ctx, epoch, 14, true))
	barrier(14)
	for _, err := range []error{s.RaiseBarrier(ctx, epoch-1, 20, false), s.RaiseBarrier(ctx, epoch+1, 20, true)} {
		wantErr(t, err, outbox.ErrSuperseded)
	}
	must(t, s.LowerBarrier(ctx, epoch-1, 20))
	barrier(14)
	must(t, s.LowerBarrier(ctx, epoch, 14))
	barrier(0)
	must(t, s.RaiseBarrier(ctx, epoch, outbox.BarrierUnknown, false))
	must(t, s.LowerBarrier(ctx, epoch, 20))
	barrier(0)
	// After a failover, transaction ids may be assigned again, so the barrier becomes unknown.
	must(t, s.RaiseBarrier(ctx, epoch, 10, false))
	succeed(t, s)
	barrier(10)
	d.Exec(t, "UPDATE relay_state SET timeline = 7")
	succeed(t, s)
	barrier(outbox.BarrierUnknown)
}
