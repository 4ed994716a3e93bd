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

	"posthaste/internal/lab/testenv"
	"posthaste/outbox"
	"posthaste/sql"
)

func TestMain(m *testing.M) { os.Exit(testenv.Main(m)) }

func TestMigrateFromManyPlacesAtOnce(t *testing.T) {
	t.Parallel()
	d := testenv.Empty(t)
	wantErr(t, sql.CheckSchema(t.Context(), d.Pool), sql.ErrSchemaMissing)
	wantErr(t, sql.NewStore(d.Pool, "x", 0).Register(t.Context()), sql.ErrSchemaMissing)
	var wg sync.WaitGroup
	var total atomic.Int64
	for range 20 {
		wg.Go(func() {
			applied, err := sql.Migrate(context.Background(), d.URL, "public", slog.New(slog.DiscardHandler))
			if total.Add(int64(len(applied))); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if files, _ := filepath.Glob("migrations/*/*.sql"); int(total.Load()) != len(files) {
		t.Errorf("applied %d migrations in all, want %d", total.Load(), len(files))
	}
	must(t, sql.CheckSchema(t.Context(), d.Pool))
	insertIn(t, begin(t, d), 1) // a migration that changes nothing does not wait for writers
	if again, err := sql.Migrate(t.Context(), d.URL, "public", slog.New(slog.DiscardHandler)); err != nil ||
		len(again) != 0 {
		t.Errorf("again: applied %v, %v", again, err)
	}
	for _, newer := range []string{"('shop', 99999)", "('another', 1)"} {
		tx := begin(t, d)
		run(t, tx, "INSERT INTO posthaste_migrations (line, version) VALUES "+newer)
		wantErr(t, sql.CheckSchema(t.Context(), tx), sql.ErrSchemaNewer)
		must(t, tx.Rollback(t.Context()))
	}
}

// A database migrated with only the outbox line has no tables of the shop; a later migration adds them. If that needs a
// table that another session uses for a long time, it blocks other sessions only briefly, and is applied when the table
// is free.
func TestMigrateTheOutboxAlone(t *testing.T) {
	t.Parallel()
	d := testenv.Empty(t)
	ctx := t.Context()
	tables := func() string {
		t.Helper()
		return testenv.Value[string](t, d, `SELECT string_agg(c.relname, ' ' ORDER BY c.relname) FROM pg_class c
			WHERE c.relnamespace = 'public'::regnamespace AND c.relkind IN ('r', 'p')`)
	}
	must(t, fails(sql.Migrate(ctx, d.URL, "public", testenv.Logger(t), sql.OutboxLines()...)))
	must(t, sql.CheckSchema(ctx, d.Pool))
	const alone = "inbox inbox_default outbox outbox_dead outbox_mark outbox_part outbox_phantom " +
		"outbox_reconcile outbox_stream posthaste_audit posthaste_migrations relay_state"
	if got := tables(); got != alone {
		t.Errorf("tables %s", got)
	}
	is(t, false)(sql.HasLine(ctx, d.Pool, sql.LineShop))
	registered(t, d, time.Hour)
	user := begin(t, d)
	must(t, fails(user.Exec(ctx, "LOCK TABLE posthaste_migrations IN SHARE MODE")))
	logs := &strings.Builder{}
	done := make(chan error, 1)
	go func() {
		applied, err := sql.Migrate(context.Background(), d.URL, "public", slog.New(slog.NewTextHandler(logs, nil)))
		if err == nil && !slices.Equal(applied, []sql.Applied{{Line: sql.LineShop, Version: 1}}) {
			err = fmt.Errorf("applied %v", applied)
		}
		done <- err
	}()
	waiting(t, d, 1)
	waiting(t, d, 0) // other sessions have run
	must(t, user.Rollback(ctx))
	if err := <-done; err != nil || !strings.Contains(logs.String(), "trying again") {
		t.Errorf("migrate: %v; %s", err, logs)
	}
	if got := tables(); got == alone {
		t.Error("the shop is missing")
	}
}

// Before the first migration, a role with the right to create in the schema has created the version table with a
// trigger, which would run as the migrating role.
func TestMigrateIntoAVersionTableOfSomebodyElse(t *testing.T) {
	t.Parallel()
	d := testenv.Empty(t)
	_, mine := role(t, d, "owner", "CREATE ON DATABASE "+d.Name, "CREATE ON SCHEMA public")
	thief, _ := role(t, d, "thief", "CREATE ON SCHEMA public")
	d.Exec(t, `CREATE TABLE posthaste_migrations (line text NOT NULL, version integer NOT NULL,
			applied_at timestamptz NOT NULL DEFAULT now(), PRIMARY KEY (line, version));
		ALTER TABLE posthaste_migrations OWNER TO `+thief+`;
		GRANT ALL ON posthaste_migrations TO PUBLIC;
		CREATE FUNCTION stolen() RETURNS trigger LANGUAGE plpgsql AS
			$$ BEGIN RAISE EXCEPTION 'ran as %', current_user; END $$;
		CREATE TRIGGER stolen BEFORE INSERT ON posthaste_migrations FOR EACH ROW EXECUTE FUNCTION stolen()`)
	for _, url := range []string{mine, testenv.As(d.URL, "postgres")} {
		_, err := sql.Migrate(t.Context(), url, "public", slog.New(slog.DiscardHandler))
		if err == nil || !strings.Contains(err.Error(), "belongs to role \""+thief+"\"") {
			t.Errorf("migrate: %v", err)
		}
	}
	d.Exec(t, "DROP TABLE posthaste_migrations")
	must(t, fails(sql.Migrate(t.Context(), mine, "public", slog.New(slog.DiscardHandler))))
}

// A change of the table that breaks a promise is named, and its remedy ends it. migrate resets a cached sequence.
func TestChangesOfTheTableAreNamed(t *testing.T) {
	t.Parallel()
	d := testenv.Postgres(t)
	insertAll(t, d, 30)
	must(t, sql.Sound(t.Context(), d.Pool))
	for change, c := range map[string]struct{ named, remedy string }{
		"DELETE FROM outbox_part WHERE part = 3": {
			"15 rows of 16", "INSERT INTO outbox_part SELECT generate_series(0, 15) ON CONFLICT DO NOTHING",
		},
		"ALTER SEQUENCE outbox_seq_seq INCREMENT BY -1 MINVALUE -1000": {
			"fall", "ALTER SEQUENCE outbox_seq_seq INCREMENT BY 1",
		},
		"SELECT setval('outbox_seq_seq', 1, false)": {
			"behind the table", "SELECT setval('outbox_seq_seq', (SELECT max(seq) FROM outbox))",
		},
		"ALTER TABLE outbox DISABLE TRIGGER outbox_guard": {
			"disabled or missing", "ALTER TABLE outbox ENABLE TRIGGER USER",
		},
	} {
		d.Exec(t, change)
		err := sql.Sound(t.Context(), d.Pool)
		if err == nil || !strings.Contains(err.Error(), c.named) || !strings.Contains(err.Error(), c.remedy) {
			t.Errorf("%s: %v", change, err)
		}
		d.Exec(t, c.remedy)
		must(t, sql.Sound(t.Context(), d.Pool))
	}
	d.Exec(t, "ALTER SEQUENCE outbox_seq_seq CACHE 50")
	if err := sql.Sound(t.Context(), d.Pool); err == nil || !strings.Contains(err.Error(), "CACHE 50") {
		t.Errorf("a cache of 50: %v", err)
	}
	must(t, fails(sql.Migrate(t.Context(), d.URL, "public", slog.New(slog.DiscardHandler))))
	must(t, sql.Sound(t.Context(), d.Pool))
}

func TestUninstall(t *testing.T) {
	t.Parallel()
	d := testenv.Postgres(t)
	must(t, sql.Uninstall(t.Context(), d.Pool, "posthaste", false, nil))
	wantRows(t, d, 0, "pg_publication")
	must(t, sql.CheckSchema(t.Context(), d.Pool))
	must(t, sql.Uninstall(t.Context(), d.Pool, "posthaste", true, nil))
	if got := testenv.Value[string](t, d,
		`SELECT coalesce(string_agg(relname, ' '), '') FROM pg_class
		WHERE relnamespace = 'public'::regnamespace`); got != "" {
		t.Errorf("left: %s", got)
	}
	must(t, sql.Uninstall(t.Context(), d.Pool, "posthaste", true, nil))
}

// Names that another outbox, or another program, has are refused before anything is made.
func TestTakenNames(t *testing.T) {
	t.Parallel()
	d := testenv.Postgres(t)
	must(t, sql.Register(t.Context(), d.Pool, "taken"))
	log := slog.New(slog.DiscardHandler)
	var taken *outbox.TakenNameError
	if _, err := sql.MigrateFor(t.Context(), d.URL, "sales", "taken", log); !errors.As(err, &taken) ||
		taken.Schema != "public" || strings.Contains(err.Error(), "\n") {
		t.Errorf("a relay name that is taken: %v", err)
	}
	d.Exec(t, "CREATE TABLE theirs (id integer)")
	d.Exec(t, "CREATE PUBLICATION posthaste_sales FOR TABLE theirs")
	if _, err := sql.MigrateFor(t.Context(), d.URL, "sales", "sales", log); err == nil ||
		!strings.Contains(err.Error(), `owned by role "postgres", with table public.theirs: DROP PUBLICATION`) {
		t.Errorf("a publication that is taken: %v", err)
	}
	if testenv.Value[bool](t, d, "SELECT EXISTS (SELECT FROM pg_namespace WHERE nspname = 'sales')") {
		t.Error("the schema was made")
	}
	d.Exec(t, "DROP PUBLICATION posthaste_sales")
	must(t, fails(sql.MigrateFor(t.Context(), d.URL, "sales", "sales", log)))
	for _, schema := range []string{"public", "sales"} {
		got := testenv.Value[string](t, d, `SELECT schemaname || '.' || tablename FROM pg_publication_tables
			WHERE pubname = $1`, sql.Publication(schema))
		if got != schema+".outbox" {
			t.Errorf("publication %s has %s", sql.Publication(schema), got)
		}
	}
	// The name was free at the migration.
	must(t, sql.NewStore(d.Pool, "taken", 0).Register(t.Context()))
	d.Exec(t, "INSERT INTO sales.relay_state (name) VALUES ('taken')")
	if err := sql.NewStore(d.Pool, "taken", 0).Register(t.Context()); !errors.As(err, &taken) || !taken.Permanent() {
		t.Errorf("register a name that is taken: %v", err)
	}
}
