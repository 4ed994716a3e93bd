package ops

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/redis/go-redis/v9"

	"posthaste/sink"
)

// lastID returns the id of a stream's last entry, without its payload.
var lastID = redis.NewScript(`local e = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)[1]
return e and e[1] or ''`)

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
		if last, err := lastID.RunRO(ctx, g.client, []string{name}).Text(); err == nil && last != "" {
			s.Last = entryTime(last)
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
