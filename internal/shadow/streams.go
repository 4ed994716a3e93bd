package shadow

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"posthaste/internal/pause"
)

// stream reads one stream from its end on.
type stream struct {
	name   string
	field  string
	client redis.UniversalClient
	ledger *ledger
	// ahead is how far the clock of Redis is ahead of this process's.
	ahead time.Duration
	// last is the entry that was read last. It is read again, which shows that it is still there.
	last string
	// gone is set when it is not: entries after it may have left the stream, too.
	gone atomic.Bool
	// read is when the stream was last read up to its end, in nanoseconds.
	read atomic.Int64
}

// readAtOnce is small because entries may be large.
const readAtOnce = 500

// open finds the end of the stream.
func (s *stream) open(ctx context.Context) error {
	sent := time.Now()
	now, err := s.client.Time(ctx).Result()
	if err != nil {
		return fmt.Errorf("ask Redis for its time: %w", err)
	}
	s.ahead = ahead(sent, now)
	list, err := s.client.XRevRangeN(ctx, s.name, "+", "-", 1).Result()
	if err != nil {
		return fmt.Errorf("read stream %s: %w", s.name, err)
	}
	if len(list) > 0 {
		s.last = list[0].ID
	}
	return nil
}

func (s *stream) run(ctx context.Context, say func(format string, args ...any)) {
	backoff := pause.Backoff{First: 100 * time.Millisecond, Most: 2 * time.Second}
	for ctx.Err() == nil {
		n, err := s.next(ctx)
		switch {
		case err != nil && ctx.Err() == nil:
			say("read stream %s: %v", s.name, err)
			backoff.Wait(ctx)
		case n == 0:
			backoff.Reset()
			pause.For(ctx, 20*time.Millisecond)
		}
	}
}

// next reads the next entries and returns their number.
func (s *stream) next(ctx context.Context) (int, error) {
	asked := time.Now()
	from := "-"
	if s.last != "" {
		from = s.last
	}
	list, err := s.client.XRangeN(ctx, s.name, from, "+", readAtOnce).Result()
	if err != nil {
		return 0, err
	}
	if s.last != "" {
		if len(list) > 0 && list[0].ID == s.last {
			list = list[1:]
		} else {
			s.gone.Store(true)
		}
	}
	now := time.Now()
	for _, m := range list {
		at, ok := entryTime(m.ID, now)
		if at = at.Add(-s.ahead); !ok {
			at = now
		}
		s.ledger.entry(eventID(m.Values, s.field), s.name, m.ID, at)
		s.last = m.ID
	}
	if len(list) == 0 {
		s.read.Store(asked.UnixNano())
	}
	return len(list), nil
}

// eventID returns the id in an entry, "" if it has none. field is a field, or after a dot the member of the JSON object
// in it, and so on.
func eventID(values map[string]any, field string) string {
	name, path, nested := strings.Cut(field, ".")
	text, _ := values[name].(string)
	for nested && text != "" {
		name, path, nested = strings.Cut(path, ".")
		members := map[string]json.RawMessage{}
		if json.Unmarshal([]byte(text), &members) != nil {
			return ""
		}
		text = string(members[name])
	}
	var plain string
	if json.Unmarshal([]byte(text), &plain) == nil { // a JSON string
		text = plain
	}
	return strings.ToLower(text)
}
