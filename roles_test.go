package posthaste_test

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/uuid"
	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"posthaste/internal/local"
	"posthaste/internal/testenv"
	"posthaste/sql"
)

func TestMain(m *testing.M) {
	code := testenv.Main(m)
	if built.path != "" {
		_ = os.RemoveAll(filepath.Dir(built.path))
	}
	os.Exit(code)
}

// as returns the address of the posthaste database for a role.
func as(role string, pg *testenv.Server) string {
	return fmt.Sprintf("postgres://%s@127.0.0.1:%d/posthaste?sslmode=disable", role, pg.Port)
}

// TestRoles runs scripts/roles.sql as the Postgres image would, migrates as the owner, and tries what each role must
// be able to do, and what it must not.
func TestRoles(t *testing.T) {
	t.Parallel()
	pg := testenv.NewServer(t)
	bin, err := local.PostgresBin(t.Context(), os.Getenv("POSTHASTE_TEST_PG_BIN"))
	if err != nil {
		t.Fatal(err)
	}
	// As in Postgres 14, and in clusters upgraded from it.
	superuser := connect(t, pg.URL("template1"))
	if _, err := superuser.Exec(t.Context(), "GRANT CREATE ON SCHEMA public TO PUBLIC"); err != nil {
		t.Fatal(err)
	}
	_ = superuser.Close(t.Context()) // a database in use is no template
	psql := filepath.Join(bin, "psql")
	if _, err := os.Stat(psql); err != nil {
		psql = "psql" // packages of servers alone come without it
	}
	cmd := exec.CommandContext(t.Context(), psql, "-v", "ON_ERROR_STOP=1", "--no-psqlrc", "-d", pg.URL("postgres"),
		"-f", "scripts/roles.sql")
	cmd.Env = append(os.Environ(), "POSTHASTE_DB_PASSWORD=o'wner", "POSTHASTE_API_DB_PASSWORD=api")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("roles.sql: %v\n%s", err, out)
	}
	if _, err := sql.Migrate(t.Context(), as("posthaste", pg), "public", slog.New(slog.DiscardHandler)); err != nil {
		t.Fatalf("migrate as the owner: %v", err)
	}
	t.Run("owner", func(t *testing.T) { testOwner(t, connect(t, as("posthaste", pg))) })
	t.Run("api", func(t *testing.T) { testAPI(t, connect(t, as("posthaste_api", pg))) })
}

func connect(tb testing.TB, url string) *pgx.Conn {
	tb.Helper()
	c, err := pgx.Connect(tb.Context(), url)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { _ = c.Close(tb.Context()) })
	return c
}

func testOwner(t *testing.T, c *pgx.Conn) {
	for _, stmt := range []string{
		"SELECT pg_create_logical_replication_slot('posthaste_default', 'pgoutput')",
		"SELECT pg_replication_slot_advance('posthaste_default', pg_current_wal_lsn())",
		"SELECT pg_drop_replication_slot('posthaste_default')",
		"CREATE TABLE h PARTITION OF outbox_history FOR VALUES FROM ('2030-01-01') TO ('2030-01-02')",
		"DROP TABLE h",
		"DROP PUBLICATION posthaste",
		"CREATE PUBLICATION posthaste FOR TABLE outbox WITH (publish = 'insert')",
		"DELETE FROM outbox",
	} {
		if _, err := c.Exec(t.Context(), stmt); err != nil {
			t.Errorf("%s: %v", stmt, err)
		}
	}
	var super, seesAll bool
	if err := c.QueryRow(t.Context(),
		"SELECT rolsuper, pg_has_role('pg_read_all_stats', 'USAGE') FROM pg_roles WHERE rolname = current_user").
		Scan(&super, &seesAll); err != nil || super || !seesAll {
		t.Errorf("superuser %v, reads all statistics %v, error %v; want false, true, none", super, seesAll, err)
	}
}

func testAPI(t *testing.T, c *pgx.Conn) {
	tx, err := c.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tx.Exec(t.Context(),
		`INSERT INTO orders (id, user_id, idem_key, idem_fp, amount, currency, status, created_at)
		VALUES ($1, $1, decode(repeat('00', 16), 'hex'), '\x00', 1, 'EUR', 'PENDING', now()) ON CONFLICT DO NOTHING`,
		uuid.New()); err != nil {
		t.Errorf("insert an order: %v", err)
	}
	if _, err := sql.InsertEvent(t.Context(), tx, sql.Event{
		AggregateType: "order", AggregateID: "1",
		Type: "order.created", Payload: []byte("{}"),
	}); err != nil {
		t.Errorf("insert an event: %v", err)
	}
	if err := tx.Commit(t.Context()); err != nil {
		t.Errorf("commit: %v", err)
	}
	for _, stmt := range []string{
		"SELECT id FROM orders", "SELECT id FROM outbox",
		"SELECT max(version_id) FROM posthaste_migrations",
	} {
		if _, err := c.Exec(t.Context(), stmt); err != nil {
			t.Errorf("%s: %v", stmt, err)
		}
	}
	for _, stmt := range []string{
		"DELETE FROM outbox", "UPDATE orders SET amount = 2", "TRUNCATE outbox", "UPDATE relay_state SET epoch = 0",
		"DROP TABLE orders", "CREATE TABLE public.mine ()", "DROP PUBLICATION posthaste",
		"SELECT pg_create_logical_replication_slot('mine', 'pgoutput')",
	} {
		_, err := c.Exec(t.Context(), stmt)
		var pe *pgconn.PgError
		if !errors.As(err, &pe) || pe.Code != pgerrcode.InsufficientPrivilege &&
			!strings.Contains(pe.Message, "owner") {
			t.Errorf("%s: got %v, want permission denied", stmt, err)
		}
	}
}
