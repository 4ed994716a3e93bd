package main

import (
	"context"
	"errors"
	"fmt"
	"io"
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
	List groupsListCmd `cmd:"" help:"List the consumer groups of every known stream, and which of them keeps entries from being trimmed."`
	Drop groupsDropCmd `cmd:"" help:"Drop a consumer group that is no longer used. Its pending and unread entries are not delivered."`
}

// withGroups runs do with the groups of every stream that posthaste has recorded or that has its prefix. If Postgres is
// unreachable, it prints that and continues with Redis alone: freeing memory in Redis must not wait for Postgres.
func (e *env) withGroups(ctx context.Context, do func(ctx context.Context, g *ops.GroupList) error) error {
	var noted []outbox.Stream
	err := e.config.WithPool(ctx, func(ctx context.Context, pool *pgxpool.Pool) (err error) {
		noted, err = sql.ListStreams(ctx, pool)
		return err
	})
	var usage *cli.UsageError
	if errors.As(err, &usage) {
		return err
	}
	if err != nil {
		fmt.Fprintln(e.Stderr, "posthaste: without Postgres only streams with the prefix are found:", err)
	}
	ctx, cancel := context.WithTimeout(ctx, app.OneShotTimeout)
	defer cancel()
	client, err := e.config.RedisClient(ctx)
	if err != nil {
		return err
	}
	defer client.Close()
	maxLen := e.config.StreamMaxlen
	if e.config.TrimForce {
		maxLen = 0
	}
	g, err := ops.FindGroups(ctx, client, noted, e.config.StreamPrefix, maxLen)
	if g == nil {
		return cli.WithRedisRemedy(err)
	}
	return cli.OneLine(errors.Join(do(ctx, g), err))
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
	fmt.Fprintln(e.Stderr, "posthaste: this is in the log only, and not in posthaste_audit:", err)
	return inOneShot(ctx, func(ctx context.Context) error { return e.audited(ctx, nil, action, args, change) })
}

type groupsListCmd struct {
	JSON bool `name:"json" help:"Print JSON."`
}

// Run lists consumer groups.
func (c groupsListCmd) Run(ctx context.Context, e *env) error {
	return e.withGroups(ctx, func(_ context.Context, g *ops.GroupList) error {
		if c.JSON {
			return e.JSON(append([]sink.Group{}, g.List...))
		}
		return printGroups(e.Stdout, g.List)
	})
}

func printGroups(w io.Writer, groups []sink.Group) error {
	if len(groups) == 0 {
		_, err := fmt.Fprintln(w, "no consumer groups")
		return err
	}
	t := cli.Table(w)
	fmt.Fprintln(t, "STREAM\tGROUP\tSTATE\tCONSUMERS\tUNREAD\tPENDING\tOLDEST PENDING\tIDLE\tLOST\tHOLDS BACK\tSTREAMS")
	for _, g := range groups {
		fmt.Fprintf(t, "%s\t%s\t%s\t%d\t%s\t%s\t%s\t%s\t%s\t%s\t%d\n", ops.Printable(g.Stream), ops.Printable(g.Name),
			ops.StateOf(g), g.Consumers, countOr(g.Lag, "unknown"), humanize.Comma(g.Pending),
			ops.Rough(g.OldestPending),
			ops.Rough(g.Idle), countOr(g.Lost, "unknown"), humanize.Comma(g.HoldsBack),
			max(len(g.Streams), 1))
	}
	if err := t.Flush(); err != nil {
		return err
	}
	for _, g := range groups {
		if len(g.Streams) > 1 && (ops.StateOf(g) > ops.Behind || g.Lost > 0) {
			worst := g.Streams[0]
			fmt.Fprintf(w, "group %s is worst on %s: %s unread, %s pending, oldest waiting for %s, %s lost\n",
				ops.Printable(g.Name), ops.Printable(worst.Stream), countOr(worst.Lag, "unknown"),
				humanize.Comma(worst.Pending), ops.Rough(worst.Waits), countOr(worst.Lost, "unknown"))
		}
	}
	for _, g := range groups {
		if g.HoldsBack > 0 {
			fmt.Fprintf(w, "group %s holds back about %s entries of %s that would be trimmed without it\n",
				ops.Printable(g.Name), humanize.Comma(g.HoldsBack), ops.Printable(g.Stream))
		}
	}
	for _, g := range groups {
		if ops.StateOf(g) == ops.Abandoned {
			fmt.Fprintf(w, "no consumer has read for group %s of %s in %s; if the group is no longer used, run: %s\n",
				ops.Printable(g.Name), ops.Printable(g.Stream), ops.Rough(g.Idle),
				ops.DropGroupCommand(g.Stream, g.Name))
		}
	}
	return nil
}

