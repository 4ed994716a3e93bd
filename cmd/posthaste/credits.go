package main

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"

	"posthaste/credits"
	"posthaste/internal/audit"
	"posthaste/internal/cli"
)

type creditsCmd struct {
	Reconcile creditsReconcileCmd `cmd:""`
	Balance   creditsBalanceCmd   `cmd:""`
	Unfreeze  creditsUnfreezeCmd  `cmd:""`
}

type creditsReconcileCmd struct {
	JSON bool `name:"json" help:"Print JSON."`
}

// Run compares the balances. It fails if there are differences.
func (c creditsReconcileCmd) Run(ctx context.Context, e *env) error {
	return e.config.WithPool(ctx, func(_ context.Context, pool *pgxpool.Pool) error {
		client, _, err := e.config.CreditsClient(ctx)
		if err != nil {
			return err
		}
		defer client.Close()
		// The comparison reads every account, so the time limit of short commands does not apply.
		r, err := credits.Reconcile(ctx, client, pool, e.Accounts())
		if err != nil {
			return err
		}
		if c.JSON {
			err = e.JSON(r)
		} else {
			err = e.Reconciliation(r)
		}
		if err == nil && !r.Clean() {
			err = cli.ErrSaid
		}
		return err
	})
}

// withAccount runs do with a user's account, as ledger and Redis have it, and with what changes it.
func (e *env) withAccount(
	ctx context.Context, user string,
	do func(ctx context.Context, pool *pgxpool.Pool, bank *credits.Bank, a *credits.Account) error,
) error {
	id, err := uuid.Parse(user)
	if err != nil {
		return cli.Usage(fmt.Sprintf("user %q is not a UUID", user))
	}
	return e.config.WithPool(ctx, func(ctx context.Context, pool *pgxpool.Pool) error {
		client, connections, err := e.config.CreditsClient(ctx)
		if err != nil {
			return err
		}
		defer client.Close()
		a, err := credits.Inspect(ctx, client, pool, id)
		if err != nil {
			return err
		}
		return do(ctx, pool, credits.New(credits.Options{
			Redis: client, Connections: connections, Pool: pool, Durability: e.config.CreditDurability(),
		}), a)
	})
}

type creditsBalanceCmd struct {
	User string `arg:"" help:"User id."`
	JSON bool   `name:"json" help:"Print JSON."`
}

func (c creditsBalanceCmd) Run(ctx context.Context, e *env) error {
	return e.withAccount(ctx, c.User,
		func(_ context.Context, _ *pgxpool.Pool, _ *credits.Bank, a *credits.Account) error {
			return e.Result(c.JSON, a, cli.AccountLines(a)...)
		})
}

type creditsUnfreezeCmd struct {
	User   string `arg:"" help:"User id."`
	Settle string `enum:",ledger,redis" default:""`
	Yes    bool   `help:"Do not ask."`
	JSON   bool   `name:"json" help:"Print JSON: the account as it was, and whether it was released."`
}

// Run shows why an account is frozen, requests confirmation, and releases the account.
func (c creditsUnfreezeCmd) Run(ctx context.Context, e *env) error {
	return e.withAccount(ctx, c.User,
		func(_ context.Context, pool *pgxpool.Pool, bank *credits.Bank, a *credits.Account) error {
			if !c.JSON {
				fmt.Fprintln(e.Stdout, strings.Join(cli.AccountLines(a), "\n"))
			}
			settle := credits.Settlement(c.Settle)
			err := a.Releasable(settle)
			if err == nil {
				if err := e.Confirm(ctx, c.Yes, "Release it?"); err != nil {
					return err
				}
				args := audit.Detail{"user": a.UserID.String(), "settle": c.Settle}
				err = e.confirmed(ctx, true, "", pool, audit.Unfreeze, args,
					func(ctx context.Context) (audit.Detail, error) {
						_, err := bank.Unfreeze(ctx, a.UserID, settle)
						return nil, err
					})
			}
			if c.JSON {
				if jerr := e.JSON(map[string]any{"account": a, "released": err == nil}); jerr != nil {
					return jerr
				}
			}
			switch {
			case errors.Is(err, credits.ErrUnsettled):
				return fmt.Errorf("%w: --settle=ledger or --settle=redis", err)
			case err == nil && !c.JSON:
				fmt.Fprintln(e.Stdout, "released")
			}
			return err
		})
}
