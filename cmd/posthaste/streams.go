package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"posthaste/internal/app"
	"posthaste/internal/audit"
	"posthaste/internal/cli"
	"posthaste/internal/ops"
	"posthaste/sink"
	"posthaste/sql"
)

type streamsCmd struct {
	List   streamsListCmd   `cmd:""`
	Drop   streamsDropCmd   `cmd:""`
	Spread streamsSpreadCmd `cmd:""`
	Leave  streamsLeaveCmd  `cmd:""`
}

type streamsListCmd struct {
	JSON bool `name:"json" help:"Print JSON."`
}

func (c streamsListCmd) Run(ctx context.Context, e *env) error {
	return e.withGroups(ctx, func(ctx context.Context, g *ops.GroupList) error {
		list, err := g.Streams(ctx)
		return errors.Join(err, e.Streams(c.JSON, list))
	})
}

type streamsSpreadCmd struct {
	PerType int  `required:"" enum:"1,2,4,8,16" placeholder:"N"`
	JSON    bool `name:"json" help:"Print JSON."`
}

// Run changes how many streams a type has. Ctrl-C cancels the change until it is committed, and then nothing has
// changed.
func (c streamsSpreadCmd) Run(ctx context.Context, e *env) error {
	return e.config.WithPool(ctx, func(_ context.Context, pool *pgxpool.Pool) error {
		spread := func(ctx context.Context) (audit.Detail, error) {
			return nil, app.Spread(ctx, e.config, slog.New(slog.DiscardHandler), c.PerType, func(why string) {
				fmt.Fprintln(e.Stderr, "posthaste: waiting: "+why)
			})
		}
		if err := e.audited(ctx, pool, audit.Spread, audit.Detail{"per_type": c.PerType}, spread); err != nil {
			return err
		}
		return e.Result(c.JSON, map[string]int{"per_type": c.PerType},
			fmt.Sprintf("streams for each type: %d; start the relays now", c.PerType))
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
	return e.open(ctx, func(short context.Context, pool *pgxpool.Pool, client redis.UniversalClient) error {
		n, err := client.XLen(short, c.Stream).Result()
		if err != nil {
			return cli.WithRedisRemedy(err)
		}
		entries := ops.CountOf(n, "entry")
		var waiting []string
		drop := func(ctx context.Context) (audit.Detail, error) {
			source, known, err := sql.DropStream(ctx, pool, c.Stream)
			if err != nil {
				return nil, err
			}
			if !known {
				return nil, fmt.Errorf("no relay publishes to a stream %q: see posthaste streams list", c.Stream)
			}
			waiting, err = sink.Drop(ctx, client, c.Stream, source)
			return audit.Detail{"entries": n, "waiting": len(waiting)}, cli.WithRedisRemedy(err)
		}
		question := fmt.Sprintf("Delete stream %s with its %s and all of its consumer groups? Events that are "+
			"not published yet will still be published to it.", c.Stream, entries)
		args := audit.Detail{"stream": c.Stream}
		if err := e.confirmed(ctx, c.Yes, question, pool, audit.StreamsDrop, args, drop); err != nil {
			return err
		}
		said := fmt.Sprintf("stream %s is gone, with %s", c.Stream, entries)
		if len(waiting) > 0 {
			said = fmt.Sprintf("%s is shared: it is deleted once streams drop also runs, within an hour, for: %s",
				c.Stream, strings.Join(waiting, ", "))
		}
		return e.Result(c.JSON, struct {
			Stream  string   `json:"stream"`
			Entries int64    `json:"entries"`
			Waiting []string `json:"waiting,omitempty"`
		}{c.Stream, n, waiting}, said)
	})
}

type streamsLeaveCmd struct {
	Source string `required:"" placeholder:"/posthaste/eu" help:"The database: the source field of its entries."`
	Yes    bool   `help:"Do not ask."`
	JSON   bool   `name:"json" help:"Print JSON."`
}

// Run removes a database from the registers of this database's streams. Its entries stay.
func (c streamsLeaveCmd) Run(ctx context.Context, e *env) error {
	return e.open(ctx, func(short context.Context, pool *pgxpool.Pool, client redis.UniversalClient) error {
		streams, err := sql.Streams(short, pool)
		if err != nil {
			return err
		}
		sharing, err := sink.Sharing(short, client, streams)
		if err != nil {
			return cli.WithRedisRemedy(err)
		}
		left, said := []string{}, []string{}
		for _, stream := range slices.Sorted(maps.Keys(sharing)) {
			if sharing[stream][c.Source] != "" {
				left = append(left, stream)
				said = append(said, c.Source+" does not share "+stream+" any more")
			}
		}
		if len(left) == 0 {
			return fmt.Errorf("%q shares none of this database's streams", c.Source)
		}
		leave := func(ctx context.Context) (audit.Detail, error) {
			for _, stream := range left {
				if _, err := sink.Leave(ctx, client, stream, c.Source); err != nil {
					return nil, cli.WithRedisRemedy(err)
				}
			}
			return nil, nil
		}
		question := fmt.Sprintf("Remove %s from the databases that share %s? Its entries stay. A relay of it that "+
			"still runs compares them with its database, and shares them again.", c.Source, strings.Join(left, ", "))
		args := audit.Detail{"source": c.Source, "streams": left}
		if err := e.confirmed(ctx, c.Yes, question, pool, audit.Leave, args, leave); err != nil {
			return err
		}
		return e.Result(c.JSON, struct {
			Source  string   `json:"source"`
			Streams []string `json:"streams"`
		}{c.Source, left}, said...)
	})
}
