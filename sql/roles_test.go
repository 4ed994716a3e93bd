package sql_test

import (
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"posthaste/internal/lab/local"
	"posthaste/internal/lab/testenv"
	"posthaste/outbox"
	"posthaste/sql"
)

// passwords are those that the test gives to roles.sql.
var passwords = map[string]string{"posthaste": "o'wner", "posthaste_api": "api"}

// as returns the address of the posthaste database for a role.
func as(role string, pg *testenv.Server) string {
	password, ok := passwords[role]
	if !ok {
		password = pg.Password
	}
	u := url.URL{Scheme: "postgres", User: url.UserPassword(role, password), Host: fmt.Sprintf("127.0.0.1:%d", pg.Port)}
	return u.JoinPath("posthaste").String() + "?sslmode=disable"
}

// TestRoles runs scripts/roles.sql as the Postgres image would, migrates as the owner, and checks what each role can
// do, and what it cannot.
func TestRoles(t *testing.T) {
	t.Parallel()
	pg := testenv.NewServer(t)
	bin, err := local.PostgresBin(t.Context(), os.Getenv("POSTHASTE_TEST_PG_BIN"))
	must(t, err)
	// As in Postgres 14, and in clusters upgraded from it.
	superuser := connect(t, pg.URL("template1"))
	must(t, fails(superuser.Exec(t.Context(), "GRANT CREATE ON SCHEMA public TO PUBLIC")))
	_ = superuser.Close(t.Context()) // a database in use is no template
	psql := filepath.Join(bin, "psql")
	if _, err := os.Stat(psql); err != nil {
		psql = "psql" // packages of servers alone come without it
	}
	cmd := exec.CommandContext(t.Context(), psql, "-v", "ON_ERROR_STOP=1", "--no-psqlrc", "-d",
		fmt.Sprintf("postgres://postgres@127.0.0.1:%d/postgres?sslmode=disable", pg.Port), "-f", "../scripts/roles.sql")
	cmd.Env = append(os.Environ(), "PGPASSWORD="+pg.Password, "POSTHASTE_DB_PASSWORD="+passwords["posthaste"],
		"POSTHASTE_API_DB_PASSWORD="+passwords["posthaste_api"])
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("roles.sql: %v\n%s", err, out)
	}
	if _, err := sql.Migrate(t.Context(), as("posthaste", pg), "public", slog.New(slog.DiscardHandler)); err != nil {
		t.Fatalf("migrate as the owner: %v", err)
	}
	for _, member := range []string{
		"CREATE ROLE shop " + testenv.Login(pg.URL("")) + " IN ROLE posthaste_emit",
		"CREATE ROLE alice " + testenv.Login(pg.URL("")) + " IN ROLE posthaste_operator",
	} {
		must(t, fails(connect(t, pg.URL("postgres")).Exec(t.Context(), member)))
	}
	t.Run("owner", func(t *testing.T) { testOwner(t, connect(t, as("posthaste", pg))) })
	t.Run("api", func(t *testing.T) { testAPI(t, pg) })
	t.Run("emit", func(t *testing.T) { testEmit(t, connect(t, as("shop", pg))) })
	t.Run("operator", func(t *testing.T) { testOperator(t, pg) })
	for role, may := range rights {
		t.Run("no more for "+role, func(t *testing.T) {
			testNoMore(t, connect(t, as("posthaste", pg)), connect(t, as(role, pg)), may.reads, may.may)
		})
	}
}

// rights are each role's rights on posthaste's tables in addition to reading, as "table.column: privilege", or
// "table: privilege"; * is every column. A role that may read may read everything.
var rights = map[string]struct {
	reads bool
	may   []string
}{
	"posthaste_api": {true, slices.Concat(emits, audits, []string{
		"orders.*: INSERT", "order_payments.*: INSERT", "credit_epoch.bucket: INSERT",
	})},
	"shop": {false, emits},
	"alice": {true, slices.Concat(audits, may("outbox_stream", "INSERT", "stream", "base", "adopted_epoch", "gated"),
		may("outbox_stream", "UPDATE", "dropped_at", "groups", "gated"),
		may("relay_state", "UPDATE", "name", "desired_mode", "changed_at"), []string{
			"relay_state.name: INSERT", "outbox_dead.dropped_at: UPDATE", "outbox_reconcile.replayed_at: UPDATE",
			"outbox_phantom.acked_at: UPDATE", "credit_accounts.frozen: UPDATE", "credit_epoch.bucket: INSERT",
			"credit_epoch.bumped_at: UPDATE",
		})},
}

