package sink

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
)

// AbandonedAfter is how long entries must have waited without any activity of a group's consumers for the group to
// count as abandoned.
const AbandonedAfter = time.Hour

// ActiveWithin is the longest idle time with which DropGroup still considers a consumer active.
const ActiveWithin = 5 * time.Minute

// maxConsumers bounds the consumers of a group whose activity the metrics read. A program that takes a new name at
// every start and never removes one leaves thousands, and listing them blocks Redis.
const maxConsumers = 1000

// Group is the state of a consumer group on a stream.
type Group struct {
	// Stream and Name identify the group. For a group from GroupsOfTypes that reads several streams, Stream is their
	// common base name.
	Stream string `json:"stream"`
	Name   string `json:"group"`
	// Length is the number of entries in the stream.
	Length int64 `json:"stream_length"`
	// Consumers is the number of consumer names of the group, including those of stopped consumers.
	Consumers int64 `json:"consumers"`
	// Pending is the number of entries delivered and not acknowledged.
	Pending int64 `json:"pending"`
	// Lag is the number of entries not yet delivered, -1 if Redis does not know it (after an XDEL in the middle).
	Lag int64 `json:"lag"`
	// OldestPending is how long ago the oldest pending entry was added; 0 if no entry is pending.
	OldestPending time.Duration `json:"-"`
	// Seen is how long ago a consumer of the group was last active; -1 if the group has no consumers, or too many to
	// check. Redis before 7.2 does not notice a consumer that waits for entries.
	Seen time.Duration `json:"-"`
	// Idle is how long entries have been waiting for this group while its consumers were inactive: the age of the
	// oldest entry that is unread or pending, or Seen if that is less. 0 if no entry waits.
	Idle time.Duration `json:"-"`
	// Waits is how long the oldest entry that is unread or pending has been waiting, even for active consumers; 0 if no
	// entry waits.
	Waits time.Duration `json:"-"`
	// Lost is how many entries left the stream before the group had read them, -1 if Redis does not know it.
	Lost int64 `json:"lost"`
	// HoldsBack is how many entries beyond the configured length of the stream cannot be trimmed because of this group;
	// 0 before MarkHolders. Several groups may hold back the same entries.
	HoldsBack int64 `json:"holds_back"`
	// Floor is the first entry that the group still needs; trimming stops there. It is empty for a group of several
	// streams.
	Floor string `json:"-"`
	// Streams are the states of the group on each stream of its type, the worst first; nil for a group of one stream.
	Streams []Group `json:"streams,omitempty"`
}

// Abandoned reports whether entries wait for the group and its consumers seem to have stopped.
func (g Group) Abandoned() bool { return g.Idle >= AbandonedAfter }

// Owes reports whether entries wait for the group.
func (g Group) Owes() bool { return g.Pending > 0 || g.Lag != 0 }

// MarshalJSON implements json.Marshaler. Durations are in seconds.
func (g Group) MarshalJSON() ([]byte, error) {
	type plain Group
	all := struct {
		plain
		OldestPending float64  `json:"oldest_pending_seconds"`
		Seen          *float64 `json:"seen_seconds"`
		Idle          float64  `json:"idle_seconds"`
		Waits         float64  `json:"waits_seconds"`
		Abandoned     bool     `json:"abandoned"`
	}{plain(g), g.OldestPending.Seconds(), nil, g.Idle.Seconds(), g.Waits.Seconds(), g.Abandoned()}
	if seen := g.Seen.Seconds(); g.Seen >= 0 {
		all.Seen = &seen
	}
	return json.Marshal(all)
}

// GroupsOfTypes combines the groups with the same name on the streams of a type, in the order of types and then names.
// bases has the Stream.Base of streams, as in package outbox; a stream without one is the only stream of its type.
// Counts are added up; a sum with an unknown count is unknown. The other fields are those of the worst stream.
func GroupsOfTypes(groups []Group, bases map[string]string) []Group {
	type key struct{ base, name string }
	of := map[key][]Group{}
	for _, g := range groups {
		k := key{cmp.Or(bases[g.Stream], g.Stream), g.Name}
		of[k] = append(of[k], g)
	}
	list := make([]Group, 0, len(of))
	for k, on := range of {
		if len(on) == 1 && on[0].Stream == k.base {
			list = append(list, on[0])
			continue
		}
		list = append(list, sumUp(k.base, on))
	}
	slices.SortFunc(list, func(a, b Group) int {
		return cmp.Or(strings.Compare(a.Stream, b.Stream), strings.Compare(a.Name, b.Name))
	})
	return list
}

