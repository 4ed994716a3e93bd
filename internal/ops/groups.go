package ops

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"regexp"
	"slices"
	"strings"
	"time"
	"unicode"

	"github.com/redis/go-redis/v9"

	"posthaste/consumer"
	"posthaste/outbox"
	"posthaste/sink"
)

type GroupList struct {
	// List has the groups, by the stream of their type. A group on several streams of a type is one entry.
	List []sink.Group

	client redis.UniversalClient
	// each has the groups of every single stream.
	each []sink.Group
	// streams are all streams that were read, and bases those of which a type has several.
	streams []string
	bases   map[string]string
}

// FindGroups reads the consumer groups of the noted streams, which are those in Postgres, and of all other streams
// with the prefix. maxLen is the length to which the relay trims the noted streams, or 0 if it trims entries that
// groups have not read; if it is not 0, the groups that hold trimming are marked. It returns what it could read, or
// nil, together with the error.
func FindGroups(
	ctx context.Context, client redis.UniversalClient, noted []outbox.Stream, prefix string, maxLen int64,
) (*GroupList, error) {
	found, err := consumer.Streams(ctx, client, prefix)
	if err != nil && len(found) == 0 {
		return nil, err
	}
	// An empty prefix matches every stream. Skip those of the credits: no aggregate type gives their names, and they
	// have readers of their own.
	found = slices.DeleteFunc(found, func(name string) bool { return strings.HasPrefix(name, "{") })
	g := &GroupList{client: client, streams: distinct(slices.Concat(outbox.StreamNames(noted), found))}
	// For the streams that only another database publishes to, and for all without Postgres, Redis has the bases.
	var unknown, unread error
	g.bases, unknown = consumer.Bases(ctx, client, g.streams)
	maps.Copy(g.bases, outbox.Bases(noted))
	g.each, unread = sink.Groups(ctx, client, g.streams)
	if maxLen > 0 {
		g.markHolders(outbox.StreamNames(noted), maxLen)
	}
	g.List = sink.GroupsOfTypes(g.each, g.bases)
	return g, errors.Join(err, unknown, unread)
}

// markHolders finds the groups that hold trimming of the noted streams.
func (g *GroupList) markHolders(noted []string, maxLen int64) {
	for i := 0; i < len(g.each); {
		j := i
		for j < len(g.each) && g.each[j].Stream == g.each[i].Stream {
			j++
		}
		if slices.Contains(noted, g.each[i].Stream) {
			sink.MarkHolders(g.each[i:j], maxLen)
		}
		i = j
	}
}

// Find returns a group, or an error that lists those that exist. The name of a type's only stream selects all streams
// of the type; that of one of several, only that one.
func (g *GroupList) Find(stream, name string) (sink.Group, error) {
	var names []string
	for _, list := range [][]sink.Group{g.List, g.each} {
		for _, h := range list {
			if h.Stream != stream {
				continue
			}
			if h.Name == name {
				return h, nil
			}
			names = append(names, h.Name)
		}
	}
	known := distinct(slices.AppendSeq(slices.Clone(g.streams), maps.Values(g.bases)))
	if !slices.Contains(known, stream) {
		return sink.Group{}, fmt.Errorf("%q is no stream of posthaste; there are: %s", stream,
			cmp.Or(strings.Join(known, ", "), "none"))
	}
	return sink.Group{}, fmt.Errorf("stream %q has no consumer group %q; it has: %s", stream, name,
		cmp.Or(strings.Join(distinct(names), ", "), "none"))
}

// distinct sorts names and removes duplicates.
func distinct(names []string) []string {
	slices.Sort(names)
	return slices.Compact(names)
}

// onEach returns the group on each of its streams.
func onEach(group sink.Group) []sink.Group {
	if group.Streams == nil {
		return []sink.Group{group}
	}
	return group.Streams
}

