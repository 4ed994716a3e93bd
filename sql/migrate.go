package sql

import (
	"context"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"slices"
	"strconv"
	"time"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"

	"posthaste/internal/pause"
)

//go:embed migrations/*/*.sql
var migrationFiles embed.FS

// The words of a line are functions and views that the statements and other programs use. Migrations replace them.
var (
	//go:embed words.sql
	outboxWords string
	//go:embed words_inbox.sql
	inboxWords string

	words = map[Line]string{LineOutbox: outboxWords, LineInbox: inboxWords}
)

// Line is a line of migrations with its own versions, in migrations/<line>/<version>_<name>.sql.
type Line string

// The outbox comes first: the others may refer to it.
const (
	LineOutbox Line = "outbox"
	LineInbox  Line = "inbox"
	LineShop   Line = "shop"
)

// Lines returns all lines in the order in which they are applied.
func Lines() []Line { return []Line{LineOutbox, LineInbox, LineShop} }

// OutboxLines returns the lines of an outbox without the shop.
func OutboxLines() []Line { return []Line{LineOutbox, LineInbox} }

// Applied is a migration that Migrate has applied.
type Applied struct {
	Line    Line `json:"line"`
	Version int  `json:"version"`
}

// versionTable has a row for each applied migration. The prefix distinguishes it from a table of the host application.
const versionTable = "posthaste_migrations"

// ErrSchemaMissing means that the database has not been migrated.
var ErrSchemaMissing error = schemaError{text: "the schema is missing or incomplete: run posthaste migrate"}

// errSchemaBarred means that the role cannot see whether the database has been migrated.
var errSchemaBarred error = schemaError{text: "this role may not use the schema: GRANT USAGE ON SCHEMA to it"}

// ErrSchemaNewer means that a later version of posthaste has migrated the database. Waiting does not help, so its
// Permanent method returns true.
var ErrSchemaNewer error = schemaError{
	text:      "the schema is newer than this binary: run the newer posthaste",
	permanent: true,
}

type schemaError struct {
	text      string
	permanent bool
}

func (e schemaError) Error() string { return e.text }

// Permanent reports whether waiting does not help.
func (e schemaError) Permanent() bool { return e.permanent }

// Condition is the name of the error in a relay's readiness.
func (schemaError) Condition() string { return "schema" }

// Migrate applies the missing embedded migrations of lines, or of all lines if none is given, to schema in the database
// at url, and returns those that it applied. Concurrent calls wait for each other on an advisory lock. Roles named like
// the files in rights get exactly the rights in them.
func Migrate(ctx context.Context, url, schema string, log *slog.Logger, lines ...Line) ([]Applied, error) {
	return MigrateFor(ctx, url, schema, "", log, lines...)
}

// MigrateFor is Migrate for the relay called relay. It applies nothing if an outbox in another schema of the database
// has a relay of that name.
func MigrateFor(ctx context.Context, url, schema, relay string, log *slog.Logger, lines ...Line) ([]Applied, error) {
	if len(lines) == 0 {
		lines = Lines()
	}
	cfg, err := ConnConfig(url, schema, "migrate")
	if err != nil {
		return nil, err
	}
	cfg.RuntimeParams["lock_timeout"] = strconv.FormatInt(migrateWait.Milliseconds(), 10)
	conn, err := Connect(ctx, cfg)
	if err != nil {
		return nil, fmt.Errorf("connect: %w", err)
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	var applied []Applied
	for {
		done, err := apply(ctx, conn, schema, relay, lines)
		applied = append(applied, done...)
		busy := SQLState(err) == pgerrcode.LockNotAvailable
		if err == nil {
			err = grant(ctx, conn, schema)
			busy = passing(err)
		}
		if err == nil {
			return applied, nil
		}
		if statementPooled(err) {
			return applied, &PoolingError{StatementPooling}
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

// passing reports whether concurrent work explains an error of grant: a held lock, or a partition that was created or
// dropped.
func passing(err error) bool {
	switch SQLState(err) {
	case pgerrcode.LockNotAvailable, pgerrcode.UndefinedTable, pgerrcode.InternalError: // tuple concurrently updated
		return true
	}
	return false
}

// migrateWait is how long a migration waits for a table that is in use, such as by a long backup. All other sessions of
// the table, even a relay's, queue behind it. Then they have migrateRest before it tries again.
const migrateWait, migrateRest = 2 * time.Second, 3 * time.Second

// exclusively runs do in a transaction, excluding other migrations of the schema.
func exclusively(ctx context.Context, conn *pgx.Conn, schema string, do func(tx pgx.Tx) error) error {
	return pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, query("migrate_lock"), schema); err != nil {
			return fmt.Errorf("take the migration lock: %w", err)
		}
		return do(tx)
	})
}

// apply applies the missing migrations of lines, all or none.
func apply(ctx context.Context, conn *pgx.Conn, schema, relay string, lines []Line) (applied []Applied, err error) {
	err = exclusively(ctx, conn, schema, func(tx pgx.Tx) error {
		applied = nil
		if relay != "" {
			if err := CheckRelayName(ctx, tx, relay); err != nil {
				return err
			}
		}
		if err := createSchema(ctx, tx, schema); err != nil {
			return err
		}
		if err := createVersions(ctx, tx); err != nil {
			return err
		}
		have, err := versions(ctx, tx)
		if err != nil {
			return err
		}
		if have[LineOutbox] == 0 && slices.Contains(lines, LineOutbox) {
			if err := checkPublication(ctx, tx, schema); err != nil {
				return err
			}
		}
		for _, line := range lines {
			for v := have[line] + 1; v <= latest(line); v++ {
				_, err := tx.Exec(ctx, migration(line, v))
				if err == nil {
					_, err = tx.Exec(ctx, query("schema_applied"), line, v)
				}
				if err != nil {
					return fmt.Errorf("%s %d: %w", line, v, err)
				}
				applied = append(applied, Applied{line, v})
			}
			if line == LineOutbox && have[LineOutbox] == 0 {
				if err := createPublication(ctx, tx, schema); err != nil {
					return fmt.Errorf("create the publication: %w", err)
				}
			}
			if len(applied) > 0 {
				if _, err := tx.Exec(ctx, words[line]); err != nil {
					return fmt.Errorf("words of %s: %w", line, err)
				}
			}
			if line == LineOutbox {
				if err := uncache(ctx, tx); err != nil {
					return err
				}
			}
		}
		return nil
	})
	if err != nil {
		applied = nil
	}
	return applied, err
}

// createVersions creates the version table. An existing one must belong to this role: another owner could have given it
// triggers, which would run with the rights of this role.
func createVersions(ctx context.Context, tx pgx.Tx) error {
	var ours bool
	var owner string
	err := tx.QueryRow(ctx, query("version_table"), versionTable).Scan(&ours, &owner)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		_, err = tx.Exec(ctx, query("version_create"))
		return err
	case err == nil && !ours:
		err = fmt.Errorf("%s belongs to role %q: run posthaste migrate as that role if it is to own posthaste's "+
			"tables, otherwise drop what it has made in the schema", versionTable, owner)
	}
	return err
}

