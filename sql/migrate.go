package sql

import (
	"context"
	stdsql "database/sql"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"strconv"
	"time"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/pressly/goose/v3"
	"github.com/pressly/goose/v3/database"
	"github.com/pressly/goose/v3/lock"

	"posthaste/internal/pause"
)

//go:embed migrations/*.sql
var migrationFiles embed.FS

// versionTable is where the applied migrations are noted. The prefix keeps it apart from a host application's own.
const versionTable = "posthaste_migrations"

// ErrSchemaMissing means that the database has not been migrated.
var ErrSchemaMissing error = schemaError{text: "the schema is missing or incomplete: run posthaste migrate"}

// ErrSchemaNewer means that a later version of posthaste has migrated the database. Waiting cannot fix it: its
// Permanent method says so.
var ErrSchemaNewer error = schemaError{
	text:      "the schema is newer than this binary: run the newer posthaste",
	permanent: true,
}

// schemaError names a condition of the schema.
type schemaError struct {
	text      string
	permanent bool
}

func (e schemaError) Error() string { return e.text }

// Permanent reports that waiting cannot fix it.
func (e schemaError) Permanent() bool { return e.permanent }

// Condition is the name under which a relay's readiness shows it.
func (schemaError) Condition() string { return "schema" }

// Migrate applies the embedded migrations to schema in the database at url, and returns the versions it applied. It
// may run in many places at once: a session lock lets one work and the others wait. Roles named like the files in
// rights get exactly the rights written there.
func Migrate(ctx context.Context, url, schema string, log *slog.Logger) ([]int64, error) {
	cfg, err := ConnConfig(url, schema, "migrate")
	if err != nil {
		return nil, err
	}
	if err := createSchema(ctx, cfg, schema); err != nil {
		return nil, err
	}
	cfg.RuntimeParams["lock_timeout"] = strconv.FormatInt(migrateWait.Milliseconds(), 10)
	db := stdlib.OpenDB(*cfg)
	defer db.Close()
	files, err := fs.Sub(migrationFiles, "migrations")
	if err != nil {
		return nil, fmt.Errorf("read the migrations: %w", err)
	}
	p, err := goose.NewProvider(goose.DialectPostgres, db, files, goose.WithSessionLocker(migrating{}),
		goose.WithTableName(versionTable), goose.WithSlog(log), goose.WithAllowOutofOrder(false))
	if err != nil {
		return nil, fmt.Errorf("prepare the migrations: %w", err)
	}
	var applied []int64
	for {
		done, err := p.Up(ctx)
		var part *goose.PartialError
		if errors.As(err, &part) {
			done = part.Applied
		}
		for _, r := range done {
			applied = append(applied, r.Source.Version)
		}
		busy := SQLState(err) == pgerrcode.LockNotAvailable
		if err == nil {
			err = grant(ctx, db, schema)
			busy = passing(err)
		}
		if err == nil {
			return applied, nil
		}
		if !busy {
			return applied, fmt.Errorf("migrate: %w", err)
		}
		log.Warn("a table is in use; trying again", "err", err)
		if err := pause.For(ctx, migrateRest); err != nil {
			return applied, fmt.Errorf("migrate: %w", err)
		}
	}
}

// passing reports an error of grant that somebody else's work at the same time explains: a lock that is held, or a
// partition that was made or dropped.
func passing(err error) bool {
	switch SQLState(err) {
	case pgerrcode.LockNotAvailable, pgerrcode.UndefinedTable, pgerrcode.InternalError: // tuple concurrently updated
		return true
	}
	return false
}

// migrateWait is how long a migration waits for a table that somebody uses (a backup reads it for hours, say):
// everybody else waits behind it, a running relay too. migrateRest is how long they are let through before it tries
// again.
const migrateWait, migrateRest = 2 * time.Second, 3 * time.Second

// migrating lets one process migrate at a time, in one version table that nobody else has made: its owner could have
// given it triggers, which would run with the rights of this role. It stands in for goose's lock, and is the same lock:
// goose calls its functions without their schema, and would take what somebody has put into ours.
type migrating struct{}

// SessionLock implements lock.SessionLocker.
func (m migrating) SessionLock(ctx context.Context, conn *stdsql.Conn) error {
	for locked := false; !locked; {
		if err := conn.QueryRowContext(ctx, query("lock_try"), lock.DefaultLockID).Scan(&locked); err != nil {
			return fmt.Errorf("take the migration lock: %w", err)
		}
		if !locked {
			if err := pause.For(ctx, migrateRest); err != nil {
				return fmt.Errorf("wait for another migration: %w", err)
			}
		}
	}
	if err := m.versions(ctx, conn); err != nil {
		return errors.Join(err, m.SessionUnlock(context.WithoutCancel(ctx), conn))
	}
	return nil
}

// SessionUnlock implements lock.SessionLocker.
func (migrating) SessionUnlock(ctx context.Context, conn *stdsql.Conn) error {
	if _, err := conn.ExecContext(ctx, query("lock_drop"), lock.DefaultLockID); err != nil {
		return fmt.Errorf("give the migration lock back: %w", err)
	}
	return nil
}

