package main

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"posthaste/internal/audit"
	"posthaste/internal/cli"
)

type auditCmd struct {
	Since string `placeholder:"T" help:"Only changes since T: RFC 3339, or how long ago (90m, 24h)."`
	Limit int    `help:"How many are listed, the newest first." default:"100"`
	JSON  bool   `name:"json" help:"Print JSON."`
}

func (c auditCmd) Run(ctx context.Context, e *env) error {
	since, err := cli.ParseTime("since", c.Since, time.Time{})
	if err != nil {
		return cli.Usage(err.Error())
	}
	if c.Limit < 1 {
		return cli.Usage(fmt.Sprintf("--limit %d: want a number above 0", c.Limit))
	}
	return e.config.WithPool(ctx, func(ctx context.Context, pool *pgxpool.Pool) error {
		list, err := audit.List(ctx, pool, since(time.Now()), c.Limit)
		if err != nil {
			return err
		}
		return cli.List(e.IO, c.JSON, list, "no changes", "TIME\tWHO\tFROM\tACTION\tOUTCOME\tDETAIL",
			func(a audit.Entry) []any {
				return []any{
					a.At.UTC().Format(time.RFC3339), a.Actor, a.Source, a.Action,
					strings.TrimSpace(a.Outcome + " " + a.Reason), cli.Short(string(a.Detail), 200),
				}
			})
	})
}
