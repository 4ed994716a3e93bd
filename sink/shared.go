package sink

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"

	"posthaste/outbox"
)

// Several databases may share streams. Each has a gate of its own. The register of the stream has the names of all
// databases and whether the only one does not share it. See lua/register.lua.

// unsure is the answer of look.lua if it has only found entries of other databases.
const unsure = 2

// name is the source field of this database's entries if it shares its streams, else "".
func (s *Sink) name() string {
	if s.o.Shared {
		return s.o.Source
	}
	return ""
}

// alone returns the scripts' argument for whether this database does not share its streams.
func (s *Sink) alone() string {
	if s.o.Shared {
		return "0"
	}
	return "1"
}

// foreign converts a script's answer to an error that names the databases that exclude this one from a stream.
func (s *Sink) foreign(stream string, reply []any) error {
	source, names, alone := text(reply, 1), text(reply, 2), text(reply, 3) == "1"
	e := &outbox.ForeignError{
		Stream: stream, Source: source, Reason: "was last written by another database (source " + source + ")",
		Remedy: "posthaste adopt, if this database is to take it over; else another --stream-prefix",
	}
	switch {
	case s.o.Shared && alone:
		e.Reason = "belongs to another database (source " + source + "), which does not share it"
		e.Remedy = "start its relays with --shared-streams, too; posthaste adopt, if this database is to take it over"
	case s.o.Shared:
		e.Reason = "is shared with another database of the same name (source " + source + ")"
		e.Remedy = "give each a --relay-name of its own; posthaste adopt, if this one has taken the place of that one"
	case !alone:
		e.Reason = "is shared by " + names
		e.Remedy = "start this relay with --shared-streams, or with another --stream-prefix; posthaste adopt, if " +
			"this database is to take it from them all"
	}
	return e
}

// behind reports whether a shared stream has entries of this database after an entry, however many entries others have
// added.
func (s *Sink) behind(ctx context.Context, stream, after string) (found bool, err error) {
	err = s.entries(ctx, stream, after, func(page []outbox.Entry) bool {
		found = len(page) > 0
		return !found
	})
	return found, err
}

// dropWithin is how long a database's request to delete a shared stream is valid.
const dropWithin = time.Hour

// Drop deletes a stream with its groups. A shared stream is deleted once every database that shares it has dropped it;
// until then Drop returns the names of the others.
func Drop(ctx context.Context, client redis.UniversalClient, stream string, source uuid.UUID) ([]string, error) {
	reply, err := run(ctx, client, dropScript, []any{
		2, stream, registerKey(stream), source.String(), dropWithin.Milliseconds(),
	})
	if err != nil || text(reply, 0) != "WAITING" {
		return nil, err
	}
	var names []string
	for i := range reply[1:] {
		names = append(names, text(reply, i+1))
	}
	return names, nil
}

// Leave removes the database whose entries have this source field from those that share a stream; false if it was not
// one of them. A relay of the database that still publishes there registers again.
func Leave(ctx context.Context, client redis.UniversalClient, stream, name string) (bool, error) {
	reply, err := run(ctx, client, leaveScript, []any{1, registerKey(stream), name})
	return text(reply, 0) == "OK", err
}

// Sharing lists, by stream, the names and sources of the databases that share it, without streams that are not shared.
func Sharing(
	ctx context.Context, client redis.UniversalClient, streams []string,
) (map[string]map[string]string, error) {
	pipe := client.Pipeline()
	registers := make([]*redis.MapStringStringCmd, len(streams))
	for i, stream := range streams {
		registers[i] = pipe.HGetAll(ctx, registerKey(stream))
	}
	_, _ = pipe.Exec(ctx)
	out := map[string]map[string]string{}
	for i, stream := range streams {
		fields, err := registers[i].Result()
		if err != nil && !notAStream(err) {
			return nil, fmt.Errorf("read the databases that share stream %q: %w", stream, err)
		}
		for field, source := range fields {
			if name, ok := strings.CutPrefix(field, "s:"); ok && fields["alone"] == "" {
				if out[stream] == nil {
					out[stream] = map[string]string{}
				}
				out[stream][name] = source
			}
		}
	}
	return out, nil
}
