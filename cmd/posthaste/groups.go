package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/dustin/go-humanize"
	"github.com/jackc/pgx/v5/pgxpool"

	"posthaste/internal/app"
	"posthaste/internal/audit"
	"posthaste/internal/cli"
	"posthaste/internal/ops"
	"posthaste/outbox"
	"posthaste/sink"
	"posthaste/sql"
)

type groupsCmd struct {
	List groupsListCmd `cmd:""`
	Drop groupsDropCmd `cmd:""`
}

// withGroups runs do with the groups of every stream that posthaste has recorded or that has its prefix. If Postgres is
// unreachable, it prints that and continues with Redis alone: freeing memory in Redis must not wait for Postgres.
func (e *env) withGroups(ctx context.Context, do func(ctx context.Context, g *ops.GroupList) error) error {
	var noted []outbox.Stream
	err := e.config.WithPool(ctx, func(ctx context.Context, pool *pgxpool.Pool) (err error) {
		noted, err = sql.ListStreams(ctx, pool)
		return err
	})
	if errors.As(err, new(*cli.UsageError)) {
		return err
	}
	if err != nil {
		fmt.Fprintln(e.Stderr, "posthaste: without Postgres only streams with the prefix are found:",
			cli.Line(err, e.config.RedisAddr()))
	}
	ctx, cancel := context.WithTimeout(ctx, app.OneShotTimeout)
	defer cancel()
	client, err := e.config.RedisClient(ctx)
	if err != nil {
		return err
	}
	defer client.Close()
	maxLen := e.config.StreamMaxlen
	if e.config.Trim == "force" {
		maxLen = 0
	}
	g, err := ops.FindGroups(ctx, client, noted, e.config.StreamPrefix, maxLen)
	if g == nil {
		return cli.WithRedisRemedy(err)
	}
	return errors.Join(do(ctx, g), err)
}

// auditedOrSaid makes a change in Redis and its audit entry. If Postgres is unreachable, it makes the change anyway,
// logs it, and reports that the entry is missing. If Postgres refuses the entry, it does not make the change.
func (e *env) auditedOrSaid(
	ctx context.Context, action string, args audit.Detail, change func(ctx context.Context) (audit.Detail, error),
) error {
	begun := false
	once := func(ctx context.Context) (audit.Detail, error) {
		begun = true
		return change(ctx)
	}
	err := e.config.WithPool(ctx, func(ctx context.Context, pool *pgxpool.Pool) error {
		return e.audited(ctx, pool, action, args, once)
	})
	if err == nil || begun || ctx.Err() != nil || errors.Is(err, audit.ErrNoEntry) && sql.SQLState(err) != "" {
		return err
	}
	fmt.Fprintln(e.Stderr, "posthaste: this is in the log only, and not in posthaste_audit:",
		cli.Line(err, e.config.RedisAddr()))
	return e.confirmed(ctx, true, "", nil, action, args, change)
}

type groupsListCmd struct {
	JSON bool `name:"json" help:"Print JSON."`
}

func (c groupsListCmd) Run(ctx context.Context, e *env) error {
	return e.withGroups(ctx, func(_ context.Context, g *ops.GroupList) error {
		if c.JSON {
			return e.JSON(append([]sink.Group{}, g.List...))
		}
		return e.Groups(g.List)
	})
}

type groupsDropCmd struct {
	Stream string `required:""` // see help.txt
	Group  string `required:"" help:"Consumer group."`
	Force  bool   `help:"Drop it even if a consumer seems to be active."`
	Yes    bool   `help:"Do not ask."`
	JSON   bool   `name:"json" help:"Print JSON."`
}

// Run drops a consumer group and its dead events.
func (c groupsDropCmd) Run(ctx context.Context, e *env) error {
	return e.withGroups(ctx, func(short context.Context, g *ops.GroupList) error {
		group, err := g.Find(c.Stream, c.Group)
		if err != nil {
			return err
		}
		if !c.Force {
			err := g.CheckDrop(short, group)
			if errors.As(err, new(*sink.ActiveError)) {
				return fmt.Errorf("%w: stop its consumers first, or repeat it with --force", err)
			}
			if err != nil {
				return err
			}
		}
		dead, err := g.Dead(short, group)
		if err != nil {
			return err
		}
		var streams []string // of a group whose type has several
		for _, on := range group.Streams {
			streams = append(streams, on.Stream)
		}
		slices.Sort(streams)
		args := audit.Detail{"stream": c.Stream, "group": c.Group, "force": c.Force}
		of := "stream " + c.Stream
		if len(streams) > 0 {
			args["streams"] = streams
			of += " (" + strings.Join(streams, ", ") + ")"
		}
		unread := cli.Count(group.Lag)
		if group.Lag < 0 {
			unread = "an unknown number of"
		}
		what := fmt.Sprintf("%s pending, %s unread and %s", humanize.Comma(group.Pending), unread,
			ops.CountOf(int64(len(dead)), "dead event"))
		if err := e.Confirm(ctx, c.Yes, fmt.Sprintf("Drop group %s of %s, and with it %s? Other groups keep theirs.",
			c.Group, of, what)); err != nil {
			return err
		}
		// The user's answer may have taken longer than the time limit of short.
		err = e.auditedOrSaid(ctx, audit.GroupsDrop, args, func(ctx context.Context) (audit.Detail, error) {
			return audit.Detail{"pending": group.Pending, "unread": group.Lag, "dead": len(dead)},
				g.Drop(ctx, group, dead, c.Force)
		})
		if err != nil {
			return err
		}
		return e.Result(c.JSON, struct {
			Stream  string   `json:"stream"`
			Group   string   `json:"group"`
			Pending int64    `json:"pending"`
			Unread  int64    `json:"unread"` // -1 if Redis does not know it
			Dead    int      `json:"dead"`
			Streams []string `json:"streams,omitempty"`
		}{c.Stream, c.Group, group.Pending, group.Lag, len(dead), streams},
			fmt.Sprintf("group %s of %s is gone, and with it %s", c.Group, of, what))
	})
}
