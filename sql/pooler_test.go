package sql_test

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"posthaste/internal/lab/testenv"
	"posthaste/sql"
)

// Behind a pooler in transaction mode every transaction has posthaste's settings, however it begins, and the sessions
// of the server, which other programs use as well, keep theirs.
func TestSettingsThroughATransactionPooler(t *testing.T) {
	t.Parallel()
	d := testenv.Postgres(t)
	ctx := t.Context()
	hostile := map[string]string{
		"statement_timeout": "1min", "lock_timeout": "1min", "idle_in_transaction_session_timeout": "1min",
		"search_path": "pg_catalog", "default_transaction_isolation": "serializable", "jit": "on",
		"synchronous_commit": "off", "timezone": "Asia/Tokyo", "enable_seqscan": "on",
	}
	for name, value := range hostile {
		d.Exec(t, "ALTER DATABASE "+d.Name+" SET "+name+" = '"+value+"'")
	}
	url := testenv.PgBouncer(t, d.URL, "transaction", "default_pool_size = 2")
	cfg, err := sql.RelayPoolConfig(url, "public")
	must(t, err)
	pool, err := pgxpool.NewWithConfig(ctx, cfg)
	must(t, err)
	defer pool.Close()
	want := map[string]string{
		"statement_timeout": "0", "lock_timeout": "0", "idle_in_transaction_session_timeout": "10s",
		"search_path": "public, pg_temp", "transaction_isolation": "read committed", "jit": "off",
		"synchronous_commit": "local", "TimeZone": "UTC", "enable_seqscan": "off", "row_security": "off",
	}
	check := func(how string, db sql.DB, want map[string]string) {
		t.Helper()
		for name, value := range want {
			var got string
			// As a prepared statement: it has an argument.
			must(t, db.QueryRow(ctx, "SELECT current_setting($1)", name).Scan(&got))
			if strings.ReplaceAll(got, `"`, "") != value {
				t.Errorf("%s: %s is %q, want %q", how, name, got, value)
			}
		}
	}
	checkAll := func() {
		t.Helper()
		check("a statement", pool, want)
		must(t, pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error { check("a transaction", tx, want); return nil }))
		repeatable := pgx.TxOptions{IsoLevel: pgx.RepeatableRead}
		must(t, pgx.BeginTxFunc(ctx, pool, repeatable, func(tx pgx.Tx) error {
			check("a repeatable read", tx, map[string]string{"transaction_isolation": "repeatable read"})
			return nil
		}))
		var batch pgx.Batch
		var path, isolation string
		batch.Queue("SELECT current_setting($1)", "search_path").QueryRow(
			func(r pgx.Row) error { return r.Scan(&path) })
		batch.Queue("SELECT 1 FROM outbox WHERE id IS NULL")
		batch.Queue("SELECT current_setting($1)", "transaction_isolation").QueryRow(
			func(r pgx.Row) error { return r.Scan(&isolation) })
		must(t, pool.SendBatch(ctx, &batch).Close())
		if strings.ReplaceAll(path, `"`, "") != want["search_path"] || isolation != "read committed" {
			t.Errorf("a batch: search_path %s, isolation %s", path, isolation)
		}
	}
	checkAll()
	// An error ends a transaction, and a cancelled statement the connection.
	_, err = pool.Exec(ctx, "SELECT 1 / $1::integer", 0)
	if sql.SQLState(err) != pgerrcode.DivisionByZero {
		t.Errorf("a division by zero: %v", err)
	}
	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, "SELECT FROM none")
		return err
	})
	if sql.SQLState(err) != pgerrcode.UndefinedTable {
		t.Errorf("a missing table: %v", err)
	}
	short, cancel := context.WithTimeout(ctx, 100*time.Millisecond)
	defer cancel()
	if _, err := pool.Exec(short, "SELECT pg_sleep($1)", 60); err == nil {
		t.Error("a cancelled statement has no error")
	}
	must(t, pool.Ping(ctx))
	rows := make([][]any, 1000)
	for i := range rows {
		rows[i] = []any{fmt.Sprint("g", i), "order", "a", "order.changed", strings.Repeat(" ", i) + "{}"}
	}
	run(t, pool, "CREATE TABLE copied (id text, a text, b text, c text, payload text)")
	columns := []string{"id", "a", "b", "c", "payload"}
	n, err := pool.CopyFrom(ctx, pgx.Identifier{"copied"}, columns, pgx.CopyFromRows(rows))
	if err != nil || n != 1000 {
		t.Errorf("copied %d rows, %v", n, err)
	}
	checkAll()

	// Both sessions of the server are taken at once.
	other := connect(t, url)
	second := connect(t, url)
	for _, c := range []*pgx.Conn{other, second} {
		tx, err := c.Begin(ctx)
		must(t, err)
		defer func() { _ = tx.Rollback(ctx) }()
		for name, value := range hostile {
			var got string
			must(t, tx.QueryRow(ctx, "SELECT current_setting('"+name+"')", pgx.QueryExecModeSimpleProtocol).Scan(&got))
			if got != value {
				t.Errorf("another program: %s is %q, want %q", name, got, value)
			}
		}
		var prepared int
		must(t, tx.QueryRow(ctx, "SELECT count(*) FROM pg_prepared_statements", pgx.QueryExecModeSimpleProtocol).
			Scan(&prepared))
		if prepared != 0 {
			t.Errorf("another program finds %d prepared statements", prepared)
		}
	}
}

