package main

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5/pgxpool"

	"posthaste/internal/app"
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
	var a *ops.Adoption
	err := e.config.WithPool(ctx, func(ctx context.Context, pool *pgxpool.Pool) (err error) {
		a, err = ops.FindAdoption(ctx, pool, e.config.RelayName, e.config.SharedStreams)
		return err
	})
	if err != nil {
		return err
	}
	client, err := e.config.RedisClient(ctx)
	if err != nil {
		return err
	}
	defer client.Close()
	if err := inOneShot(ctx, func(ctx context.Context) error { return a.FindBalances(ctx, client) }); err != nil {
		return cli.WithRedisRemedy(err)
	}
	var others []string
	err = inOneShot(ctx, func(ctx context.Context) (err error) {
		others, err = a.Others(ctx, client)
		return err
	})
	if err != nil {
		return cli.WithRedisRemedy(err)
	}
	what := slices.Clone(a.Streams)
	if a.Balances {
		what = append(what, "the balances of credits")
	}
	if len(what) > 0 {
		question := fmt.Sprintf("Take over %s? A relay of another database that still writes there is shut out.",
			strings.Join(what, ", "))
		if len(others) > 0 {
			question += " Databases that share streams now: " + strings.Join(others, ", ") + "."
		}
		if a.Balances {
			question += " Balances that this database's ledger does not explain freeze their accounts."
		}
		if err := e.Confirm(ctx, c.Yes, question); err != nil {
			return err
		}
		args := audit.Detail{"streams": a.Streams, "balances": a.Balances}
		err := e.config.WithPool(ctx, func(ctx context.Context, pool *pgxpool.Pool) error {
			return e.audited(ctx, pool, audit.Adopt, args, func(ctx context.Context) (audit.Detail, error) {
				return nil, cli.WithRedisRemedy(a.TakeOver(ctx, pool, client))
			})
		})
		if err != nil {
			return err
		}
	}
	if c.JSON {
		return e.JSON(map[string]any{"streams": append([]string{}, a.Streams...), "balances": a.Balances})
	}
	for _, name := range a.Streams {
		fmt.Fprintf(e.Stdout, "%s belongs to this database now\n", name)
	}
	if a.Balances {
		fmt.Fprintln(e.Stdout, "the balances of credits belong to this database now")
	}
	if len(what) == 0 {
		fmt.Fprintln(e.Stdout, "no streams, nothing to take over")
	}
	return nil
}

// inOneShot runs do with the time limit of a short command. It is one step of a command that may wait for the user.
func inOneShot(ctx context.Context, do func(ctx context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, app.OneShotTimeout)
	defer cancel()
	return do(ctx)
}
