package sql_test

import (
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"posthaste/internal/lab/testenv"
	"posthaste/outbox"
	"posthaste/sql"
)

// newMarker opens a session for marks.
func newMarker(tb testing.TB, s *sql.Store) outbox.Marker {
	tb.Helper()
	m, err := s.Marker(tb.Context())
	must(tb, err)
	tb.Cleanup(m.Close)
	return m
}

// lookAt formats the result of Look as "row row; row" by transaction.
func lookAt(tb testing.TB, m outbox.Marker, since outbox.Settled, below uint64) (outbox.Look, string) {
	tb.Helper()
	look, err := m.Look(tb.Context(), since, below)
	must(tb, err)
	var out []string
	for i, o := range look.Owed {
		if i > 0 && o.XID <= look.Owed[i-1].XID {
			tb.Errorf("transaction %d is behind %d", o.XID, look.Owed[i-1].XID)
		}
		if !look.Snapshot.Sees(o.XID) {
			tb.Errorf("the snapshot %s does not see transaction %d", look.Snapshot, o.XID)
		}
		out = append(out, strings.Trim(fmt.Sprint(o.Seqs), "[]"))
	}
	return look, strings.Join(out, "; ")
}

// insertIn writes n events of different parts within tx, and returns its transaction id.
func insertIn(tb testing.TB, tx pgx.Tx, n int) (xid uint64) {
	tb.Helper()
	must(tb, tx.QueryRow(tb.Context(), `WITH x AS (
		INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload)
		SELECT gen_random_uuid(), 'order', 'a-' || i, 'x', '{}' FROM generate_series(1, $1::int) i RETURNING xid)
		SELECT xid FROM x LIMIT 1`, n).Scan(&xid))
	return xid
}

// Look lists, by transaction, rows that are visible and that the mark does not settle, whatever their numbers. Its
// snapshot does not see rows that are not visible yet.
func TestLook(t *testing.T) {
	t.Parallel()
	d := testenv.NewServer(t, "max_prepared_transactions=5").Database(t)
	s := registered(t, d, 24*time.Hour)
	o := succeed(t, s)
	m := newMarker(t, s)
	first := begin(t, d)
	open := insertIn(t, first, 2) // 1, 2
	insert(t, d, "a")             // 3
	mark := settle(t, s)
	second, prepared := begin(t, d), begin(t, d)
	insertIn(t, second, 2)            // 4, 5
	waits := insertIn(t, prepared, 1) // 6
	run(t, prepared, "PREPARE TRANSACTION 'p'")
	row := insert(t, d, "a") // 7
	gone := begin(t, d)
	insertIn(t, gone, 1) // 8
	must(t, gone.Rollback(t.Context()))
	look, rows := lookAt(t, m, mark, math.MaxInt64)
	if rows != "7" || look.High != 8 || look.Snapshot.Sees(open) || look.Snapshot.Sees(waits) ||
		!look.Holds(row.XID, 7) || look.Holds(row.XID, 9) {
		t.Errorf("look %s of %+v, want 7", rows, look)
	}
	if end, err := s.InsertLSN(t.Context()); err != nil || look.End == 0 || look.End > end {
		t.Errorf("the end is %v, and then %v", look.End, end)
	}
	must(t, first.Commit(t.Context()))
	must(t, second.Commit(t.Context()))
	look, rows = lookAt(t, m, mark, math.MaxInt64)
	if rows != "1 2; 4 5; 7" && rows != "2 1; 5 4; 7" && rows != "1 2; 5 4; 7" && rows != "2 1; 4 5; 7" {
		t.Errorf("look %s of %+v", rows, look)
	}
	if _, rows = lookAt(t, m, mark, look.Owed[2].XID); strings.Count(rows, ";") != 1 {
		t.Errorf("below the last transaction: %s", rows)
	}
	if _, rows = lookAt(t, m, mark, open); rows != "" {
		t.Errorf("below the first transaction: %s", rows)
	}
	// A mark that omits running transactions and one other.
	left := append([]uint64{look.Owed[1].XID}, look.Snapshot.Running()...)
	hole := outbox.Settled{Snapshot: outbox.NewSnapshot(look.Snapshot.Max(), left), High: look.High}
	must(t, m.Move(t.Context(), o, hole, outbox.Entries{"outbox.order": "5-1"}))
	wantOwed(t, s, d, 2)
	d.Exec(t, "COMMIT PREPARED 'p'")
	look, rows = lookAt(t, m, hole, math.MaxInt64)
	if rows != "4 5; 6" && rows != "5 4; 6" || backlog(t, s, d) != 3 {
		t.Errorf("look %s of %+v", rows, look)
	}
	must(t, m.Move(t.Context(), o, look.Settled, nil))
	if _, rows = lookAt(t, m, look.Settled, math.MaxInt64); rows != "" || backlog(t, s, d) != 0 {
		t.Errorf("at last: %s", rows)
	}
	if got := testenv.Value[string](t, d, `
		SELECT string_agg(mode || coalesce(entries->>'outbox.order', '-'), ' ' ORDER BY id)
		FROM outbox_mark WHERE settled IS NOT NULL AND epoch = $1`, o.Epoch); got != "poll- cdc5-1 cdc-" {
		t.Errorf("marks %s", got)
	}
}

