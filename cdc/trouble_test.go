package cdc

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"posthaste/internal/lab/testenv"
	"posthaste/outbox"
)

// limited is a server with one slot, one walsender and prepared transactions.
func limited(t testing.TB) *testenv.Server {
	t.Helper()
	return testenv.NewServer(t, "max_replication_slots=1", "max_wal_senders=1", "max_prepared_transactions=2")
}

// runOnce runs a reader that is expected to fail by itself.
func runOnce(t testing.TB, r *Reader) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	err := r.Run(ctx, func(context.Context) error { return nil }, make(chan outbox.Chunk, 1000))
	if ctx.Err() != nil {
		t.Fatal("the run did not end by itself")
	}
	if err == nil || strings.Contains(err.Error(), "secret") || strings.Contains(err.Error(), "://") {
		t.Fatalf("error %v: absent, or with what must not be in it", err)
	}
	return err
}

// dropSlot drops a slot as soon as the server has released it: a refused session may hold it for a moment longer.
func dropSlot(t testing.TB, d *testenv.Database, slot string) {
	t.Helper()
	testenv.Eventually(t, 10*time.Second, func() error {
		_, err := d.Pool.Exec(t.Context(), "SELECT pg_drop_replication_slot($1)", slot)
		return err
	})
}

func TestRunNamesWhatIsWrongWithTheSlot(t *testing.T) {
	t.Parallel()
	e := prepare(t, testenv.Postgres(t))
	r := e.reader(t)
	wantReason(t, runOnce(t, r), outbox.ReasonSlotMissing)

	e.db.Exec(t, "SELECT pg_create_logical_replication_slot($1, 'test_decoding')", e.slot)
	wantReason(t, runOnce(t, r), outbox.ReasonSlotForeign)
	_, err := e.slots.Ensure(t.Context(), nil)
	wantReason(t, err, outbox.ReasonSlotForeign)
	wantReason(t, e.slots.Advance(t.Context(), e.walEnd(t)), outbox.ReasonSlotForeign)
	dropSlot(t, e.db, e.slot)

	e.db.Exec(t, "SELECT pg_create_physical_replication_slot($1)", e.slot)
	_, err = e.slots.Ensure(t.Context(), nil)
	wantReason(t, err, outbox.ReasonSlotForeign)
	wantReason(t, runOnce(t, r), outbox.ReasonSlotForeign)
	dropSlot(t, e.db, e.slot)

	other := testenv.Postgres(t)
	other.Exec(t, "SELECT pg_create_logical_replication_slot($1, 'pgoutput')", e.slot)
	_, err = e.slots.Ensure(t.Context(), nil)
	wantReason(t, err, outbox.ReasonSlotForeign)
	wantReason(t, runOnce(t, r), outbox.ReasonSlotForeign)
	// It is neither ours to drop, nor ours to bound.
	e.insertMany(t, "a", 100)
	wantReason(t, e.slots.Evict(t.Context()), outbox.ReasonSlotForeign)
	wantReason(t, e.slots.Drop(t.Context()), outbox.ReasonSlotForeign)
	if st := e.status(t); !st.Exists || st.RetainedBytes != 0 || st.ConfirmedLagBytes != 0 {
		t.Errorf("another database's slot: %+v", st)
	}
	dropSlot(t, other, e.slot)

	e.ensure(t)
	c := e.run(t, true)
	e.insert(t, "undisturbed")
	wantReason(t, runOnce(t, r), outbox.ReasonSlotActive)
	wantReason(t, e.slots.Advance(t.Context(), e.walEnd(t)+1<<20), outbox.ReasonSlotActive)
	if err := c.r.Run(t.Context(), nil, nil); err == nil || !strings.Contains(err.Error(), "running already") {
		t.Errorf("a second Run of one reader: %v", err)
	}
	c.wait(t, 1)
}

