package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/dustin/go-humanize"
	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"posthaste/consumer"
	"posthaste/internal/app"
	"posthaste/internal/audit"
	"posthaste/internal/cli"
	"posthaste/internal/ops"
	"posthaste/outbox"
	"posthaste/sql"
)

type deadCmd struct {
	List  deadListCmd  `cmd:"" help:"List the events parked by the relay and given up by consumer groups."`
	Retry deadRetryCmd `cmd:"" help:"Publish parked events again, or give them back to their group."`
	Drop  deadDropCmd  `cmd:"" help:"Remove parked events for good."`
}

// withDead runs do with Postgres and Redis, after it has read the dead events of the groups.
func (e *env) withDead(ctx context.Context, do func(ctx context.Context, d *ops.DeadIn) error) error {
	return e.config.WithPool(ctx, func(ctx context.Context, pool *pgxpool.Pool) error {
		client, err := e.config.RedisClient(ctx)
		if err != nil {
			return err
		}
		defer client.Close()
		d := &ops.DeadIn{Pool: pool, Client: client}
		d.Groups, err = ops.GroupsDead(ctx, client, e.config.StreamPrefix)
		// Without Redis, do still handles the relay's own dead events.
		if derr := do(ctx, d); derr != nil {
			return derr
		}
		return cli.WithRedisRemedy(err)
	})
}

type deadListCmd struct {
	JSON bool `name:"json" help:"Print JSON."`
}

// Run lists dead events.
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
			fmt.Fprintf(e.Stderr,
				"posthaste: of %s events that the relay has parked, these are the oldest %s; dead retry and dead "+
					"drop take --all\n",
				humanize.Comma(n), humanize.Comma(shown))
		}
		streams, err := sql.ListStreams(ctx, d.Pool)
		if err != nil {
			return err
		}
		bases := outbox.Bases(streams)
		for _, g := range d.Groups {
			dead = append(dead, ops.GroupDead(g, e.config.StreamPrefix, bases))
		}
		if c.JSON {
			return e.JSON(dead)
		}
		t := cli.Table(e.Stdout)
		fmt.Fprintln(t, "ID\tSOURCE\tTYPE\tAGGREGATE\tATTEMPTS\tDEAD\tSTATE\tERROR")
		for _, d := range dead {
			state := "parked"
			if d.Retrying {
				state = "retrying"
			}
			fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%d\t%s\t%s\t%s\n", d.ID, cli.Short(d.Source, 40), cli.Short(d.Type, 40),
				cli.Short(d.AggregateType+"/"+d.AggregateID, 60),
				d.Attempts, humanize.Time(d.DeadAt), state, cli.Short(d.Error, 200))
		}
		return t.Flush()
	})
}

type deadRetryCmd struct {
	ID   []string `arg:"" optional:"" help:"Event ids."`
	All  bool     `help:"Every dead event."`
	JSON bool     `name:"json" help:"Print JSON."`
}

// Run retries dead events.
func (c deadRetryCmd) Run(ctx context.Context, e *env) error {
	return e.onDead(ctx, audit.DeadRetry, c.ID, c.All, c.JSON, ops.RetryDead())
}

type deadDropCmd struct {
	ID   []string `arg:"" optional:"" help:"Event ids."`
	All  bool     `help:"Every dead event."`
	Yes  bool     `help:"Do not ask."`
	JSON bool     `name:"json" help:"Print JSON."`
}

// Run drops dead events.
func (c deadDropCmd) Run(ctx context.Context, e *env) error {
	if c.All {
		if err := e.Confirm(ctx, c.Yes, "Drop every dead event for good?"); err != nil {
			return err
		}
	}
	return e.onDead(ctx, audit.DeadDrop, c.ID, c.All, c.JSON, ops.DropDead())
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

// bounded sets a time limit for the action on each event.
func bounded(a ops.DeadAction) ops.DeadAction {
	relay, group := a.Relay, a.Group
	a.Relay = func(ctx context.Context, pool *pgxpool.Pool, id uuid.UUID) error {
		ctx, cancel := context.WithTimeout(ctx, app.OneShotTimeout)
		defer cancel()
		return relay(ctx, pool, id)
	}
	a.Group = func(ctx context.Context, client redis.UniversalClient, d consumer.DeadEntry) error {
		ctx, cancel := context.WithTimeout(ctx, app.OneShotTimeout)
		defer cancel()
		return group(ctx, client, d)
	}
	return a
}

// onDead applies a to the named dead events, or to all, in the relay and in the groups. It prints the outcome for each.
func (e *env) onDead(
	ctx context.Context, action string, names []string, all, asJSON bool, a ops.DeadAction,
) error {
	if all == (len(names) > 0) {
		return cli.Usage("name event ids, or all of them with --all")
	}
	ids := make([]uuid.UUID, len(names))
	for i, n := range names {
		var err error
		if ids[i], err = uuid.Parse(n); err != nil {
			return cli.Usage(fmt.Sprintf("event id %q is not a UUID", n))
		}
	}
	asking := ctx
	return e.withDead(ctx, func(_ context.Context, d *ops.DeadIn) error {
		ctx := asking // the limit is per event, because there may be many events
		failed := false
		results := []deadResult{}
		var tally audit.Tally
		said := func(id, source string, err error) {
			tally.Add(ops.DeadName(id, source), err)
			switch {
			case err != nil:
				failed = true
				fmt.Fprintln(e.Stderr, "posthaste:", ops.Printable(err.Error()))
				results = append(results, deadResult{ID: id, Source: source, Error: err.Error()})
			case asJSON:
				results = append(results, deadResult{ID: id, Source: source, OK: true})
			default:
				fmt.Fprintf(e.Stdout, "%s %s\n", ops.Printable(ops.DeadName(id, source)), a.Done)
			}
		}
		var err error
		each := func(ctx context.Context) (audit.Detail, error) {
			err = d.Each(ctx, bounded(a), ids, all, said)
			became, one := tally.Result()
			if err != nil {
				one = err
			}
			return became, one
		}
		args := audit.Detail{"ids": names}
		if all {
			args = audit.Detail{"all": true}
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
