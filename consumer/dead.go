package consumer

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
)

// errorText bounds the error kept with a dead entry.
const errorText = 1000

// DeadStream returns the stream that events of the given one go to when a consumer group gives them up. On a single
// server (or with Sentinel) it is "dead." + stream. In a cluster both must live in the same slot, or the move could not
// be atomic; there it is "dead.{" + stream + "}", because a key's slot is that of the part in braces.
func DeadStream(client redis.UniversalClient, stream string) string {
	if _, ok := client.(*redis.ClusterClient); ok && !strings.Contains(stream, "{") {
		return deadPrefix + "{" + stream + "}"
	}
	return deadPrefix + stream
}

// die moves e to the dead stream and lets its queue go on. While Redis does not answer, e waits in its queue.
func (c *Consumer) die(ctx context.Context, e *entry, attempts int, cause error) {
	args := []any{
		c.opt.Group, c.opt.Consumer, e.id, "dead_stream", e.stream, "dead_entry", e.id, "dead_group", c.opt.Group,
		"dead_error", clip(cause.Error(), errorText), "dead_attempts", strconv.Itoa(attempts), "dead_at",
		time.Now().UTC().Format(timeFormat),
	}
	for k, v := range e.values {
		// A dead entry that dies again (a group may read a dead stream) says where it died last.
		if !strings.HasPrefix(k, "dead_") {
			args = append(args, k, v)
		}
	}
	result, err := deadScript.Run(ctx, c.client, []string{e.stream, DeadStream(c.client, e.stream)}, args...).Text()
	if err != nil {
		e.cause, e.tried = cause, attempts
		c.again(e, "dead", err)
		return
	}
	c.outages.note("dead", e.stream, nil)
	if result == "moved" {
		c.metrics.dead.Inc()
		id, _ := e.values["id"].(string)
		c.log.Error("event moved to the dead stream", "event_id", id, "stream", e.stream, "entry_id", e.id,
			"attempt", attempts, "err", clip(cause.Error(), errorText))
	}
	c.queues.done(e, false)
}

// clip shortens s to at most n bytes of valid UTF-8.
func clip(s string, n int) string {
	s = strings.ToValidUTF8(s, "\uFFFD")
	if len(s) <= n {
		return s
	}
	return strings.ToValidUTF8(s[:n], "") + "…"
}

// DeadEntry is an event that a consumer group has given up.
type DeadEntry struct {
	// DeadStream and DeadID say where the entry stands now.
	DeadStream, DeadID string
	// Stream and EntryID say where it was read.
	Stream, EntryID string
	// Group is the consumer group that gave it up; to the other groups nothing has happened.
	Group string
	// EventID, Type and Subject are the event's; empty if the entry was malformed.
	EventID, Type, Subject string
	// Data is the payload as it was published.
	Data json.RawMessage
	// Time is the event's; zero if the entry was malformed.
	Time time.Time
	// Error is the last attempt's error.
	Error string
	// Attempts is how often the event was tried; 0 if it was malformed.
	Attempts int
	// At is when it was given up, by the clock of the consumer.
	At time.Time
}

// deadPage is how many entries are read at once; fewer if they are large.
const deadPage = 100

// Dead lists the dead events of every stream whose name begins with prefix, oldest first within a stream. The list is
// complete, however long it is. With an error it returns the events that could be read: in a cluster one node may be
// down.
func Dead(ctx context.Context, client redis.UniversalClient, prefix string) ([]DeadEntry, error) {
	names, err := listStreams(ctx, client, deadPrefixes(prefix), "dead streams")
	list, _, unread := deadIn(ctx, client, names, math.MaxInt, "all")
	return list, errors.Join(err, unread)
}

// DeadHeads lists dead events of the named streams without their Data: at most limit of them, oldest first within a
// stream, and their total number. Unlike Dead it reads no other keys, so it can be called often on a server with
// millions. With an error it returns the events that could be read.
func DeadHeads(ctx context.Context, client redis.UniversalClient, streams []string,
	limit int,
) (list []DeadEntry, total int64, err error) {
	names := make([]string, len(streams))
	for i, stream := range streams {
		names[i] = DeadStream(client, stream)
	}
	return deadIn(ctx, client, names, limit, "")
}

