package main

import (
	"context"
	"fmt"
	"log/slog"

	"posthaste/internal/cli"
	"posthaste/sql"
)

type migrateCmd struct {
	JSON bool `name:"json" help:"Print JSON."`
}

// Run migrates.
func (c migrateCmd) Run(ctx context.Context, e *env) error {
	applied, err := sql.Migrate(ctx, e.config.PostgresURL, e.config.Schema, slog.New(slog.DiscardHandler))
	if err != nil {
		return cli.OneLine(err)
	}
	if c.JSON {
		if applied == nil {
			applied = []int64{}
		}
		return e.JSON(map[string]any{"applied": applied})
	}
	if len(applied) == 0 {
		fmt.Fprintln(e.Stdout, "the schema is up to date")
		return nil
	}
	fmt.Fprintf(e.Stdout, "applied %d migrations; the schema is at version %d\n", len(applied), applied[len(applied)-1])
	return nil
}
