package jetstream

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/nats-io/nats.go"

	"posthaste/outbox"
)

// adoptions is how often an adoption is tried while an earlier owner publishes.
const adoptions = 50

// Adopt implements stream.Sink. If batches of an earlier owner are faster than the adoption, it first fences that owner
// with a message of the owner's subject.
func (s *Sink) Adopt(ctx context.Context, stream string, o outbox.Owner, intact bool) error {
	c, err := s.open(ctx)
	if err != nil {
		return err
	}
	for range adoptions {
		var done bool
		if done, err = s.adopt(ctx, c, stream, o, intact); done || err != nil && !conflict(err) {
			break
		}
		select {
		case <-ctx.Done():
			return s.failed(c, "adopt", stream, ctx.Err())
		case <-time.After(backoff):
		}
	}
	return s.failed(c, "adopt", stream, err)
}

// adopt makes one attempt.
func (s *Sink) adopt(ctx context.Context, c *conn, stream string, o outbox.Owner, intact bool) (done bool, err error) {
	mem := s.memory(stream)
	g, err := c.read(ctx, stream)
	if err != nil {
		return false, err
	}
	mine := holderOf(o)
	if p := g.owner; p != nil {
		if p.Source != o.Source {
			return false, foreign(stream, p.Source)
		}
		if p.holder == mine {
			mem.seen(g)
			return true, nil
		}
		for _, theirs := range []*holder{p.Next, &p.holder} {
			if theirs != nil && *theirs != mine && theirs.Epoch >= o.Epoch {
				return false, &outbox.FencedError{Stream: stream, Epoch: theirs.Epoch}
			}
		}
	}
	whole := g.owner != nil
	if whole {
		lost, err := c.lacks(ctx, g.name, g.events()...)
		if err != nil {
			return false, err
		}
		whole = !lost
	}
	if intact {
		message, _ := mem.newest()
		if !whole || g.let() < mem.total() {
			return false, outbox.ErrGap
		}
		if lost, err := c.lacks(ctx, g.name, message); lost || err != nil {
			return false, errors.Join(err, outbox.ErrGap)
		}
	}
	if err = s.ensure(ctx, c, stream, g); err != nil {
		return false, err
	}
	p := &ownerPost{holder: mine}
	if whole {
		if err = c.inheritGate(ctx, g, p); err != nil {
			return false, err
		}
	}
	messages := make([]*nats.Msg, 0, len(lanes)+1)
	for _, lane := range lanes {
		post := lanePost{holder: mine, Claim: -1, Last: seqOf(p.Last)}
		messages = append(messages, expecting(g.subject(lane), g.lanes[lane].seq, post))
	}
	messages = append(messages, expecting(g.subject(ownerLane), g.at, p))
	ack, err := c.write(ctx, rand.Text(), messages)
	switch {
	case err == nil:
		mem.adopted(p, ack.Seq)
		return true, nil
	case conflict(err) && g.owner != nil && g.owner.Next == nil:
		busy := *g.owner
		busy.Doubt, busy.Recalls, busy.Next = g.owner.spans(g.at), 0, &mine
		_, raised := c.commit(ctx, expecting(g.subject(ownerLane), g.at, busy))
		if raised != nil && !conflict(raised) {
			return false, raised
		}
	}
	return false, err
}

// inheritGate gives a new owner's message what the gate before has: the doubt, the count and the last event.
func (c *conn) inheritGate(ctx context.Context, g *gate, p *ownerPost) error {
	doubt := slices.Clone(g.owner.spans(g.at))
	for lane, l := range g.lanes {
		if l.holder != g.owner.holder {
			continue
		}
		batches, err := c.unsettled(ctx, g, lane)
		if err != nil {
			return err
		}
		for _, b := range batches {
			doubt = append(doubt, b.span)
		}
	}
	p.Doubt, p.Let, p.Last = join(doubt), g.let(), g.owner.Last
	if last := g.last(); last > seqOf(p.Last) {
		m, err := c.get(ctx, g.name, getRequest{Seq: last})
		if err == nil && m != nil { // otherwise it was trimmed
			p.Last = m.entry()
		}
		return err
	}
	return nil
}

// join sorts spans and joins those without messages between them.
func join(spans []span) (joined []span) {
	slices.SortFunc(spans, func(a, b span) int { return cmp.Compare(a.From, b.From) })
	for _, s := range spans {
		if n := len(joined); n > 0 && s.From <= joined[n-1].To+1 {
			joined[n-1].To = max(joined[n-1].To, s.To)
			continue
		}
		joined = append(joined, s)
	}
	return joined
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
	g.info, err = c.info(ctx, g.name)
	if hasCode(err, codeNoStream) {
		return nil, outbox.ErrGap
	}
	if err != nil {
		return nil, err
	}
	if g.root = g.info.cfg.root(); g.root == "" {
		return nil, outbox.ErrGap
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
	c, err := s.open(ctx)
	if err != nil {
		return err
	}
	for range conflicts {
		var g *gate
		if g, err = c.owned(ctx, stream, o); err != nil {
			break
		}
		p := *g.owner
		p.Doubt, p.Recalls = p.spans(g.at), 0
		before, changed := change(g, &p)
		if !changed {
			return nil
		}
		_, err = c.write(ctx, rand.Text(), append(before, expecting(g.subject(ownerLane), g.at, p)))
		if !conflict(err) {
			break
		}
	}
	return s.failed(c, step, stream, err)
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
			delete(m.Header, headerExpected)
			before = append(before, m)
		}
		p.Recalls = uint64(len(before))
		changed = len(before) > 0 || outbox.CompareIDs(last, p.Last) > 0
		p.Last = later(p.Last, last)
		return before, changed
	})
}

