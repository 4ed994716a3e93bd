package consumer

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
)

// State is what a consumer group has done and has before it on one stream.
type State struct {
	// Length is the number of entries in the stream.
	Length int64
	// Pending is the number of entries delivered and not acknowledged.
	Pending int64
	// OldestPending is how long ago the oldest pending entry was added to the stream; 0 without one.
	OldestPending time.Duration
	// Lag is the number of entries not yet delivered, -1 while it cannot be known.
	Lag int64
	// Lost is the number of entries trimmed or deleted before they were delivered that no running consumer has counted
	// in outbox_trim_lost_total yet.
	Lost int64
}

// Inspect measures a group on a stream; it changes nothing. It does not trust the lag that Redis reports, which counts
// entries trimmed unread and is unknown after a deletion.
func Inspect(ctx context.Context, client redis.UniversalClient, stream, group string) (State, error) {
	return inspect(ctx, client, stream, group, "")
}

// inspect with "settle" makes the caller count State.Lost: later calls do not return it again.
func inspect(ctx context.Context, client redis.UniversalClient, stream, group, settle string) (State, error) {
	v, err := inspectScript.Run(ctx, client, []string{stream, countedKey(stream, group)}, group, settle).Int64Slice()
	if err != nil {
		return State{}, fmt.Errorf("inspect group %q on stream %q: %w", group, stream, err)
	}
	if len(v) != 5 {
		return State{}, fmt.Errorf("inspect group %q on stream %q: unexpected reply", group, stream)
	}
	oldest := time.Duration(max(0, v[2])) * time.Millisecond
	return State{Length: v[0], Pending: v[1], OldestPending: oldest, Lag: v[3], Lost: v[4]}, nil
}

// countedKey notes which server has counted what the group has read.
func countedKey(stream, group string) string { return "{" + stream + "}:counted:" + group }

// isMissing reports that there is no stream (yet).
func isMissing(err error) bool { return err != nil && strings.Contains(err.Error(), "no such key") }
