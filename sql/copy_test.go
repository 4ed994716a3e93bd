package sql_test

import (
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"posthaste/internal/lab/testenv"
	"posthaste/outbox"
	"posthaste/sql"
)

// A copy on another server gets an identity of its own. Unsettled events stay unsettled and in order, whatever the
// transaction ids of this server; settled events stay settled.
func TestACopyOnAnotherServer(t *testing.T) {
	t.Parallel()
	s, d := newStoreAlone(t)
	ctx := t.Context()
	o := succeed(t, s)
	refused, retried := insert(t, d, "p"), insert(t, d, "p")
	for _, r := range []*outbox.Row{refused, retried} {
		must(t, fails(s.Park(ctx, o, r, "too_large", "why", 1)))
	}
	var settled []uuid.UUID
	for range 20 {
		settled = append(settled, insert(t, d, "a").ID)
	}
	settle(t, s)
	must(t, sql.RetryDead(ctx, d.Pool, retried.ID))
	var owed []uuid.UUID
	for range 20 {
		owed = append(owed, insert(t, d, "a").ID)
	}
	// Marks of a server whose ids are further ahead see everything here. One row was written here before.
	d.Exec(t, `SET posthaste.copy = 'on';
		UPDATE outbox SET xid = (xid::text::bigint + 1000000000)::text::xid8; RESET posthaste.copy`)
	d.Exec(t, fmt.Sprintf(`SET posthaste.copy = 'on';
		UPDATE outbox SET xid = pg_current_xact_id() WHERE id = '%s'; -- the same number by chance
		RESET posthaste.copy`, settled[3]))
	d.Exec(t, `INSERT INTO outbox_mark (part, epoch, settled, hi, mode)
		SELECT -1, 1, (x + 1000000000 || ':' || x + 1000000000 || ':')::pg_snapshot, hi, 'cdc'
		FROM (SELECT pg_snapshot_xmax(settled)::text::bigint AS x, hi FROM outbox_mark WHERE hi > 0) m`)
	d.Exec(t, "UPDATE relay_state SET system_identifier = 1")
	owed = append(owed, insert(t, d, "a").ID)
	source := owner(t, s).Source
	must(t, s.Register(ctx))
	if got := owner(t, s).Source; got == source {
		t.Error("the copy has the source of the original")
	}
	got := testenv.Value[[]uuid.UUID](t, d, "SELECT array_agg(id ORDER BY seq) FROM outbox_backlog")
	if want := append([]uuid.UUID{retried.ID}, owed...); fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("owed\n%v, want\n%v", got, want)
	}
	wantRows(t, d, len(settled), "outbox_history WHERE id = ANY ($1)",
		settled)
	if n := testenv.Value[int](t, d, "SELECT count(*) FROM outbox"); n != len(settled)+len(owed)+2 {
		t.Errorf("%d rows", n)
	}
	is[int64](t, 2)(s.Housekeep(ctx))
	_, rows := lookAt(t, newMarker(t, s), settledBy(t, d), math.MaxInt64)
	if n := len(strings.Fields(rows)); n != len(owed)+1 || strings.Contains(rows, ";") {
		t.Errorf("a look has %s", rows)
	}
	succeed(t, s)
	settle(t, s)
	if n, err := s.Housekeep(ctx); err != nil || n != 1 || backlog(t, s, d) != 0 {
		t.Errorf("%d dead at last: %v", n, err)
	}
	must(t, s.Register(ctx)) // idempotent
	// Marks of a server whose transaction ids continue here: no row is rewritten.
	insert(t, d, "a")
	d.Exec(t, "UPDATE relay_state SET system_identifier = 1")
	source = owner(t, s).Source
	rows = testenv.Value[string](t, d, "SELECT string_agg(xmin::text, ' ' ORDER BY seq) FROM outbox")
	must(t, s.Register(ctx))
	after := testenv.Value[string](t, d, "SELECT string_agg(xmin::text, ' ' ORDER BY seq) FROM outbox")
	if owner(t, s).Source == source || rows != after || backlog(t, s, d) != 1 {
		t.Errorf("%d owed, %s, want %s", backlog(t, s, d), after, rows)
	}
	succeed(t, s)
	settle(t, s)
	must(t, sql.KeepHistoryAt(ctx, s, time.Now().Add(100*time.Hour)))
	wantRows(t, d, 0, "outbox")
}

