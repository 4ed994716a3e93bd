package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/dustin/go-humanize"
	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"posthaste/internal/app"
	"posthaste/internal/audit"
	"posthaste/internal/cli"
	"posthaste/internal/ops"
	"posthaste/outbox"
	"posthaste/sql"
)

type deadCmd struct {
	List  deadListCmd  `cmd:""`
	Show  deadShowCmd  `cmd:""`
	Retry deadRetryCmd `cmd:""`
	Drop  deadDropCmd  `cmd:""`
}

// withDead runs do with Postgres and Redis, after it has read the dead events of the groups.
func (e *env) withDead(ctx context.Context, do func(ctx context.Context, d *ops.DeadIn) error) error {
	return e.open(ctx, func(ctx context.Context, pool *pgxpool.Pool, client redis.UniversalClient) error {
		groups, err := ops.GroupsDead(ctx, client, e.config.StreamPrefix)
		// Without Redis, do still handles the relay's own dead events.
		d := &ops.DeadIn{Pool: pool, Client: client, Groups: groups, Limit: app.OneShotTimeout}
		if derr := do(ctx, d); derr != nil && (err == nil || !errors.Is(derr, sql.ErrNotParked)) {
			return derr
		}
		return cli.WithRedisRemedy(err)
	})
}

type deadListCmd struct {
	JSON bool `name:"json" help:"Print JSON."`
}

func (c deadListCmd) Run(ctx context.Context, e *env) error {
	return e.withDead(ctx, func(ctx context.Context, d *ops.DeadIn) error {
		dead, err := ops.ListDead(ctx, d.Pool)
		if err != nil {
			return err
		}
		n, err := sql.CountDead(ctx, d.Pool)
		if err != nil {
			return err
		}
		if shown := int64(len(dead)); n > shown {
			fmt.Fprintf(e.Stderr, "posthaste: of %s dead events of the relay, these are the oldest %s; "+
				"dead retry and dead drop take --all\n", humanize.Comma(n), humanize.Comma(shown))
		}
		streams, err := sql.ListStreams(ctx, d.Pool)
		if err != nil {
			return err
		}
		bases := outbox.Bases(streams)
		for _, g := range d.Groups {
			dead = append(dead, ops.GroupDead(g, e.config.StreamPrefix, bases))
		}
		return cli.List(e.IO, c.JSON, dead, "", "ID\tSOURCE\tTYPE\tAGGREGATE\tATTEMPTS\tDEAD\tSTATE\tERROR",
			func(d ops.Dead) []any {
				state := map[bool]string{false: "dead", true: "retrying"}[d.Retrying]
				return []any{
					d.ID, cli.Short(d.Source, 40), cli.Short(d.Type, 40),
					cli.Short(d.AggregateType+"/"+d.AggregateID, 60), d.Attempts, humanize.Time(d.DeadAt), state,
					cli.Short(d.Error, 200),
				}
			})
	})
}

type deadShowCmd struct {
	ID      string `arg:"" help:"Event id."`
	Payload bool   `help:"Print the payload, too."`
	JSON    bool   `name:"json" help:"Print JSON."`
}

// Run shows a dead event: once for the relay, and once for each group that has given it up.
func (c deadShowCmd) Run(ctx context.Context, e *env) error {
	return e.withDead(ctx, func(ctx context.Context, d *ops.DeadIn) error {
		streams, err := sql.ListStreams(ctx, d.Pool)
		if err != nil {
			return err
		}
		list, err := d.ShowDead(ctx, c.ID, e.config.StreamPrefix, outbox.Bases(streams), c.Payload)
		switch {
		case err != nil:
			return cli.WithRedisRemedy(err)
		case len(list) == 0:
			return fmt.Errorf("%q: %w", c.ID, sql.ErrNotParked)
		case c.JSON:
			return e.JSON(list)
		}
		for i, one := range list {
			if i > 0 {
				fmt.Fprintln(e.Stdout)
			}
			err = errors.Join(err, e.DeadEvent(one))
		}
		return err
	})
}

// deadChosen are the events that a command acts on.
type deadChosen struct {
	ID  []string `arg:"" optional:"" help:"Event ids."`
	All bool     `help:"Every dead event."`
}

type deadRetryCmd struct {
	deadChosen

	JSON bool `name:"json" help:"Print JSON."`
}

func (c deadRetryCmd) Run(ctx context.Context, e *env) error {
	return c.each(ctx, e, audit.DeadRetry, c.JSON, ops.RetryDead())
}

type deadDropCmd struct {
	deadChosen

	Yes  bool `help:"Do not ask."`
	JSON bool `name:"json" help:"Print JSON."`
}

func (c deadDropCmd) Run(ctx context.Context, e *env) error {
	if c.All {
		if err := e.Confirm(ctx, c.Yes, "Drop every dead event for good?"); err != nil {
			return err
		}
	}
	return c.each(ctx, e, audit.DeadDrop, c.JSON, ops.DropDead())
}

// deadResult is the outcome for one dead event.
type deadResult struct {
	// ID is the event's id. Source is "relay" or the consumer group.
	ID     string `json:"id"`
	Source string `json:"source"`
	// OK is set if the action succeeded. Otherwise Error has the reason.
	OK    bool   `json:"ok"`
	Error string `json:"error,omitempty"`
}

// each applies a to the events, in the relay and in the groups. It prints the outcome for each.
func (c deadChosen) each(ctx context.Context, e *env, action string, asJSON bool, a ops.DeadAction) error {
	if c.All == (len(c.ID) > 0) {
		return cli.Usage("name event ids, or all of them with --all")
	}
	ids := make([]uuid.UUID, len(c.ID))
	for i, n := range c.ID {
		var err error
		if ids[i], err = uuid.Parse(n); err != nil {
			return cli.Usage(fmt.Sprintf("event id %q is not a UUID", n))
		}
	}
	args := audit.Detail{"ids": c.ID}
	if c.All {
		args = audit.Detail{"all": true}
	}
	return e.withDead(ctx, func(_ context.Context, d *ops.DeadIn) error { // d limits each event: there may be many
		failed := false
		results := []deadResult{}
		var tally audit.Tally
		said := func(id, source string, err error) {
			name, result := ops.DeadName(id, source), deadResult{ID: id, Source: source, OK: err == nil}
			tally.Add(name, err)
			switch {
			case err != nil:
				failed, result.Error = true, err.Error()
				fmt.Fprintln(e.Stderr, "posthaste:", ops.Printable(err.Error()))
			case !asJSON:
				fmt.Fprintf(e.Stdout, "%s %s\n", ops.Printable(name), a.Done)
			}
			results = append(results, result)
		}
		var err error
		each := func(ctx context.Context) (audit.Detail, error) {
			err = d.Each(ctx, a, ids, c.All, said)
			became, one := tally.Result()
			if err != nil {
				one = err
			}
			return became, one
		}
		if noted := e.audited(ctx, d.Pool, action, args, each); errors.Is(noted, audit.ErrNoEntry) {
			err = noted
		}
		if asJSON && (err == nil || len(results) > 0) {
			err = errors.Join(err, e.JSON(results))
		}
		if err == nil && failed {
			err = cli.ErrSaid
		}
		return err
	})
}
