package cdc

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"posthaste/internal/lab/testenv"
	"posthaste/outbox"
)

// quickSender is short for a test and long for a machine that stands still for a while.
const quickSender = 6 * time.Second

func quick(o *Options) { o.SenderTimeout = quickSender }

// goRun runs r with out left to the test.
func goRun(t testing.TB, r *Reader, out chan<- outbox.Chunk) (done chan error, stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done = make(chan error, 1)
	started, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		done <- r.Run(ctx, func(context.Context) error { close(started); return nil }, out)
	}()
	t.Cleanup(func() { cancel(); <-ended })
	select {
	case <-started:
	case <-ended:
		t.Fatalf("run ended: %v", <-done)
	}
	return done, cancel
}

// sender is the walsender's view of the connection.
type sender struct {
	pid          int
	write, flush int64
	replies      time.Time
	age          time.Duration
}

func (e *env) sender(t testing.TB) sender {
	t.Helper()
	var s sender
	err := e.db.Pool.QueryRow(t.Context(), `SELECT r.pid, coalesce(pg_wal_lsn_diff(r.write_lsn, '0/0'), 0)::bigint,
		coalesce(pg_wal_lsn_diff(r.flush_lsn, '0/0'), 0)::bigint, coalesce(r.reply_time, 'epoch'),
			clock_timestamp() - r.backend_start
		FROM pg_stat_replication r JOIN pg_replication_slots s ON s.active_pid = r.pid WHERE s.slot_name = $1`, e.slot).
		Scan(&s.pid, &s.write, &s.flush, &s.replies, &s.age)
	if err != nil {
		t.Fatalf("walsender of %s: %v", e.slot, err)
	}
	return s
}

// The trap: a status that reports a received position and nothing flushed must not confirm what was received.
func TestNothingIsConfirmedBeforeItIsSettled(t *testing.T) {
	t.Parallel()
	e := setup(t)
	was := e.status(t).Confirmed
	c := e.run(t, false, quick)
	e.insert(t, "a")
	rows := c.wait(t, 1)
	var first time.Time
	replies := 0
	testenv.Eventually(t, 20*time.Second, func() error {
		s := e.sender(t)
		if s.write < int64(rows[0].End) {
			return fmt.Errorf("write position %d", s.write)
		}
		if s.replies.After(first) {
			first = s.replies
			replies++
		}
		if replies < 3 {
			return fmt.Errorf("%d statuses", replies)
		}
		return nil
	})
	if got := e.status(t).Confirmed; got > rows[0].Commit {
		t.Errorf("confirmed went from %s to %s, beyond the unsettled commit at %s", was, got, rows[0].Commit)
	}
	if err := c.stop(); !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	if got := subjects(start(t, c.r, true).wait(t, 1)); got[0] != "a" {
		t.Errorf("got %v again", got)
	}
}

// A confirmed position lives in the server's memory until a checkpoint: after a crash confirmed events come again, and
// none is missing.
func TestConfirmedIsNotDurable(t *testing.T) {
	t.Parallel()
	for range 3 { // the server may write the slot by itself in the moment before it is stopped
		if confirmedIsLost(t) {
			return
		}
	}
	t.Error("a confirmed position survived three crashes; was it made durable?")
}

func confirmedIsLost(t *testing.T) bool {
	t.Helper()
	srv := testenv.NewServer(t)
	e := prepare(t, srv.Database(t))
	e.ensure(t)
	c := e.run(t, true)
	e.insertMany(t, "a", 5)
	rows := c.wait(t, 5)
	e.confirmed(t, rows[4].End)
	must(t, srv.Stop("immediate"))
	wantReason(t, c.ended(t, 20*time.Second), outbox.ReasonConnection)
	must(t, srv.Start(t.Context()))
	testenv.Eventually(t, 20*time.Second, func() error { return e.db.Pool.Ping(t.Context()) })
	if e.status(t).Confirmed >= rows[4].End {
		return false
	}
	e.insert(t, "b")
	again := start(t, c.r, true)
	testenv.Eventually(t, 20*time.Second, func() error {
		if got := subjects(again.events()); !slices.Contains(got, "b") {
			return fmt.Errorf("got %v", got)
		}
		return nil
	})
	got := subjects(again.events())
	if want := []string{"a1", "a2", "a3", "a4", "a5", "b"}; !slices.Equal(got, want[len(want)-len(got):]) ||
		len(got) == 1 {
		t.Errorf("got %v, want the end of %v, repeated ones included", got, want)
	}
	return true
}