// countOr returns a count as text, or unknown if the count is unknown.
func countOr(n int64, unknown string) string {
	if n < 0 {
		return unknown
	}
	return humanize.Comma(n)
}

type groupsDropCmd struct {
	Stream string `required:"" help:"Full stream name; of a type that is spread over several streams, the name without the number is all of them."`
	Group  string `required:"" help:"Consumer group."`
	Force  bool   `help:"Drop it even if a consumer seems to be active."`
	Yes    bool   `help:"Do not ask."`
	JSON   bool   `name:"json" help:"Print JSON."`
}

// Run drops a consumer group.
func (c groupsDropCmd) Run(ctx context.Context, e *env) error {
	asking := ctx
	return e.withGroups(ctx, func(ctx context.Context, g *ops.GroupList) error {
		group, err := g.Find(c.Stream, c.Group)
		if err != nil {
			return err
		}
		if !c.Force {
			err := g.CheckDrop(ctx, group)
			var active *sink.ActiveError
			if errors.As(err, &active) {
				return fmt.Errorf("%w: stop its consumers first, or repeat it with --force", err)
			}
			if err != nil {
				return err
			}
		}
		dead, err := g.Dead(ctx, group)
		if err != nil {
			return err
		}
		of, streams := "stream "+c.Stream, streamsOf(group)
		if len(streams) > 0 {
			of = fmt.Sprintf("stream %s (%s)", c.Stream, strings.Join(streams, ", "))
		}
		what := fmt.Sprintf("%s pending, %s unread and %s dead events", humanize.Comma(group.Pending),
			countOr(group.Lag, "an unknown number of"), humanize.Comma(int64(len(dead))))
		if err := e.Confirm(asking, c.Yes,
			fmt.Sprintf("Drop group %s of %s, and with it %s? Other groups keep theirs.", c.Group, of,
				what)); err != nil {
			return err
		}
		drop := func(ctx context.Context) (audit.Detail, error) {
			return audit.Detail{"pending": group.Pending, "unread": group.Lag, "dead": len(dead)},
				g.Drop(ctx, group, dead, c.Force)
		}
		args := audit.Detail{"stream": c.Stream, "group": c.Group, "force": c.Force}
		if len(streams) > 0 {
			args["streams"] = streams
		}
		// The user's answer may have taken longer than the time limit of ctx.
		if err := e.auditedOrSaid(asking, audit.GroupsDrop, args, drop); err != nil {
			return err
		}
		if c.JSON {
			return e.JSON(struct {
				Stream  string   `json:"stream"`
				Group   string   `json:"group"`
				Pending int64    `json:"pending"`
				Unread  int64    `json:"unread"` // -1 if Redis does not know it
				Dead    int      `json:"dead"`
				Streams []string `json:"streams,omitempty"`
			}{c.Stream, c.Group, group.Pending, group.Lag, len(dead), streams})
		}
		fmt.Fprintf(e.Stdout, "group %s of %s is gone, and with it %s\n", c.Group, of, what)
		return nil
	})
}

// streamsOf returns the streams of a group whose type has several.
func streamsOf(g sink.Group) (names []string) {
	for _, on := range g.Streams {
		names = append(names, on.Stream)
	}
	slices.Sort(names)
	return names
}