// Nothing is written for an owner that was superseded, however late the statement arrives. Nor is it when a standby was
// promoted and the owner has not noticed: its new sessions reach the standby, whose table has its epoch and nonce, and
// which may assign transaction ids again.
func TestMarksAreTheOwners(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(s *sql.Store, d *testenv.Database, o *outbox.Owner){
		"another owner":             func(s *sql.Store, _ *testenv.Database, _ *outbox.Owner) { succeed(t, s) },
		"another of the same epoch": func(_ *sql.Store, _ *testenv.Database, o *outbox.Owner) { o.Nonce = nonce() },
		"another timeline": func(_ *sql.Store, d *testenv.Database, _ *outbox.Owner) {
			d.Exec(t, "UPDATE relay_state SET timeline = 7")
		},
	} {
		s, d := newStore(t)
		ctx := t.Context()
		row := insert(t, d, inPart)
		o := succeed(t, s)
		pass := beginPass(t, s, o)
		m := newMarker(t, s)
		look, _ := lookAt(t, m, outbox.Settled{}, math.MaxInt64)
		w := claimed(t, d, 3)
		p := next(t, w, 3, nil)
		events, err := w.Page(ctx, p, 1, 1<<20)
		must(t, err)
		change(s, d, &o)
		marks := testenv.Value[int](t, d, "SELECT count(*) FROM outbox_mark")
		refused := []outbox.Refused{{Event: events[0], Err: errors.New("why"), Class: "x", Attempts: 1}}
		for _, c := range []struct {
			call string
			err  error
		}{
			{"begin a pass", fails(s.BeginPass(ctx, o))},
			{"park in the stream", fails(s.Park(ctx, o, row, "x", "why", 1))},
			{"park unread", fails(w.ParkRow(ctx, p, o, errors.New("why")))},
			{"park in a sweep", w.Park(ctx, p, o, refused)},
			{"settle a sweep", errors.Join(w.Settle(ctx, p, o, nil), w.Drop(ctx))},
			{"settle a pass", s.SettleAll(ctx, o, pass)},
			{"move the mark", m.Move(ctx, o, look.Settled, nil)},
			{"note a repair", s.Repaired(ctx, o, outbox.Repair{IDs: []int64{1}}, outbox.Repaired{})},
		} {
			t.Log(name, c.call)
			wantErr(t, c.err, outbox.ErrSuperseded)
		}
		if _, err := m.Look(ctx, outbox.Settled{}, math.MaxInt64); err == nil {
			t.Errorf("%s: the marker goes on after a failure", name)
		}
		wantRows(t, d, marks, "outbox_mark")
		wantRows(t, d, 0, "outbox_dead")
		wantOwed(t, s, d, 1)
		must(t, s.SettleAll(ctx, succeed(t, s), pass))
		wantOwed(t, s, d, 0)
	}
}

