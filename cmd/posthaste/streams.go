package main

import (
	"context"
	"fmt"

	"github.com/dustin/go-humanize"
	"github.com/jackc/pgx/v5/pgxpool"

	"posthaste/internal/app"
	"posthaste/internal/audit"
	"posthaste/internal/cli"
	"posthaste/sql"
)

type streamsCmd struct {
	Drop streamsDropCmd `cmd:"" help:"Delete a stream with its consumer groups, so that nothing of it is restored."`
}

type streamsDropCmd struct {
	Stream string `required:"" help:"Full stream name."`
	Yes    bool   `help:"Do not ask."`
	JSON   bool   `name:"json" help:"Print JSON."`
}

// Run deletes a stream. That it is on purpose is noted first: a relay restores what is gone without a note.
func (c streamsDropCmd) Run(ctx context.Context, e *env) error {
	asking := ctx
	return e.config.WithPool(ctx, func(ctx context.Context, pool *pgxpool.Pool) error {
		client, err := e.config.RedisClient(ctx)
		if err != nil {
			return err
		}
		defer client.Close()
		n, err := client.XLen(ctx, c.Stream).Result()
		if err != nil {
			return cli.WithRedisRemedy(err)
		}
		if err := e.Confirm(asking, c.Yes, fmt.Sprintf("Delete stream %s with its %s entries and all of its consumer "+
			"groups? What is not published yet is published to it all the same.", c.Stream,
			humanize.Comma(n))); err != nil {
			return err
		}
		// The answer may have taken longer than ctx lasts.
		ctx, cancel := context.WithTimeout(asking, app.OneShotTimeout)
		defer cancel()
		drop := func(ctx context.Context) (audit.Detail, error) {
			known, err := sql.DropStream(ctx, pool, c.Stream)
			if err != nil {
				return nil, err
			}
			if !known {
				return nil, fmt.Errorf("%q is no stream that a relay publishes to", c.Stream)
			}
			return audit.Detail{"entries": n}, cli.WithRedisRemedy(client.Unlink(ctx, c.Stream).Err())
		}
		if err := e.audited(ctx, pool, audit.StreamsDrop, audit.Detail{"stream": c.Stream}, drop); err != nil {
			return err
		}
		if c.JSON {
			return e.JSON(struct {
				Stream  string `json:"stream"`
				Entries int64  `json:"entries"`
			}{c.Stream, n})
		}
		fmt.Fprintf(e.Stdout, "stream %s is gone, with %s entries\n", c.Stream, humanize.Comma(n))
		return nil
	})
}
