package cdc

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"posthaste/internal/lab/testenv"
	"posthaste/outbox"
)

func TestOnlyWhatWasCommittedIntoTheOutboxArrives(t *testing.T) {
	t.Parallel()
	e := setup(t)
	e.db.Exec(t, "CREATE TABLE other (id int); ALTER PUBLICATION posthaste ADD TABLE other")
	e.db.Exec(t, "CREATE SCHEMA elsewhere; CREATE TABLE elsewhere.outbox (LIKE outbox INCLUDING ALL); "+
		"ALTER PUBLICATION posthaste ADD TABLE elsewhere.outbox")
	c := e.run(t, true)
	const ins = "INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload) "
	const row = " gen_random_uuid(), 'order', %s, 'order.created', '{}' "
	rows := func(n int, subject string) string {
		return fmt.Sprintf(ins+"SELECT"+row+"FROM generate_series(1, %d) i;", subject, n)
	}
	one := func(subject string) string { return fmt.Sprintf(ins+"VALUES ("+row+");", "'"+subject+"'") }

	// Rolled back to a savepoint; the rest counts.
	e.db.Exec(t, "BEGIN;"+rows(500, "'kept-' || i")+"SAVEPOINT s;"+rows(500, "'undone-' || i")+"ROLLBACK TO s;"+
		rows(5, "'after-' || i")+"COMMIT")
	got := subjects(c.wait(t, 505))
	if got[0] != "kept-1" || got[499] != "kept-500" || got[504] != "after-5" {
		t.Errorf("savepoint: %v … %v", got[0], got[504])
	}
	// Subtransactions of PL/pgSQL: one committed, one not.
	e.db.Exec(t, "DO $$ BEGIN "+one("sub-1")+" BEGIN "+one("sub-x")+
		" RAISE division_by_zero; EXCEPTION WHEN division_by_zero THEN NULL; END; BEGIN "+
		one("sub-2")+" EXCEPTION WHEN division_by_zero THEN NULL; END; END $$")
	e.db.Exec(t, "BEGIN;"+one("rolled-back")+"ROLLBACK")
	// Deleted in the same transaction, past the trigger that refuses it: the insert still counts, the delete never
	// does.
	e.db.Exec(t, "BEGIN; SET LOCAL session_replication_role = replica;"+one("gone")+
		"DELETE FROM outbox WHERE aggregate_id = 'gone'; COMMIT")
	e.db.Exec(t, "BEGIN; INSERT INTO other VALUES (1); INSERT INTO elsewhere.outbox "+
		"(seq, id, aggregate_type, aggregate_id, event_type, payload) OVERRIDING SYSTEM VALUE VALUES (1, "+
		"gen_random_uuid(), 'a', 'wrong', 't', '{}');"+
		one("mixed")+"INSERT INTO other VALUES (2); COMMIT")
	// Nothing of ours at all, but published.
	e.db.Exec(t, "INSERT INTO other SELECT generate_series(1, 10)")
	e.db.Exec(t, "DELETE FROM outbox; TRUNCATE other")
	copyRows(t, e, "copied-1", "copied-2")
	want := []string{"sub-1", "sub-2", "gone", "mixed", "copied-1", "copied-2"}
	all := c.wait(t, 511)
	if got := subjects(all)[505:]; !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
	checkEnds(t, c.all())
	// The transaction without rows of ours is confirmed too.
	e.confirmed(t, all[510].End)
}

func copyRows(t *testing.T, e *env, names ...string) {
	t.Helper()
	conn, err := e.db.Pool.Acquire(t.Context())
	must(t, err)
	defer conn.Release()
	n, err := conn.CopyFrom(t.Context(), pgx.Identifier{"outbox"},
		[]string{"id", "aggregate_type", "aggregate_id", "event_type", "payload"},
		pgx.CopyFromSlice(len(names), func(i int) ([]any, error) {
			return []any{fmt.Sprintf("01890a5d-ac96-774b-bcce-b30209900%03d", i), "order", names[i], "t", []byte("{}")},
				nil
		}))
	if err != nil || int(n) != len(names) {
		t.Fatalf("copied %d: %v", n, err)
	}
}