// A receiver that takes nothing for longer than wal_sender_timeout does not lose the connection, and what was settled
// meanwhile is reported.
func TestBlockedReceiverKeepsTheConnection(t *testing.T) {
	t.Parallel()
	e := setup(t)
	r := e.reader(t, quick)
	out := make(chan outbox.Chunk)
	done, stop := goRun(t, r, out)
	e.insertMany(t, "x", 3)
	var rows []outbox.Row
	for len(events(rows)) < 3 || rows[len(rows)-1].End == 0 {
		rows = append(rows, (<-out).Rows...)
	}
	rows = events(rows)
	e.insert(t, "y") // nobody takes it
	before := e.sender(t)
	r.Settled(rows[2].End)
	e.confirmed(t, rows[2].End)
	testenv.Eventually(t, 20*time.Second, func() error {
		if s := e.sender(t); s.age < before.age+quickSender*3/2 {
			return fmt.Errorf("age %v", s.age)
		}
		return nil
	})
	if s := e.sender(t); s.pid != before.pid {
		t.Errorf("walsender %d was replaced by %d", before.pid, s.pid)
	}
	for rows = nil; len(rows) == 0; {
		rows = append(rows, (<-out).Rows...)
	}
	if rows[0].AggregateID != "y" {
		t.Errorf("got %v", subjects(rows))
	}
	stop()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

// An idle outbox in a busy database holds back nothing, and the receiver gets the position.
func TestIdleOutboxConfirmsOtherWAL(t *testing.T) {
	t.Parallel()
	e := setup(t)
	other := testenv.Empty(t)
	c := e.run(t, true, quick)
	other.Exec(t, "CREATE TABLE noise AS SELECT repeat('x', 1000) FROM generate_series(1, 5000)")
	target := e.walEnd(t)
	other.Exec(t, "INSERT INTO noise VALUES ('y')")
	e.confirmed(t, target)
	testenv.Eventually(t, 20*time.Second, func() error {
		c.mu.Lock()
		defer c.mu.Unlock()
		if n := len(c.chunks); n == 0 || c.chunks[n-1].Position < target {
			return fmt.Errorf("%d chunks, want one at %s", n, target)
		}
		return nil
	})
	if n := len(c.events()); n != 0 {
		t.Errorf("%d events out of nowhere", n)
	}
	// Not while something is in flight.
	c.mu.Lock()
	c.settle = false
	c.mu.Unlock()
	e.insert(t, "unsettled")
	rows := c.wait(t, 1)
	other.Exec(t, "INSERT INTO noise SELECT repeat('x', 1000) FROM generate_series(1, 1000)")
	target = e.walEnd(t)
	other.Exec(t, "INSERT INTO noise VALUES ('y')")
	testenv.Eventually(t, 20*time.Second, func() error {
		if s := e.sender(t); s.write < int64(target) {
			return fmt.Errorf("write %d", s.write)
		}
		return nil
	})
	if got := e.status(t).Confirmed; got > rows[0].Commit {
		t.Errorf("confirmed %s beyond the unsettled commit at %s", got, rows[0].Commit)
	}
	c.r.Settled(rows[0].End)
	e.confirmed(t, target) // together with the WAL behind it
}

// Chunk.Position is honest: whatever is committed below it was handed out before or is in that chunk.
func TestPositionIsHonest(t *testing.T) {
	t.Parallel()
	e := setup(t)
	c := e.run(t, true)
	e.insertMany(t, "x", 300)
	e.insertOf(t, "'big'", "'{}'", 3000)
	e.insertMany(t, "y", 300)
	c.wait(t, 3600)
	c.mu.Lock()
	defer c.mu.Unlock()
	var position outbox.LSN
	for i, chunk := range c.chunks {
		for _, row := range chunk.Rows {
			if row.Commit < position {
				t.Fatalf("chunk %d: commit at %s below the position %s handed out before", i, row.Commit, position)
			}
		}
		if chunk.Position < position {
			t.Fatalf("chunk %d: position went back from %s to %s", i, position, chunk.Position)
		}
		position = chunk.Position
		if n := len(chunk.Rows); n > 0 && chunk.Rows[n-1].End > position {
			t.Fatalf("chunk %d: position %s below its own end", i, position)
		}
	}
	checkEnds(t, c.rows)
}

// Every setting that changes what the server sends is the connection's own.
func TestConnectionBringsItsOwnSettings(t *testing.T) {
	t.Parallel()
	e := setup(t)
	e.db.Exec(t, "ALTER DATABASE "+e.db.Name+" SET datestyle = 'German'")
	e.db.Exec(t, "ALTER DATABASE "+e.db.Name+" SET timezone = 'Asia/Kolkata'")
	r := e.reader(t)
	conn, err := pgconn.ConnectConfig(t.Context(), &r.cfg.Copy().Config)
	must(t, err)
	defer conn.Close(t.Context())
	for name, want := range map[string]string{
		"wal_sender_timeout": "10s", "DateStyle": "ISO, MDY", "TimeZone": "UTC",
		"client_encoding": "UTF8",
	} {
		res, err := conn.Exec(t.Context(), "SHOW "+name).ReadAll()
		must(t, err)
		if got := string(res[0].Rows[0][0]); got != want {
			t.Errorf("%s is %q, want %q", name, got, want)
		}
	}
	c := start(t, r, true)
	e.insert(t, "a")
	if row := c.wait(t, 1)[0]; time.Since(row.Time).Abs() > time.Minute {
		t.Errorf("committed at %v", row.Time)
	}
}
