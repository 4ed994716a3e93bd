package sql

import (
	"context"
	stdsql "database/sql"
	"embed"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"
)

//go:embed rights/*.sql
var rightFiles embed.FS

// reads tells for each role that Migrate gives its rights to, if there is one, whether it reads posthaste's tables.
// What it may write is in rights/<role>.sql.
var reads = map[string]bool{"posthaste_api": true, "posthaste_emit": false, "posthaste_operator": true}

// Denied reports that the role lacks a right.
func Denied(err error) bool { return SQLState(err) == pgerrcode.InsufficientPrivilege }

// grant gives each of the roles that there are exactly its rights on posthaste's tables, and takes all others. They are
// not default privileges, as they were once: those know no columns, and no tables that are not for everybody.
func grant(ctx context.Context, db *stdsql.DB, schema string) error {
	c, err := db.Conn(ctx)
	if err != nil {
		return err
	}
	defer func() { _ = c.Close() }()
	if err := (migrating{}).SessionLock(ctx, c); err != nil {
		return err
	}
	err = c.Raw(func(driver any) error {
		return pgx.BeginFunc(ctx, driver.(*stdlib.Conn).Conn(), func(tx pgx.Tx) error {
			return grantIn(ctx, tx, schema)
		})
	})
	return errors.Join(err, migrating{}.SessionUnlock(context.WithoutCancel(ctx), c))
}

func grantIn(ctx context.Context, tx pgx.Tx, schema string) error {
	var roles, held []string
	err := tx.QueryRow(ctx, query("rights_roles"), slices.Collect(maps.Keys(reads))).Scan(&roles)
	if err == nil {
		err = tx.QueryRow(ctx, query("rights_held"), relations).Scan(&held)
	}
	if err != nil {
		return fmt.Errorf("look for the roles: %w", err)
	}
	in := " SCHEMA " + pgx.Identifier{schema}.Sanitize()
	for _, role := range roles {
		text, err := rightFiles.ReadFile("rights/" + role + ".sql")
		if err != nil {
			panic(err) // embedded: cannot fail
		}
		stmts := []string{
			"ALTER DEFAULT PRIVILEGES IN" + in + " REVOKE ALL ON TABLES FROM " + role,
			"REVOKE ALL ON " + strings.Join(held, ", ") + " FROM " + role,
			"GRANT USAGE ON" + in + " TO " + role,
			string(text),
		}
		if reads[role] {
			stmts = append(stmts, "GRANT SELECT ON "+strings.Join(relations, ", ")+" TO "+role)
		}
		for _, stmt := range stmts {
			if _, err := tx.Exec(ctx, stmt); err != nil {
				return fmt.Errorf("give role %s its rights: %w", role, err)
			}
		}
	}
	return nil
}