// sumUp combines the states of a group on several streams.
func sumUp(base string, on []Group) Group {
	slices.SortStableFunc(on, func(a, b Group) int {
		return cmp.Or(cmp.Compare(max(b.Lost, 0), max(a.Lost, 0)), cmp.Compare(b.Idle, a.Idle),
			cmp.Compare(b.Waits, a.Waits))
	})
	sum := Group{Stream: base, Name: on[0].Name, Seen: -1, Streams: on}
	for _, g := range on {
		sum.Length += g.Length
		sum.Consumers = max(sum.Consumers, g.Consumers) // each consumer reads all of the streams
		sum.Pending += g.Pending
		if sum.Lag >= 0 && g.Lag >= 0 {
			sum.Lag += g.Lag
		} else {
			sum.Lag = -1
		}
		sum.OldestPending = max(sum.OldestPending, g.OldestPending)
		if g.Seen >= 0 && (sum.Seen < 0 || g.Seen < sum.Seen) {
			sum.Seen = g.Seen
		}
		sum.Idle = max(sum.Idle, g.Idle)
		sum.Waits = max(sum.Waits, g.Waits)
		sum.Lost += max(g.Lost, 0)
		sum.HoldsBack += g.HoldsBack
	}
	// Known losses are reported even if other counts are unknown.
	if sum.Lost == 0 && slices.ContainsFunc(on, func(g Group) bool { return g.Lost < 0 }) {
		sum.Lost = -1
	}
	return sum
}

// Groups lists the consumer groups of streams, in the order of streams and then as Redis lists them (by name). A
// missing stream has no groups. Streams that cannot be read are omitted and named in the error, together with the other
// streams' groups.
func Groups(ctx context.Context, client redis.UniversalClient, streams []string) ([]Group, error) {
	calls := make([]streamCall, len(streams))
	for i, stream := range streams {
		calls[i] = streamCall{stream: stream, args: []any{1, stream, 0, 0}}
	}
	cmds := runAll(ctx, client, observeScript, calls)
	var groups []Group
	var errs []error
	for i, stream := range streams {
		reply, err := cmds[i].Slice()
		if err != nil {
			errs = append(errs, fmt.Errorf("look at stream %q: %w", stream, err))
			continue
		}
		groups = append(groups, parseGroups(stream, reply)...)
	}
	return groups, errors.Join(errs...)
}

// groupsAt is the index of the first group in the answer of observe.lua.
const groupsAt = 4

// parseGroups parses the answer of observe.lua.
func parseGroups(stream string, reply []any) []Group {
	if len(reply) <= groupsAt {
		return nil
	}
	length, added, first, now := number(reply, 0), number(reply, 1), text(reply, 2), text(reply, 3)
	groups := make([]Group, 0, len(reply)-groupsAt)
	for _, item := range reply[groupsAt:] {
		v, _ := item.([]any)
		oldest, unread, last := text(v, 5), text(v, 8), text(v, 4)
		g := Group{
			Stream: stream, Name: text(v, 0), Length: length, Pending: number(v, 1), Lag: number(v, 2),
			Consumers:     number(v, 6),
			OldestPending: age(now, oldest), Seen: time.Duration(number(v, 7)) * time.Millisecond,
			Lost:  missed(length, added, number(v, 3), last, first),
			Floor: last,
		}
		if number(v, 7) < 0 {
			g.Seen = -1
		}
		if oldest != "" && lessID(oldest, g.Floor) {
			g.Floor = oldest
		}
		g.Waits = max(g.OldestPending, age(now, unread))
		g.Idle = g.Waits
		if g.Seen >= 0 {
			g.Idle = min(g.Idle, g.Seen)
		}
		groups = append(groups, g)
	}
	return groups
}

