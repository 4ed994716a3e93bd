package sql_test

import (
	"context"
	"errors"
	"math"
	"slices"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"posthaste/internal/lab/testenv"
	"posthaste/outbox"
	"posthaste/sql"
)

// everything runs each kind of work of a relay once.
func everything(t *testing.T, s *sql.Store, d *testenv.Database, url string) {
	t.Helper()
	ctx := t.Context()
	must(t, s.Register(ctx))
	o := succeed(t, s)
	must(t, fails(s.SetActive(ctx, o.Epoch, outbox.ModePoll, 1, "")))
	must(t, fails(s.NoteStream(ctx, "outbox.order", "outbox.order", o.Epoch)))
	must(t, s.CheckLayout(ctx, 4))
	must(t, s.Gated(ctx, []string{"outbox.order"}))
	must(t, fails(s.Streams(ctx)))
	_, xid, err := s.Horizon(ctx)
	must(t, err)
	must(t, fails(s.VisibleBelow(ctx, xid)))
	pass := beginPass(t, s, o)
	must(t, s.SettleAll(ctx, o, pass))
	must(t, s.ChangeLayout(ctx, o, of(4)))
	refused := insert(t, d, "a")
	marker := newMarker(t, s)
	look, _ := lookAt(t, marker, pass.Settled, math.MaxInt64)
	must(t, marker.Move(ctx, o, look.Settled, nil))
	must(t, fails(s.Audit(ctx)))
	_, _, err = s.Backlog(ctx)
	must(t, err)
	must(t, fails(s.Park(ctx, o, refused, "too_large", "why", 1)))
	must(t, fails(s.Parked(ctx)))
	must(t, sql.RetryDead(ctx, relayPool(t, url), refused.ID))
	insert(t, d, "d")
	sweep(t, url, o)
	must(t, fails(s.Housekeep(ctx)))
	must(t, s.KeepHistory(ctx))
	must(t, fails(session(t, url).TryLead(ctx)))
}

// sweep settles unsettled rows as a worker does. It treats the first row of each part as published and parks the
// others.
func sweep(t *testing.T, url string, o outbox.Owner) {
	t.Helper()
	ctx := t.Context()
	w := openSweep(t, url)
	parts, err := w.Partitions(ctx)
	must(t, err)
	for _, part := range parts {
		for {
			claim(t, w, part, o)
			p := next(t, w, part, nil)
			if p.Idle() {
				break
			}
			events, err := w.Page(ctx, p, 100, 1<<20)
			must(t, err)
			var refused []outbox.Refused
			for i, e := range events {
				if i > 0 {
					refused = append(refused, outbox.Refused{
						Event: e, Err: errors.New("why"), Class: "too_large",
						Attempts: 1,
					})
				}
			}
			must(t, w.Park(ctx, p, o, refused))
			must(t, w.Settle(ctx, p, o, outbox.Entries{"outbox.order": "1-1"}))
		}
		must(t, w.Drop(ctx))
	}
}

// claim claims the part, which is free.
func claim(t *testing.T, w *sql.Sweep, part int, o outbox.Owner) {
	t.Helper()
	if got, _, ok, err := w.Claim(t.Context(), []int{part}, o); err != nil || !ok || got != part {
		t.Fatalf("claim part %d: %d, %v, %v", part, got, ok, err)
	}
}

func openSweep(t *testing.T, url string) *sql.Sweep {
	t.Helper()
	w, err := sql.OpenSweep(t.Context(), url, "public", "test")
	must(t, err)
	t.Cleanup(w.Close)
	return w
}

// adopted returns the current owner, after an adoption if there was none.
func adopted(t *testing.T, d *testenv.Database) outbox.Owner {
	t.Helper()
	s := sql.NewStore(d.Pool, "test", 0)
	if o := owner(t, s); o.Epoch > 0 {
		return o
	}
	return succeed(t, s)
}

// claimed returns a session that has claimed the part.
func claimed(t *testing.T, d *testenv.Database, part int) *sql.Sweep {
	t.Helper()
	w, o := openSweep(t, d.URL), adopted(t, d)
	testenv.Eventually(t, 20*time.Second, func() error {
		_, _, ok, err := w.Claim(t.Context(), []int{part}, o)
		return notYet(ok, err)
	})
	return w
}

// settled settles the last page and claims part 3 again.
func settled(t *testing.T, w *sql.Sweep, p *outbox.PartPass, o outbox.Owner, entries outbox.Entries) {
	t.Helper()
	must(t, w.Settle(t.Context(), p, o, entries))
	claim(t, w, 3, o)
}

