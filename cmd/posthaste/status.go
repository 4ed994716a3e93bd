package main

import (
	"context"

	"github.com/jackc/pgx/v5/pgxpool"

	"posthaste/internal/app"
	"posthaste/internal/cli"
	"posthaste/internal/ops"
)

type statusCmd struct {
	JSON  bool `name:"json" help:"Print JSON, as GET /relay answers; with --watch one line each time."`
	Watch bool `help:"Refresh every second until interrupted, even while Postgres is unavailable."`
	Check bool `help:"Exit with 0 if all is well, 1 if it is degraded, and 2 if it is broken or cannot be read."`
}

// Run shows the status.
func (c statusCmd) Run(ctx context.Context, e *env) error {
	if c.Watch {
		return app.WatchStatus(ctx, e.config, e.IO, c.JSON)
	}
	var s cli.Screen
	err := e.config.WithPool(ctx, func(ctx context.Context, pool *pgxpool.Pool) (err error) {
		if s, err = app.ReadStatus(ctx, e.config, pool); err != nil {
			return err
		}
		if c.JSON {
			return e.JSON(s.Report)
		}
		return s.Print(e.Stdout, cli.Colours(e.Stdout))
	})
	switch {
	case !c.Check:
		return err
	case err != nil:
		return &cli.ExitError{Code: 2, Err: err}
	case s.Verdict.Word == ops.Broken.Word():
		return &cli.ExitError{Code: 2, Err: cli.ErrSaid}
	case s.Verdict.Word != ops.OK.Word():
		return &cli.ExitError{Code: 1, Err: cli.ErrSaid}
	}
	return nil
}