// A change of the publication may have left rows out, so the stream ends before the first row behind it. Other changes
// of the catalog announce the table again, too, and nothing else happens.
func TestAChangedPublicationEndsTheStream(t *testing.T) {
	t.Parallel()
	e := setup(t)
	c := e.run(t, true)
	harmless := []string{
		"VACUUM outbox", "ANALYZE outbox", "CREATE INDEX new ON outbox (created_at)", "DROP INDEX new",
		"ALTER TABLE outbox ADD COLUMN new int", "CREATE TABLE other (id int)",
		"ALTER PUBLICATION posthaste ADD TABLE other", "CREATE PUBLICATION other FOR TABLE outbox",
	}
	for i, stmt := range harmless {
		e.db.Exec(t, stmt)
		e.insert(t, stmt)
		c.wait(t, i+1)
	}
	_ = c.stop()
	for _, rows := range []int{0, 1} { // that were streamed before
		c := e.run(t, true)
		for i := range rows {
			e.insert(t, "before")
			c.wait(t, i+1)
		}
		e.db.Exec(t, "ALTER PUBLICATION posthaste DROP TABLE outbox")
		e.insert(t, "left out")
		e.db.Exec(t, "ALTER PUBLICATION posthaste ADD TABLE outbox")
		e.insert(t, "behind it")
		wantReason(t, c.ended(t, 20*time.Second), outbox.ReasonPublication)
		if got := len(c.events()); got != rows {
			t.Errorf("%d rows were streamed, want %d", got, rows)
		}
		must(t, e.slots.Advance(t.Context(), e.walEnd(t)))
	}
}

// A slot that is older than its publication cannot be decoded. Before Postgres 18 the server reports it, later ones
// skip the older rows. Ensure therefore replaces the slot whenever it had to repair the publication.
func TestPublicationIsMendedAndTheSlotReplaced(t *testing.T) {
	t.Parallel()
	e := setup(t)
	e.db.Exec(t, "DROP PUBLICATION posthaste")
	e.insert(t, "while missing")
	r := e.reader(t)
	version := testenv.Value[int](t, e.db, "SELECT current_setting('server_version_num')::int")
	if version < 180000 {
		wantReason(t, runOnce(t, r), outbox.ReasonPublication)
		e.db.Exec(t, "CREATE PUBLICATION posthaste FOR TABLE outbox WITH (publish = 'insert')")
		wantReason(t, runOnce(t, r), outbox.ReasonPublication)
		e.db.Exec(t, "DROP PUBLICATION posthaste")
	}
	spoils := []string{
		"DROP PUBLICATION IF EXISTS posthaste",
		"ALTER PUBLICATION posthaste DROP TABLE outbox",
		"ALTER PUBLICATION posthaste SET (publish = 'update, delete')",
	}
	if version >= 150000 { // before that a table is published as a whole
		spoils = append(spoils, "ALTER PUBLICATION posthaste SET TABLE outbox WHERE (seq > 1000000)",
			"ALTER PUBLICATION posthaste SET TABLE outbox (id, seq)")
	}
	for i, spoil := range spoils {
		e.db.Exec(t, spoil)
		e.insert(t, "unseen")
		t.Log(spoil)
		e.ensure(t)
		if created, err := e.slots.Ensure(t.Context(), nil); err != nil || created {
			t.Fatalf("once more: created %v, %v", created, err)
		}
		c := start(t, r, true)
		e.insert(t, fmt.Sprint(i))
		if got := subjects(c.wait(t, 1)); got[0] != fmt.Sprint(i) {
			t.Errorf("%s: got %v", spoil, got)
		}
		_ = c.stop()
	}
	// Too much is no loss: the slot stays.
	e.db.Exec(t, "ALTER PUBLICATION posthaste SET (publish = 'insert, delete')")
	if created, err := e.slots.Ensure(t.Context(), nil); err != nil || created {
		t.Errorf("created %v, %v", created, err)
	}
	if testenv.Value[bool](t, e.db, "SELECT pubdelete FROM pg_publication") {
		t.Error("deletes are still published")
	}
}

func TestRoleWithoutRights(t *testing.T) {
	t.Parallel()
	e := prepare(t, testenv.Postgres(t))
	role := "r" + e.db.Relay
	e.db.Exec(t, "CREATE ROLE "+role+" "+testenv.Login(e.db.URL))
	t.Cleanup(func() { _, _ = e.db.Pool.Exec(context.Background(), "DROP OWNED BY "+role+"; DROP ROLE "+role) })
	pool, err := pgxpool.New(t.Context(), testenv.As(e.db.URL, role))
	must(t, err)
	defer pool.Close()
	slots, err := NewSlots(Options{Pool: pool, Slot: e.slot})
	must(t, err)
	_, err = slots.Ensure(t.Context(), nil)
	wantReason(t, err, outbox.ReasonNoRight)
	wantReason(t, runOnce(t, e.reader(t, func(o *Options) { o.URL = testenv.As(o.URL, role) })),
		outbox.ReasonNoRight)
	e.db.Exec(t, "DROP PUBLICATION posthaste")
	_, err = slots.Ensure(t.Context(), nil)
	wantReason(t, err, outbox.ReasonPublication)
}

