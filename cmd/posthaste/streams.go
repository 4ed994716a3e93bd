package main

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"

	"github.com/dustin/go-humanize"
	"github.com/jackc/pgx/v5/pgxpool"

	"posthaste/internal/app"
	"posthaste/internal/audit"
	"posthaste/internal/cli"
	"posthaste/sink"
	"posthaste/sql"
)

type streamsCmd struct {
	Drop   streamsDropCmd   `cmd:"" help:"Delete a stream with its consumer groups, so that nothing of it is restored."`
	Spread streamsSpreadCmd `cmd:"" help:"Change over how many streams each type is spread, while no relay runs."`
	Leave  streamsLeaveCmd  `cmd:"" help:"Take a database that is gone for good out of those that share streams."`
}

type streamsSpreadCmd struct {
	PerType int  `required:"" enum:"1,2,4,8,16" placeholder:"N" help:"Streams for each type: 1, 2, 4, 8 or 16. With more than one they are named prefix.type.0 and so on; an aggregate is always in one of them."`
	JSON    bool `name:"json" help:"Print JSON."`
}

// Run changes how many streams a type has. Ctrl-C cancels the change until it is committed, and then nothing has
// changed.
func (c streamsSpreadCmd) Run(ctx context.Context, e *env) error {
	unbounded := ctx
	return e.config.WithPool(ctx, func(_ context.Context, pool *pgxpool.Pool) error {
		args := audit.Detail{"per_type": c.PerType}
		err := e.audited(unbounded, pool, audit.Spread, args, func(ctx context.Context) (audit.Detail, error) {
			return nil, app.Spread(ctx, e.config, slog.New(slog.DiscardHandler), c.PerType, func(why string) {
				fmt.Fprintln(e.Stderr, "posthaste: waiting: "+why)
			})
		})
		if err != nil {
			return err
		}
		if c.JSON {
			return e.JSON(map[string]int{"per_type": c.PerType})
		}
		fmt.Fprintf(e.Stdout, "streams for each type: %d; start the relays now\n", c.PerType)
		return nil
	})
}

type streamsDropCmd struct {
	Stream string `required:"" help:"Full stream name."`
	Yes    bool   `help:"Do not ask."`
	JSON   bool   `name:"json" help:"Print JSON."`
}

// Run deletes a stream. It records the deletion first, because a relay restores a stream that is missing without a
// record. A shared stream is deleted when all of its databases have requested it.
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
			"groups? Events that are not published yet will still be published to it.", c.Stream,
			humanize.Comma(n))); err != nil {
			return err
		}
		// The user's answer may have taken longer than the time limit of ctx.
		ctx, cancel := context.WithTimeout(asking, app.OneShotTimeout)
		defer cancel()
		var waiting []string
		drop := func(ctx context.Context) (audit.Detail, error) {
			source, known, err := sql.DropStream(ctx, pool, c.Stream)
			if err != nil {
				return nil, err
			}
			if !known {
				return nil, fmt.Errorf("%q is no stream that a relay publishes to", c.Stream)
			}
			waiting, err = sink.Drop(ctx, client, c.Stream, source)
			return audit.Detail{"entries": n, "waiting": len(waiting)}, cli.WithRedisRemedy(err)
		}
		if err := e.audited(ctx, pool, audit.StreamsDrop, audit.Detail{"stream": c.Stream}, drop); err != nil {
			return err
		}
		if c.JSON {
			return e.JSON(struct {
				Stream  string   `json:"stream"`
				Entries int64    `json:"entries"`
				Waiting []string `json:"waiting,omitempty"`
			}{c.Stream, n, waiting})
		}
		if len(waiting) > 0 {
			fmt.Fprintf(e.Stdout, "%s is shared: it is deleted once streams drop also runs, within an hour, for: %s\n",
				c.Stream, strings.Join(waiting, ", "))
			return nil
		}
		fmt.Fprintf(e.Stdout, "stream %s is gone, with %s entries\n", c.Stream, humanize.Comma(n))
		return nil
	})
}

type streamsLeaveCmd struct {
	Source string `required:"" placeholder:"/posthaste/eu" help:"The database, as the source field of its entries has it."`
	Yes    bool   `help:"Do not ask."`
	JSON   bool   `name:"json" help:"Print JSON."`
}

// Run removes a database from the registers of this database's streams. Its entries stay.
func (c streamsLeaveCmd) Run(ctx context.Context, e *env) error {
	asking := ctx
	return e.config.WithPool(ctx, func(ctx context.Context, pool *pgxpool.Pool) error {
		streams, err := sql.Streams(ctx, pool)
		if err != nil {
			return err
		}
		client, err := e.config.RedisClient(ctx)
		if err != nil {
			return err
		}
		defer client.Close()
		sharing, err := sink.Sharing(ctx, client, streams)
		if err != nil {
			return cli.WithRedisRemedy(err)
		}
		left := []string{}
		for _, stream := range slices.Sorted(maps.Keys(sharing)) {
			if sharing[stream][c.Source] != "" {
				left = append(left, stream)
			}
		}
		if len(left) == 0 {
			return fmt.Errorf("%q shares none of this database's streams", c.Source)
		}
		if err := e.Confirm(asking, c.Yes, fmt.Sprintf("Remove %s from the databases that share %s? Its entries stay. "+
			"A relay of it that still runs compares them with its database, and shares them again.", c.Source,
			strings.Join(left, ", "))); err != nil {
			return err
		}
		ctx, cancel := context.WithTimeout(asking, app.OneShotTimeout)
		defer cancel()
		leave := func(ctx context.Context) (audit.Detail, error) {
			for _, stream := range left {
				if _, err := sink.Leave(ctx, client, stream, c.Source); err != nil {
					return nil, cli.WithRedisRemedy(err)
				}
			}
			return nil, nil
		}
		args := audit.Detail{"source": c.Source, "streams": left}
		if err := e.audited(ctx, pool, audit.Leave, args, leave); err != nil {
			return err
		}
		if c.JSON {
			return e.JSON(struct {
				Source  string   `json:"source"`
				Streams []string `json:"streams"`
			}{c.Source, left})
		}
		for _, stream := range left {
			fmt.Fprintf(e.Stdout, "%s does not share %s any more\n", c.Source, stream)
		}
		return nil
	})
}
