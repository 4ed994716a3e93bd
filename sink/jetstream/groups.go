package jetstream

import (
	"cmp"
	"context"
	"slices"
	"sync"
	"time"

	"github.com/google/uuid"

	"posthaste/outbox"
)

// consumerInfo has what this package reads of a consumer.
type consumerInfo struct {
	Name      string `json:"name"`
	Delivered struct {
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
			if permanent(err) { // Check reports it as well
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

// Unread implements stream.Sink.
func (s *Sink) Unread(ctx context.Context, _ uuid.UUID, streams []string) ([]outbox.Unread, error) {
	var mu sync.Mutex
	var all []outbox.Unread
	err := s.each(ctx, "look at the groups of", streams, func(c *conn, stream string) error {
		name := StreamName(stream)
		info, err := c.info(ctx, name)
		if hasCode(err, codeNoStream) {
			return nil
		}
		if err != nil {
			return err
		}
		list, err := c.consumers(ctx, name)
		if err != nil {
			return err
		}
		mu.Lock()
		defer mu.Unlock()
		if info.State.Messages > len(lanes)+1 && info.Now.Sub(info.Created) < foundWithin {
			all = append(all, outbox.Unread{Stream: stream, Entries: int64(info.State.Messages)})
		}
		for _, i := range list {
			n := i.Unacknowledged + i.Pending
			if n == 0 {
				continue
			}
			active := info.Created
			for _, t := range []*time.Time{i.Delivered.LastActive, i.AckFloor.LastActive} {
				if t != nil && t.After(active) {
					active = *t
				}
			}
			all = append(all, outbox.Unread{
				Stream: stream, Group: GroupName(i.Name), Entries: n, Idle: max(info.Now.Sub(active), 0),
			})
		}
		return nil
	})
	slices.SortFunc(all, func(a, b outbox.Unread) int {
		return cmp.Or(cmp.Compare(a.Stream, b.Stream), cmp.Compare(a.Group, b.Group))
	})
	return all, err
}