func TestServerWithoutRoom(t *testing.T) {
	t.Parallel()
	srv := limited(t)
	one := prepare(t, srv.Database(t))
	one.ensure(t)
	two := prepare(t, srv.Database(t))
	_, err := two.slots.Ensure(t.Context(), nil)
	wantReason(t, err, outbox.ReasonSlotsFull)
	c := one.run(t, true)
	wantReason(t, runOnce(t, one.reader(t)), outbox.ReasonSendersFull)
	_ = c.stop()
}

func TestServerWithoutLogicalWAL(t *testing.T) {
	t.Parallel()
	srv := testenv.NewServer(t, "wal_level=replica")
	e := prepare(t, srv.Database(t))
	if st, err := e.slots.Status(t.Context()); err != nil || st.Exists {
		t.Errorf("status %+v, %v", st, err)
	}
	_, err := e.slots.Ensure(t.Context(), nil)
	wantReason(t, err, outbox.ReasonWALLevel)
	wantReason(t, runOnce(t, e.reader(t)), outbox.ReasonWALLevel)
}

// A slot that is invalidated while it is streamed announces itself as a mere end of the connection.
func TestLostSlotIsNamedAndReplaced(t *testing.T) {
	t.Parallel()
	srv := testenv.NewServer(t, "max_slot_wal_keep_size=16MB", "min_wal_size=32MB", "max_wal_size=64MB")
	e := prepare(t, srv.Database(t))
	e.ensure(t)
	if st := e.status(t); st.MaxKeepBytes != 16<<20 || st.Lost || !st.Exists {
		t.Errorf("status %+v", st)
	}
	c := e.run(t, false)
	e.insert(t, "unsettled")
	c.wait(t, 1)
	e.loseSlot(t)
	// The checkpoint ends the stream first and invalidates the slot when its process has ended. In between, the
	// connection has ended and the slot has no fault.
	var first *outbox.SlotError
	err := c.ended(t, 20*time.Second)
	if !errors.As(err, &first) || first.Reason != outbox.ReasonSlotLost && first.Reason != outbox.ReasonConnection {
		t.Errorf("got %v, want reason %q, or that the connection was ended", err, outbox.ReasonSlotLost)
	}
	testenv.Eventually(t, 20*time.Second, func() error {
		if st := e.status(t); !st.Lost || st.Reason == "" {
			return fmt.Errorf("status %+v", st)
		}
		return nil
	})
	wantReason(t, runOnce(t, c.r), outbox.ReasonSlotLost)
	wantReason(t, e.slots.Advance(t.Context(), e.walEnd(t)), outbox.ReasonSlotLost)
	e.ensure(t)
	c = start(t, c.r, true)
	e.insert(t, "new")
	if got := subjects(c.wait(t, 1)); got[0] != "new" {
		t.Errorf("got %v", got)
	}
}

// loseSlot writes WAL until a checkpoint gives the slot up.
func (e *env) loseSlot(t testing.TB) {
	t.Helper()
	for range 6 {
		e.db.Exec(t, "CREATE TABLE IF NOT EXISTS noise (t text)")
		e.db.Exec(t, "INSERT INTO noise VALUES ('x')")
		e.db.Exec(t, "SELECT pg_switch_wal()")
	}
	e.db.Exec(t, "CHECKPOINT")
}

func (e *env) through(t testing.TB) (*testenv.Link, func(*Options)) {
	t.Helper()
	u, err := url.Parse(e.db.URL)
	must(t, err)
	p := testenv.NewLink(t, u.Host)
	u.Host = p.Addr()
	return p, func(o *Options) { o.URL, o.SenderTimeout = u.String(), quickSender }
}

func TestSilentServerIsNoticed(t *testing.T) {
	t.Parallel()
	e := setup(t)
	p, via := e.through(t)
	c := e.run(t, true, via)
	e.insert(t, "a")
	c.wait(t, 1)
	p.Set(testenv.Trouble{LoseReplies: true})
	e.insert(t, "b")
	wantReason(t, c.ended(t, 20*time.Second), outbox.ReasonSilent)
	if got := c.r.wireIdle(); got != 0 {
		t.Errorf("wire idle %v without a connection", got)
	}
	p.Set(testenv.Trouble{})
	testenv.Eventually(t, 20*time.Second, func() error { return e.slots.Evict(t.Context()) })
	again := start(t, c.r, true)
	if got := subjects(again.wait(t, 1)); got[0] != "b" {
		t.Errorf("got %v", got)
	}
}

