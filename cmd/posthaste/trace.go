package main

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"

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
	var user uuid.UUID
	if c.User != "" {
		var err error
		if user, err = uuid.Parse(c.User); err != nil {
			return cli.Usage(fmt.Sprintf("user %q is not a UUID", c.User))
		}
	}
	return e.config.WithPool(ctx, func(ctx context.Context, pool *pgxpool.Pool) error {
		id := c.ID
		if c.User != "" {
			var err error
			if id, err = ops.OrderID(ctx, pool, user, api.OrderKey(user, c.ID)); err != nil {
				return err
			}
		}
		client, err := e.config.RedisClient(ctx)
		if err != nil {
			return err
		}
		defer client.Close()
		steps, err := ops.Trace(ctx, pool, client, id)
		if errors.Is(err, ops.ErrUnknownID) {
			return fmt.Errorf("%w (--user=USER)", err)
		}
		// Without Redis, the trace still prints the steps that Postgres has recorded.
		show := func() error { return printSteps(e.Stdout, steps) }
		if c.JSON {
			show = func() error { return e.JSON(steps) }
		}
		if len(steps) > 0 {
			if perr := show(); perr != nil {
				return perr
			}
		}
		return cli.WithRedisRemedy(err)
	})
}

func printSteps(w io.Writer, steps []ops.Step) error {
	t := cli.Table(w)
	for _, s := range steps {
		at := "-"
		if !s.At.IsZero() {
			at = s.At.UTC().Format("2006-01-02 15:04:05.000000")
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\n", at, ops.Printable(s.Place), ops.Printable(s.ID), ops.Printable(s.Detail))
	}
	return t.Flush()
}
