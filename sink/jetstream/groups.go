package jetstream

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/google/uuid"

	"posthaste/outbox"
	"posthaste/sink/metrics"
)

// consumerInfo has what this package reads of a consumer.
type consumerInfo struct {
	Name      string `json:"name"`
	Delivered struct {
		Consumer   int64      `json:"consumer_seq"`
		Stream     uint64     `json:"stream_seq"`
		LastActive *time.Time `json:"last_active"`
	} `json:"delivered"`
	AckFloor struct {
		Stream     uint64     `json:"stream_seq"`
		LastActive *time.Time `json:"last_active"`
	} `json:"ack_floor"`
	Config struct {
		Durable string `json:"durable_name"`
	} `json:"config"`
	Unacknowledged int64 `json:"num_ack_pending"`
	Pending        int64 `json:"num_pending"`
}

// consumers lists the durable consumers of a stream. A stream that does not exist has none.
func (c *conn) consumers(ctx context.Context, name string) (list []consumerInfo, err error) {
	for {
		var page struct {
			Total     int            `json:"total"`
			Consumers []consumerInfo `json:"consumers"`
		}
		err := c.call(ctx, "CONSUMER.LIST."+name, map[string]int{"offset": len(list)}, &page)
		if hasCode(err, codeNoStream) {
			return nil, nil
		}
		if err != nil {
			return nil, err
		}
		list = append(list, page.Consumers...)
		if len(page.Consumers) == 0 || len(list) >= page.Total {
			return slices.DeleteFunc(list, func(i consumerInfo) bool { return i.Config.Durable == "" }), nil
		}
	}
}

// Groups implements stream.Sink. The groups of a stream are its durable consumers.
func (s *Sink) Groups(ctx context.Context, o outbox.Owner, streams []string) (map[string][]string, error) {
	var mu sync.Mutex
	all := map[string][]string{}
	err := s.each(ctx, "list the groups of", streams, func(c *conn, stream string) error {
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
	})
	return all, err
}

// Regroup implements stream.Sink.
func (s *Sink) Regroup(ctx context.Context, stream string, groups []string) error {
	c, err := s.open(ctx)
	if err != nil || len(groups) == 0 {
		return err
	}
	return s.failed(c, "make the groups of", stream, s.regroup(ctx, c, stream, groups))
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
		if slices.ContainsFunc(there, func(i consumerInfo) bool { return i.Name == name }) {
			continue
		}
		there = append(there, consumerInfo{Name: name})
		filter := EventsFilter(stream)
		body := map[string]any{"stream_name": g.name, "action": "create", "config": map[string]any{
			"name": name, "durable_name": name, "ack_policy": "explicit", "deliver_policy": "all",
			"replay_policy": "instant", "filter_subject": filter,
		}}
		var made consumerInfo
		if err := c.call(ctx, "CONSUMER.CREATE."+g.name+"."+name+"."+filter, body, &made); err != nil &&
			!hasCode(err, codeConsumerExists) {
			return err
		}
	}
	return nil
}

// codeConsumerExists is the refusal of a consumer that another process has just made.
const codeConsumerExists = 10148

// Follow implements stream.Sink.
func (s *Sink) Follow(ctx context.Context, stream string, others []string) error {
	c, err := s.open(ctx)
	if err != nil {
		return err
	}
	var groups []string
	for _, other := range others {
		list, err := c.consumers(ctx, StreamName(other))
		if err != nil {
			return s.failed(c, "list the groups of", other, err)
		}
		for _, i := range list {
			groups = append(groups, GroupName(i.Name))
		}
	}
	return s.Regroup(ctx, stream, groups)
}

// Sharded implements stream.Sink. Consumers of JetStream find the streams of a type by their names.
func (*Sink) Sharded(context.Context, string) error { return nil }

// foundWithin is the time in which a consumer finds a new stream.
const foundWithin = 6 * time.Second

// pending returns how many events wait for the group, and how long they have waited while it was inactive.
func (i *consumerInfo) pending(info *streamInfo) (n int64, idle time.Duration) {
	n = i.Unacknowledged + i.Pending
	active := info.Created
	for _, t := range []*time.Time{i.Delivered.LastActive, i.AckFloor.LastActive} {
		if t != nil && t.After(active) {
			active = *t
		}
	}
	if n > 0 {
		idle = max(info.Now.Sub(active), 0)
	}
	return n, idle
}

// observation is what a stream and its groups are at one time. exists is false if the stream does not exist.
type observation struct {
	exists bool
	info   streamInfo
	groups []consumerInfo
	// oldest has, for each group, the age of the oldest event that is delivered and not acknowledged.
	oldest []time.Duration
	err    error
}

// observe reads streams and their groups. It returns the first error.
func (s *Sink) observe(ctx context.Context, step string, streams []string, oldest bool) ([]observation, error) {
	all := make([]observation, len(streams))
	at := map[string]*observation{}
	for i, stream := range streams {
		at[stream] = &all[i]
	}
	err := s.each(ctx, step, streams, func(c *conn, stream string) error {
		o, name := at[stream], StreamName(stream)
		if o.info, o.err = c.info(ctx, name); hasCode(o.err, codeNoStream) {
			o.err = nil
			return nil
		}
		if o.exists = o.err == nil; o.exists {
			o.groups, o.err = c.consumers(ctx, name)
		}
		for _, g := range o.groups {
			var age time.Duration
			if oldest && g.Unacknowledged > 0 && o.err == nil {
				var m *message
				req := getRequest{Seq: g.AckFloor.Stream + 1, NextFor: EventsFilter(stream)}
				if m, o.err = c.getAny(ctx, name, req); m != nil {
					age = max(o.info.Now.Sub(m.Time), 0)
				}
			}
			o.oldest = append(o.oldest, age)
		}
		return o.err
	})
	return all, err
}

// Observe reads the state of streams and their groups into the metrics.
func (s *Sink) Observe(ctx context.Context, streams []string) error {
	all, err := s.observe(ctx, "observe", streams, true)
	if all == nil {
		return err
	}
	_ = s.m.Observe(streams, func(i int, _ map[string]struct{}) (int64, map[string]struct{}, error) {
		o := all[i]
		if !o.exists || o.err != nil {
			return 0, nil, o.err
		}
		groups := map[string]struct{}{}
		for n, g := range o.groups[:min(len(o.groups), metrics.MaxGroups)] {
			name := GroupName(g.Name)
			groups[name] = struct{}{}
			_, idle := g.pending(&o.info)
			s.m.Group(streams[i], name, metrics.Group{
				Pending: g.Unacknowledged, Lag: g.Pending, Oldest: o.oldest[n], Idle: idle,
			})
		}
		return int64(o.info.State.Messages), groups, nil
	})
	return err
}

// Unobserve deletes the series of Observe, because another instance exports them from now on.
func (s *Sink) Unobserve() { s.m.Unobserve() }

// Unread implements stream.Sink.
func (s *Sink) Unread(ctx context.Context, _ uuid.UUID, streams []string) (list []outbox.Unread, err error) {
	all, err := s.observe(ctx, "look at the groups of", streams, false)
	for i, o := range all {
		if o.exists && o.info.State.Messages > len(lanes)+1 && o.info.Now.Sub(o.info.Created) < foundWithin {
			list = append(list, outbox.Unread{Stream: streams[i], Entries: int64(o.info.State.Messages)})
		}
		for _, g := range o.groups {
			if n, idle := g.pending(&o.info); n > 0 {
				list = append(list, outbox.Unread{Stream: streams[i], Group: GroupName(g.Name), Entries: n, Idle: idle})
			}
		}
	}
	return list, err
}