// A mark waits for a running adoption, and is written only if that rolls back. So does the recording of a stream: the
// adoption reads the list of streams afterwards.
func TestAMarkWaitsForTheAdoption(t *testing.T) {
	t.Parallel()
	for _, commits := range []bool{true, false} {
		s, d := newStore(t)
		ctx := t.Context()
		insert(t, d, "a")
		o := succeed(t, s)
		m := newMarker(t, s)
		pass := beginPass(t, s, o)
		look, _ := lookAt(t, m, outbox.Settled{}, math.MaxInt64)
		calls := map[string]func() error{
			"begin":  func() error { _, err := s.BeginPass(ctx, o); return err },
			"settle": func() error { return s.SettleAll(ctx, o, pass) },
			"move":   func() error { return m.Move(ctx, o, look.Settled, nil) },
			"note":   func() error { _, err := s.NoteStream(ctx, "outbox.order", "outbox.order", o.Epoch); return err },
		}
		adoption := begin(t, d)
		run(t, adoption, `UPDATE relay_state
			SET epoch = epoch + 1, nonce = decode(repeat('11', 16), 'hex')`)
		type result struct {
			name string
			err  error
		}
		results := make(chan result, len(calls))
		for name, call := range calls {
			go func() { results <- result{name, call()} }()
		}
		waiting(t, d, len(calls))
		if commits {
			must(t, adoption.Commit(ctx))
		} else {
			must(t, adoption.Rollback(ctx))
		}
		failed := 0
		for range calls {
			switch r := <-results; {
			case commits && !errors.Is(r.err, outbox.ErrSuperseded):
				t.Errorf("%s beside an adoption: %v", r.name, r.err)
			case !commits && r.err != nil: // pass is older than look, so it is refused
				if failed++; r.name != "settle" || errors.Is(r.err, outbox.ErrSuperseded) {
					t.Errorf("%s beside an adoption that came to nothing: %v", r.name, r.err)
				}
			}
		}
		want := int64(0)
		if commits {
			want = 1
		}
		wantOwed(t, s, d, want)
	}
}

// An adoption waits for a running mark: rows that are unsettled after it are not settled for the previous owner.
func TestAnAdoptionWaitsForAMark(t *testing.T) {
	t.Parallel()
	s, d := newStore(t)
	ctx := t.Context()
	o := succeed(t, s)
	insert(t, d, "a")
	m := newMarker(t, s)
	look, _ := lookAt(t, m, outbox.Settled{}, math.MaxInt64)
	d.Exec(t, `CREATE FUNCTION hold() RETURNS trigger LANGUAGE plpgsql AS
		$$ BEGIN PERFORM pg_advisory_xact_lock(42); RETURN NEW; END $$;
		CREATE TRIGGER hold BEFORE INSERT ON outbox_mark FOR EACH ROW EXECUTE FUNCTION hold()`)
	hold := begin(t, d)
	run(t, hold, "SELECT pg_advisory_xact_lock(42)")
	adoptsBehind(t, s, d, hold, func() error { return m.Move(ctx, o, look.Settled, nil) })
	wantOwed(t, s, d, 0)
}

// adoptsBehind makes a call that waits for the transaction hold, and an adoption that waits for the call. Both succeed.
func adoptsBehind(t *testing.T, s *sql.Store, d *testenv.Database, hold pgx.Tx, call func() error) {
	t.Helper()
	o := owner(t, s)
	called, adopted := make(chan error, 1), make(chan bool, 1)
	go func() { called <- call() }()
	waiting(t, d, 1)
	go func() {
		ok, _ := s.Adopt(t.Context(), after(o))
		adopted <- ok
	}()
	waiting(t, d, 2)
	must(t, hold.Rollback(t.Context()))
	if err := <-called; err != nil {
		t.Errorf("the call under way: %v", err)
	}
	if !<-adopted {
		t.Error("the adoption behind it failed")
	}
}