func next(t *testing.T, w *sql.Sweep, part int, within *outbox.Pass) *outbox.PartPass {
	t.Helper()
	p, err := w.Begin(t.Context(), part, within)
	must(t, err)
	return p
}

// page reads up to n rows and returns their numbers.
func page(t *testing.T, w *sql.Sweep, p *outbox.PartPass, n int) (seqs []int64) {
	t.Helper()
	events, err := w.Page(t.Context(), p, n, 1<<20)
	must(t, err)
	for _, e := range events {
		seqs = append(seqs, e.Seq)
	}
	return seqs
}

// wantPage reads up to n rows, and checks their numbers.
func wantPage(t *testing.T, w *sql.Sweep, p *outbox.PartPass, n int, want []int64) {
	t.Helper()
	if got := page(t, w, p, n); !slices.Equal(got, want) {
		t.Errorf("the page has %v, want %v", got, want)
	}
}

// wantParts checks which parts have unsettled rows or an unfinished pass.
func wantParts(t *testing.T, w *sql.Sweep, want ...int) {
	t.Helper()
	if parts, err := w.Partitions(t.Context()); err != nil || !slices.Equal(parts, want) {
		t.Errorf("parts %v, %v; want %v", parts, err, want)
	}
}

// endSessions ends the sessions of sweep workers.
func endSessions(t *testing.T, d *testenv.Database) {
	t.Helper()
	d.Exec(t, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND "+
		"application_name = 'posthaste sweep'")
}

// inPart is an aggregate whose events are in part 3.
const inPart = "a-9"

func insertAll(t *testing.T, d *testenv.Database, n int) (seqs []int64) {
	t.Helper()
	for range n {
		seqs = append(seqs, insert(t, d, inPart).Seq)
	}
	return seqs
}

// A page exceeds its bytes by at most one event. It counts the bytes that it reads, and the statement limits by stored
// size, so that the server sends no more.
func TestAPageIsBoundedByBytes(t *testing.T) {
	t.Parallel()
	_, d := newStore(t)
	w := claimed(t, d, 3)
	fill := func(text string) (stored int) {
		d.Exec(t, "DELETE FROM outbox")
		d.Exec(t, `INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload)
			SELECT 'order', $1, 'e', to_jsonb(`+text+`) FROM generate_series(1, 10) g`, inPart)
		return testenv.Value[int](t, d, "SELECT sum(bytes)::integer FROM outbox_rows")
	}
	for name, c := range map[string]struct {
		text           string
		stored, atMost int
	}{
		"compressed": {"repeat('x', 100000)", 10 * 1000, 10 * 10_000},
		"plain": {
			"(SELECT string_agg(md5((g * 1000 + i)::text), '') FROM generate_series(1, 50) i)", 10 * 1600,
			10 * 2000,
		},
	} {
		if n := fill(c.text); n < c.stored || n > c.atMost {
			t.Errorf("%s: 10 events are %d bytes, want %d to %d", name, n, c.stored, c.atMost)
		}
		p := next(t, w, 3, nil)
		size := testenv.Value[int](t, d, "SELECT length(payload::text) FROM outbox LIMIT 1")
		events, err := w.Page(t.Context(), p, 10, 3*size/2)
		if err != nil || len(events) != 2 {
			t.Errorf("%s: %d events in a page of one and a half: %v", name, len(events), err)
		}
	}
}

func TestClaims(t *testing.T) {
	t.Parallel()
	_, d := newStore(t)
	ctx := t.Context()
	a, b, o := openSweep(t, d.URL), openSweep(t, d.URL), adopted(t, d)
	places := func() string {
		return testenv.Value[string](t, d, "SELECT string_agg(ctid::text, ',' ORDER BY part) FROM outbox_part")
	}
	was := places()
	_, first, ok, err := a.Claim(ctx, []int{3}, o)
	if err != nil || !ok {
		t.Fatalf("claim: %v, %v", ok, err)
	}
	if _, _, ok, err := b.Claim(ctx, []int{3}, o); err != nil || ok {
		t.Errorf("a part claimed twice: %v", err)
	}
	if part, _, ok, err := b.Claim(ctx, []int{3, 5, 4}, o); err != nil || !ok || part != 5 {
		t.Errorf("another part: %d, %v, %v", part, ok, err)
	}
	must(t, b.Drop(ctx))
	must(t, a.Drop(ctx))
	_, second, ok, err := b.Claim(ctx, []int{3}, o)
	if err != nil || !ok || second <= first {
		t.Errorf("claim %d after %d: %v, %v", second, first, ok, err)
	}
	// A claim leaves no dead row, and ends with its session.
	if is := places(); is != was {
		t.Errorf("the rows of the parts have moved from %s to %s", was, is)
	}
	endSessions(t, d)
	claimed(t, d, 3)
	if _, _, _, err := a.Claim(ctx, []int{3}, o); err == nil || !a.Closed() {
		t.Errorf("a dead session claims: %v", err)
	}
}

