package bridge

import (
	"context"
	"embed"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"posthaste/internal/statement"
	"posthaste/sql"
)

//go:embed queries/*.sql
var files embed.FS

var query = statement.In(files)

// lockTimeout bounds the wait for the table's lock: writers queue behind it.
const lockTimeout = 5 * time.Second

// Plan is a bridge that can be created.
type Plan struct {
	Config

	// Statements create it, in one transaction.
	Statements []string
	// Waiting is the number of rows that are copied at once.
	Waiting int64

	event event
}

// New plans the bridge that c describes. An error says what to correct.
func New(ctx context.Context, db sql.DB, c Config) (*Plan, error) {
	if err := c.Check(); err != nil {
		return nil, err
	}
	t, err := find(ctx, db, c.Table)
	if err != nil {
		return nil, err
	}
	if err := t.fits(c); err != nil {
		return nil, err
	}
	if err := t.free(); err != nil {
		return nil, err
	}
	comment, err := json.Marshal(c)
	if err != nil {
		return nil, err
	}
	name := "outbox_bridge_" + uuid.NewString()[:8]
	e := t.event(c)
	waiting, err := e.count(ctx, db)
	if err != nil {
		return nil, err
	}
	return &Plan{c, e.statements(name, string(comment)), waiting, e}, nil
}

func find(ctx context.Context, db sql.DB, name string) (*table, error) {
	schema, name, _ := strings.Cut(name, ".")
	found, err := statement.Structs[table](ctx, db, "read table "+schema+"."+name, query("table"), schema, name)
	switch {
	case err != nil:
		return nil, err
	case len(found) == 0:
		return nil, fmt.Errorf("table %s.%s does not exist in this database", schema, name)
	}
	t := &found[0]
	t.inSchema, t.ofTable = schema, name
	return t, nil
}

func (t *table) event(c Config) event {
	return event{table: t, Config: c, helpers: pgx.Identifier{t.Schema}.Sanitize()}
}

// count returns the number of waiting rows.
func (e event) count(ctx context.Context, db sql.DB) (n int64, err error) {
	if e.Pending == "" {
		return 0, nil
	}
	err = db.QueryRow(ctx, "SELECT count(*) "+e.waiting()).Scan(&n)
	switch state := sql.SQLState(err); {
	case sql.Denied(err):
		return 0, fmt.Errorf("count the waiting rows of %s: %w", e.name(), err)
	case strings.HasPrefix(state, "42"):
		return 0, errors.New("--pending must be a condition of a WHERE clause, such as 'published_at IS NULL': " +
			err.Error())
	case err != nil:
		return 0, fmt.Errorf("count the waiting rows of %s: %w", e.name(), detailed(err))
	}
	return n, nil
}

// Create makes the bridge and copies the waiting rows: both, or nothing. Writers of the table wait until it is done. It
// returns the number of rows that it has copied.
func (p *Plan) Create(ctx context.Context, pool *pgxpool.Pool) (copied int64, err error) {
	err = locking(ctx, pool, p.Table, func(tx pgx.Tx) error {
		for _, s := range p.Statements {
			tag, err := tx.Exec(ctx, s)
			if err != nil {
				return err
			}
			if tag.Insert() {
				copied = tag.RowsAffected()
			}
		}
		return nil
	})
	return copied, p.event.named(ctx, pool, err)
}

// named returns an error of the copy that names the row. Postgres names only the event if outbox has its id already:
// from another waiting row, or from a transaction that has just committed.
func (e event) named(ctx context.Context, db sql.DB, err error) error {
	pg, ok := errors.AsType[*pgconn.PgError](err)
	if !ok || pg.ConstraintName != "outbox_pkey" {
		return detailed(err)
	}
	event := eventID.FindString(pg.Detail)
	var rows int
	var id string
	if db.QueryRow(ctx, e.ofEvent(), event).Scan(&rows, &id) != nil {
		return detailed(err)
	}
	detail := fmt.Sprintf("The id %q is that of event %s.", id, event)
	if rows > 1 {
		detail = fmt.Sprintf("%d waiting rows have the id %q, for event %s.", rows, id, event)
	}
	return errors.New("column " + e.ID + " of " + e.name() + " must be " + unique + ". " + detail)
}

var eventID = regexp.MustCompile(`[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}`)

// locking runs do in a transaction that does not wait longer than lockTimeout for a lock.
func locking(ctx context.Context, pool *pgxpool.Pool, table string, do func(tx pgx.Tx) error) error {
	err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, fmt.Sprintf("SET LOCAL lock_timeout = %d", lockTimeout.Milliseconds())); err != nil {
			return err
		}
		return do(tx)
	})
	if sql.SQLState(err) == pgerrcode.LockNotAvailable {
		return fmt.Errorf("a transaction has used %s for more than %s: end it, or repeat the command: %w", table,
			lockTimeout, err)
	}
	return err
}

