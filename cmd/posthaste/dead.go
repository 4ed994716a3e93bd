package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"text/tabwriter"

	"github.com/dustin/go-humanize"
	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"posthaste/api/admin"
	"posthaste/consumer"
	"posthaste/sql"
)

type deadCmd struct {
	List  deadListCmd  `cmd:"" help:"List the events parked by the relay and given up by consumer groups."`
	Retry deadRetryCmd `cmd:"" help:"Publish parked events again, or give them back to their group."`
	Drop  deadDropCmd  `cmd:"" help:"Remove parked events for good."`
}

// deadIn is where dead events are: the relay's in Postgres, the groups' in Redis.
type deadIn struct {
	pool   *pgxpool.Pool
	client *redis.Client
	groups []consumer.DeadEntry
}

// withDead runs do with both, and with what the groups have given up already read.
func (e *env) withDead(ctx context.Context, do func(ctx context.Context, d *deadIn) error) error {
	return e.withPool(ctx, func(ctx context.Context, pool *pgxpool.Pool) error {
		client, err := consumerClient(e.config.RedisURL)
		if err != nil {
			return err
		}
		defer client.Close()
		d := &deadIn{pool: pool, client: client}
		d.groups, err = consumer.Dead(ctx, client, e.config.StreamPrefix)
		// Without Redis the relay's own dead events can still be looked after.
		if derr := do(ctx, d); derr != nil {
			return derr
		}
		return err
	})
}

type deadListCmd struct {
	JSON bool `name:"json" help:"Print JSON."`
}

// Run lists dead events.
func (c deadListCmd) Run(ctx context.Context, e *env) error {
	return e.withDead(ctx, func(ctx context.Context, d *deadIn) error {
		dead, err := admin.ListDead(ctx, d.pool)
		if err != nil {
			return err
		}
		for _, g := range d.groups {
			dead = append(dead, groupDead(g, e.config.StreamPrefix))
		}
		if c.JSON {
			return e.json(dead)
		}
		t := tabwriter.NewWriter(e.stdout, 0, 4, 2, ' ', 0)
		fmt.Fprintln(t, "ID\tSOURCE\tTYPE\tAGGREGATE\tATTEMPTS\tDEAD\tSTATE\tERROR")
		for _, d := range dead {
			state := "parked"
			if d.Retrying {
				state = "retrying"
			}
			fmt.Fprintf(t, "%s\t%s\t%s\t%s/%s\t%d\t%s\t%s\t%s\n", d.ID, d.Source, d.Type, d.AggregateType, d.AggregateID, d.Attempts,
				humanize.Time(d.DeadAt), state, d.Error)
		}
		return t.Flush()
	})
}

// groupDead shows what a group has given up in the form of the relay's.
func groupDead(g consumer.DeadEntry, prefix string) admin.Dead {
	id, _ := uuid.Parse(g.EventID) // a malformed entry has none
	return admin.Dead{
		Source: g.Group, ID: id, AggregateType: strings.TrimPrefix(g.Stream, prefix), AggregateID: g.Subject, Type: g.Type, Class: "consumer",
		Error: g.Error, Attempts: g.Attempts, CreatedAt: g.At, DeadAt: g.At,
	}
}

type deadRetryCmd struct {
	ID  []string `arg:"" optional:"" help:"Event ids."`
	All bool     `help:"Every dead event."`
}

// Run retries dead events.
func (c deadRetryCmd) Run(ctx context.Context, e *env) error {
	return e.onDead(ctx, c.ID, c.All, deadAction{
		done:  "is on its way again",
		relay: sql.RetryDead,
		group: consumer.Retry,
	})
}

type deadDropCmd struct {
	ID  []string `arg:"" optional:"" help:"Event ids."`
	All bool     `help:"Every dead event."`
	Yes bool     `help:"Do not ask."`
}

// Run drops dead events.
func (c deadDropCmd) Run(ctx context.Context, e *env) error {
	if c.All {
		if err := e.confirm(c.Yes, "Drop every dead event for good?"); err != nil {
			return err
		}
	}
	return e.onDead(ctx, c.ID, c.All, deadAction{
		done:  "is dropped",
		relay: func(ctx context.Context, pool *pgxpool.Pool, id uuid.UUID) error { return sql.DropDead(ctx, pool, id) },
		group: consumer.Drop,
	})
}

// deadAction is what is done to a dead event, and what is said when it is done.
type deadAction struct {
	done  string
	relay func(ctx context.Context, pool *pgxpool.Pool, id uuid.UUID) error
	group func(ctx context.Context, client redis.UniversalClient, d consumer.DeadEntry) error
}

// onDead does a to the named dead events, or to all, wherever they are, and says what became of each.
func (e *env) onDead(ctx context.Context, names []string, all bool, a deadAction) error {
	if all == (len(names) > 0) {
		return &usageError{"name event ids, or all of them with --all"}
	}
	wanted := map[string]bool{}
	var ids []uuid.UUID
	for _, n := range names {
		id, err := uuid.Parse(n)
		if err != nil {
			return &usageError{fmt.Sprintf("event id %q is not a UUID", n)}
		}
		ids = append(ids, id)
		wanted[id.String()] = true
	}
	return e.withDead(ctx, func(ctx context.Context, d *deadIn) error {
		if all {
			var err error
			if ids, err = sql.DeadIDs(ctx, d.pool); err != nil {
				return err
			}
		}
		failed := false
		say := func(what string, err error) {
			if err != nil {
				failed = true
				fmt.Fprintln(e.stderr, "posthaste:", err)
				return
			}
			fmt.Fprintf(e.stdout, "%s %s\n", what, a.done)
		}
		handled := map[string]bool{}
		for _, g := range d.groups {
			if all || wanted[strings.ToLower(g.EventID)] {
				handled[strings.ToLower(g.EventID)] = true
				say(fmt.Sprintf("%s (group %s)", g.EventID, g.Group), a.group(ctx, d.client, g))
			}
		}
		for _, id := range ids {
			err := a.relay(ctx, d.pool, id)
			if errors.Is(err, sql.ErrNotParked) && (handled[id.String()] || all) {
				continue // only a group had it, or it is gone since it was listed
			}
			say(id.String(), err)
		}
		if failed {
			return errSaid
		}
		return nil
	})
}
