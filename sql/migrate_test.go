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
	"testing"

	"github.com/jackc/pgx/v5"

	"posthaste/internal/testenv"
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
			d.Exec(t, "ALTER TABLE relay_state DROP COLUMN sink; DROP TABLE outbox_loss; DELETE FROM "+
				"posthaste_migrations WHERE version_id = 8")
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
				if err == nil && !slices.Equal(applied, []int64{8}) {
					err = fmt.Errorf("applied %v", applied)
				}
				done <- err
			}()
			waiting(t, d, 1)
			waiting(t, d, 0) // it has let the others through
			if err := user.Rollback(t.Context()); err != nil {
				t.Fatal(err)
			}
			if err := <-done; err != nil || !strings.Contains(logs.String(), "trying again") {
				t.Errorf("migrate: %v; %s", err, logs)
			}
		})
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
