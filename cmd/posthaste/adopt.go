package main

import (
	"context"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"posthaste/internal/audit"
	"posthaste/internal/cli"
	"posthaste/internal/ops"
)

type adoptCmd struct {
	Yes  bool `help:"Do not ask."`
	JSON bool `name:"json" help:"Print JSON."`
}

// Run takes over the gates of this database's streams, and the balances of credits if they are another database's.
func (c adoptCmd) Run(ctx context.Context, e *env) error {
	return e.open(ctx, func(short context.Context, pool *pgxpool.Pool, client redis.UniversalClient) error {
		a, err := ops.FindAdoption(short, pool, e.config.RelayName, e.config.SharedStreams.On())
		if err != nil {
			return err
		}
		if err := a.FindBalances(short, client); err != nil {
			return cli.WithRedisRemedy(err)
		}
		others, err := a.Others(short, client)
		if err != nil {
			return cli.WithRedisRemedy(err)
		}
		what := slices.Clone(a.Streams)
		var done []string
		for _, name := range a.Streams {
			done = append(done, name+" belongs to this database now")
		}
		if a.Balances {
			what = append(what, "the balances of credits")
			done = append(done, "the balances of credits belong to this database now")
		}
		result := map[string]any{"streams": append([]string{}, a.Streams...), "balances": a.Balances}
		if len(what) == 0 {
			return e.Result(c.JSON, result, "no streams, nothing to take over")
		}
		question := "Take over " + strings.Join(what, ", ") + "? A relay of another database that still writes there " +
			"is shut out."
		if len(others) > 0 {
			question += " Databases that share streams now: " + strings.Join(others, ", ") + "."
		}
		if a.Balances {
			question += " Balances that this database's ledger does not explain freeze their accounts."
		}
		args := audit.Detail{"streams": a.Streams, "balances": a.Balances}
		err = e.confirmed(ctx, c.Yes, question, pool, audit.Adopt, args,
			func(ctx context.Context) (audit.Detail, error) {
				return nil, cli.WithRedisRemedy(a.TakeOver(ctx, pool, client))
			})
		if err != nil {
			return err
		}
		return e.Result(c.JSON, result, done...)
	})
}