// A mark is not written after a later one, whether its session was abandoned or it waits for a part that another
// session holds.
func TestMarksMoveOnlyForward(t *testing.T) {
	t.Parallel()
	s, d := newStore(t)
	ctx := t.Context()
	o := succeed(t, s)
	insert(t, d, inPart)
	late := newMarker(t, s)
	old, _ := lookAt(t, late, outbox.Settled{}, math.MaxInt64)
	pass := beginPass(t, s, o)
	w := claimed(t, d, 3)
	insert(t, d, inPart)
	sweeps := next(t, w, 3, nil)
	page(t, w, sweeps, 10)
	moved := make(chan error, 2)
	go func() { moved <- late.Move(ctx, o, old.Settled, nil) }()
	go func() { moved <- s.SettleAll(ctx, o, pass) }()
	waiting(t, d, 2)
	must(t, w.Settle(ctx, sweeps, o, nil))
	must(t, w.Drop(ctx))
	for range 2 {
		if err := <-moved; err == nil || errors.Is(err, outbox.ErrSuperseded) {
			t.Errorf("behind a later mark: %v", err)
		}
	}
	wantOwed(t, s, d, 0)
	// A mark must also include the unfinished pass of a part.
	rows := []*outbox.Row{insert(t, d, inPart), insert(t, d, inPart)}
	again, err := newMarker(t, s).Look(ctx, outbox.Settled{}, math.MaxInt64)
	must(t, err)
	rows = append(rows, insert(t, d, inPart))
	w = claimed(t, d, 3)
	sweeps = next(t, w, 3, nil)
	page(t, w, sweeps, 1)
	must(t, w.Settle(ctx, sweeps, o, nil))
	w.Close()
	if err := newMarker(t, s).Move(ctx, o, again.Settled, nil); err == nil {
		t.Error("a mark is written that does not see what a pass under way has settled")
	}
	wantOwed(t, s, d, int64(len(rows))-1)
}

// SettleAll and a marker wait for a part for a limited time, and then fail.
func TestAMarkWaitsForThePart(t *testing.T) {
	t.Parallel()
	s, d := newStore(t)
	o := succeed(t, s)
	pass := beginPass(t, s, o)
	claimed(t, d, 7)
	if err := s.SettleAll(t.Context(), o, pass); err == nil {
		t.Error("a mark is written for a part that somebody has")
	}
}

// After a crash the server assigns transaction ids again that are not in the WAL. The next session does not use an
// earlier snapshot; a written mark is safe.
func TestASnapshotDoesNotOutliveItsSession(t *testing.T) {
	t.Parallel()
	server := testenv.NewServer(t, "wal_writer_delay=10s", "wal_buffers=16MB", "bgwriter_delay=10s")
	d := server.Database(t)
	ctx := t.Context()
	pool := relayPool(t, d.URL)
	s := sql.NewStore(pool, "test", 24*time.Hour)
	must(t, s.Register(ctx))
	o := succeed(t, s)
	mark := settle(t, s)
	restart := func() {
		t.Helper()
		must(t, server.Stop("immediate"))
		must(t, server.Start(ctx, "wal_writer_delay=10s", "wal_buffers=16MB", "bgwriter_delay=10s"))
		pool.Reset()
		d.Pool.Reset()
	}
	aborted := func() (xid uint64) {
		t.Helper()
		tx := begin(t, d)
		xid = insertIn(t, tx, 1)
		must(t, tx.Rollback(ctx))
		return xid
	}
	// A snapshot that was not written: the id is assigned again, to an unsettled row.
	twice := false
	for range 10 {
		m := newMarker(t, s)
		lost := aborted()
		look, err := m.Look(ctx, mark, math.MaxInt64)
		must(t, err)
		if !look.Snapshot.Sees(lost) {
			t.Fatalf("transaction %d has ended, and %s does not see it", lost, look.Snapshot)
		}
		restart()
		row := insert(t, d, "a")
		if look.Holds(row.XID, row.Seq) {
			t.Logf("transaction %d was given twice", row.XID)
		}
		twice = twice || look.Snapshot.Visible(row.XID)
		if err := m.Move(ctx, o, look.Settled, nil); err == nil {
			t.Fatal("a mark was moved to what was seen before a crash")
		}
		m.Close()
		m = newMarker(t, s)
		_, rows := lookAt(t, m, mark, math.MaxInt64)
		m.Close()
		if !strings.Contains("; "+rows+";", fmt.Sprintf("; %d;", row.Seq)) {
			t.Fatalf("row %d is not owed: %s", row.Seq, rows)
		}
		if twice {
			break
		}
	}
	if !twice {
		t.Error("no id was given twice: nothing was tested")
	}
	// A written mark: no id that it sees is assigned again.
	for range 5 {
		lost := aborted()
		pass := beginPass(t, s, o)
		restart()
		row := insert(t, d, "a")
		if pass.Snapshot.Visible(row.XID) || !pass.Snapshot.Sees(lost) {
			t.Fatalf("the pass %s sees transaction %d of after the crash", pass.Snapshot, row.XID)
		}
		must(t, s.SettleAll(ctx, o, pass))
		if n := backlog(t, s, d); n != 1 {
			t.Fatalf("%d rows are owed, want that of after the crash", n)
		}
	}
}

