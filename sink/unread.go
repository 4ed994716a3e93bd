package sink

import (
	"context"
	"time"

	"posthaste/outbox"
)

// foundWithin is within which time a consumer finds a new stream, at most; see package consumer.
const foundWithin = 6 * time.Second

// Unread implements outbox.Sink. What groups have not read is looked for by ids, so that it is right where Redis itself
// cannot tell how much that is.
func (s *Sink) Unread(ctx context.Context, streams []string) ([]outbox.Unread, error) {
	calls := make([]streamCall, len(streams))
	for i, stream := range streams {
		calls[i] = streamCall{stream: stream, args: []any{1, stream, 0, maxConsumers}}
	}
	var list []outbox.Unread
	for i, cmd := range runAll(ctx, s.client, observeScript, calls) {
		reply, err := cmd.Slice()
		if notAStream(err) {
			continue
		}
		if err != nil {
			return nil, s.failed("look at the groups of", streams[i], err)
		}
		list = append(list, unread(streams[i], reply)...)
	}
	return list, nil
}

// unread takes the answer of observe.lua.
func unread(stream string, reply []any) (list []outbox.Unread) {
	if n, first := number(reply, 0), text(reply, 2); n > 0 && age(text(reply, 3), first) < foundWithin {
		list = append(list, outbox.Unread{Stream: stream, Entries: n})
	}
	for _, g := range parseGroups(stream, reply) {
		if !g.Owes() {
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

// shardedKey is what tells consumers that a type has several streams. No type has such a name.
func shardedKey(base string) string { return base + "#sharded" }

// Sharded implements outbox.Sink. A consumer that reads a type by the name of its only stream finds the others by that.
func (s *Sink) Sharded(ctx context.Context, base string) error {
	return s.failed("name the streams of", base, s.client.SetNX(ctx, shardedKey(base), 1, 0).Err())
}
