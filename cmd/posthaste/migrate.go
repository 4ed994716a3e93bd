package main

import (
	"context"
	"fmt"
	"log/slog"

	"posthaste/internal/cli"
	"posthaste/sql"
)

type migrateCmd struct {
	Only string `enum:",outbox" default:"" placeholder:"outbox" help:"Only the outbox with its audit and the inbox: no tables of orders, payments and credits."`
	JSON bool   `name:"json" help:"Print JSON."`
}

// Run migrates.
func (c migrateCmd) Run(ctx context.Context, e *env) error {
	var lines []sql.Line
	if c.Only != "" {
		lines = sql.OutboxLines()
	}
	applied, err := sql.MigrateFor(ctx, e.config.PostgresURL, e.config.Schema, e.config.RelayName,
		slog.New(slog.DiscardHandler), lines...)
	if err != nil {
		return cli.OneLine(err)
	}
	if c.JSON {
		if applied == nil {
			applied = []sql.Applied{}
		}
		return e.JSON(map[string]any{"applied": applied})
	}
	if len(applied) == 0 {
		fmt.Fprintln(e.Stdout, "the schema is up to date")
		return nil
	}
	for _, a := range applied {
		fmt.Fprintf(e.Stdout, "applied migration %d of %s\n", a.Version, a.Line)
	}
	return nil
}
