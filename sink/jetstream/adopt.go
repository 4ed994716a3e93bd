package jetstream

import (
	"context"
	"slices"

	"github.com/google/uuid"
	"github.com/nats-io/nats.go"
	js "github.com/nats-io/nats.go/jetstream"

	"posthaste/internal/pause"
	"posthaste/outbox"
)

// adoptions is how often an adoption is tried while an earlier owner publishes.
const adoptions = 50

// Adopt implements stream.Sink. If batches of an earlier owner are faster than the adoption, it first fences that owner
// with a message of the owner's subject.
func (s *Sink) Adopt(ctx context.Context, stream string, o outbox.Owner, intact bool) error {
	return s.on(ctx, "adopt", stream, func(c *conn) (err error) {
		for range adoptions {
			if err = s.adopt(ctx, c, stream, o, intact); !conflict(err) {
				return err
			}
			if ended := pause.For(ctx, backoff); ended != nil {
				return ended
			}
		}
		return err
	})
}

// adopt makes one attempt.
func (s *Sink) adopt(ctx context.Context, c *conn, stream string, o outbox.Owner, intact bool) error {
	mem := s.memory(stream)
	g, err := c.read(ctx, stream)
	if err != nil {
		return err
	}
	mine := holderOf(o)
	if p := g.owner; p != nil {
		if p.Source != o.Source {
			return foreign(stream, p.Source)
		}
		if p.holder == mine {
			mem.seen(g)
			return nil
		}
		for _, theirs := range []*holder{p.Next, &p.holder} {
			if theirs != nil && *theirs != mine && theirs.Epoch >= o.Epoch {
				return &outbox.FencedError{Stream: stream, Epoch: theirs.Epoch}
			}
		}
	}
	whole := g.owner != nil
	if whole {
		lost, err := c.lacks(ctx, g.name, g.events()...)
		if err != nil {
			return err
		}
		whole = !lost
	}
	if intact {
		message, _ := mem.newest()
		if !whole || g.let() < mem.total() {
			return outbox.ErrGap
		}
		if err := gapIf(c.lacks(ctx, g.name, message)); err != nil {
			return err
		}
	}
	if err = s.ensure(ctx, c, stream, g); err != nil {
		return err
	}
	p := &ownerPost{holder: mine}
	if whole {
		if err = c.inheritGate(ctx, g, p); err != nil {
			return err
		}
	}
	messages := make([]*nats.Msg, 0, len(lanes)+1)
	for _, lane := range lanes {
		post := lanePost{holder: mine, Claim: -1, Last: seqOf(p.Last)}
		messages = append(messages, expecting(g.subject(lane), g.lanes[lane].seq, post))
	}
	messages = append(messages, expecting(g.subject(ownerLane), g.at, p))
	ack, err := c.write(ctx, messages)
	switch {
	case err == nil:
		mem.adopted(p, ack.Sequence)
		return nil
	case conflict(err) && g.owner != nil && g.owner.Next == nil:
		busy := *g.owner
		busy.Doubt, busy.Recalls, busy.Next = g.owner.spans(g.at), 0, &mine
		_, raised := c.commit(ctx, expecting(g.subject(ownerLane), g.at, busy))
		if raised != nil && !conflict(raised) {
			return raised
		}
	}
	return err
}

// inheritGate gives a new owner's message what the gate before has: the doubt, the count and the last event.
func (c *conn) inheritGate(ctx context.Context, g *gate, p *ownerPost) error {
	var err error
	if p.Doubt, err = c.unsettled(ctx, g); err != nil {
		return err
	}
	p.Let, p.Last = g.let(), g.owner.Last
	if last := g.last(); last > seqOf(p.Last) {
		m, err := c.get(ctx, g.name, getRequest{Seq: last})
		if err == nil && m != nil { // otherwise it was trimmed
			p.Last = m.entry()
		}
		return err
	}
	return nil
}

func foreign(stream string, source uuid.UUID) error {
	return &outbox.ForeignError{
		Stream: stream, Source: source.String(), Reason: "was last written by another database (source " +
			source.String() + ")",
		Remedy: "another --stream-prefix; databases cannot share a stream of JetStream",
	}
}

// owned reads the owner's message of a stream, and returns the error of the port if it is not o's.
func (c *conn) owned(ctx context.Context, stream string, o outbox.Owner) (g *gate, err error) {
	g = &gate{stream: stream, name: StreamName(stream)}
	if g.info, g.root, err = c.rooted(ctx, g.name); err != nil {
		return nil, err
	}
	if g.owner, g.at, err = ownerOf(ctx, c.get, g.name, g.root); err != nil {
		return nil, err
	}
	return g, assess(stream, g.owner.rules(o), o)
}

// rewrite changes the owner's message of a gate that is o's. change returns the messages to write before it, and false
// if there is nothing to change.
func (s *Sink) rewrite(ctx context.Context, step, stream string, o outbox.Owner,
	change func(g *gate, p *ownerPost) (before []*nats.Msg, any bool),
) error {
	return s.on(ctx, step, stream, func(c *conn) (err error) {
		for range conflicts {
			g, failed := c.owned(ctx, stream, o)
			if failed != nil {
				return failed
			}
			p := *g.owner
			p.Doubt, p.Recalls = p.spans(g.at), 0
			before, changed := change(g, &p)
			if !changed {
				return nil
			}
			_, err = c.write(ctx, append(before, expecting(g.subject(ownerLane), g.at, p)))
			if !conflict(err) {
				return err
			}
		}
		return err // the owner's message changes all the time
	})
}

// ForgetDoubt implements stream.Sink.
func (s *Sink) ForgetDoubt(ctx context.Context, o outbox.Owner, stream string) error {
	return s.rewrite(ctx, "forget doubt", stream, o, func(_ *gate, p *ownerPost) ([]*nats.Msg, bool) {
		changed := len(p.Doubt) > 0
		p.Doubt = nil
		return nil, changed
	})
}

// recallEvents bounds the events of one message.
const recallEvents = 5000

// Recall implements stream.Sink. The stream lists the recalled events in messages of the gate.
func (s *Sink) Recall(ctx context.Context, o outbox.Owner, stream string, ids []uuid.UUID, last string) error {
	return s.rewrite(ctx, "recall", stream, o, func(g *gate, p *ownerPost) (before []*nats.Msg, changed bool) {
		for some := range slices.Chunk(ids, recallEvents) {
			post := lanePost{holder: p.holder}
			for _, id := range some {
				post.Repeated = append(post.Repeated, id[:]...)
			}
			m := expecting(g.subject(recallLane), 0, post)
			delete(m.Header, js.ExpectedLastSubjSeqHeader)
			before = append(before, m)
		}
		p.Recalls = uint64(len(before))
		changed = len(before) > 0 || outbox.CompareIDs(last, p.Last) > 0
		p.Last = later(p.Last, last)
		return before, changed
	})
}