// checkEnds: every transaction has exactly one End, on its last row, and commits ascend.
func checkEnds(t *testing.T, rows []outbox.Row) {
	t.Helper()
	var last outbox.LSN
	for i, r := range rows {
		if r.Commit < last {
			t.Fatalf("row %d: commit %s after %s", i, r.Commit, last)
		}
		closes := i == len(rows)-1 || rows[i+1].Commit != r.Commit
		if (r.End != 0) != closes || (r.End != 0 && r.End <= r.Commit) {
			t.Fatalf("row %d of the transaction at %s: end %s, last %v", i, r.Commit, r.End, closes)
		}
		last = r.Commit
	}
}

func TestPreparedTransactionArrivesWhenItIsCommitted(t *testing.T) {
	t.Parallel()
	srv := limited(t)
	e := prepare(t, srv.Database(t))
	e.ensure(t)
	c := e.run(t, true)
	e.db.Exec(t, "BEGIN;"+strings.ReplaceAll(insertOne, "$1", "'prepared'")+"; PREPARE TRANSACTION 'p'")
	e.insert(t, "between")
	if got := subjects(c.wait(t, 1)); got[0] != "between" {
		t.Errorf("got %v", got)
	}
	e.db.Exec(t, "COMMIT PREPARED 'p'")
	rows := c.wait(t, 2)
	if rows[1].AggregateID != "prepared" || rows[1].End == 0 {
		t.Errorf("got %+v", rows[1])
	}
	e.confirmed(t, rows[1].End)
}

func TestTableMayChangeWhileItIsStreamed(t *testing.T) {
	t.Parallel()
	e := setup(t)
	c := e.run(t, true)
	e.insert(t, "1")
	e.db.Exec(t, "ALTER TABLE outbox ADD COLUMN tenant text DEFAULT 'x'")
	e.insert(t, "2")
	// headers and created_at move behind tenant.
	e.db.Exec(t, `ALTER TABLE outbox DROP COLUMN headers CASCADE; ALTER TABLE outbox DROP COLUMN created_at;
		ALTER TABLE outbox ADD COLUMN headers jsonb`)
	e.db.Exec(t, `INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload, headers, tenant)
		VALUES (gen_random_uuid(), 'order', '3', 'order.created', '{"n": 3}', '{"traceparent": "x"}', 'not the `+
		`headers')`)
	e.db.Exec(t, "ALTER TABLE outbox DROP COLUMN tenant")
	e.insert(t, "4")
	rows := c.wait(t, 4)
	if !slices.Equal(subjects(rows), []string{"1", "2", "3", "4"}) {
		t.Fatalf("got %v", subjects(rows))
	}
	if rows[2].TraceParent() != "x" || string(rows[2].Payload) != `{"n": 3}` {
		t.Errorf("third row: %+v", rows[2])
	}
	e.db.Exec(t, "ALTER TABLE outbox RENAME COLUMN payload TO body")
	e.db.Exec(t, strings.NewReplacer("payload", "body", "$1", "'5'").Replace(insertOne))
	err := c.ended(t, 20*time.Second)
	wantReason(t, err, outbox.ReasonDecode)
	if !strings.Contains(err.Error(), `"payload"`) {
		t.Errorf("the error does not name the column: %v", err)
	}
	if st := e.status(t); !st.Exists || st.Active {
		t.Errorf("the slot is not kept free: %+v", st)
	}
}