// CheckDrop returns *sink.ActiveError if consumers may still read for the group. It changes nothing.
func (g *GroupList) CheckDrop(ctx context.Context, group sink.Group) error {
	for _, on := range onEach(group) {
		if err := sink.CheckDrop(ctx, g.client, on.Stream, on.Name, sink.ActiveWithin); err != nil {
			return err
		}
	}
	return nil
}

// Dead lists a group's dead events, without payloads. They cannot be retried once the group is dropped.
func (g *GroupList) Dead(ctx context.Context, group sink.Group) ([]consumer.DeadEntry, error) {
	var dead []consumer.DeadEntry
	for _, on := range onEach(group) {
		all, _, err := consumer.DeadHeads(ctx, g.client, []string{on.Stream, "{" + on.Stream + "}"}, math.MaxInt)
		if err != nil {
			return nil, err
		}
		dead = append(dead, slices.DeleteFunc(all,
			func(d consumer.DeadEntry) bool { return d.Stream != on.Stream || d.Group != on.Name })...)
	}
	return dead, nil
}

// Drop drops a group on all its streams, and dead, its dead events. Unless force is set, it checks for active
// consumers in the same step, as CheckDrop does. Its error names the streams from which the group has been dropped
// already.
func (g *GroupList) Drop(ctx context.Context, group sink.Group, dead []consumer.DeadEntry, force bool) error {
	var gone []string
	for _, on := range onEach(group) {
		if err := sink.DropGroup(ctx, g.client, on.Stream, on.Name, sink.ActiveWithin, force); err != nil {
			if len(gone) > 0 {
				err = fmt.Errorf("%w; the group is gone from %s", err, strings.Join(gone, ", "))
			}
			return err
		}
		gone = append(gone, on.Stream)
	}
	for _, d := range dead {
		if err := consumer.Drop(ctx, g.client, d); err != nil && !errors.Is(err, consumer.ErrDeadGone) {
			return fmt.Errorf("the group is gone; its dead events are still listed by posthaste dead list: %w", err)
		}
	}
	return nil
}

const (
	// unreadAfter is how long a group may leave an entry unread.
	unreadAfter = time.Minute
	// behindAfter is the same for a group with active consumers, which may retry an entry for some minutes.
	behindAfter = 5 * time.Minute
)

// GroupState describes how a consumer group keeps up. A higher state is worse.
type GroupState int

const (
	// UpToDate has no unread or pending entries.
	UpToDate GroupState = iota
	// Behind has had unread or pending entries for a short time.
	Behind
	// Slow does not keep up.
	Slow
	// Abandoned has no active consumer.
	Abandoned
)

func StateOf(g sink.Group) GroupState {
	switch {
	case g.Abandoned():
		return Abandoned
	case !g.Owes():
		return UpToDate
	case g.Idle >= unreadAfter || g.Waits >= behindAfter:
		return Slow
	}
	return Behind
}

func (s GroupState) String() string {
	return [...]string{"up to date", "behind", "behind", "abandoned"}[s]
}

var plainWord = regexp.MustCompile(`^[a-zA-Z0-9_.:/@%+,-]+$`)

// DropGroupCommand is the command that drops a consumer group, safe to paste into a shell. Any writer to Redis can
// choose a group's name, so it is quoted. Unprintable characters are shown as question marks; such a command matches
// no group.
func DropGroupCommand(stream, group string) string {
	return "posthaste groups drop --stream=" + Quoted(stream) + " --group=" + Quoted(group)
}

// Quoted returns a word for a command line, quoted if a shell needs that.
func Quoted(word string) string {
	if plainWord.MatchString(word) {
		return word
	}
	// Replace what cannot be typed, rather than drop it: the result must not be the name of another group.
	word = strings.Map(func(r rune) rune {
		if r != ' ' && !unicode.IsPrint(r) {
			return '?'
		}
		return r
	}, word)
	return "'" + strings.ReplaceAll(word, "'", `'\''`) + "'"
}