func TestConnectionCutInTheMiddleOfARow(t *testing.T) {
	t.Parallel()
	e := setup(t)
	p, via := e.through(t)
	c := e.run(t, true, via)
	e.insert(t, "a")
	a := c.wait(t, 1)[0]
	e.confirmed(t, a.End)
	p.Set(testenv.Trouble{CutReplies: 150000})
	e.insertOf(t, "i::text", "to_jsonb(repeat('x', 100000))", 3)
	wantReason(t, c.ended(t, 20*time.Second), outbox.ReasonConnection)
	for _, row := range c.events()[1:] {
		if row.End != 0 || len(row.Payload) != 100002 {
			t.Errorf("a torn row came through: %d bytes, end %s", len(row.Payload), row.End)
		}
	}
	p.Set(testenv.Trouble{})
	testenv.Eventually(t, 20*time.Second, func() error { return e.slots.Evict(t.Context()) })
	again := start(t, c.r, true)
	if got := fmt.Sprint(subjects(again.wait(t, 3))); got != "[1 2 3]" {
		t.Errorf("got %v", got)
	}
	// The end comes with the last row, or in a marker behind it.
	testenv.Eventually(t, 20*time.Second, func() error {
		if rows := again.all(); rows[len(rows)-1].End == 0 {
			return errors.New("the transaction has no end")
		}
		return nil
	})
}

func TestServerThatCannotBeReached(t *testing.T) {
	t.Parallel()
	e := prepare(t, testenv.Postgres(t))
	p, via := e.through(t)
	p.Down()
	wantReason(t, runOnce(t, e.reader(t, via, func(o *Options) {
		o.URL = strings.Replace(o.URL, testenv.Password(o.URL), "secret", 1)
	})), outbox.ReasonConnection)
}

// While started runs no other process can move the slot, nothing is read, and the server does not close the connection.
func TestStartedHoldsTheSlotBeforeAnythingIsRead(t *testing.T) {
	t.Parallel()
	e := setup(t)
	e.insert(t, "a")
	out := make(chan outbox.Chunk, 10)
	r := e.reader(t, quick)
	stop := errors.New("the sweep has failed")
	calls := 0
	err := r.Run(t.Context(), func(ctx context.Context) error {
		calls++
		wantReason(t, e.slots.Advance(ctx, e.walEnd(t)+1<<20), outbox.ReasonSlotActive)
		first := e.sender(t)
		testenv.Eventually(t, 20*time.Second, func() error {
			if s := e.sender(t); s.pid != first.pid || s.age < quickSender*3/2 {
				return fmt.Errorf("walsender %+v", s)
			}
			return nil
		})
		return stop
	}, out)
	if !errors.Is(err, stop) || calls != 1 || len(out) != 0 {
		t.Errorf("got %v after %d calls, %d chunks", err, calls, len(out))
	}
	if st := e.status(t); st.Active {
		t.Error("the slot is still held")
	}
	// An end of ctx meanwhile ends both.
	ctx, cancel := context.WithCancel(t.Context())
	err = r.Run(ctx, func(ctx context.Context) error {
		cancel()
		<-ctx.Done()
		return ctx.Err()
	}, out)
	if !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
}

func TestOptionsAreChecked(t *testing.T) {
	t.Parallel()
	const dsn = "postgres://u:secret@127.0.0.1:1/d"
	pool, err := pgxpool.New(t.Context(), dsn)
	must(t, err)
	defer pool.Close()
	for name, o := range map[string]Options{
		"slot":    {URL: dsn, Slot: "no;such"},
		"long":    {URL: dsn, Slot: strings.Repeat("s", 64)},
		"timeout": {URL: dsn, Slot: "s", SenderTimeout: time.Millisecond},
		"url":     {URL: "postgres://u:secret@127.0.0.1:port/d", Slot: "s"},
	} {
		o.Pool = pool
		if _, err := NewReader(o); err == nil || strings.Contains(err.Error(), "secret") {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := NewSlots(Options{Slot: "s"}); err == nil {
		t.Error("no pool: no error")
	}
}
