package sql_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"posthaste/internal/testenv"
	"posthaste/outbox"
	"posthaste/sql"
)

func TestMain(m *testing.M) { os.Exit(testenv.Main(m)) }

func TestMigrateFromManyPlacesAtOnce(t *testing.T) {
	t.Parallel()
	d := testenv.Empty(t)
	if err := sql.CheckSchema(t.Context(), d.Pool); !errors.Is(err, sql.ErrSchemaMissing) {
		t.Fatalf("before: got %v, want ErrSchemaMissing", err)
	}
	var wg sync.WaitGroup
	applied := make([]int, 4)
	errs := make([]error, 4)
	for i := range applied {
		wg.Go(func() {
			v, err := sql.Migrate(context.Background(), d.URL, "public", slog.New(slog.DiscardHandler))
			applied[i], errs[i] = len(v), err
		})
	}
	wg.Wait()
	total := 0
	for i := range applied {
		if errs[i] != nil {
			t.Errorf("migrate %d: %v", i, errs[i])
		}
		total += applied[i]
	}
	if files, _ := filepath.Glob("migrations/*.sql"); total != len(files) {
		t.Errorf("applied %d migrations in all, want %d", total, len(files))
	}
	if err := sql.CheckSchema(t.Context(), d.Pool); err != nil {
		t.Errorf("after: %v", err)
	}
	d.Exec(t, "INSERT INTO posthaste_migrations (version_id, is_applied) VALUES (99999, true)")
	if err := sql.CheckSchema(t.Context(), d.Pool); !errors.Is(err, sql.ErrSchemaNewer) {
		t.Errorf("newer: got %v, want ErrSchemaNewer", err)
	}
}

// Somebody uses a table for long that a migration changes, or the one that notes the migrations. Nobody else waits
// behind the migration for longer than a moment, and it comes when the table is free.
func TestAMigrationWaitsItsTurn(t *testing.T) {
	t.Parallel()
	for name, lock := range map[string]string{
		"a backup":  "SELECT FROM relay_state",
		"their own": "LOCK TABLE posthaste_migrations",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d := testenv.Postgres(t)
			unmarked(t, d)
			user, err := d.Pool.Begin(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = user.Rollback(context.Background()) }()
			if _, err := user.Exec(t.Context(), lock); err != nil {
				t.Fatal(err)
			}
			logs := &strings.Builder{}
			done := make(chan error, 1)
			go func() {
				applied, err := sql.Migrate(context.Background(), d.URL, "public",
					slog.New(slog.NewTextHandler(logs, nil)))
				if err == nil && !slices.Equal(applied, []int64{9, 10, 11, 12}) {
					err = fmt.Errorf("applied %v", applied)
				}
				done <- err
			}()
			waiting(t, d, 1)
			testenv.Eventually(t, 20*time.Second, func() error { // it has let the others through
				if n := testenv.Value[int](t, d, `SELECT count(*) FROM pg_locks WHERE NOT granted
					AND database = (SELECT oid FROM pg_database WHERE datname = current_database())`); n > 0 {
					return errors.New("it waits")
				}
				return nil
			})
			if err := user.Rollback(t.Context()); err != nil {
				t.Fatal(err)
			}
			if err := <-done; err != nil || !strings.Contains(logs.String(), "trying again") {
				t.Errorf("migrate: %v; %s", err, logs)
			}
		})
	}
}

// unmarked takes the migrations back from that on with which the table became a log.
func unmarked(tb testing.TB, d *testenv.Database) {
	tb.Helper()
	for _, file := range []string{"00012_shards.sql", "00011_audit.sql", "00010_repair.sql", "00009_marks.sql"} {
		text, err := os.ReadFile("migrations/" + file)
		must(tb, err)
		_, down, _ := strings.Cut(string(text), "-- +goose Down")
		d.Exec(tb, "BEGIN;"+down+";COMMIT")
	}
	d.Exec(tb, "DELETE FROM posthaste_migrations WHERE version_id >= 9")
}