// versions makes the version table as goose would, or looks at whose it is.
func (migrating) versions(ctx context.Context, conn *stdsql.Conn) error {
	var ours bool
	var owner string
	err := conn.QueryRowContext(ctx, query("version_table"), versionTable).Scan(&ours, &owner)
	switch {
	case errors.Is(err, stdsql.ErrNoRows):
		return createVersions(ctx, conn)
	case err != nil:
		return fmt.Errorf("look for the version table: %w", err)
	case !ours:
		return fmt.Errorf("%s belongs to role %q: run posthaste migrate as that role if it is to own posthaste's "+
			"tables, otherwise drop what it has made in the schema", versionTable, owner)
	}
	return nil
}

func createVersions(ctx context.Context, conn *stdsql.Conn) error {
	store, err := database.NewStore(database.DialectPostgres, versionTable)
	if err != nil {
		return fmt.Errorf("prepare the version table: %w", err)
	}
	tx, err := conn.BeginTx(ctx, nil)
	if err != nil {
		return fmt.Errorf("make the version table: %w", err)
	}
	defer func() { _ = tx.Rollback() }()
	err = store.CreateVersionTable(ctx, tx)
	if err == nil {
		err = store.Insert(ctx, tx, database.InsertRequest{Version: 0})
	}
	if err == nil {
		err = tx.Commit()
	}
	if err != nil {
		return fmt.Errorf("make the version table: %w", err)
	}
	return nil
}

// createSchema makes the schema if it is missing. CREATE SCHEMA IF NOT EXISTS wants the right to create even when
// there is nothing to create, so it is asked for only when needed.
func createSchema(ctx context.Context, cfg *pgx.ConnConfig, schema string) error {
	c, err := pgx.ConnectConfig(ctx, cfg)
	if err != nil {
		return fmt.Errorf("connect: %w", err)
	}
	defer func() { _ = c.Close(context.WithoutCancel(ctx)) }()
	var exists bool
	if err := c.QueryRow(ctx, query("schema_exists"), schema).Scan(&exists); err != nil {
		return fmt.Errorf("look for schema %q: %w", schema, err)
	}
	if exists {
		return nil
	}
	if _, err := c.Exec(ctx, "CREATE SCHEMA IF NOT EXISTS "+pgx.Identifier{schema}.Sanitize()); err != nil {
		return fmt.Errorf("create schema %q: %w", schema, err)
	}
	return nil
}

// CheckSchema compares the database's migrations with the embedded ones: nil, ErrSchemaMissing, ErrSchemaNewer, or an
// error of the connection.
func CheckSchema(ctx context.Context, db DB) error {
	var exists bool
	if err := db.QueryRow(ctx, query("schema_table_exists"), versionTable).Scan(&exists); err != nil {
		return fmt.Errorf("look for the schema: %w", err)
	}
	if !exists {
		return ErrSchemaMissing
	}
	var version int64
	if err := db.QueryRow(ctx, query("schema_version")).Scan(&version); err != nil {
		return fmt.Errorf("read the schema's version: %w", err)
	}
	switch want := latestMigration(); {
	case version < want:
		return ErrSchemaMissing
	case version > want:
		return ErrSchemaNewer
	}
	return nil
}

// OrderTablesError names tables that an order is written to and that the connection's role cannot use.
type OrderTablesError struct{ Tables string }

func (e *OrderTablesError) Error() string {
	return "orders cannot be written: table " + e.Tables +
		" is not there or its rights are missing (GRANT SELECT, INSERT ON orders and INSERT ON outbox)"
}

// CheckOrderTables reports whether orders could be written: nil, an OrderTablesError, or an error of the connection.
func CheckOrderTables(ctx context.Context, db DB) error {
	var tables string
	if err := db.QueryRow(ctx, query("order_tables")).Scan(&tables); err != nil {
		return fmt.Errorf("look for the tables of orders: %w", err)
	}
	if tables != "" {
		return &OrderTablesError{tables}
	}
	return nil
}

// ErrReadOnly means that this database takes no writes.
var ErrReadOnly = errors.New("this database takes no writes: it is a standby, or default_transaction_read_only is on")

// CheckWritable returns ErrReadOnly if nothing can be written, as after a failover to a server that was not promoted.
func CheckWritable(ctx context.Context, db DB) error {
	return writable(ctx, db, "order_writable", "orders")
}

// writable runs queries/<probe>.sql, a write that writes nothing, for which one needs the rights of the real one.
func writable(ctx context.Context, db DB, probe, what string) error {
	_, err := db.Exec(ctx, query(probe))
	if SQLState(err) == pgerrcode.ReadOnlySQLTransaction {
		return ErrReadOnly
	}
	if err != nil {
		return fmt.Errorf("check that %s can be written: %w", what, err)
	}
	return nil
}

func latestMigration() int64 {
	entries, err := migrationFiles.ReadDir("migrations")
	if err != nil {
		panic(err) // embedded: cannot fail
	}
	var last int64
	for _, e := range entries {
		n, err := strconv.ParseInt(e.Name()[:5], 10, 64)
		if err != nil {
			panic(err)
		}
		last = max(last, n)
	}
	return last
}
