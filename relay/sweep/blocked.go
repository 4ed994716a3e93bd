package sweep

import (
	"cmp"
	"sync"
	"time"

	"posthaste/internal/pause"
	"posthaste/outbox"
)

// blockades are the streams that cannot be published to. The workers share them, so that attempts are spaced for all
// parts together. Its methods are safe for concurrent use.
type blockades struct {
	mu      sync.Mutex
	streams map[string]blockade
}

// blockade is why a stream cannot be published to, and the time of the next attempt.
type blockade struct {
	err  error
	wait pause.Backoff
	next time.Time
}

// note records the result of an attempt.
func (b *blockades) note(stream string, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !outbox.Alone(err) {
		delete(b.streams, stream)
		return
	}
	s, ok := b.streams[stream]
	if !ok {
		s.wait = pause.Backoff{First: blockedFirst, Most: blockedMost}
	}
	s.err, s.next = err, time.Now().Add(s.wait.Next())
	b.streams[stream] = s
}

// why returns why a stream cannot be published to, nil if it is time for an attempt. If late, it is not.
func (b *blockades) why(stream string, late bool) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if s, ok := b.streams[stream]; ok && (late || time.Now().Before(s.next)) {
		return s.err
	}
	return nil
}

// order sorts streams for publishing: the blocked ones first, because what is sent to others depends on them.
func (b *blockades) order(one, other string) int {
	b.mu.Lock()
	defer b.mu.Unlock()
	rank := func(stream string) int {
		if _, ok := b.streams[stream]; ok {
			return 0
		}
		return 1
	}
	return cmp.Compare(rank(one), rank(other))
}