// The table has a backlog, parked events and a history when it becomes a log, services write to it, and the last
// version sweeps. Nothing is lost on the way, nor on the way back.
func TestTheTableBecomesALog(t *testing.T) {
	t.Parallel()
	d := testenv.Postgres(t)
	ctx := t.Context()
	unmarked(t, d)
	const columns = "seq, id, aggregate_type, aggregate_id, event_type, payload, headers, created_at"
	role := "reader_" + d.Name
	d.Exec(t, "CREATE ROLE "+role)
	d.Exec(t, "GRANT SELECT ON outbox, outbox_history TO "+role)
	insertMany := func(kind string, n int) {
		d.Exec(t, `INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload)
			SELECT gen_random_uuid(), 'order', 'a-' || i % 50, $1, '{}' FROM generate_series(1, $2::int) i`, kind, n)
	}
	insertMany("delivered", 100)
	settleAsBefore := `WITH gone AS (
			DELETE FROM outbox WHERE seq IN (SELECT seq FROM outbox ORDER BY seq LIMIT 10) RETURNING *)
		INSERT INTO outbox_history (` + columns + `, published_at, stream, entry_id, mode)
		SELECT ` + columns + `, now(), 'outbox.order', '1-1', 'poll' FROM gone`
	for range 10 {
		d.Exec(t, settleAsBefore)
	}
	d.Exec(t, `INSERT INTO outbox_dead (id, seq, aggregate_type, aggregate_id, event_type, payload, created_at, error,
			class, attempts)
		VALUES (gen_random_uuid(), 1, 'order', 'a-1', 'x', '{}', now(), 'x', 'x', 1)`)
	insertMany("owed", 500)

	stop := make(chan struct{})
	var busy sync.WaitGroup
	writing := func(done func(context.Context) error) {
		t.Helper()
		busy.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				if err := done(context.Background()); err != nil {
					t.Errorf("beside the migration: %v", err)
					return
				}
			}
		})
	}
	var written atomic.Int64
	writing(func(ctx context.Context) error {
		_, err := d.Pool.Exec(ctx, `INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload)
			VALUES (gen_random_uuid(), 'order', 'w', 'written', '{}')`)
		written.Add(1)
		return err
	})
	old, err := pgx.Connect(ctx, d.URL+"&application_name=posthaste%20sweep")
	must(t, err)
	defer old.Close(ctx)
	writing(func(ctx context.Context) error {
		_, err := old.Exec(ctx, settleAsBefore)
		return err
	})
	if _, err := sql.Migrate(ctx, d.URL, "public", testenv.Logger(t)); err != nil {
		t.Fatal(err)
	}
	close(stop)
	busy.Wait()
	count := func(what string) (n int64) {
		t.Helper()
		return testenv.Value[int64](t, d, "SELECT count(*) FROM "+what)
	}
	s := sql.NewStore(relayPool(t, d.URL), "test", 24*time.Hour)
	must(t, s.Register(ctx))
	all := 600 + written.Load()
	owed := backlog(t, s, d)
	if n := count("outbox_history"); owed != count("outbox") || owed+n != all || n < 100 {
		t.Errorf("%d rows are owed, %d are history, of %d", owed, n, all)
	}
	for _, view := range []string{"outbox_backlog", "outbox_history"} {
		if !testenv.Value[bool](t, d, "SELECT has_table_privilege($1, $2, 'SELECT')", role, view) {
			t.Errorf("who could read the table may not read %s", view)
		}
	}
	d.Exec(t, "DROP OWNED BY "+role)
	o := succeed(t, s)
	parked := int64(0)
	if owed > 0 { // the last version may have settled all
		parked = 1
		var r outbox.Row
		must(t, d.Pool.QueryRow(ctx, "SELECT seq, id, aggregate_id FROM outbox LIMIT 1").
			Scan(&r.Seq, &r.ID, &r.AggregateID))
		_, err = s.Park(ctx, o, &r, "too_large", "why", 1)
		must(t, err)
	}
	settle(t, s)
	if _, err := old.Exec(ctx, settleAsBefore); err == nil {
		t.Error("the last version settles beside the new one")
	}
	insertMany("last", 7)
	history := count("outbox_history")
	if n := backlog(t, s, d); n != 7 || history != all-parked {
		t.Errorf("%d rows are owed, %d are history, of %d", n, history, all)
	}
	unmarked(t, d)
	last, rows, kept, dead := count("outbox WHERE event_type = 'last'"), count("outbox"), count("outbox_history"),
		count("outbox_dead")
	if last != 7 || rows != 7 || kept != history || dead != 1+parked {
		t.Errorf("after the way back: %d rows, %d of the last; %d are history, %d dead", rows, last, kept, dead)
	}
	if _, err := old.Exec(ctx, settleAsBefore); err != nil || count("outbox") != 0 {
		t.Errorf("the last version settles afterwards: %v", err)
	}
	if _, err := sql.Migrate(ctx, d.URL, "public", testenv.Logger(t)); err != nil {
		t.Errorf("and forward again: %v", err)
	}
}