// missed returns how many entries left the stream before a group had read them; -1 if that is unknown. Added less
// existing entries are those that left the stream at its head. The group can no longer read those that it had not read.
func missed(length, added, read int64, last, first string) int64 {
	switch {
	case added == length, first != "" && !lessID(last, first):
		return 0
	case added < 0 || read < 0:
		return -1
	}
	return max(added-length-read, 0)
}

// age returns the time from the creation of an entry's id to now, which is in milliseconds; 0 without an entry.
func age(now, id string) time.Duration {
	ms, _, _ := strings.Cut(id, "-")
	then, err1 := strconv.ParseInt(ms, 10, 64)
	at, err2 := strconv.ParseInt(now, 10, 64)
	if err1 != nil || err2 != nil || then > at {
		return 0
	}
	return time.Duration(at-then) * time.Millisecond
}

// ErrNoGroup means that the stream does not exist or has no such group.
var ErrNoGroup = errors.New("no such consumer group")

// ActiveError is the reason why DropGroup did not drop a group.
type ActiveError struct{ Reason string }

func (e *ActiveError) Error() string { return e.Reason }

// DropGroup destroys a consumer group, including its pending and unread entries, and the lease of package consumer's
// ordered mode. Unless forced, it atomically refuses as CheckDrop does. Errors: ErrNoGroup, *ActiveError, or those of
// Redis.
func DropGroup(ctx context.Context, client redis.UniversalClient, stream, group string, active time.Duration,
	force bool,
) error {
	how := "drop"
	if force {
		how = "force"
	}
	return dropGroup(ctx, client, stream, group, active, how)
}

// CheckDrop returns *ActiveError if a consumer of the group was active within active, holds a lease, or may be waiting
// for entries on a server that does not notice that; ErrNoGroup if the group does not exist. It changes nothing.
func CheckDrop(ctx context.Context, client redis.UniversalClient, stream, group string, active time.Duration) error {
	return dropGroup(ctx, client, stream, group, active, "look")
}

func dropGroup(ctx context.Context, client redis.UniversalClient, stream, group string, active time.Duration,
	how string,
) error {
	lease := "{" + stream + "}:lease:" + group // see package consumer
	v, err := run(ctx, client, dropGroupScript, []any{2, stream, lease, group, active.Milliseconds(), how})
	switch {
	case err != nil:
	case text(v, 0) == "OK":
		return nil
	case text(v, 0) == "GONE":
		err = ErrNoGroup
	case text(v, 0) == "LEASED":
		err = &ActiveError{fmt.Sprintf("consumer %q reads it in ordered mode", text(v, 1))}
	case text(v, 0) == "ACTIVE":
		err = &ActiveError{fmt.Sprintf("consumer %q was active %s ago", text(v, 1),
			time.Duration(number(v, 2))*time.Millisecond)}
	case text(v, 0) == "UNSURE":
		err = &ActiveError{fmt.Sprintf(
			"it has read everything, and this server cannot tell whether its %d consumers still wait for more",
			number(v, 1))}
	default:
		err = errors.New("unexpected reply")
	}
	return fmt.Errorf("drop group %q of stream %q: %w", group, stream, err)
}

// MarkHolders sets HoldsBack of groups, which are all groups of their streams, for streams that are trimmed to maxLen.
func MarkHolders(groups []Group, maxLen int64) {
	lowest := map[string]string{}
	for _, g := range groups {
		if low, ok := lowest[g.Stream]; !ok || lessID(g.Floor, low) {
			lowest[g.Stream] = g.Floor
		}
	}
	for i := range groups {
		g := &groups[i]
		// Redis does not report how many entries follow an id. Without pending entries it is the lag. After the lowest
		// floor it is about the length, because trimming has reached that floor. For other groups this is a lower
		// bound.
		needs := g.Pending + max(g.Lag, 0)
		if g.Lag < 0 || g.Pending > 0 && g.Floor == lowest[g.Stream] {
			needs = g.Length
		}
		g.HoldsBack = max(0, min(needs, g.Length)-maxLen)
	}
}
