package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/dustin/go-humanize"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"posthaste/api/admin"
	"posthaste/consumer"
	"posthaste/sink"
	"posthaste/sql"
)

type groupsCmd struct {
	List groupsListCmd `cmd:"" help:"List the consumer groups of every known stream, and which of them keeps entries from being trimmed."`
	Drop groupsDropCmd `cmd:"" help:"Drop a consumer group that nobody reads any more, with everything that waits for it."`
}

// groupsIn are the consumer groups there are.
type groupsIn struct {
	client *redis.Client
	// streams are all streams looked at, ascending.
	streams []string
	groups  []sink.Group
}

// withGroups runs do with the groups of every stream that posthaste knows or that has its prefix. That posthaste cannot
// reach Postgres is said, and no reason to do nothing: a Redis that fills up does not wait.
func (e *env) withGroups(ctx context.Context, do func(ctx context.Context, g *groupsIn) error) error {
	var noted []string
	err := e.withPool(ctx, func(ctx context.Context, pool *pgxpool.Pool) (err error) {
		noted, err = sql.Streams(ctx, pool)
		return err
	})
	var usage *usageError
	if errors.As(err, &usage) {
		return err
	}
	if err != nil {
		fmt.Fprintln(e.stderr, "posthaste: without Postgres only streams with the prefix are found:", err)
	}
	ctx, cancel := context.WithTimeout(ctx, oneShotTimeout)
	defer cancel()
	client, err := sink.NewClient(e.config.RedisURL)
	if err != nil {
		return &usageError{err.Error()}
	}
	defer client.Close()
	found, err := consumer.Streams(ctx, client, e.config.StreamPrefix)
	if err != nil {
		return oneLine(err)
	}
	// With an empty prefix that is every stream; those of the credits have names that no aggregate type gives, and readers
	// of their own.
	found = slices.DeleteFunc(found, func(name string) bool { return strings.HasPrefix(name, "{") })
	g := &groupsIn{client: client, streams: slices.Concat(noted, found)}
	slices.Sort(g.streams)
	g.streams = slices.Compact(g.streams)
	g.groups, err = sink.Groups(ctx, client, g.streams)
	e.markHolders(g.groups, noted)
	return oneLine(errors.Join(do(ctx, g), err))
}

// markHolders finds who holds trimming, of the streams that the relay trims.
func (e *env) markHolders(groups []sink.Group, noted []string) {
	if e.config.TrimForce || e.config.StreamMaxlen == 0 {
		return
	}
	for i := 0; i < len(groups); {
		j := i
		for j < len(groups) && groups[j].Stream == groups[i].Stream {
			j++
		}
		if slices.Contains(noted, groups[i].Stream) {
			sink.MarkHolders(groups[i:j], e.config.StreamMaxlen)
		}
		i = j
	}
}

type groupsListCmd struct {
	JSON bool `name:"json" help:"Print JSON."`
}

// Run lists consumer groups.
func (c groupsListCmd) Run(ctx context.Context, e *env) error {
	return e.withGroups(ctx, func(_ context.Context, g *groupsIn) error {
		if c.JSON {
			if g.groups == nil {
				g.groups = []sink.Group{}
			}
			return e.json(g.groups)
		}
		return printGroups(e.stdout, g.groups)
	})
}

func printGroups(w io.Writer, groups []sink.Group) error {
	if len(groups) == 0 {
		_, err := fmt.Fprintln(w, "no consumer groups")
		return err
	}
	t := tabwriter.NewWriter(w, 0, 4, 2, ' ', 0)
	fmt.Fprintln(t, "STREAM\tGROUP\tSTATE\tCONSUMERS\tUNREAD\tPENDING\tOLDEST PENDING\tIDLE\tLOST\tHOLDS BACK")
	for _, g := range groups {
		fmt.Fprintf(t, "%s\t%s\t%s\t%d\t%s\t%s\t%s\t%s\t%s\t%s\n", foreign(g.Stream), foreign(g.Name), groupState(g), g.Consumers, countOr(g.Lag, "unknown"), humanize.Comma(g.Pending),
			rough(g.OldestPending), rough(g.Idle), countOr(g.Lost, "unknown"), humanize.Comma(g.HoldsBack))
	}
	if err := t.Flush(); err != nil {
		return err
	}
	for _, g := range groups {
		if g.HoldsBack > 0 {
			fmt.Fprintf(w, "group %s holds back about %s entries of %s that would be trimmed without it\n", foreign(g.Name), humanize.Comma(g.HoldsBack), foreign(g.Stream))
		}
	}
	for _, g := range groups {
		if g.Abandoned() {
			fmt.Fprintf(w, "nobody has read for group %s of %s in %s; if nobody will: %s\n",
				foreign(g.Name), foreign(g.Stream), rough(g.Idle), admin.DropGroupCommand(g.Stream, g.Name))
		}
	}
	return nil
}

