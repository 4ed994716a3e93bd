package sink

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"

	"posthaste/outbox"
)

// Several databases may share streams. Each then has a gate of its own, and all of them are in a register, which is
// where the gate is of a stream that is not shared: whoever does not know of sharing finds somebody else's gate there.
// See lua/shared.lua.

// sharedSource is the source that a register has.
const sharedSource = "shared"

// unsure is what look.lua answers if it has found only entries of others.
const unsure = 2

// name is the source field of this database's entries if it shares its streams, else "".
func (s *Sink) name() string {
	if s.shared {
		return s.source
	}
	return ""
}

// gateOf returns the key of the gate that o raises.
func (s *Sink) gateOf(stream string, o outbox.Owner) string {
	if s.shared {
		return gateKey(stream) + ":" + o.Source.String()
	}
	return gateKey(stream)
}

// keys are those that an adoption is about, behind how many they are. While a slot moves, a key that is not named may
// be missing at one master because the other one has it.
func (s *Sink) keys(stream string, source uuid.UUID) []any {
	if s.shared {
		return sharedKeys(stream, source)
	}
	return []any{2, stream, gateKey(stream)}
}

func sharedKeys(stream string, source uuid.UUID) []any {
	return []any{3, stream, gateKey(stream), gateKey(stream) + ":" + source.String()}
}

// foreign names who is in the way, by the word of the gate. who is a source or a name.
func foreign(stream, word, who string) error {
	e := &outbox.ForeignError{Stream: stream, Source: who}
	if word == "FOREIGN" && who == sharedSource {
		word, who = "SHARED", "by other databases"
	} else if word == "SHARED" {
		who = "by " + who
	}
	switch word {
	case "SHARED":
		e.Reason = fmt.Sprintf("is shared %s: start this relay with --shared-streams, or with another "+
			"--stream-prefix; if it is meant to be taken from them all, run: posthaste adopt", who)
	case "UNSHARED":
		e.Reason = fmt.Sprintf("belongs to another database (source %s), which does not share it: start its relays "+
			"with --shared-streams, too; if it is meant to be taken over, run: posthaste adopt", who)
	case "NAMED":
		e.Reason = fmt.Sprintf("is shared with another database of the same name (source %s): each needs a "+
			"--relay-name of its own; if this one has taken the place of that one, run: posthaste adopt", who)
	}
	return e
}

// registered returns ErrGap if the register does not know the gate any more, and says who else has the name. sent is
// what became of the pipeline.
func registered(stream string, cmd *redis.SliceCmd, sent error, reg any, o outbox.Owner) error {
	v, err := cmd.Result()
	if err == nil && len(v) != 2 {
		err = sent
	}
	if err != nil {
		return err
	}
	source, _ := v[1].(string)
	switch {
	case source != "" && source != o.Source.String():
		return foreign(stream, "NAMED", source)
	case source == "" || v[0] != reg:
		return outbox.ErrGap
	}
	return nil
}

// behind tells whether a shared stream has entries of this database behind one, however many others have written
// there.
func (s *Sink) behind(ctx context.Context, stream, after string) (found bool, err error) {
	err = s.entries(ctx, stream, after, func(page []outbox.Entry) bool {
		found = len(page) > 0
		return !found
	})
	return found, err
}

// dropWithin is how long a database's word lasts that a shared stream is to be deleted.
const dropWithin = time.Hour

// Drop deletes a stream on purpose, with its groups. One that is shared is deleted when every database that shares it
// has said so; until then it returns the names of the others.
func Drop(ctx context.Context, client redis.UniversalClient, stream string, source uuid.UUID) ([]string, error) {
	reply, err := run(ctx, client, dropScript, []any{
		2, stream, gateKey(stream), source.String(), dropWithin.Milliseconds(),
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

// Leave takes the database whose entries have this source field out of those that share a stream; false if it is not
// one of them. A relay of it that still publishes there registers again.
func Leave(ctx context.Context, client redis.UniversalClient, stream, name string) (bool, error) {
	reply, err := run(ctx, client, leaveScript, []any{1, gateKey(stream), name})
	return text(reply, 0) == "OK", err
}

// Sharing lists, by stream, the names of the databases that share it, and their sources. Streams that are not shared
// are left out.
func Sharing(
	ctx context.Context, client redis.UniversalClient, streams []string,
) (map[string]map[string]string, error) {
	pipe := client.Pipeline()
	sources := make([]*redis.StringCmd, len(streams))
	for i, stream := range streams {
		sources[i] = pipe.HGet(ctx, gateKey(stream), "source")
	}
	_, _ = pipe.Exec(ctx)
	out := map[string]map[string]string{}
	for i, stream := range streams {
		source, err := sources[i].Result()
		if source == sharedSource {
			out[stream], err = members(ctx, client, stream)
		}
		if err != nil && !errors.Is(err, redis.Nil) && !notAStream(err) {
			return nil, fmt.Errorf("read who shares stream %q: %w", stream, err)
		}
	}
	return out, nil
}

func members(ctx context.Context, client redis.UniversalClient, stream string) (map[string]string, error) {
	fields, err := client.HGetAll(ctx, gateKey(stream)).Result()
	sources := map[string]string{}
	for field, source := range fields {
		if name, ok := strings.CutPrefix(field, "s:"); ok {
			sources[name] = source
		}
	}
	return sources, err
}