// lookEvents bounds the events after the table's last one that Look compares.
const lookEvents = 1000

// Look implements stream.Sink.
func (s *Sink) Look(ctx context.Context, source uuid.UUID, streams []string, noted map[string]string) (
	[]outbox.StreamState, error,
) {
	states := make([]outbox.StreamState, len(streams))
	err := s.each(ctx, "look at", streams, func(c *conn, stream string) error {
		st, err := s.look(ctx, c, source, stream, noted[stream])
		states[slices.Index(streams, stream)] = st
		return err
	})
	if err != nil {
		return nil, err
	}
	return states, nil
}

func (s *Sink) look(ctx context.Context, c *conn, source uuid.UUID, stream, noted string) (
	st outbox.StreamState, err error,
) {
	st = outbox.StreamState{Stream: stream, Now: time.Now()}
	mem := s.memory(stream)
	g, err := c.read(ctx, stream)
	if err != nil {
		return st, err
	}
	if g.owner != nil && g.owner.Source != source {
		return st, foreign(stream, g.owner.Source)
	}
	st.Missing = max(0, mem.total()-g.let())
	mem.seen(g)
	if st.Forgot, err = c.missing(ctx, g.name, noted); err != nil || g.info.Config == nil {
		return st, err
	}
	st.Now = g.info.Now
	// Without a gate, the stream's last event counts.
	last, lost := g.last(), false
	if p := g.owner; p != nil {
		st.Gate, st.Epoch, st.Nonce = true, p.Epoch, p.Nonce
		if p.Next != nil {
			st.Epoch, st.Nonce = p.Next.Epoch, p.Next.Nonce
		}
		if lost, err = c.lacks(ctx, g.name, g.events()...); err != nil {
			return st, err
		}
	}
	youngest := ""
	if !g.info.cfg.Direct {
		return st, fmt.Errorf("the JetStream stream %s has no allow_direct", g.name)
	}
	err = c.scan(ctx, g.name, getRequest{Seq: last + 1, NextFor: EventsFilter(stream)}, func(m *message) error {
		if m.Seq > g.info.State.Last {
			return errStop
		}
		if _, ok := m.event(); ok {
			youngest = m.entry()
		}
		return nil
	})
	if err != nil {
		return st, err
	}
	st.Behind = youngest != ""
	st.Forgot = st.Forgot || lost
	switch {
	case lost:
	case g.owner == nil:
		st.Last = youngest
	case last > 0:
		m, err := c.get(ctx, g.name, getRequest{Seq: last})
		if err != nil {
			return st, err
		}
		if m != nil {
			st.Last = m.entry()
		}
	}
	if g.owner != nil && !st.Forgot && noted != "" {
		st.Unknown, err = c.wentBack(ctx, g, noted)
	}
	return st, err
}

// missing reports whether a stream lacks an entry that it had. An entry before the first one was trimmed.
func (c *conn) missing(ctx context.Context, name, entry string) (bool, error) {
	if entry == "" {
		return false, nil
	}
	m, err := c.get(ctx, name, getRequest{Seq: seqOf(entry)})
	if hasCode(err, codeNoStream) {
		return true, nil
	}
	if err != nil || m != nil {
		return m != nil && m.entry() != entry, err
	}
	return c.lacks(ctx, name, seqOf(entry))
}

// wentBack reports whether the gate has let through an event after the table's last one that is settled.
func (c *conn) wentBack(ctx context.Context, g *gate, noted string) (back bool, err error) {
	spans := slices.Clone(g.owner.spans(g.at))
	for lane := range g.lanes {
		batches, err := c.unsettled(ctx, g, lane)
		if err != nil {
			return false, err
		}
		for _, b := range batches {
			spans = append(spans, b.span)
		}
	}
	unsettled := map[uuid.UUID]bool{}
	err = c.ids(ctx, g.name, g.root, join(spans), func(id uuid.UUID, _ string) { unsettled[id] = true })
	if err != nil {
		return false, err
	}
	n, last := 0, g.last()
	req := getRequest{Seq: seqOf(noted) + 1, NextFor: EventsFilter(g.stream)}
	err = c.scan(ctx, g.name, req, func(m *message) error {
		if n++; n > lookEvents || m.Seq > last {
			return errStop
		}
		if id, ok := m.event(); ok && !unsettled[id] {
			back = true
			return errStop
		}
		return nil
	})
	return back, err
}