// deadIn lists at most limit entries of the named dead streams, page by page, and returns their total number. It omits
// the payloads unless what is "all".
func deadIn(ctx context.Context, client redis.UniversalClient, names []string, limit int, what string) (
	list []DeadEntry, total int64, err error,
) {
	var errs []error
	for _, name := range names {
		start := "-"
		for page := 0; start != "" && (page == 0 || len(list) < limit); page++ {
			most := min(deadPage, limit-len(list))
			reply, err := headsScript.RunRO(ctx, client, []string{name}, start, most, what).Slice()
			if err == nil && len(reply) < 2 {
				err = errors.New("unexpected reply")
			}
			if err != nil {
				errs = append(errs, fmt.Errorf("read dead stream %q: %w", name, err))
				break
			}
			if n, _ := reply[0].(int64); page == 0 {
				total += n
			}
			start, _ = reply[1].(string) // "" at the end
			for _, item := range reply[2:] {
				list = append(list, deadHead(name, item))
			}
		}
	}
	return list, total, errors.Join(errs...)
}

// deadHead reads an entry of a dead stream as its script answers it: the id, then names and values of fields.
func deadHead(stream string, item any) DeadEntry {
	e, _ := item.([]any)
	if len(e) == 0 {
		return DeadEntry{DeadStream: stream}
	}
	values := fieldMap(e[1:])
	field := func(name string) string { return text(values[name]) }
	d := DeadEntry{
		DeadStream: stream, DeadID: text(e[0]), Stream: field("dead_stream"), EntryID: field("dead_entry"),
		Group: field("dead_group"), EventID: field("id"), Type: field("type"), Subject: field("subject"),
		Data: json.RawMessage(field("data")), Error: field("dead_error"),
	}
	d.Attempts, _ = strconv.Atoi(field("dead_attempts")) // an entry somebody else wrote has none
	if t, err := time.Parse(timeFormat, field("dead_at")); err == nil {
		d.At = t
	}
	if t, err := time.Parse(time.RFC3339Nano, field("time")); err == nil {
		d.Time = t
	}
	return d
}

// ErrDeadGone means that the dead entry does not exist any more: it was retried or dropped before.
var ErrDeadGone = errors.New("no such dead entry")

// ErrGroupGone means that the consumer group of a dead entry does not exist any more.
var ErrGroupGone = errors.New("the consumer group does not exist any more")

// ErrUnrestored means that the stream lacks events that its relay has published: it was deleted, or put back to an
// earlier state. The relay restores them, unless it does not run. Until then a dead event cannot be added to the
// stream.
var ErrUnrestored = errors.New("the stream lacks events that the relay has published, and the relay has not restored " +
	"them yet; try again when it has")

// Retry gives a dead event back to its group, with all its attempts before it again; a running consumer takes it up
// within a third of its ClaimIdle. Other groups do not see it, unless the original entry has been trimmed: then the
// event is added to the stream again, marked as replayed, and consumers of this package skip it in other groups.
// Errors: ErrDeadGone, ErrGroupGone, ErrUnrestored, or those of Redis; a lost reply shows as ErrDeadGone in the next
// call.
func Retry(ctx context.Context, client redis.UniversalClient, d DeadEntry) error {
	if d.Stream == "" || d.EntryID == "" || d.Group == "" {
		return fmt.Errorf("retry dead entry %s of stream %q: it does not say where it came from", d.DeadID,
			d.DeadStream)
	}
	keys := []string{d.Stream, d.DeadStream, registerKey(d.Stream)}
	var result string
	var err error
	for result == "" && err == nil {
		reply := retryScript.Run(ctx, client, keys, d.DeadID, d.Group, d.EntryID)
		if gates, ok := reply.Val().([]any); ok { // that it needs as keys
			for _, gate := range gates {
				keys = append(keys, text(gate))
			}
			continue
		}
		result, err = reply.Text()
	}
	switch {
	case noGroup(err):
		err = ErrGroupGone
	case err == nil && result == "gone":
		err = ErrDeadGone
	case err == nil && result == "unrestored":
		err = ErrUnrestored
	}
	if err != nil {
		return fmt.Errorf("retry dead entry %s of stream %q: %w", d.DeadID, d.DeadStream, err)
	}
	return nil
}

// registerKey returns the key that has the databases which publish to a stream, as package sink does.
func registerKey(stream string) string {
	if open := strings.IndexByte(stream, '{'); open >= 0 && strings.IndexByte(stream[open+1:], '}') > 0 {
		return stream + ":gate"
	}
	return "{" + stream + "}:gate"
}

// Drop removes a dead event for good. Errors: ErrDeadGone, or those of Redis.
func Drop(ctx context.Context, client redis.UniversalClient, d DeadEntry) error {
	n, err := client.XDel(ctx, d.DeadStream, d.DeadID).Result()
	if err == nil && n == 0 {
		err = ErrDeadGone
	}
	if err != nil {
		return fmt.Errorf("drop dead entry %s of stream %q: %w", d.DeadID, d.DeadStream, err)
	}
	return nil
}
