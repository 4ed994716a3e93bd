package cdc

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"testing"
	"time"

	"posthaste/internal/lab/testenv"
	"posthaste/outbox"
)

func TestMain(m *testing.M) { os.Exit(testenv.Main(m)) }

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// env is one test's database with a slot on its outbox.
type env struct {
	db    *testenv.Database
	slot  string
	slots *Slots
}

func setup(t testing.TB) *env {
	t.Helper()
	e := prepare(t, testenv.Postgres(t))
	e.ensure(t)
	return e
}

// prepare makes the Slots without touching the server.
func prepare(t testing.TB, d *testenv.Database) *env {
	t.Helper()
	e := &env{db: d, slot: "posthaste_" + d.Relay}
	var err error
	if e.slots, err = NewSlots(Options{Pool: d.Pool, Slot: e.slot, Logger: testenv.Logger(t)}); err != nil {
		t.Fatal(err)
	}
	return e
}

// ensure makes the slot. That waits for every older transaction of the server: other tests' may take longer than is
// waited at once, and then it is tried again.
func (e *env) ensure(t testing.TB) {
	t.Helper()
	testenv.Eventually(t, time.Minute, func() error {
		created, err := e.slots.Ensure(t.Context(), nil)
		var slot *outbox.SlotError
		if errors.As(err, &slot) && slot.Reason == outbox.ReasonTransactionHeld {
			return err
		}
		if err != nil || !created {
			t.Fatalf("ensure: created %v, %v", created, err)
		}
		return nil
	})
}

func (e *env) reader(t testing.TB, with ...func(*Options)) *Reader {
	t.Helper()
	o := Options{URL: e.db.URL, Pool: e.db.Pool, Slot: e.slot, Logger: testenv.Logger(t)}
	for _, f := range with {
		f(&o)
	}
	r, err := NewReader(o)
	must(t, err)
	r.closing = 20 * time.Second // a busy machine may need more than a second until the slot is free
	return r
}

// run is a Reader at work whose chunks are collected.
type run struct {
	r      *Reader
	cancel context.CancelFunc
	done   chan struct{}
	// settle makes the collector report every End at once.
	settle bool

	mu     sync.Mutex
	chunks []outbox.Chunk
	rows   []outbox.Row
	err    error
}

func (e *env) run(t testing.TB, settle bool, with ...func(*Options)) *run {
	t.Helper()
	return start(t, e.reader(t, with...), settle)
}

func start(t testing.TB, r *Reader, settle bool) *run {
	t.Helper()
	out := make(chan outbox.Chunk, 1)
	ended, cancel := goRun(t, r, out)
	c := &run{r: r, cancel: cancel, done: make(chan struct{}), settle: settle}
	go func() {
		err := <-ended
		c.mu.Lock()
		c.err = err
		c.mu.Unlock()
		close(out)
	}()
	go func() {
		defer close(c.done)
		for chunk := range out {
			c.take(chunk)
		}
	}()
	t.Cleanup(func() { cancel(); <-c.done })
	return c
}

func (c *run) take(chunk outbox.Chunk) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.chunks = append(c.chunks, chunk)
	c.rows = append(c.rows, chunk.Rows...)
	if c.settle {
		for i := range chunk.Rows {
			if chunk.Rows[i].End != 0 {
				c.r.Settled(chunk.Rows[i].End)
			}
		}
	}
}

func (c *run) failure() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}

// stop ends the run and returns its error.
func (c *run) stop() error {
	c.cancel()
	<-c.done
	return c.failure()
}

// ended waits for the run to end by itself.
func (c *run) ended(t testing.TB, within time.Duration) error {
	t.Helper()
	select {
	case <-c.done:
	case <-time.After(within):
		t.Fatalf("the run has not ended within %v", within)
	}
	return c.failure()
}

func (c *run) all() []outbox.Row {
	c.mu.Lock()
	defer c.mu.Unlock()
	return append([]outbox.Row(nil), c.rows...)
}

func (c *run) events() []outbox.Row { return events(c.all()) }

