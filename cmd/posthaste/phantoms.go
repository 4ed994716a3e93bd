package main

import (
	"context"
	"fmt"

	"github.com/dustin/go-humanize"
	"github.com/jackc/pgx/v5/pgxpool"

	"posthaste/internal/audit"
	"posthaste/internal/cli"
	"posthaste/internal/ops"
	"posthaste/sql"
)

type phantomsCmd struct {
	Ack   bool `help:"Acknowledge all phantoms, which ends their alert and notices. The list keeps them."`
	Limit int  `help:"How many are listed, the youngest first." default:"1000"`
	JSON  bool `name:"json" help:"Print JSON."`
}

func (c phantomsCmd) Run(ctx context.Context, e *env) error {
	return e.config.WithPool(ctx, func(ctx context.Context, pool *pgxpool.Pool) error {
		if c.Ack {
			return c.ack(ctx, e, pool)
		}
		list, err := sql.Phantoms(ctx, pool, c.Limit)
		if err != nil {
			return err
		}
		return c.print(e, list, "no phantoms: each event that was compared with its stream is in Postgres")
	})
}

func (c phantomsCmd) print(e *env, list []sql.Phantom, none string) error {
	return cli.List(e.IO, c.JSON, list, none, "ID\tSTREAM\tENTRY\tNOTICED\tACKNOWLEDGED", func(p sql.Phantom) []any {
		acked := "no"
		if p.Acked != nil {
			acked = humanize.Time(*p.Acked)
		}
		return []any{p.ID, p.Stream, p.Entry, humanize.Time(p.Noticed), acked}
	})
}

// ack acknowledges all phantoms and prints them.
func (c phantomsCmd) ack(ctx context.Context, e *env, pool *pgxpool.Pool) error {
	var list []sql.Phantom
	var back bool
	change := func(ctx context.Context) (_ audit.Detail, err error) {
		list, back, err = sql.AckPhantoms(ctx, pool)
		return audit.Detail{"phantoms": len(list)}, err
	}
	if err := e.audited(ctx, pool, audit.Phantoms, audit.Detail{"ack": true}, change); err != nil {
		return err
	}
	if c.JSON {
		return e.JSON(map[string]any{"phantoms": append([]sql.Phantom{}, list...), "went_back": back})
	}
	if back {
		fmt.Fprintln(e.Stdout, "acknowledged: Postgres has gone back in time")
	}
	none := "no phantoms to acknowledge"
	if len(list) > 0 {
		none = ""
		fmt.Fprintf(e.Stdout, "acknowledged: %s\n", ops.CountOf(int64(len(list)), "phantom"))
	}
	return c.print(e, list[:min(len(list), max(c.Limit, 0))], none)
}
