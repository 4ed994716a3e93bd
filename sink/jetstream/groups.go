package jetstream

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/google/uuid"
	js "github.com/nats-io/nats.go/jetstream"

	"posthaste/outbox"
	"posthaste/sink/metrics"
)

// consumers lists the durable consumers of a stream. A stream that does not exist has none.
func (c *conn) consumers(ctx context.Context, name string) (list []js.ConsumerInfo, err error) {
	for {
		var page struct {
			Total     int               `json:"total"`
			Consumers []js.ConsumerInfo `json:"consumers"`
		}
		err := c.call(ctx, "CONSUMER.LIST."+name, map[string]int{"offset": len(list)}, &page)
		if hasCode(err, js.JSErrCodeStreamNotFound) {
			return nil, nil
		}
		if err != nil {
			return nil, err
		}
		list = append(list, page.Consumers...)
		if len(page.Consumers) == 0 || len(list) >= page.Total {
			return slices.DeleteFunc(list, func(i js.ConsumerInfo) bool { return i.Config.Durable == "" }), nil
		}
	}
}

// Groups implements stream.Sink. The groups of a stream are its durable consumers.
func (s *Sink) Groups(ctx context.Context, o outbox.Owner, streams []string) (map[string][]string, error) {
	var mu sync.Mutex
	all := map[string][]string{}
	err := gravest(s.each(ctx, "list the groups of", streams, func(c *conn, i int) error {
		stream := streams[i]
		if err := s.check(ctx, c, o, stream); err != nil {
			if metrics.Permanent(err) { // Check reports it as well
				err = nil
			}
			return err
		}
		list, err := c.consumers(ctx, StreamName(stream))
		groups := []string{}
		for _, i := range list {
			groups = append(groups, GroupName(i.Name))
		}
		mu.Lock()
		defer mu.Unlock()
		if err == nil {
			all[stream] = groups
		}
		return err
	}))
	return all, err
}

// Regroup implements stream.Sink.
func (s *Sink) Regroup(ctx context.Context, stream string, groups []string) error {
	if len(groups) == 0 {
		return nil
	}
	return s.on(ctx, "make the groups of", stream, func(c *conn) error { return s.regroup(ctx, c, stream, groups) })
}

func (s *Sink) regroup(ctx context.Context, c *conn, stream string, groups []string) error {
	g, err := c.read(ctx, stream)
	if err == nil {
		err = s.ensure(ctx, c, stream, g)
	}
	if err != nil {
		return err
	}
	there, err := c.consumers(ctx, g.name)
	if err != nil {
		return err
	}
	for _, group := range groups {
		name := ConsumerName(group)
		if slices.ContainsFunc(there, func(i js.ConsumerInfo) bool { return i.Name == name }) {
			continue
		}
		there = append(there, js.ConsumerInfo{Name: name})
		filter := EventsFilter(stream)
		cfg := js.ConsumerConfig{Name: name, Durable: name, AckPolicy: js.AckExplicitPolicy, FilterSubject: filter}
		body := map[string]any{"stream_name": g.name, "action": "create", "config": cfg}
		err := c.call(ctx, "CONSUMER.CREATE."+g.name+"."+name+"."+filter, body, &js.ConsumerInfo{})
		if err != nil && !hasCode(err, js.JSErrCodeConsumerExists) { // another process may have just made it
			return err
		}
	}
	return nil
}

// Follow implements stream.Sink.
func (s *Sink) Follow(ctx context.Context, stream string, others []string) error {
	var groups []string
	for _, other := range others {
		err := s.on(ctx, "list the groups of", other, func(c *conn) error {
			list, err := c.consumers(ctx, StreamName(other))
			for _, i := range list {
				groups = append(groups, GroupName(i.Name))
			}
			return err
		})
		if err != nil {
			return err
		}
	}
	return s.Regroup(ctx, stream, groups)
}

// Sharded implements stream.Sink. Consumers of JetStream find the streams of a type by their names.
func (*Sink) Sharded(context.Context, string) error { return nil }

