package sql_test

import (
	"errors"
	"log/slog"
	"strings"
	"testing"

	"posthaste/internal/testenv"
	"posthaste/outbox"
	"posthaste/sql"
)

// Names that another outbox, or another program, has are refused before anything is made.
func TestTakenNames(t *testing.T) {
	t.Parallel()
	d := testenv.Postgres(t)
	if err := sql.Register(t.Context(), d.Pool, "taken"); err != nil {
		t.Fatal(err)
	}
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
	if _, err := sql.MigrateFor(t.Context(), d.URL, "sales", "sales", log); err != nil {
		t.Fatal(err)
	}
	for _, schema := range []string{"public", "sales"} {
		got := testenv.Value[string](t, d, `SELECT schemaname || '.' || tablename FROM pg_publication_tables
			WHERE pubname = $1`, sql.Publication(schema))
		if got != schema+".outbox" {
			t.Errorf("publication %s has %s", sql.Publication(schema), got)
		}
	}
	// The name was free at the migration.
	if err := sql.NewStore(d.Pool, "taken", 0).Register(t.Context()); err != nil {
		t.Errorf("register: %v", err)
	}
	d.Exec(t, "INSERT INTO sales.relay_state (name) VALUES ('taken')")
	if err := sql.NewStore(d.Pool, "taken", 0).Register(t.Context()); !errors.As(err, &taken) || !taken.Permanent() {
		t.Errorf("register a name that is taken: %v", err)
	}
}