// A superseded owner cannot claim, nor can an owner that adopted before the database was promoted: its events would be
// unsettled there again.
func TestClaimsAreTheOwners(t *testing.T) {
	t.Parallel()
	s, d := newStore(t)
	old := adopted(t, d)
	for what, before := range map[string]func(){
		"another owner": func() { succeed(t, s) },
		"promoted":      func() { d.Exec(t, "UPDATE relay_state SET timeline = timeline + 1") },
	} {
		o := adopted(t, d)
		before()
		w := openSweep(t, d.URL)
		if _, _, ok, err := w.Claim(t.Context(), []int{3}, o); ok || !errors.Is(err, outbox.ErrSuperseded) {
			t.Errorf("%s: claimed %v, %v", what, ok, err)
		}
		succeed(t, s)
		free := openSweep(t, d.URL)
		claim(t, free, 3, adopted(t, d))
		free.Close()
	}
	_, _, ok, err := openSweep(t, d.URL).Claim(t.Context(), []int{3}, old)
	if ok || !errors.Is(err, outbox.ErrSuperseded) {
		t.Errorf("long gone: claimed %v, %v", ok, err)
	}
}

// A pass keeps its snapshot, whichever worker continues it: rows that become visible later belong to the next pass,
// whatever their numbers.
func TestAPassGoesOnWhereItStopped(t *testing.T) {
	t.Parallel()
	s, d := newStore(t)
	o := succeed(t, s)
	late := begin(t, d)
	early := insertBy(t, late, inPart).Seq
	seqs := insertAll(t, d, 5)

	w := claimed(t, d, 3)
	p := next(t, w, 3, nil)
	wantPage(t, w, p, 2, seqs[:2])
	settled(t, w, p, o, outbox.Entries{"outbox.order": "5-1"})
	if p.Over || !p.Listed() {
		t.Fatal("the pass is over after two rows of five")
	}
	must(t, late.Commit(t.Context()))
	behind := insertAll(t, d, 1)
	wantPage(t, w, p, 2, seqs[2:4])
	endSessions(t, d) // not settled

	w = claimed(t, d, 3)
	p = next(t, w, 3, nil)
	wantPage(t, w, p, 100, seqs[2:])
	settled(t, w, p, o, nil)
	if !p.Over {
		t.Error("the pass is not over")
	}
	p = next(t, w, 3, nil)
	if got, want := page(t, w, p, 100), append([]int64{early}, behind...); !slices.Equal(got, want) {
		t.Errorf("the next pass has %v, want %v", got, want)
	}
	settled(t, w, p, o, nil)
	if p = next(t, w, 3, nil); !p.Idle() {
		t.Error("something is left")
	}
	wantRows(t, d, 1, "outbox_mark WHERE entries ? 'outbox.order'")
	wantRows(t, d, 7, "outbox_history WHERE mode = 'poll'")
}

// A mark is written only if it adds something, so an idle table costs nothing.
func TestNothingOwedWritesNothing(t *testing.T) {
	t.Parallel()
	s, d := newStore(t)
	o := succeed(t, s)
	insertAll(t, d, 3)
	sweep(t, d.URL, o)
	before := testenv.Value[string](t, d, "SELECT max(id)::text FROM outbox_mark")
	w := claimed(t, d, 3)
	wantParts(t, w)
	if p := next(t, w, 3, nil); !p.Idle() {
		t.Error("a pass over nothing")
	}
	if after := testenv.Value[string](t, d, "SELECT max(id)::text FROM outbox_mark"); after != before {
		t.Errorf("mark %s after %s", after, before)
	}
	// An unfinished pass is ended, even if no row is left of it.
	seqs := insertAll(t, d, 3)
	p := next(t, w, 3, nil)
	page(t, w, p, 1)
	settled(t, w, p, o, nil)
	d.Exec(t, "DELETE FROM outbox WHERE seq > $1", seqs[0])
	wantParts(t, w, 3)
	left := next(t, w, 3, nil)
	if left.Idle() || left.Listed() {
		t.Error("a pass under way is not resumed")
	}
	must(t, w.Settle(t.Context(), left, o, nil))
	if parts, err := w.Partitions(t.Context()); err != nil || len(parts) > 0 || !left.Over {
		t.Errorf("parts %v, %v", parts, err)
	}
}

