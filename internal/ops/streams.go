package ops

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/redis/go-redis/v9"

	"posthaste/sink"
)

// StreamState is the state of one stream.
type StreamState struct {
	Stream  string `json:"stream"`
	Entries int64  `json:"entries"`
	// Last is when the last entry was added, by the clock of Redis; zero if the stream is empty or missing.
	Last time.Time `json:"last_entry_at,omitzero"`
	// Bytes is about how much memory the stream takes, -1 if Redis does not say it.
	Bytes  int64        `json:"memory_bytes"`
	Groups []sink.Group `json:"groups"`
}

// Streams returns the state of every stream, in the order of their names. It returns what it could read together with
// the error.
func (g *GroupList) Streams(ctx context.Context) ([]StreamState, error) {
	var list []StreamState
	var errs []error
	for _, name := range g.streams {
		s := StreamState{Stream: name, Groups: []sink.Group{}}
		var err error
		if s.Entries, err = g.client.XLen(ctx, name).Result(); err != nil {
			errs = append(errs, fmt.Errorf("stream %q: %w", name, err))
			continue
		}
		if last, err := g.client.XRevRangeN(ctx, name, "+", "-", 1).Result(); err == nil && len(last) > 0 {
			s.Last = entryTime(last[0].ID)
		}
		s.Bytes, err = g.client.MemoryUsage(ctx, name, 5).Result()
		if err != nil && !errors.Is(err, redis.Nil) { // an ACL may refuse it
			s.Bytes = -1
		}
		for _, group := range g.each {
			if group.Stream == name {
				s.Groups = append(s.Groups, group)
			}
		}
		list = append(list, s)
	}
	return list, errors.Join(errs...)
}
