package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"posthaste/credits"
	"posthaste/internal/app"
	"posthaste/internal/audit"
	"posthaste/internal/cli"
)

type creditsCmd struct {
	Reconcile creditsReconcileCmd `cmd:"" help:"Compare entries, ledger and Redis for every account, and explain each difference."`
	Balance   creditsBalanceCmd   `cmd:"" help:"Show one account as ledger and Redis have it."`
	Unfreeze  creditsUnfreezeCmd  `cmd:"" help:"Release an account that was frozen because its operations contradict the ledger."`
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
		r, err := credits.Reconcile(ctx, client, pool, reconcileProgress(e.Stderr))
		if err != nil {
			return err
		}
		if c.JSON {
			err = e.JSON(r)
		} else {
			err = printReport(e, r)
		}
		if err == nil && !r.Clean() {
			err = cli.ErrSaid
		}
		return err
	})
}

func printReport(e *env, r *credits.Report) error {
	fmt.Fprintf(e.Stdout,
		"%d accounts, %d credits in the ledger; %d in Redis, %d of them ahead of the ledger by what is in the "+
			"streams; %d differences\n",
		r.Accounts, r.Total, r.Cached, r.Pending, len(r.Differences)+len(r.Buckets))
	for _, b := range r.Buckets {
		fmt.Fprintf(e.Stdout,
			"bucket %d: its accounts add up to %d, its counter-account says %d: accounts were changed or deleted by "+
				"hand (%s)\n",
			b.Bucket, b.Accounts, b.Issued, b.Cause)
	}
	if len(r.Differences) == 0 {
		return nil
	}
	t := cli.Table(e.Stdout)
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

// reconcileProgress prints the progress of a long reconciliation.
func reconcileProgress(w io.Writer) func(done, about int64) {
	const every = 5 * time.Second
	told := time.Now()
	return func(done, about int64) {
		if time.Since(told) >= every {
			told = time.Now()
			fmt.Fprintf(w, "%d of about %d accounts\n", done, about)
		}
	}
}

// withBank runs do with a Bank and its connections.
func (e *env) withBank(ctx context.Context, user string, do func(ctx context.Context, b *credits.Bank,
	c redis.UniversalClient, pool *pgxpool.Pool, id uuid.UUID) error,
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
		bank := credits.New(credits.Options{
			Redis: client, Connections: connections, Pool: pool, Durability: e.config.CreditDurability(),
		})
		return do(ctx, bank, client, pool, id)
	})
}

type creditsBalanceCmd struct {
	User string `arg:"" help:"User id."`
	JSON bool   `name:"json" help:"Print JSON."`
}

// Run shows one account.
func (c creditsBalanceCmd) Run(ctx context.Context, e *env) error {
	return e.withBank(ctx, c.User, func(ctx context.Context, _ *credits.Bank, client redis.UniversalClient,
		pool *pgxpool.Pool, user uuid.UUID,
	) error {
		a, err := credits.Inspect(ctx, client, pool, user)
		if err != nil {
			return err
		}
		if c.JSON {
			return e.JSON(a)
		}
		printAccount(e.Stdout, a)
		return nil
	})
}

type creditsUnfreezeCmd struct {
	User   string `arg:"" help:"User id."`
	Settle string `enum:",ledger,redis" default:"" help:"Which balance is kept if they differ: ledger (quarantined operations are discarded) or redis (the difference becomes an operation)."`
	Yes    bool   `help:"Do not ask."`
	JSON   bool   `name:"json" help:"Print JSON: the account as it was, and whether it was released."`
}

// Run shows why an account is frozen, requests confirmation, and releases the account.
func (c creditsUnfreezeCmd) Run(ctx context.Context, e *env) error {
	asking := ctx
	return e.withBank(ctx, c.User, func(ctx context.Context, b *credits.Bank, client redis.UniversalClient,
		pool *pgxpool.Pool, user uuid.UUID,
	) error {
		a, err := credits.Inspect(ctx, client, pool, user)
		if err != nil {
			return err
		}
		if !c.JSON {
			printAccount(e.Stdout, a)
		}
		if err = a.Releasable(credits.Settlement(c.Settle)); err == nil {
			if err = e.Confirm(asking, c.Yes, "Release it?"); err != nil {
				return err
			}
			// The user's answer may have taken longer than the time limit of ctx.
			ctx, cancel := context.WithTimeout(asking, app.OneShotTimeout)
			defer cancel()
			args := audit.Detail{"user": user.String(), "settle": c.Settle}
			err = e.audited(ctx, pool, audit.Unfreeze, args, func(ctx context.Context) (audit.Detail, error) {
				_, err := b.Unfreeze(ctx, user, credits.Settlement(c.Settle))
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
		case err != nil:
			return err
		}
		if !c.JSON {
			fmt.Fprintln(e.Stdout, "released")
		}
		return nil
	})
}

func printAccount(w io.Writer, a *credits.Account) {
	fmt.Fprintf(w, "ledger: %d credits after operation %d\n", a.Ledger, a.Seq)
	if a.Redis != nil {
		fmt.Fprintf(w, "redis:  %d credits after operation %d, %d waiting for the ledger\n", *a.Redis, *a.RedisSeq,
			a.Waiting)
	} else {
		fmt.Fprintln(w, "redis:  not loaded; it is loaded from the ledger on demand")
	}
	if a.Difference != "" {
		fmt.Fprintln(w, "difference:", a.Difference)
	}
	switch {
	case a.Frozen != "":
		fmt.Fprintf(w, "frozen: %s; %d operations in quarantine\n", a.Frozen, a.Quarantined)
	case a.RedisFrozen != "":
		fmt.Fprintf(w, "frozen in Redis only: %s\n", a.RedisFrozen)
	}
	for _, q := range a.Quarantine {
		fmt.Fprintf(w, "  %s %q %q, operation %q (%s, %s)\n", q.At.UTC().Format(time.RFC3339), q.Kind, q.Amount, q.Seq,
			q.Reason, q.StreamID)
	}
}
