// Package statement returns SQL statements that a package embeds, one file each in its folder queries, and the rows of
// statements.
package statement

import (
	"context"
	"embed"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"
)

// In returns a function that returns the text of queries/<name>.sql in files. It panics for an unknown name: the
// files are embedded, so a missing one is a bug.
func In(files embed.FS) func(name string) string {
	list, err := files.ReadDir("queries")
	if err != nil {
		panic(err)
	}
	texts := make(map[string]string, len(list))
	for _, f := range list {
		b, err := files.ReadFile("queries/" + f.Name())
		if err != nil {
			panic(err)
		}
		texts[strings.TrimSuffix(f.Name(), ".sql")] = string(b)
	}
	return func(name string) string {
		text, ok := texts[name]
		if !ok {
			panic("no statement is called " + name)
		}
		return text
	}
}

// DB executes statements: a pool, a connection or a transaction.
type DB interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}

// Rows returns the rows of a statement, each as convert makes it. what says in its error what the statement is for.
func Rows[T any](ctx context.Context, db DB, what string, convert pgx.RowToFunc[T], text string, args ...any) (
	[]T, error,
) {
	rows, err := db.Query(ctx, text, args...)
	if err == nil {
		var list []T
		if list, err = pgx.CollectRows(rows, convert); err == nil {
			return list, nil
		}
	}
	return nil, fmt.Errorf("%s: %w", what, err)
}

// Structs is Rows for structs with a field for each column.
func Structs[T any](ctx context.Context, db DB, what, text string, args ...any) ([]T, error) {
	return Rows(ctx, db, what, pgx.RowToStructByPos[T], text, args...)
}