// Columns that define the order of events, and which are settled, cannot be updated. The transaction that inserts an
// event cannot change or delete it. Everything else can be updated and deleted.
func TestGuard(t *testing.T) {
	t.Parallel()
	s, d := newStore(t)
	ctx := t.Context()
	insert(t, d, "a")
	row := insert(t, d, "a")
	succeed(t, s)
	settle(t, s)
	for _, set := range []string{
		"aggregate_id = 'b'", "aggregate_type = 'b'", "id = gen_random_uuid()", "seq = DEFAULT", "xid = '3'",
	} {
		if _, err := d.Pool.Exec(ctx, "UPDATE outbox SET "+set); err == nil {
			t.Errorf("UPDATE SET %s is let through", set)
		}
	}
	d.Exec(t, "UPDATE outbox SET payload = '{\"redacted\": true}', aggregate_id = aggregate_id")
	const mine = " WHERE seq = (SELECT max(seq) FROM outbox)"
	for _, change := range []string{
		"UPDATE outbox SET payload = '2'" + mine, "DELETE FROM outbox" + mine, "TRUNCATE outbox",
	} {
		tx := begin(t, d)
		run(t, tx, "SAVEPOINT s")
		insertIn(t, tx, 1)
		_, err := tx.Exec(ctx, change)
		if err == nil || !strings.Contains(err.Error(), "must not change or delete it") {
			t.Errorf("%s by the transaction that has inserted the event: %v", change, err)
		}
		must(t, tx.Rollback(ctx))
	}
	// An application with another search_path and few rights.
	_, url := role(t, d, "app", "SELECT, DELETE ON outbox")
	app := connect(t, url+"&search_path=pg_catalog")
	tag, err := app.Exec(ctx, "DELETE FROM public.outbox WHERE seq = $1", row.Seq)
	if err != nil || tag.RowsAffected() != 1 {
		t.Errorf("an application deletes: %v, %v", tag, err)
	}
}

// A part has lost its marks. The relay's state cannot be read, and no mark of every part settles what a hand-over that
// was under way has not seen.
func TestAPartWithoutAMark(t *testing.T) {
	t.Parallel()
	s, d := newStore(t)
	ctx := t.Context()
	o := succeed(t, s)
	insert(t, d, inPart)
	d.Exec(t, `INSERT INTO outbox_mark (part, epoch, settled, hi) SELECT 5, epoch, settled, hi FROM outbox_mark
		WHERE settled IS NOT NULL; DELETE FROM outbox_mark WHERE part = -1`)
	pass := beginPass(t, s, o)
	for name, err := range map[string]error{
		"a hand-over": s.SettleAll(ctx, o, pass), "a stream": newMarker(t, s).Move(ctx, o, pass.Settled, nil),
	} {
		if err == nil {
			t.Errorf("%s settles a part without a mark", name)
		}
	}
	if _, err := s.State(ctx); err == nil || !strings.Contains(err.Error(), "INSERT INTO outbox_mark") {
		t.Errorf("state: %v; want a remedy", err)
	}
}

// settledBy returns the newest mark.
func settledBy(tb testing.TB, d *testenv.Database) (m outbox.Settled) {
	tb.Helper()
	var text string
	must(tb, d.Pool.QueryRow(tb.Context(), "SELECT settled::text, hi FROM outbox_settled ORDER BY mark DESC LIMIT 1").
		Scan(&text, &m.High))
	var err error
	m.Snapshot, err = outbox.ParseSnapshot(text)
	must(tb, err)
	return m
}
