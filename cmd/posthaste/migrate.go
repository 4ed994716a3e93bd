package main

import (
	"context"
	"fmt"
	"log/slog"

	"posthaste/sql"
)

type migrateCmd struct {
	Only string `enum:",outbox" default:"" placeholder:"outbox"`
	JSON bool   `name:"json" help:"Print JSON."`
}

func (c migrateCmd) Run(ctx context.Context, e *env) error {
	var lines []sql.Line
	if c.Only != "" {
		lines = sql.OutboxLines()
	}
	applied, err := sql.MigrateFor(ctx, e.config.PostgresURL, e.config.Schema, e.config.RelayName,
		slog.New(slog.DiscardHandler), lines...)
	if err != nil {
		return err
	}
	var said []string
	for _, a := range applied {
		said = append(said, fmt.Sprintf("applied migration %d of %s", a.Version, a.Line))
	}
	if len(applied) == 0 {
		said = []string{"the schema is up to date"}
	}
	return e.Result(c.JSON, map[string]any{"applied": append([]sql.Applied{}, applied...)}, said...)
}
