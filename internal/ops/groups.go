package ops

import (
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

// GroupList are the consumer groups there are.
type GroupList struct {
	// List has the groups, by the stream of their type: one that is on several streams of a type is one.
	List []sink.Group

	client redis.UniversalClient
	// each has the groups, by stream.
	each []sink.Group
	// streams are all streams looked at, and bases those of which a type has several.
	streams []string
	bases   map[string]string
}

// FindGroups reads the consumer groups of the noted streams, which are those that Postgres knows of, and of every other
// stream with the prefix. maxLen is the length to which the relay trims the noted ones, 0 if it does so whatever the
// groups have read: for those it finds who holds trimming. What could be read is returned beside the error of what
// could not; nil if that is nothing.
func FindGroups(
	ctx context.Context, client redis.UniversalClient, noted []outbox.Stream, prefix string, maxLen int64,
) (*GroupList, error) {
	found, err := consumer.Streams(ctx, client, prefix)
	if err != nil && len(found) == 0 {
		return nil, err
	}
	// With an empty prefix that is every stream; those of the credits have names that no aggregate type gives, and
	// readers of their own.
	found = slices.DeleteFunc(found, func(name string) bool { return strings.HasPrefix(name, "{") })
	g := &GroupList{client: client, streams: slices.Concat(outbox.StreamNames(noted), found)}
	slices.Sort(g.streams)
	g.streams = slices.Compact(g.streams)
	// Streams that only another database publishes to, and all of them without Postgres, are as Redis has them.
	bases, unknown := consumer.Bases(ctx, client, g.streams)
	maps.Copy(bases, outbox.Bases(noted))
	g.bases = bases
	var unread error
	g.each, unread = sink.Groups(ctx, client, g.streams)
	if maxLen > 0 {
		g.markHolders(outbox.StreamNames(noted), maxLen)
	}
	g.List = sink.GroupsOfTypes(g.each, g.bases)
	return g, errors.Join(err, unknown, unread)
}

// markHolders finds who holds trimming, of the streams that the relay trims.
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

// Find returns a group, or an error that says what there is. The name of a type's only stream stands for all streams of
// the type; that of one of several, for that one.
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
	known := slices.AppendSeq(slices.Clone(g.streams), maps.Values(g.bases))
	slices.Sort(known)
	known = slices.Compact(known)
	if !slices.Contains(known, stream) {
		return sink.Group{}, fmt.Errorf("%q is no stream of posthaste; there are: %s", stream, orNo(known))
	}
	slices.Sort(names)
	return sink.Group{}, fmt.Errorf("stream %q has no consumer group %q; it has: %s", stream, name,
		orNo(slices.Compact(names)))
}

func orNo(names []string) string {
	if len(names) == 0 {
		return "none"
	}
	return strings.Join(names, ", ")
}

// onEach is what a group is on each stream.
func onEach(group sink.Group) []sink.Group {
	if group.Streams == nil {
		return []sink.Group{group}
	}
	return group.Streams
}

// CheckDrop returns *sink.ActiveError if somebody may still read for the group. It changes nothing.
func (g *GroupList) CheckDrop(ctx context.Context, group sink.Group) error {
	for _, on := range onEach(group) {
		if err := sink.CheckDrop(ctx, g.client, on.Stream, on.Name, sink.ActiveWithin); err != nil {
			return err
		}
	}
	return nil
}

// Dead lists what a group has given up, without the payloads. Nobody can retry it once the group is gone.
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

// Drop drops a group, on all streams of its type if it has several, and with it dead, which is what it has given up.
// Unless forced it refuses as CheckDrop does, in the same step with each stream's: an error names those from which the
// group is gone already.
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
	// unreadAfter is how long a group may leave an entry lying.
	unreadAfter = time.Minute
	// behindAfter is the same for a group whose consumers are at work, which may try an entry again for some minutes.
	behindAfter = 5 * time.Minute
)

// GroupState is how a consumer group keeps up. States are ordered: a higher one is worse.
type GroupState int

// All states there are.
const (
	// UpToDate has nothing before it.
	UpToDate GroupState = iota
	// Behind has something before it, for a moment so far.
	Behind
	// Slow does not keep up.
	Slow
	// Abandoned has nobody who reads for it.
	Abandoned
)

// StateOf says how a group keeps up.
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

// String is the state in a table.
func (s GroupState) String() string {
	return [...]string{"up to date", "behind", "behind", "abandoned"}[s]
}

var plainWord = regexp.MustCompile(`^[a-zA-Z0-9_.:/@%+,-]+$`)

// DropGroupCommand is the command that drops a consumer group, to be pasted into a shell. Anybody who may write to
// Redis chooses a group's name, so it is quoted; what cannot be printed is shown as a question mark, and names no
// group.
func DropGroupCommand(stream, group string) string {
	return "posthaste groups drop --stream=" + quoted(stream) + " --group=" + quoted(group)
}

func quoted(word string) string {
	if plainWord.MatchString(word) {
		return word
	}
	// What cannot be typed is not turned into something that can: it would be another name.
	word = strings.Map(func(r rune) rune {
		if r != ' ' && !unicode.IsPrint(r) {
			return '?'
		}
		return r
	}, word)
	return "'" + strings.ReplaceAll(word, "'", `'\''`) + "'"
}
