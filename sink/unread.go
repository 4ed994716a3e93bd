package sink

import (
	"cmp"
	"context"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/google/uuid"

	"posthaste/internal/redisurl"
	"posthaste/outbox"
)

// foundWithin bounds the time in which a consumer finds a new stream; see package consumer.
const foundWithin = 6 * time.Second

// Unread implements stream.Sink. It finds unread entries by id, so it is correct even if Redis does not know their
// number. In a shared stream only this database's entries count, because others keep publishing.
func (s *Sink) Unread(ctx context.Context, source uuid.UUID, streams []string) ([]outbox.Unread, error) {
	ours := make([]string, len(streams))
	if s.o.Shared {
		states, err := s.Look(ctx, source, streams, nil)
		if err != nil {
			return nil, err
		}
		for i, st := range states {
			if ours[i] = st.Last; st.Last == "" && !st.Behind {
				ours[i] = neverRead
			}
		}
	}
	calls := make([]streamCall, len(streams))
	for i, stream := range streams {
		calls[i] = streamCall{stream: stream, args: []any{1, stream, 0, maxConsumers}}
	}
	var list []outbox.Unread
	for i, cmd := range runAll(ctx, s.o.Client, observeScript, calls) {
		reply, err := cmd.Slice()
		if notAStream(err) {
			continue
		}
		if err != nil {
			return nil, s.failed("look at the groups of", streams[i], err)
		}
		list = append(list, unread(streams[i], reply, ours[i])...)
	}
	return list, nil
}

// unread evaluates the answer of observe.lua. last is the last entry that counts, "" if all do.
func unread(stream string, reply []any, last string) (list []outbox.Unread) {
	counts := func(id string) bool { return id != "" && (last == "" || !lessID(last, id)) }
	now, first := text(reply, 3), text(reply, 2)
	if counts(first) && max(age(now, first), age(now, last)) < foundWithin {
		list = append(list, outbox.Unread{Stream: stream, Entries: number(reply, 0)})
	}
	for i, g := range parseGroups(stream, reply) {
		v, _ := reply[groupsAt+i].([]any)
		if !g.Owes() || last != "" && !counts(text(v, 5)) && !counts(text(v, 8)) {
			continue
		}
		n := g.Pending + max(g.Lag, 0)
		if g.Lag < 0 {
			n = g.Pending + g.Length
		}
		list = append(list, outbox.Unread{Stream: stream, Group: g.Name, Entries: n, Idle: g.Idle})
	}
	return list
}

// Follow implements stream.Sink.
func (s *Sink) Follow(ctx context.Context, stream string, others []string) error {
	var groups []string
	for _, other := range others {
		reply, err := run(ctx, s.o.Client, observeScript, []any{1, other, 0, maxConsumers})
		if notAStream(err) {
			continue
		}
		if err != nil {
			return s.failed(stepGroups, other, err)
		}
		for _, g := range parseGroups(other, reply) {
			groups = append(groups, g.Name)
		}
	}
	return s.Regroup(ctx, stream, groups)
}

// Regroup implements stream.Sink.
func (s *Sink) Regroup(ctx context.Context, stream string, groups []string) error {
	for some := range slices.Chunk(groups, redisurl.Fit(4, 1)) {
		args := []any{1, stream}
		for _, group := range some {
			args = append(args, group)
		}
		_, err := run(ctx, s.o.Client, regroupScript, args)
		if notAStream(err) {
			return nil
		}
		if err != nil {
			return s.failed(stepRegroup, stream, err)
		}
	}
	return nil
}

// keptGroups bounds the groups of a stream that are listed, and so restored with it.
const keptGroups = 1000

// Groups implements stream.Sink. It omits names that are not valid text.
func (s *Sink) Groups(ctx context.Context, o outbox.Owner, streams []string) (map[string][]string, error) {
	calls := make([]streamCall, len(streams))
	for i, stream := range streams {
		calls[i] = streamCall{stream: stream, args: append(gateArgs(stream, o), keptGroups)}
	}
	list := make(map[string][]string, len(streams))
	var first error
	for i, cmd := range runAll(ctx, s.o.Client, checkScript, calls) {
		reply, err := cmd.Slice()
		if notAStream(err) {
			continue
		}
		if err != nil {
			first = cmp.Or(first, s.failed("list the groups of", streams[i], err))
			continue
		}
		if verdict(streams[i], reply) != nil { // Check reports this as well
			continue
		}
		groups := []string{}
		for n := range reply[1:] {
			if name := text(reply, n+1); utf8.ValidString(name) && !strings.Contains(name, "\x00") {
				groups = append(groups, name)
			}
		}
		list[streams[i]] = groups
	}
	return list, first
}

// Sharded implements stream.Sink. A consumer that reads a type by the name of its only stream finds the others by this
// key. No type has such a name.
func (s *Sink) Sharded(ctx context.Context, base string) error {
	return s.failed(stepName, base, s.o.Client.SetNX(ctx, base+"#sharded", 1, 0).Err())
}
