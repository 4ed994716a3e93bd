package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"posthaste/api"
	"posthaste/internal/cli"
	"posthaste/internal/ops"
)

type traceCmd struct {
	ID   string `arg:"" help:"Id of an order or an event, any aggregate id, or, with --user, an idempotency key."`
	User string `help:"The user whose idempotency key ID is; a key is found only with it."`
	JSON bool   `name:"json" help:"Print JSON."`
}

// Run follows an id through orders, outbox, history, dead events, streams and consumer groups.
func (c traceCmd) Run(ctx context.Context, e *env) error {
	user, err := uuid.Parse(c.User)
	if c.User != "" && err != nil {
		return cli.Usage(fmt.Sprintf("user %q is not a UUID", c.User))
	}
	return e.open(ctx, func(ctx context.Context, pool *pgxpool.Pool, client redis.UniversalClient) error {
		id := c.ID
		if c.User != "" {
			if id, err = ops.OrderID(ctx, pool, user, api.OrderKey(user, c.ID)); err != nil {
				return err
			}
		}
		steps, err := ops.Trace(ctx, pool, client, id)
		if errors.Is(err, ops.ErrUnknownID) {
			return fmt.Errorf("%w (--user=USER)", err)
		}
		// Without Redis, the trace still prints the steps that Postgres has recorded.
		if len(steps) > 0 {
			err = errors.Join(printSteps(e.IO, c.JSON, steps), err)
		}
		return cli.WithRedisRemedy(err)
	})
}

func printSteps(o cli.IO, asJSON bool, steps []ops.Step) error {
	return cli.List(o, asJSON, steps, "", "", func(s ops.Step) []any {
		at := "-"
		if !s.At.IsZero() {
			at = s.At.UTC().Format("2006-01-02 15:04:05.000000")
		}
		return []any{at, s.Place, s.ID, s.Detail}
	})
}
