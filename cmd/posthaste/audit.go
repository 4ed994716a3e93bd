package main

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"posthaste/internal/audit"
	"posthaste/internal/cli"
	"posthaste/internal/ops"
)

// audited makes a change and writes its audit entries. Without a pool, it only logs them.
func (e *env) audited(
	ctx context.Context, pool *pgxpool.Pool, action string, args audit.Detail,
	change func(ctx context.Context) (audit.Detail, error),
) error {
	return audit.New(pool, e.config.LoggerTo(e.Stderr)).Do(ctx, audit.Terminal(), action, args, change)
}

type auditCmd struct {
	Since string `placeholder:"T" help:"Only changes since T: RFC 3339, or how long ago (90m, 24h)."`
	Limit int    `help:"How many are listed, the newest first." default:"100"`
	JSON  bool   `name:"json" help:"Print JSON."`
}

// Run lists the changes and their authors.
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
		if c.JSON {
			return e.JSON(append([]audit.Entry{}, list...))
		}
		if len(list) == 0 {
			_, err := fmt.Fprintln(e.Stdout, "no changes")
			return err
		}
		t := cli.Table(e.Stdout)
		fmt.Fprintln(t, "TIME\tWHO\tFROM\tACTION\tOUTCOME\tDETAIL")
		for _, a := range list {
			detail := cli.Short(string(a.Detail), 200)
			outcome := strings.TrimSpace(a.Outcome + " " + a.Reason)
			fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%s\n", a.At.UTC().Format(time.RFC3339), ops.Printable(a.Actor),
				ops.Printable(a.Source), ops.Printable(a.Action), ops.Printable(outcome), detail)
		}
		return t.Flush()
	})
}
