package main

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"posthaste/credits"
	"posthaste/outbox"
	"posthaste/sink"
	"posthaste/sql"
)

type adoptCmd struct {
	Yes  bool `help:"Do not ask."`
	JSON bool `name:"json" help:"Print JSON."`
}

// Run takes over the gates of this database's streams, and the balances of credits if they are another database's.
func (c adoptCmd) Run(ctx context.Context, e *env) error {
	var st outbox.State
	streams := []string{}
	err := e.withPool(ctx, func(ctx context.Context, pool *pgxpool.Pool) (err error) {
		if err := sql.Register(ctx, pool, e.config.RelayName); err != nil {
			return err
		}
		if err := sql.Identify(ctx, pool); err != nil {
			return err
		}
		if st, err = sql.ReadState(ctx, pool, e.config.RelayName); err != nil {
			return err
		}
		streams, err = sql.KnownStreams(ctx, pool, e.config.StreamPrefix)
		return err
	})
	if err != nil {
		return err
	}
	client, err := sink.NewClient(e.config.RedisURL)
	if err != nil {
		return &usageError{err.Error()}
	}
	defer client.Close()
	balances, err := e.foreignBalances(ctx, client, st.Owner)
	if err != nil {
		return ofRedis(err)
	}
	what := slices.Clone(streams)
	if balances {
		what = append(what, "the balances of credits")
	}
	if len(what) > 0 {
		question := fmt.Sprintf("Take over %s? A relay of another database that still writes there is shut out.", strings.Join(what, ", "))
		if balances {
			question += " Balances that this database's ledger does not explain freeze their accounts."
		}
		if err := e.confirm(ctx, c.Yes, question); err != nil {
			return err
		}
		if err := e.takeOver(ctx, client, streams, balances, st.Owner); err != nil {
			return ofRedis(err)
		}
	}
	if c.JSON {
		return e.json(map[string]any{"streams": streams, "balances": balances})
	}
	for _, name := range streams {
		fmt.Fprintf(e.stdout, "%s belongs to this database now\n", name)
	}
	if balances {
		fmt.Fprintln(e.stdout, "the balances of credits belong to this database now")
	}
	if len(what) == 0 {
		fmt.Fprintln(e.stdout, "no streams, nothing to take over")
	}
	return nil
}

// foreignBalances reports whether Redis has balances of another database.
func (e *env) foreignBalances(ctx context.Context, client redis.UniversalClient, owner outbox.Owner) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, oneShotTimeout)
	defer cancel()
	source, err := credits.Owner(ctx, client)
	return source != "" && source != owner.Source.String(), err
}

// takeOver makes owner the owner of the streams' gates, and of the balances. It may be repeated.
func (e *env) takeOver(ctx context.Context, client redis.UniversalClient, streams []string, balances bool, owner outbox.Owner) error {
	ctx, cancel := context.WithTimeout(ctx, oneShotTimeout)
	defer cancel()
	s := sink.New(sink.Options{Client: client})
	for _, name := range streams {
		if err := s.TakeOver(ctx, name, owner); err != nil {
			return fmt.Errorf("take over stream %q: %w", name, err)
		}
	}
	if balances {
		return credits.TakeOver(ctx, client, owner.Source.String())
	}
	return nil
}