// detailed adds the detail of an error of Postgres, which names the row.
func detailed(err error) error {
	if pg, ok := errors.AsType[*pgconn.PgError](err); ok && pg.Detail != "" {
		return fmt.Errorf("%w: %s", err, pg.Detail)
	}
	return err
}

// Bridge is a bridge in the database.
type Bridge struct {
	Config // Table is its name when the bridge was created

	// Now is the table's name now, "" if the table is gone or has lost the trigger.
	Now string `json:"now"`
	// Copied counts the copied rows, including those of transactions that were rolled back; -1 if it is unknown.
	Copied int64 `json:"copied"`
	// Waiting is the number of rows that Pending selects and that have no copy; -1 if it is unknown.
	Waiting int64 `json:"waiting"`
	// Fault describes why the bridge does not copy rows, or no longer fits the table; "" if all is well.
	Fault string `json:"fault,omitempty"`

	name string
}

// found is a row of queries/list.sql.
type found struct {
	Name, Body, Config, InSchema, Table string
	Enabled                             bool
	Copied                              int64
}

// List returns the bridges of posthaste's schema, and checks each of them.
func List(ctx context.Context, db sql.DB) ([]Bridge, error) {
	all, err := statement.Structs[found](ctx, db, "list bridges", query("list"))
	if err != nil {
		return nil, err
	}
	list := make([]Bridge, len(all))
	for i, f := range all {
		b := Bridge{Copied: f.Copied, Waiting: -1, name: f.Name}
		if err := json.Unmarshal([]byte(f.Config), &b.Config); err != nil {
			b.Fault = "the comment of function " + f.Name + ", which holds its columns, was changed"
		} else if err := b.check(ctx, db, f); err != nil {
			b.Fault = err.Error()
		}
		list[i] = b
	}
	return list, nil
}

// check fills in what depends on the table.
func (b *Bridge) check(ctx context.Context, db sql.DB, f found) error {
	if f.Table == "" {
		return fmt.Errorf("%s is gone, or has lost its trigger", b.Table)
	}
	b.Now = f.InSchema + "." + f.Table
	t, err := find(ctx, db, b.Now)
	if err != nil {
		return err
	}
	if err := t.fits(b.Config); err != nil {
		return err
	}
	e := t.event(b.Config)
	if b.Waiting, err = e.count(ctx, db); err != nil {
		b.Waiting = -1
		return err
	}
	switch {
	case !f.Enabled:
		return fmt.Errorf("its trigger is disabled: ALTER TABLE %s ENABLE TRIGGER posthaste_bridge", t.quoted())
	case b.Now == b.Table && e.body(e.helpers+"."+f.Name) != f.Body:
		return fmt.Errorf("columns of %s have other types than when the bridge was created", b.Now)
	}
	return nil
}

// Drop removes the bridge of a table, or, if a table of this name was dropped, what is left of its bridge. The copied
// rows stay in outbox.
func Drop(ctx context.Context, pool *pgxpool.Pool, table string) error {
	list, err := List(ctx, pool)
	if err != nil {
		return err
	}
	for _, now := range []string{"", table} { // first the one that copies nothing
		for _, b := range list {
			if b.Now == now && (now != "" || b.Table == table) {
				return drop(ctx, pool, b)
			}
		}
	}
	return fmt.Errorf("%s has no bridge (posthaste bridge list)", table)
}

// DropAll removes every bridge of posthaste's schema, and returns their tables.
func DropAll(ctx context.Context, pool *pgxpool.Pool) (tables []string, err error) {
	list, err := List(ctx, pool)
	for _, b := range list {
		if err == nil {
			err = drop(ctx, pool, b)
			tables = append(tables, b.Table)
		}
	}
	return tables, err
}

// drop removes the objects of a bridge. The function's owner may drop the trigger with it; others need the table.
func drop(ctx context.Context, pool *pgxpool.Pool, b Bridge) error {
	return locking(ctx, pool, b.Table, func(tx pgx.Tx) error {
		for _, s := range []string{"DROP FUNCTION " + b.name + " CASCADE", "DROP SEQUENCE IF EXISTS " + b.name} {
			if _, err := tx.Exec(ctx, s); err != nil {
				return fmt.Errorf("drop the bridge of %s: %w", b.Table, err)
			}
		}
		return nil
	})
}
