package poll_test

import (
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"posthaste/internal/testenv"
	"posthaste/outbox"
)

func TestOrderWithManyWorkersAndSweepers(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ sweepers, workers, rows int }{{1, 1, 100}, {1, 4, 7}, {3, 2, 20}} {
		t.Run(fmt.Sprintf("%d by %d", c.sweepers, c.workers), func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			for range c.sweepers {
				r.run(r.options(c.workers, c.rows))
			}
			load := testenv.StartLoad(t, r.db, testenv.LoadOptions{
				Total: 1500, Writers: 6,
				Types: []string{"order", "credits"},
			})
			load.Wait()
			r.oracle().Check(t, load, 20*time.Second)
		})
	}
}

// A transaction that began early commits between two batches, and its aggregate has a younger event behind the first
// batch. The sweep that goes on behind the last number it met publishes the younger one first.
func TestALateRowIsNotOvertaken(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	names := inPart(t, r, 2)
	late := names[0]
	tx := r.begin()
	first, err := insertIn(t.Context(), tx, "order", late, `{"n":1}`)
	r.must(err)
	between := r.insert("order", names[1], `{"n":1}`)
	var second uuid.UUID
	var once sync.Once
	r.published = func([]*outbox.Event) {
		once.Do(func() {
			r.must(tx.Commit(t.Context()))
			second = r.insert("order", late, `{"n":2}`)
		})
	}
	r.run(r.options(1, 1))
	r.oracle().WaitEmpty(t, 20*time.Second)
	r.eventually(20*time.Second, "three entries", func() bool { return len(r.entries("order")) == 3 })
	if got, want := r.entries("order"), []uuid.UUID{between, first, second}; !slices.Equal(got, want) {
		t.Errorf("published %v, want %v", got, want)
	}
}

// Somebody writes to a row while the sweep waits for it: its headers are redacted, say. The row has moved, and is still
// the first of its aggregate. A row that was deleted is not missed.
func TestARowThatIsWrittenMeanwhileIsNotOvertaken(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		write string
		gone  bool
	}{
		"updated": {write: `UPDATE outbox SET headers = '{"redacted": true}' WHERE id = $1`},
		"deleted": {write: `DELETE FROM outbox WHERE id = $1`, gone: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			var want []uuid.UUID
			for n := range 4 {
				want = append(want, r.insert("order", "a", fmt.Sprintf(`{"n":%d}`, n)))
			}
			tx := r.begin()
			_, err := tx.Exec(t.Context(), c.write, want[1])
			r.must(err)
			r.run(r.options(1, 500))
			r.eventually(20*time.Second, "the sweep waits", func() bool {
				return testenv.Value[bool](t, r.db,
					"SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted AND locktype = 'transactionid' AND "+
						"transactionid IN (SELECT transactionid FROM pg_locks WHERE granted AND pid = $1))",
					tx.Conn().PgConn().PID())
			})
			r.must(tx.Commit(t.Context()))
			r.oracle().WaitEmpty(t, 20*time.Second)
			if c.gone {
				want = slices.Delete(want, 1, 2)
			}
			r.eventually(20*time.Second, "all entries", func() bool { return len(r.entries("order")) == len(want) })
			if got := r.entries("order"); !slices.Equal(got, want) {
				t.Errorf("published %v, want %v", got, want)
			}
			if n := testenv.Value[int](t, r.db,
				"SELECT count(*) FROM outbox_history WHERE headers ? 'redacted'"); !c.gone && n != 1 {
				t.Errorf("%d events in history are as they were written last, want 1", n)
			}
		})
	}
}

// inPart returns n aggregates of one part.
func inPart(tb testing.TB, r *rig, n int) []string {
	tb.Helper()
	rows, err := r.db.Pool.Query(tb.Context(),
		"SELECT 'a-' || g FROM generate_series(1, 1000) g WHERE hashtextextended('a-' || g, 0) & 15 = 3 LIMIT $1", n)
	r.must(err)
	names, err := pgx.CollectRows(rows, pgx.RowTo[string])
	r.must(err)
	if len(names) != n {
		tb.Fatalf("%d names, want %d", len(names), n)
	}
	return names
}

func TestHistoryIsTheReceipt(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	id := uuid.New()
	r.db.Exec(t, `INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload, headers)
		VALUES ($1, 'order', 'o-1', 'order.created', '{"b": [1.50, "\u00e9"], "a": null}', '{"tenant": "x"}')`, id)
	r.db.Exec(t, "CREATE TABLE before AS SELECT * FROM outbox")
	r.insert("credits", "u-1", `{}`)
	r.run(r.options(2, 10))
	r.oracle().WaitEmpty(t, 20*time.Second)
	same := testenv.Value[int](t, r.db,
		`SELECT count(*) FROM outbox_history h JOIN before b USING (seq, id, aggregate_type, aggregate_id, `+
			`event_type, created_at)
		WHERE h.payload = b.payload AND h.headers = b.headers AND mode = 'poll' AND stream = 'outbox.order'
		  AND published_at BETWEEN created_at AND clock_timestamp()`)
	if same != 1 {
		t.Error("the history's row is not the outbox's")
	}
	if n := testenv.Value[int](t, r.db,
		"SELECT count(*) FROM outbox_history WHERE headers IS NULL AND stream = 'outbox.credits'"); n != 1 {
		t.Errorf("%d rows of the other event", n)
	}
	entry := testenv.Value[string](t, r.db, "SELECT entry_id FROM outbox_history WHERE id = $1", id)
	if msgs, err := r.redis.Client.XRange(t.Context(), "outbox.order", entry, entry).Result(); err != nil ||
		len(msgs) != 1 || msgs[0].Values["id"] != id.String() {
		t.Errorf("entry %q is %v, %v", entry, msgs, err)
	}
}

func TestWithoutHistory(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.insert("order", "o-1", `{}`)
	o := r.options(1, 10)
	o.History = false
	r.run(o)
	r.oracle().WaitEmpty(t, 20*time.Second)
	if n := testenv.Value[int](t, r.db, "SELECT count(*) FROM outbox_history"); n != 0 || len(r.entries("order")) != 1 {
		t.Errorf("%d rows of history, %d entries", n, len(r.entries("order")))
	}
}
