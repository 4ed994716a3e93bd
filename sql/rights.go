package sql

import (
	"context"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"path"
	"slices"
	"strings"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"
)

//go:embed rights/*/*.sql
var rightFiles embed.FS

// reads lists the roles whose rights Migrate manages if they exist, and whether each may read posthaste's tables.
// rights/<line>/<role>.sql lists what a role may write.
var reads = map[string]bool{"posthaste_api": true, "posthaste_emit": false, "posthaste_operator": true}

// Denied reports whether the role lacks a right.
func Denied(err error) bool { return SQLState(err) == pgerrcode.InsufficientPrivilege }

// grant gives each existing role exactly its rights on posthaste's tables and revokes all others.
func grant(ctx context.Context, conn *pgx.Conn, schema string) error {
	return exclusively(ctx, conn, schema, func(tx pgx.Tx) error {
		var roles, held, named []string
		err := tx.QueryRow(ctx, query("rights_roles"), slices.Collect(maps.Keys(reads))).Scan(&roles)
		if err != nil {
			return fmt.Errorf("look for the roles: %w", err)
		}
		if err = tx.QueryRow(ctx, query("rights_held"), relations()).Scan(&held, &named); err != nil {
			return fmt.Errorf("look for the tables: %w", err)
		}
		have, err := versions(ctx, tx)
		if err != nil {
			return err
		}
		for _, role := range roles {
			for _, stmt := range grants(role, schema, held, named, have) {
				if _, err := tx.Exec(ctx, stmt); err != nil {
					return fmt.Errorf("give role %s its rights: %w", role, err)
				}
			}
		}
		return nil
	})
}

// grants returns the statements that give a role its rights in the existing lines. named are the tables and views; held
// also contains the partitions.
func grants(role, schema string, held, named []string, have map[Line]int) []string {
	list := []string{
		"REVOKE ALL ON " + strings.Join(held, ", ") + " FROM " + role,
		"GRANT USAGE ON SCHEMA " + pgx.Identifier{schema}.Sanitize() + " TO " + role,
	}
	for _, line := range Lines() {
		text, err := rightFiles.ReadFile(path.Join("rights", string(line), role+".sql"))
		if have[line] > 0 && !errors.Is(err, fs.ErrNotExist) {
			list = append(list, string(text))
		}
	}
	if reads[role] {
		list = append(list, "GRANT SELECT ON "+strings.Join(named, ", ")+" TO "+role)
	}
	return list
}
