package sink

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"

	"posthaste/outbox"
)

// Alive implements stream.Sink. It signs on every master of a cluster, because any of them may be down when another
// leader looks, except on those that were silent when the sink was bound. A relay without the right to the key counts
// as the only one.
func (s *Sink) Alive(ctx context.Context, source uuid.UUID, m outbox.Member, before *outbox.Sign) (
	other *outbox.Sign, err error,
) {
	args := []any{
		m.ID, m.Server, m.Holder, outbox.SignLasts.Milliseconds(), outbox.TwinLasts.Milliseconds(), "",
		uuid.NewString(),
	}
	if before != nil {
		args[5] = before.Text
	}
	var mu sync.Mutex
	signed := false
	err = s.each(ctx, func(ctx context.Context, c *redis.Client) error {
		if s.silent(c) {
			return nil
		}
		ctx, cancel := context.WithTimeout(ctx, signTimeout)
		defer cancel()
		key := s.keyOn(ctx, c, "posthaste:"+source.String(), "alive")
		reply, err := run(ctx, c, aliveScript, append([]any{1, key}, args...))
		mu.Lock()
		defer mu.Unlock()
		switch _, moved := redis.IsMovedError(err); {
		case moved: // the node has too few slots, or the slot has just moved
			return nil
		case len(reply) > 0:
			who := outbox.Member{ID: text(reply, 0), Server: text(reply, 1), Holder: text(reply, 2)}
			other = &outbox.Sign{Member: who, Text: text(reply, 3)}
		case err == nil || Class(err) == "noperm":
			signed, err = true, nil
		}
		return err
	})
	switch {
	case other != nil:
		err = nil
	case err == nil && !signed:
		err = errors.New("no node takes the sign of life")
	}
	return other, s.failed("sign", "", err)
}

// signTimeout is less than outbox.SignLasts, so that a node that hangs does not keep the sign from being renewed on the
// others.
const signTimeout = 2 * time.Second

// silent reports whether the node has not answered when the sink was bound.
func (s *Sink) silent(c *redis.Client) bool {
	if s.o.Server == nil {
		return false
	}
	m := s.o.Server.member(c.Options().Addr)
	m.server.mu.Lock()
	defer m.server.mu.Unlock()
	return m.first && !m.met
}
