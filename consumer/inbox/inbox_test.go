package inbox_test

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"go.uber.org/goleak"

	"posthaste/consumer/inbox"
	"posthaste/internal/lab/testenv"
)

var must = testenv.Must

func TestMain(m *testing.M) {
	code := testenv.Main(m)
	if err := goleak.Find(); err != nil && code == 0 {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

func v7(t *testing.T) string {
	t.Helper()
	id, err := uuid.NewV7()
	must(t, err)
	return id.String()
}

// old is a UUIDv7 made the given number of days ago.
func old(t *testing.T, days int) string {
	t.Helper()
	id := uuid.MustParse(v7(t))
	ms := time.Now().AddDate(0, 0, -days).UnixMilli()
	for i := range 6 {
		id[i] = byte(ms >> (40 - 8*i))
	}
	return id.String()
}

func once(t *testing.T, d *testenv.Database, group, id string) bool {
	t.Helper()
	var first bool
	err := pgx.BeginFunc(t.Context(), d.Pool, func(tx pgx.Tx) (err error) {
		first, err = inbox.Once(t.Context(), tx, group, id)
		return err
	})
	must(t, err)
	return first
}

func TestOncePerGroupAndEvent(t *testing.T) {
	t.Parallel()
	d := testenv.Postgres(t)
	must(t, inbox.Maintain(t.Context(), d.Pool, 24*time.Hour))
	for _, id := range []string{v7(t), old(t, 400), uuid.NewString(), "not a uuid"} {
		if !once(t, d, "a", id) || once(t, d, "a", id) || !once(t, d, "b", id) || once(t, d, "b", id) {
			t.Errorf("event %q is not seen exactly once per group", id)
		}
	}
	n := testenv.Value[int](t, d, "SELECT count(*) FROM inbox_default") // those of today belong into today's
	testenv.Equal(t, "notes in the default partition", n, 6)
}

// inbox_once and Once find each other's notes. The function needs no more rights than Once, and no search path.
func TestTheFunctionDoesTheSame(t *testing.T) {
	t.Parallel()
	d := testenv.Postgres(t)
	role := "reader_" + d.Name
	d.Exec(t, "CREATE ROLE "+role+" "+testenv.Login(d.URL))
	d.Exec(t, "GRANT INSERT (day, consumer_group, event_id) ON inbox TO "+role)
	c, err := pgx.Connect(t.Context(), testenv.As(d.URL, role))
	must(t, err)
	t.Cleanup(func() { _ = c.Close(t.Context()) })
	call := func(group, id string) (first bool) {
		t.Helper()
		err := pgx.BeginFunc(t.Context(), c, func(tx pgx.Tx) error {
			var limit string
			_, err := tx.Exec(t.Context(), "SET LOCAL search_path = pg_catalog")
			must(t, err)
			must(t, tx.QueryRow(t.Context(), "SELECT public.inbox_once($1, $2)", group, id).Scan(&first))
			must(t, tx.QueryRow(t.Context(), "SHOW idle_in_transaction_session_timeout").Scan(&limit))
			testenv.Equal(t, "how long the transaction may be idle", limit, "1min")
			return nil
		})
		must(t, err)
		return first
	}
	for _, id := range []string{
		v7(t), old(t, 400), uuid.NewString(), uuid.Nil.String(), uuid.Max.String(),
		"00000000-0000-7000-8000-000000000000", "ffffffff-ffff-7fff-bfff-ffffffffffff",
	} {
		if !call("a", id) || call("a", id) || once(t, d, "a", id) {
			t.Errorf("event %s: the function's note is not found", id)
		}
		if !once(t, d, "b", id) || call("b", id) {
			t.Errorf("event %s: the function does not find a note", id)
		}
	}
}

// A database that fails is not the event's fault, in the words of package consumer.
func TestAFailingDatabaseIsUnavailable(t *testing.T) {
	t.Parallel()
	d := testenv.Postgres(t)
	role := "denied_" + d.Name
	d.Exec(t, "CREATE ROLE "+role+" "+testenv.Login(d.URL))
	for name, c := range map[string]struct {
		role, before, group string
		unavailable         bool
	}{
		"no right":          {role, "SELECT 1", "g", true},
		"no table":          {"", "SET LOCAL search_path = pg_catalog", "g", true},
		"a standby":         {"", "SET TRANSACTION READ ONLY", "g", true},
		"a lost connection": {"", "SELECT pg_terminate_backend(pg_backend_pid())", "g", true},
		"a bad group":       {"", "SELECT 1", "", false},
		"an ended one":      {"", "ROLLBACK", "g", false},
	} {
		url := d.URL
		if c.role != "" {
			url = testenv.As(d.URL, c.role)
		}
		conn, err := pgx.Connect(t.Context(), url)
		must(t, err)
		tx, err := conn.Begin(t.Context())
		must(t, err)
		if c.before == "ROLLBACK" {
			_ = tx.Rollback(t.Context())
		} else {
			_, _ = tx.Exec(t.Context(), c.before)
		}
		_, err = inbox.Once(t.Context(), tx, c.group, v7(t))
		var u interface{ Unavailable() bool }
		if err == nil || (errors.As(err, &u) && u.Unavailable()) != c.unavailable {
			t.Errorf("%s: %v", name, err)
		}
		_ = conn.Close(t.Context())
	}
}

func TestRollbackForgets(t *testing.T) {
	t.Parallel()
	d := testenv.Postgres(t)
	id := v7(t)
	boom := errors.New("boom")
	err := pgx.BeginFunc(t.Context(), d.Pool, func(tx pgx.Tx) error {
		if first, err := inbox.Once(t.Context(), tx, "g", id); err != nil || !first {
			t.Errorf("Once = %v, %v", first, err)
		}
		return boom
	})
	testenv.ErrorIs(t, "the transaction", err, boom)
	if !once(t, d, "g", id) {
		t.Error("the note outlived its transaction")
	}
}

// A transaction that holds a note and does nothing is bounded, unless its session says otherwise.
func TestIdleTransactionIsBounded(t *testing.T) {
	t.Parallel()
	d := testenv.Postgres(t)
	for own, want := range map[string]string{"0": "1min", "7s": "7s"} {
		err := pgx.BeginFunc(t.Context(), d.Pool, func(tx pgx.Tx) error {
			_, err := tx.Exec(t.Context(), "SELECT set_config('idle_in_transaction_session_timeout', $1, true)", own)
			must(t, err)
			_, err = inbox.Once(t.Context(), tx, "g", v7(t))
			must(t, err)
			var got string
			must(t, tx.QueryRow(t.Context(), "SHOW idle_in_transaction_session_timeout").Scan(&got))
			testenv.Equal(t, "own limit "+own, got, want)
			return nil
		})
		must(t, err)
	}
}

// Many transactions at once, some of which fail: exactly one has the effect, in every isolation level.
func TestConcurrentDeliveriesHaveOneEffect(t *testing.T) {
	t.Parallel()
	for _, level := range []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable} {
		t.Run(string(level), func(t *testing.T) {
			t.Parallel()
			d := testenv.Postgres(t)
			for range 10 {
				id := v7(t)
				var effects atomic.Int32
				var wg sync.WaitGroup
				for i := range 6 {
					wg.Go(func() {
						for attempt := range 50 {
							err := pgx.BeginTxFunc(t.Context(), d.Pool, pgx.TxOptions{IsoLevel: level},
								func(tx pgx.Tx) error {
									// fixes the snapshot
									if _, err := tx.Exec(t.Context(), "SELECT 1 FROM orders LIMIT 1"); err != nil {
										return err
									}
									first, err := inbox.Once(t.Context(), tx, "g", id)
									if err != nil || !first {
										return err
									}
									if i%2 == 0 && attempt == 0 {
										return errors.New("a failing handler")
									}
									_, err = tx.Exec(t.Context(),
										"INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload) "+
											"VALUES ($1, 'x', 'x', 'x', '{}')",
										uuid.New())
									if err == nil {
										effects.Add(1)
									}
									return err
								})
							if err == nil {
								return
							}
						}
					})
				}
				wg.Wait()
				if n := effects.Load(); n != 1 {
					t.Fatalf("%d effects, want 1", n)
				}
			}
			testenv.Equal(t, "rows", testenv.Value[int](t, d, "SELECT count(*) FROM outbox"), 10)
		})
	}
}

func TestMaintain(t *testing.T) {
	t.Parallel()
	d := testenv.Postgres(t)
	const retention = 48 * time.Hour
	// A partition of ten days ago whose notes are old, one with a fresh note, and old notes in the default partition.
	for _, days := range []int{10, 9} {
		day := time.Now().UTC().AddDate(0, 0, -days)
		d.Exec(t, fmt.Sprintf("CREATE TABLE inbox_p%s PARTITION OF inbox FOR VALUES FROM ('%s') TO ('%s')",
			day.Format("20060102"), day.Format("2006-01-02"), day.AddDate(0, 0, 1).Format("2006-01-02")))
	}
	gone, late, other := old(t, 10), old(t, 9), uuid.NewString()
	for _, id := range []string{gone, late, other} {
		once(t, d, "g", id)
	}
	d.Exec(t, "UPDATE inbox SET seen_at = seen_at - interval '3 days' WHERE event_id IN ($1, $2)", gone, other)
	// A note of tomorrow that came before its partition keeps that day in the default partition.
	once(t, d, "g", old(t, -1))
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			testenv.ErrorIs(t, "Maintain", inbox.Maintain(t.Context(), d.Pool, retention), nil)
		})
	}
	wg.Wait()
	must(t, inbox.Maintain(t.Context(), d.Pool, retention))
	if got := testenv.Value[int](t, d,
		"SELECT count(*) FROM pg_inherits WHERE inhparent = 'inbox'::regclass"); got != 1+1+3 {
		t.Errorf("%d partitions, want the default one, the one with the late note, and 3 of the 4 ahead", got)
	}
	if once(t, d, "g", late) {
		t.Error("a note seen within the retention was forgotten")
	}
	if !once(t, d, "g", gone) || !once(t, d, "g", other) {
		t.Error("old notes were kept")
	}
	if err := inbox.Maintain(t.Context(), d.Pool, time.Minute); err == nil {
		t.Error("a retention of a minute was accepted")
	}
}

// Housekeeping gives up instead of making handlers wait behind it.
func TestMaintainDoesNotQueueHandlers(t *testing.T) {
	t.Parallel()
	d := testenv.Postgres(t)
	err := pgx.BeginFunc(t.Context(), d.Pool, func(tx pgx.Tx) error {
		if _, err := inbox.Once(t.Context(), tx, "g", v7(t)); err != nil {
			return err
		}
		if err := inbox.Maintain(t.Context(), d.Pool, 24*time.Hour); err == nil {
			t.Error("Maintain made a partition while a handler's transaction held the table")
		}
		return nil
	})
	must(t, err)
	must(t, inbox.Maintain(t.Context(), d.Pool, 24*time.Hour))
}

func TestEveryQueryPrepares(t *testing.T) {
	t.Parallel()
	testenv.Postgres(t).PrepareAll(t, "queries")
}