// foundWithin is the time in which a consumer finds a new stream.
const foundWithin = 6 * time.Second

func count(n uint64) int64 { return int64(n) } //nolint:gosec // far from the end

// observation is what a stream and its groups are at one time. info is nil if the stream does not exist.
type observation struct {
	info   *js.StreamInfo
	groups []groupState
	err    error
}

type groupState struct {
	name string
	metrics.Group
}

// observe reads streams and their groups. It returns the first error; nil and an error if there is no connection.
func (s *Sink) observe(ctx context.Context, step string, streams []string, oldest bool) ([]observation, error) {
	if _, err := s.open(ctx); err != nil {
		return nil, err
	}
	all := make([]observation, len(streams))
	err := gravest(s.each(ctx, step, streams, func(c *conn, i int) error {
		all[i] = c.observe(ctx, streams[i], oldest)
		return all[i].err
	}))
	return all, err
}

// observe leaves out the age of the oldest events that wait for an acknowledgement unless oldest is set.
func (c *conn) observe(ctx context.Context, stream string, oldest bool) (o observation) {
	name := StreamName(stream)
	info, err := c.info(ctx, name)
	if hasCode(err, js.JSErrCodeStreamNotFound) {
		return o
	}
	if err != nil {
		return observation{err: err}
	}
	o.info = info
	groups, err := c.consumers(ctx, name)
	for _, i := range groups {
		g := metrics.Group{Pending: int64(i.NumAckPending), Lag: count(i.NumPending)}
		active := info.Created
		for _, t := range []*time.Time{i.Delivered.Last, i.AckFloor.Last} {
			if t != nil && t.After(active) {
				active = *t
			}
		}
		if g.Pending+g.Lag > 0 {
			g.Idle = max(info.TimeStamp.Sub(active), 0)
		}
		if oldest && g.Pending > 0 && err == nil {
			var m *message
			req := getRequest{Seq: i.AckFloor.Stream + 1, NextFor: EventsFilter(stream)}
			if m, err = c.getAny(ctx, name, req); m != nil {
				g.Oldest = max(info.TimeStamp.Sub(m.Time), 0)
			}
		}
		o.groups = append(o.groups, groupState{GroupName(i.Name), g})
	}
	o.err = err
	return o
}

// Observe reads the state of streams and their groups into the metrics.
func (s *Sink) Observe(ctx context.Context, streams []string) error {
	all, err := s.observe(ctx, "observe", streams, true)
	if all == nil {
		return err
	}
	_ = s.m.Observe(streams, func(i int, _ map[string]struct{}) (int64, map[string]struct{}, error) {
		o := all[i]
		if o.info == nil || o.err != nil {
			return 0, nil, o.err
		}
		groups := map[string]struct{}{}
		for _, g := range o.groups[:min(len(o.groups), metrics.MaxGroups)] {
			groups[g.name] = struct{}{}
			s.m.Group(streams[i], g.name, g.Group)
		}
		return count(o.info.State.Msgs), groups, nil
	})
	return err
}

// Unobserve deletes the series of Observe, because another instance exports them from now on.
func (s *Sink) Unobserve() { s.m.Unobserve() }

// Unread implements stream.Sink.
func (s *Sink) Unread(ctx context.Context, _ uuid.UUID, streams []string) (list []outbox.Unread, err error) {
	all, err := s.observe(ctx, "look at the groups of", streams, false)
	for i, o := range all {
		if o.info != nil && count(o.info.State.Msgs) > int64(len(lanes)+1) &&
			o.info.TimeStamp.Sub(o.info.Created) < foundWithin {
			list = append(list, outbox.Unread{Stream: streams[i], Entries: count(o.info.State.Msgs)})
		}
		for _, g := range o.groups {
			if n := g.Pending + g.Lag; n > 0 {
				list = append(list, outbox.Unread{Stream: streams[i], Group: g.name, Entries: n, Idle: g.Idle})
			}
		}
	}
	return list, err
}