// A page skips rows that were deleted since the pass began and reads updated rows as they are now.
func TestAPageReadsWhatIsThere(t *testing.T) {
	t.Parallel()
	s, d := newStore(t)
	o := succeed(t, s)
	seqs := insertAll(t, d, 6)
	w := claimed(t, d, 3)
	p := next(t, w, 3, nil)
	d.Exec(t, "DELETE FROM outbox WHERE seq = ANY($1)", []int64{seqs[0], seqs[1], seqs[3]})
	d.Exec(t, `UPDATE outbox SET payload = '{"new":1}' WHERE seq = $1`, seqs[2])
	wantPage(t, w, p, 2, nil)
	settled(t, w, p, o, nil)
	events, err := w.Page(t.Context(), p, 2, 1<<20)
	if err != nil || len(events) != 1 || events[0].Seq != seqs[2] || string(events[0].Payload) != `{"new": 1}` {
		t.Errorf("page %+v, %v", events, err)
	}
	wantPage(t, w, p, 3, []int64{seqs[2], seqs[4]})
	// Payloads bound a page as well; one row is always read.
	events, err = w.Page(t.Context(), p, 3, 1)
	if err != nil || len(events) != 1 || events[0].Seq != seqs[2] {
		t.Errorf("page %+v, %v", events, err)
	}
	settled(t, w, p, o, nil)
	if got := page(t, w, p, 100); !slices.Equal(got, seqs[4:]) || p.Over {
		t.Errorf("the rest: %v", got)
	}
	settled(t, w, p, o, nil)
	if !p.Over {
		t.Error("the pass is not over")
	}
}

// Among the rows of a pass there are others, which a page leaves out: some are settled, and some were committed later.
func TestAPageHasOnlyItsPass(t *testing.T) {
	t.Parallel()
	s, d := newStore(t)
	o := succeed(t, s)
	open := func() (seq int64, tx pgx.Tx) {
		tx = begin(t, d)
		must(t, tx.QueryRow(t.Context(), `INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload)
			VALUES (gen_random_uuid(), 'order', $1, 'x', '{}') RETURNING seq`, inPart).Scan(&seq))
		return seq, tx
	}
	first, before := open()
	insertAll(t, d, 1)
	w := claimed(t, d, 3)
	p := next(t, w, 3, nil)
	page(t, w, p, 100)
	settled(t, w, p, o, nil)
	must(t, before.Commit(t.Context()))
	later, after := open()
	last := insertAll(t, d, 1)[0]
	p = next(t, w, 3, nil)
	must(t, after.Commit(t.Context()))
	wantPage(t, w, p, 100, []int64{first, last})
	settled(t, w, p, o, nil)
	wantPage(t, w, next(t, w, 3, nil), 100, []int64{later})
}

// No session overwrites a mark that another one has moved.
func TestAMarkMovedByAnother(t *testing.T) {
	t.Parallel()
	s, d := newStore(t)
	o := succeed(t, s)
	insertAll(t, d, 3)
	w := claimed(t, d, 3)
	p := next(t, w, 3, nil)
	page(t, w, p, 1)
	d.Exec(t, "INSERT INTO outbox_mark (part, epoch, settled, hi) VALUES (-1, 2, pg_current_snapshot(), 100)")
	if err := w.Settle(t.Context(), p, o, nil); err == nil || errors.Is(err, outbox.ErrSuperseded) {
		t.Errorf("settle behind another mark: %v", err)
	}
	wantRows(t, d, 0, "outbox_mark WHERE part = 3")
	claim(t, w, 3, o)
	wantErr(t, fails(w.Page(t.Context(), p, 1, 1<<20)), outbox.ErrPassed)
}

