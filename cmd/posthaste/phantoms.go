package main

import (
	"context"
	"fmt"

	"github.com/dustin/go-humanize"
	"github.com/jackc/pgx/v5/pgxpool"

	"posthaste/internal/cli"
	"posthaste/internal/ops"
	"posthaste/sql"
)

type phantomsCmd struct {
	Limit int  `help:"How many are listed, the youngest first." default:"1000"`
	JSON  bool `name:"json" help:"Print JSON."`
}

// Run lists phantoms.
func (c phantomsCmd) Run(ctx context.Context, e *env) error {
	return e.config.WithPool(ctx, func(ctx context.Context, pool *pgxpool.Pool) error {
		list, err := sql.Phantoms(ctx, pool, c.Limit)
		if err != nil {
			return err
		}
		if c.JSON {
			return e.JSON(append([]sql.Phantom{}, list...))
		}
		if len(list) == 0 {
			_, err := fmt.Fprintln(e.Stdout, "no phantoms: each event that was compared with its stream is in Postgres")
			return err
		}
		t := cli.Table(e.Stdout)
		fmt.Fprintln(t, "ID\tSTREAM\tENTRY\tNOTICED")
		for _, p := range list {
			fmt.Fprintf(t, "%s\t%s\t%s\t%s\n", p.ID, ops.Printable(p.Stream), p.Entry, humanize.Time(p.Noticed))
		}
		return t.Flush()
	})
}