func groupState(g sink.Group) string {
	switch {
	case g.Abandoned():
		return "abandoned"
	case g.Owes():
		return "behind"
	}
	return "up to date"
}

// countOr writes a count, or what stands for an unknown one.
func countOr(n int64, unknown string) string {
	if n < 0 {
		return unknown
	}
	return humanize.Comma(n)
}

// rough writes a duration for people: its two largest units.
func rough(d time.Duration) string {
	switch {
	case d <= 0:
		return "-"
	case d < time.Second:
		return d.Round(time.Millisecond).String()
	case d < time.Minute:
		return d.Round(100 * time.Millisecond).String()
	case d < time.Hour:
		return fmt.Sprintf("%dm%02ds", d/time.Minute, d%time.Minute/time.Second)
	case d < 24*time.Hour:
		return fmt.Sprintf("%dh%02dm", d/time.Hour, d%time.Hour/time.Minute)
	}
	return fmt.Sprintf("%dd%02dh", d/(24*time.Hour), d%(24*time.Hour)/time.Hour)
}

type groupsDropCmd struct {
	Stream string `required:"" help:"Full stream name."`
	Group  string `required:"" help:"Consumer group."`
	Force  bool   `help:"Drop it even if a consumer seems to be active."`
	Yes    bool   `help:"Do not ask."`
	JSON   bool   `name:"json" help:"Print JSON."`
}

// Run drops a consumer group.
func (c groupsDropCmd) Run(ctx context.Context, e *env) error {
	asking := ctx
	return e.withGroups(ctx, func(ctx context.Context, g *groupsIn) error {
		group, err := g.find(c.Stream, c.Group)
		if err != nil {
			return err
		}
		if !c.Force {
			err := sink.CheckDrop(ctx, g.client, c.Stream, c.Group, sink.ActiveWithin)
			var active *sink.ActiveError
			if errors.As(err, &active) {
				return fmt.Errorf("%w: stop its consumers first, or repeat it with --force", err)
			}
			if err != nil {
				return err
			}
		}
		dead, err := g.dead(ctx, group)
		if err != nil {
			return err
		}
		what := fmt.Sprintf("%s pending, %s unread and %s dead events", humanize.Comma(group.Pending), countOr(group.Lag, "an unknown number of"), humanize.Comma(int64(len(dead))))
		if err := e.confirm(asking, c.Yes, fmt.Sprintf("Drop group %s of stream %s, and with it %s? Other groups keep theirs.", c.Group, c.Stream, what)); err != nil {
			return err
		}
		// The answer may have taken longer than ctx lasts.
		ctx, cancel := context.WithTimeout(asking, oneShotTimeout)
		defer cancel()
		if err := sink.DropGroup(ctx, g.client, c.Stream, c.Group, sink.ActiveWithin, c.Force); err != nil {
			return err
		}
		for _, d := range dead {
			if err := consumer.Drop(ctx, g.client, d); err != nil && !errors.Is(err, consumer.ErrDeadGone) {
				return fmt.Errorf("the group is gone; its dead events are still listed by posthaste dead list: %w", err)
			}
		}
		if c.JSON {
			return e.json(struct {
				Stream  string `json:"stream"`
				Group   string `json:"group"`
				Pending int64  `json:"pending"`
				Unread  int64  `json:"unread"` // -1 if Redis cannot tell
				Dead    int    `json:"dead"`
			}{c.Stream, c.Group, group.Pending, group.Lag, len(dead)})
		}
		fmt.Fprintf(e.stdout, "group %s of stream %s is gone, and with it %s\n", c.Group, c.Stream, what)
		return nil
	})
}

// find returns a group, or an error that says what there is.
func (g *groupsIn) find(stream, name string) (sink.Group, error) {
	var names []string
	for _, h := range g.groups {
		if h.Stream != stream {
			continue
		}
		if h.Name == name {
			return h, nil
		}
		names = append(names, h.Name)
	}
	if !slices.Contains(g.streams, stream) {
		return sink.Group{}, fmt.Errorf("%q is no stream of posthaste; there are: %s", stream, orNo(g.streams))
	}
	return sink.Group{}, fmt.Errorf("stream %q has no consumer group %q; it has: %s", stream, name, orNo(names))
}

func orNo(names []string) string {
	if len(names) == 0 {
		return "none"
	}
	return strings.Join(names, ", ")
}

// dead lists what a group has given up, without the payloads. Nobody can retry it once the group is gone.
func (g *groupsIn) dead(ctx context.Context, group sink.Group) ([]consumer.DeadEntry, error) {
	all, _, err := consumer.DeadHeads(ctx, g.client, []string{group.Stream, "{" + group.Stream + "}"}, math.MaxInt)
	return slices.DeleteFunc(all, func(d consumer.DeadEntry) bool { return d.Stream != group.Stream || d.Group != group.Name }), err
}