// A mark waits for a running adoption and is then refused; an adoption waits for a running mark.
func TestAMarkWaitsForAnAdoption(t *testing.T) {
	t.Parallel()
	s, d := newStore(t)
	o := succeed(t, s)
	insertAll(t, d, 1)
	w := claimed(t, d, 3)
	p := next(t, w, 3, nil)
	page(t, w, p, 1)
	_, err := sql.SessionOf(w).Exec(t.Context(), "SET lock_timeout = '60s'") // the mark waits until the adoption ends
	must(t, err)
	adoption := begin(t, d)
	run(t, adoption, "UPDATE relay_state SET epoch = epoch + 1")
	done := make(chan error, 1)
	go func() { done <- w.Settle(context.Background(), p, o, nil) }()
	testenv.Eventually(t, 20*time.Second, func() error {
		if !testenv.Value[bool](t, d, "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() "+
			"AND application_name = 'posthaste sweep' AND wait_event_type = 'Lock')") {
			return errors.New("the mark does not wait")
		}
		return nil
	})
	must(t, adoption.Commit(t.Context()))
	wantErr(t, <-done, outbox.ErrSuperseded)
}

// Parked rows do not count as unsettled, whether a mark settles them or not.
func TestParkedRowsAreNotOwed(t *testing.T) {
	t.Parallel()
	s, d := newStore(t)
	o := succeed(t, s)
	seqs := insertAll(t, d, 3)
	w := claimed(t, d, 3)
	pass := beginPass(t, s, o)
	p := next(t, w, 3, nil)
	events, err := w.Page(t.Context(), p, 3, 1<<20)
	must(t, err)
	refuse := func(events ...*outbox.Record) (refused []outbox.Refused) {
		for _, e := range events {
			refused = append(refused, outbox.Refused{
				Event: e, Err: errors.New("no \x00 text \xff"), Class: "x", Attempts: 2,
			})
		}
		return refused
	}
	must(t, w.Park(t.Context(), p, o, refuse(events[1])))
	must(t, w.Drop(t.Context())) // without a mark
	claim(t, w, 3, o)
	must(t, w.Park(t.Context(), p, o, refuse(events[0])))
	endSessions(t, d) // between park and mark: it is not parked

	w = claimed(t, d, 3)
	is(t, false)(w.Reached(t.Context(), 3, pass))
	p = next(t, w, 3, nil)
	wantPage(t, w, p, 3, []int64{seqs[0], seqs[2]})
	must(t, w.Park(t.Context(), p, o, refuse(events[0], events[2])))
	wantPage(t, w, p, 3, nil)
	wantParts(t, w)
	is(t, true)(w.Reached(t.Context(), 3, pass))
	settled(t, w, p, o, nil)
	if p = next(t, w, 3, nil); !p.Idle() {
		t.Error("parked rows are owed behind the mark")
	}
	wantRows(t, d, 3, `outbox_dead d JOIN outbox o USING (id)
		WHERE o.seq = d.row_seq AND d.seq = d.row_seq AND d.attempts = 2
		  AND d.payload = o.payload AND d.headers = o.headers`)
	// A retry inserts a new row; if it is parked again, it keeps its first place.
	must(t, sql.RetryDead(t.Context(), d.Pool, events[0].ID))
	p = next(t, w, 3, nil)
	events, err = w.Page(t.Context(), p, 3, 1<<20)
	if err != nil || len(events) != 1 {
		t.Fatalf("the retried row: %v, %v", events, err)
	}
	must(t, w.Park(t.Context(), p, o, refuse(events...)))
	must(t, w.Drop(t.Context()))
	claim(t, w, 3, o)
	if n := testenv.Value[int](t, d, "SELECT count(*) FROM outbox_dead WHERE seq = $1 AND row_seq = $2 AND "+
		"retry_seq IS NULL AND attempts = 4", seqs[0], events[0].Seq); n != 1 {
		t.Error("it is not parked again in its place")
	}
	// A deleted row is not parked.
	gone := insertAll(t, d, 1)
	d.Exec(t, "DELETE FROM outbox WHERE seq = $1", gone[0])
	must(t, w.Park(t.Context(), p, o, refuse(&outbox.Record{Seq: gone[0]})))
	wantRows(t, d, 3, "outbox_dead")
}

