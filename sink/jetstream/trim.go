package jetstream

import (
	"context"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	js "github.com/nats-io/nats.go/jetstream"

	"posthaste/outbox"
)

// Tail implements stream.Sink. An entry whose second half is 0 is a time.
func (s *Sink) Tail(ctx context.Context, stream, after string) (tail []outbox.Entry, err error) {
	err = s.on(ctx, "list", stream, func(c *conn) error {
		req := getRequest{Seq: seqOf(after) + 1, NextFor: EventsFilter(stream)}
		if half, _, _ := strings.Cut(after, "-"); after != "" && req.Seq == 1 {
			ms, err := strconv.ParseInt(half, 10, 64)
			if err != nil {
				return err
			}
			at := time.UnixMilli(ms)
			req.Seq, req.StartTime = 0, &at
		}
		return c.scan(ctx, StreamName(stream), req, func(m *message) error {
			if id, ok := m.event(); ok {
				tail = append(tail, outbox.NewEntry(id, m.entry()))
			}
			return nil
		})
	})
	return tail, err
}

// Trim implements stream.Sink. It removes whole messages from the beginning of the stream, never events that are not
// settled or that are in doubt, and keeps up to twice the configured number: messages of the gate count as well. What
// the gate still needs of the removed messages is written again first.
func (s *Sink) Trim(ctx context.Context, stream string) error {
	if s.o.MaxLen <= 0 {
		return nil
	}
	return s.on(ctx, "trim", stream, func(c *conn) error { return s.trim(ctx, c, stream) })
}

func (s *Sink) trim(ctx context.Context, c *conn, stream string) error {
	g, err := c.read(ctx, stream)
	if err != nil || g.owner == nil {
		return err
	}
	keep := 2 * uint64(s.o.MaxLen) //nolint:gosec // positive
	if g.info.State.LastSeq <= keep {
		return nil
	}
	upTo := min(g.info.State.LastSeq-keep+1, g.last()) // the first message that stays
	groups, err := c.consumers(ctx, g.name)
	if err != nil {
		return err
	}
	for _, i := range groups {
		if !s.o.TrimForce {
			upTo = min(upTo, i.AckFloor.Stream+1)
		}
	}
	spans, err := c.unsettled(ctx, g)
	if err != nil {
		return err
	}
	if len(spans) > 0 {
		upTo = min(upTo, spans[0].From)
	}
	if upTo <= g.info.State.FirstSeq || len(g.own()) < len(g.lanes) { // an adoption is under way
		return nil
	}
	var again []*nats.Msg
	for lane, l := range g.lanes {
		if l.seq < upTo {
			again = append(again, expecting(g.subject(lane), l.seq, l.copied()))
		}
	}
	if g.at < upTo {
		p := *g.owner
		p.Doubt, p.Recalls = p.spans(g.at), 0
		again = append(again, expecting(g.subject(ownerLane), g.at, p))
	}
	if len(again) > 0 {
		if _, err := c.write(ctx, again); err != nil {
			if conflict(err) { // the next call trims
				err = nil
			}
			return err
		}
	}
	if err := c.call(ctx, "STREAM.PURGE."+g.name, map[string]uint64{"seq": upTo}, &struct{}{}); err != nil {
		return err
	}
	return s.countLost(ctx, c, g, upTo, groups)
}

// countLost counts the events before upTo that groups have not read, from their numbers before and after a purge.
// Events that are published or delivered again between make the count smaller.
func (s *Sink) countLost(ctx context.Context, c *conn, g *gate, upTo uint64, before []js.ConsumerInfo) error {
	before = slices.DeleteFunc(before, func(i js.ConsumerInfo) bool {
		return i.Delivered.Stream+1 >= upTo || i.NumPending == 0
	})
	if len(before) == 0 {
		return nil
	}
	after, err := c.consumers(ctx, g.name)
	for _, now := range after {
		for _, was := range before {
			n := count(was.NumPending-now.NumPending) - count(now.Delivered.Consumer-was.Delivered.Consumer)
			if now.Name == was.Name && n > 0 {
				s.m.Lost(g.stream, GroupName(now.Name), n)
			}
		}
	}
	return err
}