// A view shows every row, whatever a policy says: nobody may read it because he may read some rows of the table.
func TestViewsAreNotForThoseWithAPolicy(t *testing.T) {
	t.Parallel()
	d := testenv.Postgres(t)
	unmarked(t, d)
	role := "tenant_" + d.Name
	d.Exec(t, "CREATE ROLE "+role)
	t.Cleanup(func() { _, _ = d.Pool.Exec(context.Background(), "DROP OWNED BY "+role+"; DROP ROLE "+role) })
	d.Exec(t, "GRANT SELECT ON outbox, outbox_history TO "+role)
	d.Exec(t, "ALTER TABLE outbox ENABLE ROW LEVEL SECURITY")
	d.Exec(t, "CREATE POLICY mine ON outbox FOR SELECT TO "+role+" USING (aggregate_id = 'mine')")
	_, err := sql.Migrate(t.Context(), d.URL, "public", testenv.Logger(t))
	must(t, err)
	for _, view := range []string{"outbox_backlog", "outbox_history", "outbox_settled"} {
		if testenv.Value[bool](t, d, "SELECT has_table_privilege($1, $2, 'SELECT')", role, view) {
			t.Errorf("whom a policy shows some rows may read %s", view)
		}
	}
}

// Somebody who may create in the schema has made the table that notes the migrations, before the first one, with a
// trigger that would run as whoever migrates.
func TestMigrateIntoAVersionTableOfSomebodyElse(t *testing.T) {
	t.Parallel()
	d := testenv.Empty(t)
	owner, thief := d.Name+"_owner", d.Name+"_thief"
	for _, stmt := range []string{
		"CREATE ROLE " + owner + " " + testenv.Login(d.URL), "CREATE ROLE " + thief + " " + testenv.Login(d.URL),
		"GRANT CREATE ON DATABASE " + d.Name + " TO " + owner,
		"GRANT CREATE ON SCHEMA public TO " + owner + ", " + thief,
		`CREATE TABLE posthaste_migrations (id integer PRIMARY KEY GENERATED BY DEFAULT AS IDENTITY,
			version_id bigint NOT NULL, is_applied boolean NOT NULL, tstamp timestamp NOT NULL DEFAULT now());
		ALTER TABLE posthaste_migrations OWNER TO ` + thief + `;
		INSERT INTO posthaste_migrations (version_id, is_applied) VALUES (0, true);
		GRANT ALL ON posthaste_migrations TO PUBLIC;
		CREATE FUNCTION stolen() RETURNS trigger LANGUAGE plpgsql AS
			$$ BEGIN RAISE EXCEPTION 'ran as %', current_user; END $$;
		CREATE TRIGGER stolen BEFORE INSERT ON posthaste_migrations FOR EACH ROW EXECUTE FUNCTION stolen()`,
	} {
		d.Exec(t, stmt)
	}
	t.Cleanup(func() {
		_, _ = d.Pool.Exec(context.Background(),
			"DROP OWNED BY "+owner+", "+thief+" CASCADE; DROP ROLE "+owner+", "+thief)
	})
	for _, role := range []string{owner, "postgres"} {
		_, err := sql.Migrate(t.Context(), testenv.As(d.URL, role), "public",
			slog.New(slog.DiscardHandler))
		if err == nil || !strings.Contains(err.Error(), "belongs to role \""+thief+"\"") {
			t.Errorf("as %s: %v", role, err)
		}
	}
	d.Exec(t, "DROP TABLE posthaste_migrations")
	if _, err := sql.Migrate(t.Context(), testenv.As(d.URL, owner), "public",
		slog.New(slog.DiscardHandler)); err != nil {
		t.Errorf("when it is gone: %v", err)
	}
}

func TestMigrateIntoItsOwnSchema(t *testing.T) {
	t.Parallel()
	d := testenv.Empty(t)
	if _, err := sql.Migrate(t.Context(), d.URL, "own", slog.New(slog.DiscardHandler)); err != nil {
		t.Fatal(err)
	}
	if got := testenv.Value[bool](t, d,
		"SELECT to_regclass('own.outbox') IS NOT NULL AND to_regclass('public.outbox') IS NULL"); !got {
		t.Error("the tables are not in the schema asked for")
	}
}

// Every statement is prepared against the migrated schema, so that none can name a column that does not exist.
func TestEveryQueryPrepares(t *testing.T) {
	t.Parallel()
	d := testenv.Postgres(t)
	files, err := filepath.Glob("queries/*.sql")
	if err != nil || len(files) == 0 {
		t.Fatalf("no query files: %v", err)
	}
	conn, err := pgx.Connect(t.Context(), d.URL)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(t.Context())
	parts := []string{"replay_all", "replay_few"} // what "history" is, see Selection.query
	prepare := func(name, text string) {
		if _, err := conn.Prepare(t.Context(), name, text); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	for _, f := range files {
		name := strings.TrimSuffix(filepath.Base(f), ".sql")
		switch text := queryText(t, name); {
		case slices.Contains(parts, name):
		case strings.Contains(text, "FROM history\n"):
			for _, part := range parts {
				prepare(part+" "+name, queryText(t, part)+text)
			}
		default:
			prepare(name, text)
		}
	}
}
