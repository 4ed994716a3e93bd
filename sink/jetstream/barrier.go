package jetstream

import (
	"context"
	"fmt"
	"maps"
	"slices"

	js "github.com/nats-io/nats.go/jetstream"

	"posthaste/internal/pause"
	"posthaste/outbox"
)

// Check implements stream.Sink.
func (s *Sink) Check(ctx context.Context, o outbox.Owner, streams []string) error {
	return gravest(s.each(ctx, "check", streams, func(c *conn, i int) error { return s.check(ctx, c, o, streams[i]) }))
}

func (s *Sink) check(ctx context.Context, c *conn, o outbox.Owner, stream string) error {
	own, err := c.owned(ctx, stream, o) // as the leader of the stream knows it
	if err != nil {
		return err
	}
	g, err := c.read(ctx, stream)
	if err != nil {
		return err
	}
	g.owner = own.owner
	message, _ := s.memory(stream).newest()
	return gapIf(c.lacks(ctx, g.name, append(g.events(), message)...))
}

func gapIf(lost bool, err error) error {
	if err == nil && lost {
		return outbox.ErrGap
	}
	return err
}

// byStream groups marks.
func byStream(marks []outbox.Mark) (streams []string, of map[string][]outbox.Mark) {
	of = map[string][]outbox.Mark{}
	for _, m := range marks {
		of[m.Stream] = append(of[m.Stream], m)
	}
	return slices.Collect(maps.Keys(of)), of
}

// Confirm implements stream.Sink. A message is acknowledged when it is as durable as the server's settings make it, so
// Confirm only verifies these, as far as a client can.
func (s *Sink) Confirm(ctx context.Context, o outbox.Owner, marks []outbox.Mark) error {
	streams, of := byStream(marks)
	return gravest(s.each(ctx, "confirm", streams, func(c *conn, i int) error {
		g, err := c.owned(ctx, streams[i], o)
		if err != nil {
			return err
		}
		for _, m := range of[g.stream] {
			at, err := c.laneOf(ctx, g.name, g.subject(m.Lane.Name()))
			if err != nil {
				return err
			}
			switch {
			case at.seq == 0 || at.holder != g.owner.holder:
				return outbox.ErrGap
			case at.Claim > m.Lane.Claim || at.Claim == m.Lane.Claim && at.ClaimNonce != m.Lane.Nonce.String():
				return &outbox.FencedError{Stream: g.stream, Epoch: o.Epoch}
			case at.Claim < m.Lane.Claim || at.Number < m.Number:
				return outbox.ErrGap
			}
			if err := gapIf(c.lacks(ctx, g.name, at.Last, at.Prev)); err != nil {
				return err
			}
		}
		return s.durable(g)
	}))
}

// DurabilityError means that a stream cannot have the durability that is configured.
type DurabilityError struct {
	Stream string
	// Reason is what is wrong, and Remedy what to do.
	Reason, Remedy string
}

func (e *DurabilityError) Error() string {
	return fmt.Sprintf("the JetStream stream %s %s%s%s", e.Stream, e.Reason, outbox.RemedyMark, e.Remedy)
}

// durable verifies what a client can know about the durability of a stream.
func (s *Sink) durable(g *gate) error {
	cfg := g.info.Config
	switch {
	case !s.o.Fsync:
	case cfg.Storage != js.FileStorage:
		return &DurabilityError{g.name, "is stored in memory", "make it with storage: file"}
	case cfg.PersistMode == js.AsyncPersistMode:
		return &DurabilityError{
			g.name, "acknowledges before it writes (persist_mode: async)", "make it with persist_mode: default",
		}
	case cfg.Replicas < s.o.Replicas:
		reason := fmt.Sprintf("has %d replicas, and %d are configured", max(cfg.Replicas, 1), s.o.Replicas)
		return &DurabilityError{g.name, reason, "raise num_replicas of the stream"}
	}
	return nil
}

// Settled implements stream.Sink.
func (s *Sink) Settled(ctx context.Context, o outbox.Owner, marks []outbox.Mark) error {
	streams, of := byStream(marks)
	return gravest(s.each(ctx, "settle", streams, func(c *conn, i int) error {
		g, err := c.owned(ctx, streams[i], o)
		for _, m := range of[streams[i]] {
			if err == nil {
				err = c.settle(ctx, g, m)
			}
		}
		return err
	}))
}

// settle reports that batches of one lane are settled.
func (c *conn) settle(ctx context.Context, g *gate, m outbox.Mark) error {
	subject := g.subject(m.Lane.Name())
	for range conflicts {
		at, err := c.laneOf(ctx, g.name, subject)
		if err != nil || at.seq == 0 || at.holder != g.owner.holder {
			return err
		}
		p, n := at.copied(), len(at.Inherited)
		switch {
		case p.Claim == m.Lane.Claim && p.ClaimNonce == m.Lane.Nonce.String():
			p.Settled = max(p.Settled, min(m.Number, p.Number))
		case p.Claim > m.Lane.Claim:
			p.Inherited = slices.DeleteFunc(p.Inherited, func(b inherited) bool {
				return b.Claim == m.Lane.Claim && b.Number <= m.Number
			})
		}
		if p.Settled == at.Settled && len(p.Inherited) == n {
			return nil
		}
		if p.Settled == p.Number {
			p.Since = at.seq
		}
		if _, err = c.commit(ctx, expecting(subject, at.seq, p)); !conflict(err) {
			return err
		}
		_ = pause.For(ctx, backoff)
	}
	return fmt.Errorf("settle batches of %s: the lane's message changes all the time", g.name)
}
