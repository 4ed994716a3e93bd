package main

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5/pgxpool"

	"posthaste/internal/audit"
	"posthaste/internal/cli"
	"posthaste/outbox"
	"posthaste/sql"
)

type modeCmd struct {
	Mode string `arg:"" optional:"" help:"auto, cdc or poll; without it the mode is shown."`
	JSON bool   `name:"json" help:"Print JSON."`
}

func (c modeCmd) Run(ctx context.Context, e *env) error {
	var mode outbox.Mode
	if c.Mode != "" {
		var err error
		if mode, err = outbox.ParseMode(c.Mode); err != nil {
			return cli.Usage(err.Error())
		}
	}
	return e.config.WithPool(ctx, func(ctx context.Context, pool *pgxpool.Pool) error {
		if err := sql.Register(ctx, pool, e.config.RelayName); err != nil {
			return err
		}
		if mode != "" {
			args := audit.Detail{"mode": string(mode), "relay": e.config.RelayName}
			set := func(ctx context.Context) (audit.Detail, error) {
				return nil, sql.SetDesired(ctx, pool, e.config.RelayName, mode)
			}
			if err := e.audited(ctx, pool, audit.Mode, args, set); err != nil {
				return err
			}
		}
		st, err := sql.ReadState(ctx, pool, e.config.RelayName)
		if err != nil {
			return err
		}
		return e.Result(c.JSON, map[string]any{"desired": st.Desired, "mode": st.Active},
			fmt.Sprintf("desired %s, active %s", st.Desired, st.Active))
	})
}
