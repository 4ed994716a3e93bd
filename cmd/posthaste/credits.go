package main

import (
	"context"
	"fmt"
	"text/tabwriter"

	"github.com/jackc/pgx/v5/pgxpool"

	"posthaste/credits"
	"posthaste/sink"
)

type creditsCmd struct {
	Reconcile creditsReconcileCmd `cmd:"" help:"Compare entries, ledger and Redis for every account, and explain each difference."`
}

type creditsReconcileCmd struct {
	JSON bool `name:"json" help:"Print JSON."`
}

// Run compares the balances; differences are a failure.
func (c creditsReconcileCmd) Run(ctx context.Context, e *env) error {
	return e.withPool(ctx, func(_ context.Context, pool *pgxpool.Pool) error {
		client, err := credits.NewClient(e.config.RedisURL)
		if err != nil {
			return &usageError{err.Error()}
		}
		defer client.Close()
		// Not bounded like the other commands: it looks at every account there is.
		r, err := credits.Reconcile(ctx, client, pool)
		if err != nil {
			return err
		}
		if c.JSON {
			err = e.json(r)
		} else {
			err = printReport(e, r)
		}
		if err == nil && len(r.Differences) > 0 {
			err = errSaid
		}
		return err
	})
}

func printReport(e *env, r *credits.Report) error {
	fmt.Fprintf(e.stdout, "%d accounts, %d credits in the ledger; %d in Redis, %d of them ahead of the ledger by what is in the streams; %d differences\n",
		r.Accounts, r.Total, r.Cached, r.Pending, len(r.Differences))
	if len(r.Differences) == 0 {
		return nil
	}
	t := tabwriter.NewWriter(e.stdout, 0, 4, 2, ' ', 0)
	fmt.Fprintln(t, "USER\tENTRIES\tLEDGER\tREDIS\tCAUSE\tEXPLANATION")
	for _, d := range r.Differences {
		inRedis := "-"
		if d.Redis != nil {
			inRedis = fmt.Sprint(*d.Redis)
		}
		fmt.Fprintf(t, "%s\t%d\t%d\t%s\t%s\t%s\n", d.UserID, d.Entries, d.Ledger, inRedis, d.Cause, d.Explanation)
	}
	return t.Flush()
}

// creditDurability is what a credit operation waits for: the same as the deletion of a row.
func creditDurability(d sink.Durability) credits.Durability {
	return credits.Durability{Replicas: d.Replicas, AOF: d.AOF}
}