var (
	emits  = may("outbox", "INSERT", "id", "aggregate_type", "aggregate_id", "event_type", "payload", "headers")
	audits = may("posthaste_audit", "INSERT", "attempt", "outcome", "reason", "action", "actor", "source", "detail")
)

// may lists a right on several columns of a table.
func may(table, privilege string, columns ...string) (list []string) {
	for _, c := range columns {
		list = append(list, table+"."+c+": "+privilege)
	}
	return list
}

// testNoMore tries every right on every table and column as the role: it has those in may, and no others.
func testNoMore(t *testing.T, owner, c *pgx.Conn, reads bool, may []string) {
	var columns [][2]string
	rows, err := owner.Query(t.Context(), `SELECT c.relname, a.attname FROM pg_class c JOIN pg_attribute a
		ON a.attrelid = c.oid WHERE c.relnamespace = 'public'::regnamespace AND c.relkind IN ('r', 'p')
		AND a.attnum > 0 AND NOT a.attisdropped ORDER BY 1, 2`)
	if err == nil {
		columns, err = pgx.CollectRows(rows, func(r pgx.CollectableRow) (c [2]string, err error) {
			return c, r.Scan(&c[0], &c[1])
		})
	}
	if err != nil || len(columns) < 100 {
		t.Fatalf("%d columns, %v", len(columns), err)
	}
	tried := map[string]string{}
	partition := func(table string) bool { return strings.HasSuffix(table, "_default") }
	for _, col := range columns {
		table, column := col[0], col[1]
		tried[table+"."+column+": SELECT"] = fmt.Sprintf("SELECT %s FROM %s LIMIT 0", column, table)
		tried[table+"."+column+": INSERT"] = fmt.Sprintf("INSERT INTO %s (%s) OVERRIDING SYSTEM VALUE SELECT %[2]s "+
			"FROM (SELECT (NULL::%[1]s).*) AS none WHERE false", table, column)
		tried[table+"."+column+": UPDATE"] = fmt.Sprintf("UPDATE %s SET %s = DEFAULT WHERE false", table, column)
		tried[table+": DELETE"] = "DELETE FROM " + table + " WHERE false"
		tried[table+": TRUNCATE"] = "TRUNCATE " + table
		tried[table+": TRIGGER"] = fmt.Sprintf("CREATE TRIGGER t BEFORE INSERT ON %s EXECUTE FUNCTION "+
			"suppress_redundant_updates_trigger()", table)
		tried[table+": LOCK"] = "LOCK TABLE " + table + " IN ACCESS EXCLUSIVE MODE"
		tried[table+": DROP"] = "DROP TABLE " + table + " CASCADE"
	}
	for _, stmt := range forNobody {
		tried[stmt] = stmt
	}
	for what, stmt := range tried {
		table, _, _ := strings.Cut(what, ".")
		_, privilege, _ := strings.Cut(what, ": ")
		table, _, _ = strings.Cut(table, ":")
		should := reads && privilege == "SELECT" && !partition(table) || slices.Contains(may, what) ||
			slices.Contains(may, table+".*: "+privilege)
		tx, err := c.Begin(t.Context())
		must(t, err)
		_, err = tx.Exec(t.Context(), stmt)
		_ = tx.Rollback(t.Context())
		var pe *pgconn.PgError
		denied := errors.As(err, &pe) && (pe.Code == pgerrcode.InsufficientPrivilege ||
			pe.Code == pgerrcode.GeneratedAlways) // nobody may
		switch {
		case should && err != nil:
			t.Errorf("%s (%s): %v", what, stmt, err)
		case !should && !denied:
			t.Errorf("%s (%s): got %v, want permission denied", what, stmt, err)
		}
	}
}

func connect(tb testing.TB, url string) *pgx.Conn {
	tb.Helper()
	c, err := pgx.Connect(tb.Context(), url)
	must(tb, err)
	tb.Cleanup(func() { _ = c.Close(tb.Context()) })
	return c
}