// events returns the rows without markers. The end of a transaction comes with its last row, or in a marker behind it
// when the COMMIT was a moment late; here it is the row's in both cases.
func events(rows []outbox.Row) []outbox.Row {
	var out []outbox.Row
	for i := range rows {
		if !rows[i].Marker() {
			out = append(out, rows[i])
		} else if n := len(out); n > 0 && out[n-1].Commit == rows[i].Commit {
			out[n-1].End = rows[i].End
		}
	}
	return out
}

// wait waits until n events and the end of the last one's transaction have come, and returns them.
func (c *run) wait(t testing.TB, n int) []outbox.Row {
	t.Helper()
	var got []outbox.Row
	testenv.Eventually(t, 20*time.Second, func() error {
		select {
		case <-c.done:
			t.Fatalf("the run ended: %v", c.failure())
		default:
		}
		if got = c.events(); len(got) < n {
			return fmt.Errorf("%d of %d events", len(got), n)
		}
		if len(got) == n && got[n-1].End == 0 {
			return errors.New("the last transaction has no end")
		}
		return nil
	})
	if len(got) > n {
		t.Fatalf("got %d events, want %d", len(got), n)
	}
	return got
}

// subjects are the aggregate ids in order.
func subjects(rows []outbox.Row) []string {
	out := make([]string, len(rows))
	for i := range rows {
		out[i] = rows[i].AggregateID
	}
	return out
}

const insertOne = `INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload)
	VALUES (gen_random_uuid(), 'order', $1, 'order.created', '{"n": 1}')`

func (e *env) insert(t testing.TB, subject string) {
	t.Helper()
	e.db.Exec(t, insertOne, subject)
}

// insertMany writes n events, each in a transaction of its own.
func (e *env) insertMany(t testing.TB, prefix string, n int) {
	t.Helper()
	e.db.Exec(t, fmt.Sprintf(`DO $$ BEGIN FOR i IN 1..%d LOOP
		INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload)
		VALUES (gen_random_uuid(), 'order', '%s' || i, 'order.created', '{"n": 1}'); COMMIT; END LOOP; END $$`, n,
		prefix))
}

// insertOf writes n events in one transaction. Subject and payload are expressions, in which i counts the events.
func (e *env) insertOf(t testing.TB, subject, payload string, n int) {
	t.Helper()
	e.db.Exec(t, fmt.Sprintf(`INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload)
		SELECT gen_random_uuid(), 'order', %s, 't', %s FROM generate_series(1, %d) i`, subject, payload, n))
}

// status reads the slot.
func (e *env) status(t testing.TB) outbox.SlotStatus {
	t.Helper()
	st, err := e.slots.Status(t.Context())
	must(t, err)
	return st
}

// walEnd is the current end of the WAL on disk: no further can a slot be moved.
func (e *env) walEnd(t testing.TB) outbox.LSN {
	t.Helper()
	return outbox.LSN(testenv.Value[int64](t, e.db,
		"SELECT pg_wal_lsn_diff(pg_current_wal_flush_lsn(), '0/0')::bigint"))
}

// confirmed waits until the slot's confirmed position is at least want.
func (e *env) confirmed(t testing.TB, want outbox.LSN) {
	t.Helper()
	testenv.Eventually(t, 20*time.Second, func() error {
		if got := e.status(t).Confirmed; got < want {
			return fmt.Errorf("confirmed %s, want %s", got, want)
		}
		return nil
	})
}

// wantConfirmed checks that everything up to settled is confirmed, and nothing of next. WAL of other tests that lies in
// between may be confirmed with it.
func (e *env) wantConfirmed(t testing.TB, settled, next outbox.Row) {
	t.Helper()
	if got := e.status(t).Confirmed; got < settled.End || got > next.Commit {
		t.Errorf("confirmed %s, want %s, and at most %s, where the next one commits", got, settled.End, next.Commit)
	}
}

// wantReason checks that err is a SlotError with the reason and a fix.
func wantReason(t testing.TB, err error, reason string) {
	t.Helper()
	var slot *outbox.SlotError
	if !errors.As(err, &slot) || slot.Reason != reason {
		t.Fatalf("got %v, want reason %q", err, reason)
	}
	if slot.Remedy == "" {
		t.Errorf("reason %q has no fix", reason)
	}
}