// createSchema creates the schema if it is missing. CREATE SCHEMA IF NOT EXISTS requires the right to create schemas
// even if the schema exists.
func createSchema(ctx context.Context, tx pgx.Tx, schema string) error {
	var exists bool
	err := scan(ctx, tx, fmt.Sprintf("look for schema %q", schema), "schema_exists", []any{schema}, &exists)
	if err != nil || exists {
		return err
	}
	if _, err := tx.Exec(ctx, "CREATE SCHEMA "+pgx.Identifier{schema}.Sanitize()); err != nil {
		return fmt.Errorf("create schema %q: %w", schema, err)
	}
	return nil
}

// versions returns the highest applied version of each line.
func versions(ctx context.Context, db DB) (map[Line]int, error) {
	return pairs[Line, int](ctx, db, "read the schema's versions", "schema_versions")
}

// CheckSchema compares the database's migrations with the embedded ones: nil, ErrSchemaMissing, ErrSchemaNewer, or an
// error of the connection. The outbox line must exist; other lines that exist must be complete.
func CheckSchema(ctx context.Context, db DB) error {
	var exists, barred bool
	if err := db.QueryRow(ctx, query("schema_table_exists"), versionTable).Scan(&exists, &barred); err != nil {
		return fmt.Errorf("look for the schema: %w", err)
	}
	if barred {
		return errSchemaBarred
	}
	if !exists {
		return ErrSchemaMissing
	}
	have, err := versions(ctx, db)
	if err != nil {
		return err
	}
	missing := have[LineOutbox] == 0
	for line, version := range have {
		if version > latest(line) {
			return ErrSchemaNewer
		}
		missing = missing || version < latest(line)
	}
	if missing {
		return ErrSchemaMissing
	}
	return nil
}

// HasLine reports whether a line of migrations was applied to the database.
func HasLine(ctx context.Context, db DB, line Line) (bool, error) {
	have, err := versions(ctx, db)
	return have[line] > 0, err
}

// OrderTablesError names tables that writing an order needs and that the connection's role cannot use.
type OrderTablesError struct{ Tables string }

func (e *OrderTablesError) Error() string {
	return "orders cannot be written: table " + e.Tables +
		" is not there or its rights are missing (GRANT SELECT, INSERT ON orders and INSERT ON outbox)"
}

// CheckOrderTables checks that orders can be written: nil, an OrderTablesError, or an error of the connection.
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

// ErrReadOnly means that this database refuses writes.
var ErrReadOnly = errors.New("this database takes no writes: it is a standby, or default_transaction_read_only is on")

// CheckWritable returns ErrReadOnly if the database refuses writes, as after a failover to a server that was not
// promoted.
func CheckWritable(ctx context.Context, db DB) error {
	return writable(ctx, db, "order_writable", "orders")
}

// ErrCommitsWait means that commits do not end, because no synchronous standby confirms them.
var ErrCommitsWait = errors.New("commits wait for a synchronous standby")

// CheckCommits returns ErrCommitsWait, with the names of the standbys, while commits of this role wait for one. A
// server that withholds the state of its standbys has none.
func CheckCommits(ctx context.Context, db DB) error {
	var waits bool
	var standbys string
	err := scan(ctx, db, "look for commits that wait", "commits", nil, &waits, &standbys)
	switch {
	case Withheld(err):
		err = nil
	case waits:
		err = fmt.Errorf("%w (synchronous_standby_names = '%s')", ErrCommitsWait, standbys)
	}
	return err
}

// writable runs queries/<probe>.sql, a write of no rows that requires the same rights as the real one.
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

// migrations are the texts of the embedded migrations by line, in the order of their versions, which begin at 1.
var migrations = func() map[Line][]string {
	all := map[Line][]string{}
	for _, line := range Lines() {
		for {
			files, _ := fs.Glob(migrationFiles, fmt.Sprintf("migrations/%s/%d_*.sql", line, len(all[line])+1))
			if len(files) == 0 {
				break
			}
			text, err := migrationFiles.ReadFile(files[0])
			if err != nil {
				panic(err) // embedded: cannot fail
			}
			all[line] = append(all[line], string(text))
		}
	}
	return all
}()

// latest is the newest version of a line, 0 for a line that this binary does not know.
func latest(line Line) int { return len(migrations[line]) }

func migration(line Line, version int) string { return migrations[line][version-1] }
