package sql

import (
	"context"
	"embed"
	"errors"
	"fmt"
	"net"
	"strings"
	"time"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"posthaste/internal/failpoint"
	"posthaste/internal/socket"
	"posthaste/internal/statement"
)

//go:embed queries/*.sql
var queryFiles embed.FS

// query returns the text of queries/<name>.sql.
var query = statement.In(queryFiles)

// DB is what a statement needs: a pool, a connection or a transaction.
type DB interface {
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

// ConnConfig parses url (libpq variables fill what it leaves out) and adds what every connection of posthaste has: the
// schema in front of the search path, a name for pg_stat_activity, settings that a role or a database might have made
// otherwise, and TCP keepalives on both ends, without which a vanished peer blocks the rest for hours. Errors never
// contain the password.
func ConnConfig(url, schema, component string) (*pgx.ConnConfig, error) {
	cfg, err := pgx.ParseConfig(url)
	if err != nil {
		return nil, redact(err)
	}
	decorate(cfg, schema, component)
	return cfg, nil
}

// PoolConfig is ConnConfig for a pool.
func PoolConfig(url, schema, component string) (*pgxpool.Config, error) {
	cfg, err := pgxpool.ParseConfig(url)
	if err != nil {
		return nil, redact(err)
	}
	decorate(cfg.ConnConfig, schema, component)
	prepare(cfg.ConnConfig)
	return cfg, nil
}

// prepare makes the sessions of cfg what everything here relies on; see session.sql. One that began while nothing could
// be written would go on like that when the rest of the world has recovered, so it ends with the first refusal.
func prepare(cfg *pgx.ConnConfig) {
	goesOn := cfg.OnPgError
	cfg.OnPgError = func(c *pgconn.PgConn, err *pgconn.PgError) bool {
		return goesOn(c, err) && err.Code != pgerrcode.ReadOnlySQLTransaction
	}
	cfg.AfterConnect = func(ctx context.Context, c *pgconn.PgConn) error {
		return c.Exec(ctx, query("session")).Close()
	}
}

// redact drops the connection string that pgx quotes in its parse errors.
func redact(err error) error {
	var pe *pgconn.ParseConfigError
	if errors.As(err, &pe) {
		if cause := errors.Unwrap(pe); cause != nil && !strings.Contains(cause.Error(), "://") {
			return fmt.Errorf("the Postgres URL cannot be parsed: %w", cause)
		}
		return errors.New("the Postgres URL cannot be parsed")
	}
	return err
}

func decorate(cfg *pgx.ConnConfig, schema, component string) {
	set := func(name, value string) {
		if _, ok := cfg.RuntimeParams[name]; !ok {
			cfg.RuntimeParams[name] = value
		}
	}
	set("application_name", "posthaste "+component)
	// Nothing behind the schema: tables of the same name in public are not ours. pg_temp last: a temporary table must
	// not shadow them.
	cfg.RuntimeParams["search_path"] = pgx.Identifier{schema}.Sanitize() + ", pg_temp"
	// Row security that hides rows is an error: to see nothing would look like having nothing to do.
	cfg.RuntimeParams["row_security"] = "off"
	// What waits for a row goes on with what has become of it.
	cfg.RuntimeParams["default_transaction_isolation"] = "read committed"
	// What is asked here reads a few rows of many parts, which looks expensive: compiling it takes many times as long
	// as the answer, on a busy machine 20 s of a processor for a count of what is owed.
	cfg.RuntimeParams["jit"] = "off"
	// A caller that needs a limit sets its own. Otherwise what a role has (ALTER ROLE ... SET statement_timeout) would
	// end a count or a wait at the same place each time, and nothing would ever finish.
	for _, timeout := range []string{
		"statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout", "idle_session_timeout",
	} {
		cfg.RuntimeParams[timeout] = "0"
	}
	set("timezone", "UTC")
	set("tcp_keepalives_idle", "5")
	set("tcp_keepalives_interval", "2")
	set("tcp_keepalives_count", "3")
	set("tcp_user_timeout", "10000")
	if cfg.ConnectTimeout == 0 {
		cfg.ConnectTimeout = 5 * time.Second
	}
	d := &net.Dialer{Timeout: cfg.ConnectTimeout, KeepAliveConfig: net.KeepAliveConfig{
		Enable: true, Idle: 5 * time.Second, Interval: 2 * time.Second, Count: 3,
	}}
	cfg.DialFunc = pgconn.DialFunc(socket.Quiet(d.DialContext))
	failpoint.Statements(cfg)
}
