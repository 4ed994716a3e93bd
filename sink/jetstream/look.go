package jetstream

import (
	"context"
	"time"

	"github.com/google/uuid"

	"posthaste/outbox"
)

// lookEvents bounds the events after the table's last one that Look compares.
const lookEvents = 1000

// Look implements stream.Sink.
func (s *Sink) Look(ctx context.Context, source uuid.UUID, streams []string, noted map[string]string) (
	[]outbox.StreamState, error,
) {
	states := make([]outbox.StreamState, len(streams))
	errs, err := s.each(ctx, "look at", streams, func(c *conn, i int) (err error) {
		states[i], err = s.look(ctx, c, source, streams[i], noted[streams[i]])
		return err
	})
	for i, e := range errs {
		if outbox.Alone(e) {
			states[i] = outbox.StreamState{Stream: streams[i], Err: e}
		}
	}
	return states, gravest(errs, err)
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
	message, _ := mem.newest()
	mem.seen(g)
	if st.Forgot, err = c.missing(ctx, g.name, noted); err != nil || g.info == nil {
		return st, err
	}
	st.Now = g.info.TimeStamp
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
	youngest, err := c.youngest(ctx, g, last)
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
	if err == nil && st.Intact() {
		// Adopt compares message as well: it may be that of a stream that was deleted, and made by another process.
		st.Forgot, err = c.lacks(ctx, g.name, message)
	}
	return st, err
}

// youngest returns the last event after a sequence. Events that were published since the gate was read do not count.
func (c *conn) youngest(ctx context.Context, g *gate, after uint64) (entry string, err error) {
	m, err := c.get(ctx, g.name, getRequest{LastFor: EventsFilter(g.stream)})
	if err != nil || m == nil || m.Seq <= after {
		return "", err
	}
	if _, ok := m.event(); ok && m.Seq <= g.info.State.LastSeq || !g.info.Config.AllowDirect {
		return m.entry(), nil
	}
	req := getRequest{Seq: after + 1, NextFor: EventsFilter(g.stream)}
	err = c.scan(ctx, g.name, req, func(m *message) error {
		if m.Seq > g.info.State.LastSeq {
			return errStop
		}
		if _, ok := m.event(); ok {
			entry = m.entry()
		}
		return nil
	})
	return entry, err
}

// missing reports whether a stream lacks an entry that it had. An entry before the first one was trimmed.
func (c *conn) missing(ctx context.Context, name, entry string) (bool, error) {
	if entry == "" {
		return false, nil
	}
	m, err := c.get(ctx, name, getRequest{Seq: seqOf(entry)})
	if err != nil || m != nil {
		return m != nil && m.entry() != entry, err
	}
	return c.lacks(ctx, name, seqOf(entry))
}

// wentBack reports whether the gate has let through an event after the table's last one that is settled.
func (c *conn) wentBack(ctx context.Context, g *gate, noted string) (back bool, err error) {
	spans, err := c.unsettled(ctx, g)
	if err != nil {
		return false, err
	}
	unsettled := map[uuid.UUID]bool{}
	err = c.ids(ctx, g.name, g.root, spans, func(id uuid.UUID, _ string) { unsettled[id] = true })
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