func TestPoolingOf(t *testing.T) {
	t.Parallel()
	d := testenv.Postgres(t)
	ctx := t.Context()
	for name, c := range map[string]struct {
		url  string
		want sql.Pooling
	}{
		"direct":      {d.URL, sql.Unpooled},
		"session":     {testenv.PgBouncer(t, d.URL, "session"), sql.SessionPooling},
		"transaction": {testenv.PgBouncer(t, d.URL, "transaction"), sql.TransactionPooling},
		"statement":   {testenv.PgBouncer(t, d.URL, "statement"), sql.StatementPooling},
		"one session for all": {
			testenv.PgBouncer(t, d.URL, "transaction", "default_pool_size = 1"), sql.TransactionPooling,
		},
		"in turns": {
			testenv.PgBouncer(t, d.URL, "transaction", "server_round_robin = 1", "min_pool_size = 2"),
			sql.TransactionPooling,
		},
	} {
		cfg, err := sql.ConnConfig(c.url, "public", "test")
		must(t, err)
		conn, err := sql.Connect(ctx, cfg)
		must(t, err)
		defer conn.Close(ctx)
		t.Log(name)
		is(t, c.want)(sql.PoolingOf(ctx, conn, cfg))
	}
}

// A pooler in transaction mode is never taken for one in session mode, however busy others keep it: a relay would leave
// its locks behind, and wait for them.
func TestPoolingOfABusyPooler(t *testing.T) {
	t.Parallel()
	d := testenv.Postgres(t)
	cfg, err := sql.ConnConfig(testenv.PgBouncer(t, d.URL, "transaction"), "public", "test")
	must(t, err)
	busy, stop := context.WithCancel(t.Context())
	var others sync.WaitGroup
	for range 4 {
		c, err := sql.Connect(t.Context(), cfg)
		must(t, err)
		others.Go(func() {
			defer c.Close(t.Context())
			for busy.Err() == nil {
				_, _ = c.Exec(t.Context(), "SELECT pg_catalog.pg_sleep(0.0005)")
			}
		})
	}
	conn, err := sql.Connect(t.Context(), cfg)
	must(t, err)
	defer conn.Close(t.Context())
	for range 200 {
		is(t, sql.TransactionPooling)(sql.PoolingOf(t.Context(), conn, cfg))
	}
	stop()
	others.Wait()
}