// A server took over the identifier of the server that its rows and marks were replicated from. Its marks, or if the
// original has settled nothing since its clone began to follow, its rows, have transaction ids that are still to come
// here, so it is a copy as well. Later rows would pass such a row, and it would be settled unpublished.
func TestMarksOfTheFutureAreAnotherServers(t *testing.T) {
	t.Parallel()
	for _, marks := range []bool{true, false} {
		s, d := newStoreAlone(t)
		succeed(t, s)
		insert(t, d, "a")
		settle(t, s)
		const future = "SET posthaste.copy = 'on'; UPDATE outbox SET xid = '899999999' WHERE aggregate_id = '%s'; " +
			"RESET posthaste.copy"
		if marks {
			d.Exec(t, fmt.Sprintf(future, "a"))
			d.Exec(t, `INSERT INTO outbox_mark (part, epoch, settled, hi)
				VALUES (-1, 5, '900000000:900000000:', 1000000)`)
			insert(t, d, "b")
		} else {
			insert(t, d, "b")
			d.Exec(t, fmt.Sprintf(future, "b"))
		}
		source := owner(t, s).Source
		must(t, s.Register(t.Context()))
		if n := backlog(t, s, d); n != 1 || owner(t, s).Source == source {
			t.Errorf("%d rows are owed, want 1, under another source than %s", n, source)
		}
		succeed(t, s)
		settle(t, s)
		wantOwed(t, s, d, 0)
		source = owner(t, s).Source
		must(t, s.Register(t.Context())) // idempotent
		if owner(t, s).Source != source {
			t.Error("the copy is given another source")
		}
	}
}

// A copy on the same server has the server's transactions and rows that they wrote. No row is rewritten, even while a
// transaction older than the marks is open.
func TestACopyOnTheSameServer(t *testing.T) {
	t.Parallel()
	s, d := newStoreAlone(t)
	ctx := t.Context()
	succeed(t, s)
	at := func(name string) string { return strings.Replace(d.URL, "/"+d.Name, "/"+name, 1) }
	other := connect(t, at("postgres"))
	open := connect(t, at("postgres"))
	run(t, open, "BEGIN; SELECT pg_current_xact_id()")
	for range 20 {
		insert(t, d, "a")
	}
	settle(t, s)
	for range 3 {
		insert(t, d, "a")
	}
	beside := *d
	beside.Name, beside.URL = "beside", at("beside")
	for _, stmt := range []string{
		"ALTER DATABASE " + d.Name + " ALLOW_CONNECTIONS false",
		"SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE datname = '" + d.Name + "'",
		"CREATE DATABASE beside TEMPLATE " + d.Name,
		"ALTER DATABASE " + d.Name + " ALLOW_CONNECTIONS true",
		"ALTER DATABASE beside ALLOW_CONNECTIONS true",
	} {
		run(t, other, stmt)
	}
	d.Pool.Reset()
	beside.Pool = relayPool(t, beside.URL)
	cs, c := sql.NewStore(beside.Pool, "test", 24*time.Hour), &beside
	rows := testenv.Value[string](t, c, "SELECT string_agg(xmin::text, ' ' ORDER BY seq) FROM outbox")
	source := owner(t, cs).Source
	must(t, cs.Register(ctx))
	mine := owner(t, cs).Source
	if mine == source {
		t.Error("the copy has the source of the original")
	}
	after := testenv.Value[string](t, c, "SELECT string_agg(xmin::text, ' ' ORDER BY seq) FROM outbox")
	if after != rows {
		t.Errorf("rows are of %s, want %s", after, rows)
	}
	wantOwed(t, cs, c, 3)
	must(t, cs.Register(ctx)) // once is enough, before and after it has led
	succeed(t, cs)
	must(t, cs.Register(ctx))
	if got := owner(t, cs).Source; got != mine {
		t.Error("the copy changes its source")
	}
	testenv.Eventually(t, 20*time.Second, func() error { return s.Register(ctx) })
	if got := owner(t, s).Source; got != source {
		t.Error("the original has another source")
	}
}

// A transaction that is open here and has not written to the table has an id that the marks of the other server see. So
// does one that wrote its rows and ended before the relay starts.
func TestACopyBesideAnOpenTransaction(t *testing.T) {
	t.Parallel()
	for _, ended := range []bool{false, true} {
		s, d := newStore(t)
		ctx := t.Context()
		succeed(t, s)
		open := begin(t, d)
		write := func() {
			insertIn(t, open, 3)
			must(t, open.Commit(ctx))
		}
		var xid int64
		must(t, open.QueryRow(ctx, "SELECT pg_current_xact_id()::text::bigint").Scan(&xid))
		d.Exec(t, `INSERT INTO outbox_mark (part, epoch, settled, hi)
			SELECT -1, 7, format('%s:%s:', $1::bigint + 5, $1::bigint + 5)::pg_snapshot, 0`, xid)
		d.Exec(t, "UPDATE relay_state SET system_identifier = 1")
		for range 10 {
			d.Exec(t, "SELECT pg_current_xact_id()")
		}
		if ended {
			write()
		}
		must(t, s.Register(ctx))
		succeed(t, s)
		if !ended {
			write()
		}
		wantOwed(t, s, d, 3)
	}
}

