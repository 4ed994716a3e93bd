package main

import (
	"cmp"
	"context"
	"fmt"
	"strings"

	"github.com/dustin/go-humanize"
	"github.com/jackc/pgx/v5/pgxpool"

	"posthaste/internal/audit"
	"posthaste/internal/bridge"
	"posthaste/internal/cli"
)

type bridgeCmd struct {
	Create bridgeCreateCmd `cmd:""`
	List   bridgeListCmd   `cmd:""`
	Drop   bridgeDropCmd   `cmd:""`
}

type bridgeCreateCmd struct {
	bridge.Config

	Yes bool `help:"Do not print the SQL and ask."`
}

// Run creates a bridge. Copying the waiting rows has no time limit.
func (c bridgeCreateCmd) Run(ctx context.Context, e *env) error {
	if err := c.Check(); err != nil {
		return cli.Usage(err.Error())
	}
	return e.config.WithPool(ctx, func(_ context.Context, pool *pgxpool.Pool) error {
		plan, err := bridge.New(ctx, pool, c.Config)
		if err != nil {
			return err
		}
		waiting := humanize.Comma(plan.Waiting)
		if !c.Yes {
			fmt.Fprintf(e.Stdout, "-- one transaction; %s waiting rows are copied\n%s;\n", waiting,
				strings.Join(plan.Statements, ";\n"))
		}
		if err := e.Confirm(ctx, c.Yes, fmt.Sprintf("Create the bridge of %s, and copy %s waiting rows? Until they "+
			"are copied, writers of the table wait.", c.Table, waiting)); err != nil {
			return err
		}
		var copied int64
		create := func(ctx context.Context) (_ audit.Detail, err error) {
			copied, err = plan.Create(ctx, pool)
			return audit.Detail{"copied": copied}, err
		}
		if err := e.audited(ctx, pool, audit.BridgeCreate, audit.Detail{"table": c.Table}, create); err != nil {
			return err
		}
		fmt.Fprintf(e.Stdout, "each row inserted into %s is copied into outbox; %s waiting rows were copied\n", c.Table,
			humanize.Comma(copied))
		return nil
	})
}

type bridgeListCmd struct {
	JSON bool `name:"json" help:"Print JSON."`
}

// Run lists the bridges. Counting the waiting rows has no time limit.
func (c bridgeListCmd) Run(ctx context.Context, e *env) error {
	return e.config.WithPool(ctx, func(_ context.Context, pool *pgxpool.Pool) error {
		list, err := bridge.List(ctx, pool)
		if err != nil {
			return err
		}
		return cli.List(e.IO, c.JSON, list, "no bridges", "TABLE\tCOPIED\tWAITING\tSTATE", func(b bridge.Bridge) []any {
			return []any{cmp.Or(b.Now, b.Table), cli.Count(b.Copied), cli.Count(b.Waiting), cmp.Or(b.Fault, "ok")}
		})
	})
}

type bridgeDropCmd struct {
	Table string `required:"" placeholder:"SCHEMA.NAME" help:"The table, as its name is in the catalog."`
	Yes   bool   `help:"Do not ask."`
}

func (c bridgeDropCmd) Run(ctx context.Context, e *env) error {
	question := fmt.Sprintf("Drop the bridge of %s? Rows that are inserted later are not published.", c.Table)
	if err := e.Confirm(ctx, c.Yes, question); err != nil {
		return err
	}
	return e.config.WithPool(ctx, func(ctx context.Context, pool *pgxpool.Pool) error {
		err := e.audited(ctx, pool, audit.BridgeDrop, audit.Detail{"table": c.Table},
			func(ctx context.Context) (audit.Detail, error) { return nil, bridge.Drop(ctx, pool, c.Table) })
		if err != nil {
			return err
		}
		fmt.Fprintf(e.Stdout, "the bridge of %s is gone; the copied rows stay\n", c.Table)
		return nil
	})
}
