package sql

import (
	"cmp"
	"context"
	"embed"
	"errors"
	"fmt"
	"maps"
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
	"posthaste/outbox"
)

//go:embed queries/*.sql
var queryFiles embed.FS

var query = statement.In(queryFiles)

// DB is what a statement needs: a pool, a connection or a transaction.
type DB interface {
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

// scan reads the row of a statement. what says in its error what it is for.
func scan(ctx context.Context, db DB, what, name string, args []any, to ...any) error {
	if err := db.QueryRow(ctx, query(name), args...).Scan(to...); err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	return nil
}

// exec executes a statement, and returns how many rows it has changed. what says in its error what it is for.
func exec(ctx context.Context, db DB, what, name string, args ...any) (rows int64, err error) {
	tag, err := db.Exec(ctx, query(name), args...)
	if err != nil {
		return 0, fmt.Errorf("%s: %w", what, err)
	}
	return tag.RowsAffected(), nil
}

// owned is scan for a statement whose first column reports whether the caller still is the owner: ErrSuperseded if not.
func owned(ctx context.Context, db DB, what, name string, args []any, to ...any) error {
	var owner bool
	err := scan(ctx, db, what, name, args, append([]any{&owner}, to...)...)
	if err == nil && !owner {
		err = fmt.Errorf("%s: %w", what, outbox.ErrSuperseded)
	}
	return err
}

// pairs returns the rows of a statement with two columns, by the first one.
func pairs[K comparable, V any](ctx context.Context, db DB, what, name string) (map[K]V, error) {
	type pair struct {
		Key   K
		Value V
	}
	list, err := structs[pair](ctx, db, what, name)
	m := make(map[K]V, len(list))
	for _, p := range list {
		m[p.Key] = p.Value
	}
	return m, err
}

// collect is statement.Rows by name, and structs is statement.Structs.
func collect[T any](ctx context.Context, db DB, what string, convert pgx.RowToFunc[T], name string, args ...any,
) ([]T, error) {
	return statement.Rows(ctx, db, what, convert, query(name), args...)
}

func structs[T any](ctx context.Context, db DB, what, name string, args ...any) ([]T, error) {
	return statement.Structs[T](ctx, db, what, query(name), args...)
}

// ConnConfig parses url (libpq variables supply what it omits) and adds the settings of every connection of posthaste:
// the schema as search path, a name for pg_stat_activity, overrides of settings that a role or a database may have, and
// TCP keepalives on both ends, without which a vanished peer blocks the other for hours. Errors never contain the
// password. The configuration is one for Connect, which makes the settings, its RuntimeParams, by a statement.
func ConnConfig(url, schema, component string) (*pgx.ConnConfig, error) {
	cfg, err := pgx.ParseConfig(url)
	if err != nil {
		return nil, redact(err)
	}
	decorate(cfg, schema, component)
	return cfg, nil
}

// Connect connects, directly or through a pooler.
func Connect(ctx context.Context, cfg *pgx.ConnConfig) (*pgx.Conn, error) {
	cfg = cfg.Copy()
	if err := readCredentials(cfg); err != nil {
		return nil, err
	}
	setOnConnect(cfg)
	return pgx.ConnectConfig(ctx, cfg)
}

// PoolConfig is ConnConfig with more settings for a pool, whose connections may go through a pooler. They need its
// BeforeConnect for that.
func PoolConfig(url, schema, component string, settings ...map[string]string) (*pgxpool.Config, error) {
	cfg, err := pgxpool.ParseConfig(url)
	if err != nil {
		return nil, redact(err)
	}
	decorate(cfg.ConnConfig, schema, component)
	for _, some := range settings {
		maps.Copy(cfg.ConnConfig.RuntimeParams, some)
	}
	prepare(cfg.ConnConfig)
	cfg.BeforeConnect = func(_ context.Context, c *pgx.ConnConfig) error {
		err := readCredentials(c)
		setOnConnect(c)
		return err
	}
	return cfg, nil
}

// prepare makes the first refused write close a session. A session that began on a read-only server stays read-only
// after that server recovers.
func prepare(cfg *pgx.ConnConfig) {
	goesOn := cfg.OnPgError
	cfg.OnPgError = func(c *pgconn.PgConn, err *pgconn.PgError) bool {
		return goesOn(c, err) && err.Code != pgerrcode.ReadOnlySQLTransaction
	}
}

// redact drops the connection string that pgx quotes in its parse errors.
func redact(err error) error {
	if pe, ok := errors.AsType[*pgconn.ParseConfigError](err); ok {
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
	// No other schema: tables of the same name in public belong to another application. pg_temp is last so that a
	// temporary table cannot shadow posthaste's.
	cfg.RuntimeParams["search_path"] = pgx.Identifier{schema}.Sanitize() + ", pg_temp"
	// A policy of row security that hides rows causes an error. Otherwise hidden rows would look like an empty outbox.
	cfg.RuntimeParams["row_security"] = "off"
	// A statement that waited for a row lock continues with the new version of the row.
	cfg.RuntimeParams["default_transaction_isolation"] = "read committed"
	// The planner overestimates these statements, which read a few rows of many parts. JIT compilation would take many
	// times as long as running them: 20 s of CPU for one count of the backlog on a busy machine.
	cfg.RuntimeParams["jit"] = "off"
	// A caller that needs a limit sets its own. A timeout of the role (ALTER ROLE ... SET statement_timeout) would
	// otherwise end the same count or wait at each attempt, and it would never complete.
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
	cfg.ConnectTimeout = cmp.Or(cfg.ConnectTimeout, 5*time.Second)
	d := &net.Dialer{Timeout: cfg.ConnectTimeout, KeepAliveConfig: net.KeepAliveConfig{
		Enable: true, Idle: 5 * time.Second, Interval: 2 * time.Second, Count: 3,
	}}
	cfg.DialFunc = pgconn.DialFunc(socket.Quiet(d.DialContext))
	failpoint.Statements(cfg)
}