// The sequences of a copy restart, as with logical replication: the marks of the other server have higher numbers than
// the first rows that services write here before the relay starts.
func TestACopyWithoutSequences(t *testing.T) {
	t.Parallel()
	s, d := newStore(t)
	ctx := t.Context()
	succeed(t, s)
	insert(t, d, "a")
	settle(t, s)
	d.Exec(t, "DELETE FROM outbox_mark")
	d.Exec(t, `INSERT INTO outbox_mark (id, part, epoch, settled, hi) OVERRIDING SYSTEM VALUE
		VALUES (100000, -1, 5, '900000000:900000000:', 1000000)`)
	d.Exec(t, "UPDATE outbox_mark SET at = clock_timestamp() - interval '25 hours'")
	d.Exec(t, "SET posthaste.copy = 'on'; UPDATE outbox SET xid = '899999999'; RESET posthaste.copy")
	d.Exec(t, "UPDATE relay_state SET system_identifier = 1")
	insert(t, d, "b")
	updated := insert(t, d, "b")
	d.Exec(t, "UPDATE outbox SET headers = '{}' WHERE id = $1", updated.ID)
	tx := begin(t, d)
	saved, err := tx.Begin(ctx)
	must(t, err)
	insertIn(t, saved, 1)
	must(t, saved.Commit(ctx))
	must(t, tx.Commit(ctx))
	must(t, s.Register(ctx))
	wantOwed(t, s, d, 3)
	succeed(t, s)
	insert(t, d, "c")
	must(t, s.KeepHistory(ctx)) // everything that the other server's mark settled is older than the retention
	wantOwed(t, s, d, 4)
	settle(t, s)
	wantOwed(t, s, d, 0)
}

// An open writer delays the relay of a copy, which waits for the table lock, but not other writers.
func TestACopyBesideAWriter(t *testing.T) {
	t.Parallel()
	s, d := newStore(t)
	ctx := t.Context()
	succeed(t, s)
	d.Exec(t, "UPDATE relay_state SET system_identifier = 1")
	open := begin(t, d)
	insertIn(t, open, 1)
	registered := make(chan error, 1)
	go func() { registered <- s.Register(ctx) }()
	waiting(t, d, 1)
	insert(t, d, "other")
	if len(registered) > 0 {
		t.Error("it did not wait for the writer")
	}
	must(t, open.Commit(ctx))
	must(t, <-registered)
	wantOwed(t, s, d, 2)
}

// A database that no relay ever led was copied: the transactions of its rows are still to come here.
func TestACopyThatNobodyLed(t *testing.T) {
	t.Parallel()
	d := testenv.Postgres(t)
	s := sql.NewStore(relayPool(t, d.URL), "test", 24*time.Hour)
	for range 5 {
		insert(t, d, "a")
	}
	d.Exec(t, `SET posthaste.copy = 'on';
		UPDATE outbox SET xid = (xid::text::bigint + 1000000000)::text::xid8; RESET posthaste.copy`)
	must(t, s.Register(t.Context()))
	succeed(t, s)
	wantOwed(t, s, d, 5)
	settle(t, s)
	wantOwed(t, s, d, 0)
}

// A transaction that restores rows of another server is open while the first relay adopts, which waits for it. Another
// one that would begin after it is refused.
func TestARestoreThatIsOpenDuringTheFirstAdoption(t *testing.T) {
	t.Parallel()
	for _, xid := range []string{"3", "899999999"} {
		s, d := newStoreAlone(t)
		ctx := t.Context()
		restore := func(db sql.DB) error {
			_, err := db.Exec(ctx, `INSERT INTO outbox (xid, aggregate_type, aggregate_id, event_type, payload)
				SELECT '`+xid+`', 'order', i::text, 'order.created', '{}' FROM generate_series(1, 40) i`)
			return err
		}
		careful, err := d.Pool.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.RepeatableRead})
		must(t, err)
		if err := restore(careful); err == nil || !strings.Contains(err.Error(), "leave xid and seq out") {
			t.Errorf("a transaction that would not see the adoption: %v", err)
		}
		must(t, careful.Rollback(ctx))
		open, late := begin(t, d), begin(t, d)
		must(t, restore(open))
		adopt := func() (bool, error) {
			return s.Adopt(ctx, outbox.Adoption{From: 0, To: outbox.Owner{Epoch: 1}, Holder: "me"})
		}
		waits := func(err error) bool {
			return err != nil && strings.Contains(err.Error(), "does a transaction bring rows of another database")
		}
		if ok, err := adopt(); ok || !waits(err) {
			t.Errorf("adopted %v, %v", ok, err)
		}
		insert(t, d, "beside") // writers do not wait
		adopted := make(chan bool, 1)
		go func() {
			ok, err := adopt()
			for waits(err) { // for five seconds, which a busy machine may take to commit
				ok, err = adopt()
			}
			adopted <- ok && err == nil
		}()
		waiting(t, d, 1)
		refused := make(chan error, 1)
		go func() { refused <- restore(late) }()
		waiting(t, d, 2)
		must(t, open.Commit(ctx))
		if ok := <-adopted; ok != (xid == "3") {
			t.Errorf("adopted %v beside rows of transaction %s", ok, xid)
		}
		if err := <-refused; err == nil || !strings.Contains(err.Error(), "leave xid and seq out") {
			t.Errorf("rows of another server after the adoption: %v", err)
		}
		must(t, s.Register(ctx))
		succeed(t, s)
		wantOwed(t, s, d, 41)
	}
}