// A transaction of 100,000 rows is delivered in bounded pieces while it is received, and reading stops while the
// receiver is blocked.
func TestLargeTransactionIsHandedOverInPieces(t *testing.T) {
	t.Parallel()
	e := setup(t)
	const n = 100_000
	r := e.reader(t, func(o *Options) { o.ChunkBytes = 256 << 10 })
	out := make(chan outbox.Chunk)
	done, stop := goRun(t, r, out)
	e.insertOf(t, "i::text", `'{"n": 1}'`, n)
	var first outbox.Chunk
	for len(first.Rows) == 0 {
		first = <-out
	}
	if first.Rows[len(first.Rows)-1].End != 0 || first.Position != first.Rows[0].Commit {
		t.Errorf("the first piece claims the end of the transaction: %+v, position %s", first.Rows[len(first.Rows)-1],
			first.Position)
	}
	// The receiver does not take the second piece, so the reader stops reading, and the server sending.
	testenv.Eventually(t, 20*time.Second, func() error {
		return testenv.FailIf(r.wireIdle() < 1, "the reader goes on reading")
	})
	if !testenv.Value[bool](t, e.db, `SELECT sent_lsn <= $1::pg_lsn FROM pg_stat_replication r
		JOIN pg_replication_slots s ON s.active_pid = r.pid WHERE s.slot_name = $2`, first.Position.String(), e.slot) {
		t.Error("the server has sent the transaction as a whole")
	}
	seq, ends, largest := len(first.Rows), 0, 0
	for seq < n || ends == 0 {
		chunk := <-out
		largest = max(largest, chunk.Bytes)
		sum := 0
		for i := range chunk.Rows {
			row := &chunk.Rows[i]
			sum += row.Size()
			if row.End != 0 {
				ends++
			}
			if row.Marker() {
				continue
			}
			if seq++; row.AggregateID != fmt.Sprint(seq) {
				t.Fatalf("row %d is %s", seq, row.AggregateID)
			}
		}
		if sum != chunk.Bytes || len(chunk.Rows) > chunkRows {
			t.Fatalf("chunk of %d rows says %d bytes, has %d", len(chunk.Rows), chunk.Bytes, sum)
		}
	}
	if ends != 1 || largest > 256<<10+1024 {
		t.Errorf("%d ends, largest piece %d bytes", ends, largest)
	}
	stop()
	_ = <-done
}

// With synchronous replication a commit waits for the standby before others see it, but it is streamed at once.
func TestCommitIsStreamedBeforeItIsVisible(t *testing.T) {
	t.Parallel()
	// Only sessions that request it wait for the standby, which does not exist.
	srv := testenv.NewServer(t, "synchronous_standby_names=nobody", "synchronous_commit=local")
	e := prepare(t, srv.Database(t))
	e.ensure(t)
	c := e.run(t, true)
	writer, err := e.db.Pool.Acquire(t.Context())
	must(t, err)
	defer writer.Release()
	_, err = writer.Exec(t.Context(), "SET synchronous_commit = on")
	must(t, err)
	committed := make(chan error, 1)
	go func() {
		_, err := writer.Exec(t.Context(), insertOne, "held")
		committed <- err
	}()
	rows := c.wait(t, 1)
	if n := testenv.Value[int](t, e.db, "SELECT count(*)::int FROM outbox"); n != 0 {
		t.Errorf("%d rows are visible, want none yet", n)
	}
	var xmin int64
	err = e.db.Pool.QueryRow(t.Context(),
		"SELECT pg_snapshot_xmin(pg_current_snapshot())::text::bigint & 4294967295").Scan(&xmin)
	if err != nil || xmin > int64(rows[0].XID) {
		t.Errorf("xmin %d is beyond transaction %d: %v", xmin, rows[0].XID, err)
	}
	e.db.Exec(t, "SELECT pg_cancel_backend($1)", writer.Conn().PgConn().PID()) // ends the wait, not the commit
	if err := <-committed; err != nil {
		t.Error(err)
	}
	if n := testenv.Value[int](t, e.db, "SELECT count(*)::int FROM outbox"); n != 1 {
		t.Errorf("%d rows are visible at the end", n)
	}
}