func testOwner(t *testing.T, c *pgx.Conn) {
	for _, stmt := range []string{
		"SELECT pg_create_logical_replication_slot('posthaste_default', 'pgoutput')",
		"SELECT pg_replication_slot_advance('posthaste_default', pg_current_wal_lsn())",
		"SELECT pg_drop_replication_slot('posthaste_default')",
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

// forNobody are refused to every role except the owner: to switch off the triggers of the audit trail, to create
// objects in the schema, and to change the order of events.
var forNobody = []string{
	"ALTER TABLE posthaste_audit DISABLE TRIGGER ALL", "CREATE TABLE public.mine ()", "DROP PUBLICATION posthaste",
	"CREATE FUNCTION public.hashtextextended(text, integer) RETURNS bigint LANGUAGE sql AS 'SELECT 1::bigint'",
	"SELECT pg_create_logical_replication_slot('mine', 'pgoutput')", "SELECT setval('outbox_seq_seq', 1)",
}

func pool(t *testing.T, role string, pg *testenv.Server) *sql.Pool {
	t.Helper()
	cfg, err := sql.PoolConfig(as(role, pg), "public", "roles")
	must(t, err)
	p, err := pgxpool.NewWithConfig(t.Context(), cfg)
	must(t, err)
	t.Cleanup(p.Close)
	return p
}

func testAPI(t *testing.T, pg *testenv.Server) {
	ctx, p := t.Context(), pool(t, "posthaste_api", pg)
	must(t, errors.Join(sql.CheckSchema(ctx, p), sql.CheckOrderTables(ctx, p), sql.CheckWritable(ctx, p)))
	o, e := newOrder(uuid.New(), 1)
	must(t, fails(sql.PlaceOrder(ctx, p, o, e)))
	must(t, fails(sql.NotePayment(ctx, p, &sql.Payment{
		OpID: uuid.New(), RefundID: uuid.New(), UserID: uuid.New(), Fingerprint: []byte{1}, OrderID: uuid.New(),
		Amount: 1, Currency: "USD", CreatedAt: time.Now(),
	}, time.Minute)))
	c := connect(t, as("posthaste_api", pg))
	must(t, fails(c.Exec(ctx, "INSERT INTO credit_epoch (bucket) VALUES (1) ON CONFLICT DO NOTHING")))
}

func testEmit(t *testing.T, c *pgx.Conn) {
	must(t, pgx.BeginFunc(t.Context(), c, func(tx pgx.Tx) error {
		_, err := outbox.Insert(t.Context(), tx, outbox.Event{
			AggregateType: "order", AggregateID: "1", Type: "order.created", Payload: []byte("{}"),
			Headers: map[string]string{"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"},
		})
		return err
	}))
}

// testOperator runs the statements of the commands that write: mode, adopt, dead, replay, credits unfreeze.
func testOperator(t *testing.T, pg *testenv.Server) {
	ctx, p, owner := t.Context(), pool(t, "alice", pg), connect(t, as("posthaste", pg))
	for name, err := range map[string]error{
		"register": sql.Register(ctx, p, "default"), "rename": sql.Register(ctx, p, "other"),
		"set the mode": sql.SetDesired(ctx, p, "other", outbox.ModePoll), "identify": sql.Identify(ctx, p),
		"take over":     sql.NoteTaken(ctx, p, []outbox.Stream{{Name: "a", Base: "a"}}, 0),
		"note a replay": sql.BroughtBack(ctx, p, time.Now(), time.Now(), ""),
	} {
		if err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	id := uuid.New()
	for _, stmt := range []string{
		`INSERT INTO outbox_dead (id, seq, aggregate_type, aggregate_id, event_type, payload, created_at, error, class,
			attempts) VALUES ($1, 1, 'order', '1', 'order.created', '{}', now(), 'no', 'no', 1)`,
		"INSERT INTO credit_accounts (user_id, balance, last_seq, frozen, updated_at) VALUES ($1, 1, 1, 'why', now())",
	} {
		must(t, fails(owner.Exec(ctx, stmt, id)))
	}
	must(t, sql.RetryDead(ctx, p, id))
	must(t, sql.DropDead(ctx, p, id))
	_, _, err := sql.AckPhantoms(ctx, p)
	must(t, err)
	c := connect(t, as("alice", pg))
	must(t, fails(c.Exec(ctx, "SELECT FROM credit_epoch FOR UPDATE SKIP LOCKED")))
	must(t, fails(c.Exec(ctx, "UPDATE credit_accounts SET frozen = NULL")))
}