// A given pass is used if its snapshot is between the part's mark and now.
func TestAPassThatIsGiven(t *testing.T) {
	t.Parallel()
	s, d := newStore(t)
	o := succeed(t, s)
	seqs := insertAll(t, d, 2)
	pass := beginPass(t, s, o)
	more := insertAll(t, d, 1)
	w := claimed(t, d, 3)
	reached := func(want bool) {
		t.Helper()
		if ok, err := w.Reached(t.Context(), 3, pass); err != nil || ok != want {
			t.Errorf("reached: %v, %v; want %v", ok, err, want)
		}
	}
	reached(false)
	p := next(t, w, 3, &pass)
	wantPage(t, w, p, 1, seqs[:1])
	settled(t, w, p, o, nil)
	reached(false)
	wantPage(t, w, p, 10, seqs[1:])
	settled(t, w, p, o, nil)
	reached(true)
	mark := testenv.Value[string](t, d, "SELECT settled::text FROM outbox_mark ORDER BY id DESC LIMIT 1")
	if mark != pass.Snapshot.String() {
		t.Errorf("the mark is %s, want %s", mark, pass.Snapshot)
	}
	p = next(t, w, 3, nil)
	wantPage(t, w, p, 10, more)
	settled(t, w, p, o, nil)
	// Now the mark is newer than the pass.
	reached(true)
	last := insertAll(t, d, 1)
	old, future := pass, pass
	future.Snapshot = outbox.NewSnapshot(pass.Snapshot.Max()+1_000_000, nil)
	for _, within := range []outbox.Pass{old, future} {
		p := next(t, w, 3, &within)
		wantPage(t, w, p, 10, last)
	}
}

// The number of a mark never falls, even if the sequence was set back or a given pass has a lower number: the first
// mark that settles a row is found by its number.
func TestTheNumberOfAMarkDoesNotGoBack(t *testing.T) {
	t.Parallel()
	s, d := newStore(t)
	o := succeed(t, s)
	insertAll(t, d, 5)
	sweep(t, d.URL, o)
	w := claimed(t, d, 3)
	for _, given := range []bool{false, true} {
		d.Exec(t, "TRUNCATE outbox RESTART IDENTITY")
		insertAll(t, d, 1)
		var within *outbox.Pass
		if given {
			pass := beginPass(t, s, o)
			pass.High = 1
			within = &pass
		}
		p := next(t, w, 3, within)
		page(t, w, p, 1)
		settled(t, w, p, o, nil)
		if hi := testenv.Value[int](t, d, "SELECT hi FROM outbox_settled WHERE part = 3"); hi != 5 {
			t.Errorf("given %v: the mark has number %d, want 5", given, hi)
		}
	}
}

// A row that the server cannot copy as a whole is parked without its payload.
func TestParkUnread(t *testing.T) {
	t.Parallel()
	s, d := newStore(t)
	o := succeed(t, s)
	seqs := insertAll(t, d, 2)
	w := claimed(t, d, 3)
	p := next(t, w, 3, nil)
	page(t, w, p, 1)
	e, err := w.ParkRow(t.Context(), p, o, errors.New("no \x00 text \xff"))
	if err != nil || e.Seq != seqs[0] || e.AggregateID != inPart || e.AggregateType != "order" || e.ID == uuid.Nil {
		t.Errorf("parked %+v, %v", e, err)
	}
	wantPage(t, w, p, 1, nil)
	settled(t, w, p, o, nil)
	d.Exec(t, `CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS
		$$ BEGIN
			IF NEW.payload IS NOT NULL THEN RAISE 'missing chunk' USING ERRCODE = 'XX001'; END IF;
			RETURN NEW;
		END $$;
		CREATE TRIGGER refuse BEFORE INSERT ON outbox_dead FOR EACH ROW EXECUTE FUNCTION refuse()`)
	page(t, w, p, 1)
	if e, err = w.ParkRow(t.Context(), p, o, errors.New("why")); err != nil || e.Seq != seqs[1] {
		t.Errorf("parked %+v, %v", e, err)
	}
	settled(t, w, p, o, nil)
	if n := testenv.Value[int](t, d, "SELECT count(*) FROM outbox_dead WHERE class = 'unreadable' AND "+
		"attempts = 1 AND row_seq = seq AND (payload IS NULL) = (seq = $1)", seqs[1]); n != 2 || !p.Over {
		t.Errorf("%d rows parked, want 2", n)
	}
	unread := testenv.Value[uuid.UUID](t, d, "SELECT id FROM outbox_dead WHERE payload IS NULL")
	wantErr(t, sql.RetryDead(t.Context(), d.Pool, unread), sql.ErrUnreadable)
	seqs = insertAll(t, d, 1)
	p = next(t, w, 3, nil)
	d.Exec(t, "DELETE FROM outbox WHERE seq = $1", seqs[0])
	if e, err := w.ParkRow(t.Context(), p, o, errors.New("why")); err != nil || e != nil {
		t.Errorf("a row that is gone is parked: %+v, %v", e, err)
	}
}
