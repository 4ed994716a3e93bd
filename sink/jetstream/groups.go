package jetstream

import (
	"context"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/nats-io/nats.go"
	js "github.com/nats-io/nats.go/jetstream"

	"posthaste/outbox"
	"posthaste/sink/metrics"
)

// consumers lists the durable consumers of a stream. A stream that does not exist has none.
func (r *remote) consumers(ctx context.Context) (list []js.ConsumerInfo, err error) {
	for {
		var page struct {
			Total     int               `json:"total"`
			Consumers []js.ConsumerInfo `json:"consumers"`
		}
		err := r.call(ctx, "CONSUMER.LIST."+r.name, map[string]int{"offset": len(list)}, &page)
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

func (r *remote) groups(ctx context.Context) ([]string, error) {
	list, err := r.consumers(ctx)
	groups := make([]string, len(list))
	for i := range list {
		groups[i] = GroupName(list[i].Name)
	}
	return groups, err
}

// Groups implements stream.Sink. The groups of a stream are its durable consumers.
func (s *Sink) Groups(ctx context.Context, o outbox.Owner, streams []string) (map[string][]string, error) {
	var mu sync.Mutex
	all := map[string][]string{}
	err := gravest(s.each(ctx, "list the groups of", streams, func(r *remote, _ int) error {
		if err := s.check(ctx, r, o); err != nil {
			if metrics.Permanent(err) { // Check reports it as well
				err = nil
			}
			return err
		}
		groups, err := r.groups(ctx)
		if err == nil {
			mu.Lock()
			defer mu.Unlock()
			all[r.stream] = groups
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
	return s.on(ctx, "make the groups of", stream, func(r *remote) error {
		g, err := r.read(ctx)
		if err == nil {
			err = s.ensure(ctx, g)
		}
		if err != nil {
			return err
		}
		there, err := r.consumers(ctx)
		if err != nil {
			return err
		}
		for _, group := range groups {
			name, filter := ConsumerName(group), EventsFilter(stream)
			if slices.ContainsFunc(there, func(i js.ConsumerInfo) bool { return i.Name == name }) {
				continue
			}
			there = append(there, js.ConsumerInfo{Name: name})
			cfg := js.ConsumerConfig{Name: name, Durable: name, AckPolicy: js.AckExplicitPolicy, FilterSubject: filter}
			body := map[string]any{"stream_name": r.name, "action": "create", "config": cfg}
			err := r.call(ctx, "CONSUMER.CREATE."+r.name+"."+name+"."+filter, body, &js.ConsumerInfo{})
			if err != nil && !hasCode(err, js.JSErrCodeConsumerExists) { // another process may have just made it
				return err
			}
		}
		return nil
	})
}

// Follow implements stream.Sink.
func (s *Sink) Follow(ctx context.Context, stream string, others []string) error {
	var groups []string
	for _, other := range others {
		err := s.on(ctx, "list the groups of", other, func(r *remote) error {
			list, err := r.groups(ctx)
			groups = append(groups, list...)
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
	groups []metrics.Group
}

// observe reads streams and their groups, and returns the first error. An observation that failed is nil.
func (s *Sink) observe(ctx context.Context, step string, streams []string, oldest bool) ([]*observation, error) {
	all := make([]*observation, len(streams))
	err := gravest(s.each(ctx, step, streams, func(r *remote, i int) (err error) {
		all[i], err = r.observe(ctx, oldest)
		return err
	}))
	return all, err
}

// observe leaves out the age of the oldest events that wait for an acknowledgement unless oldest is set.
func (r *remote) observe(ctx context.Context, oldest bool) (*observation, error) {
	info, err := r.state(ctx)
	if err != nil {
		return nil, err
	}
	if info == nil {
		return &observation{}, nil
	}
	list, err := r.consumers(ctx)
	if err != nil {
		return nil, err
	}
	o := &observation{info: info}
	for _, i := range list {
		g := metrics.Group{Name: GroupName(i.Name), Pending: int64(i.NumAckPending), Lag: count(i.NumPending)}
		active := info.Created
		for _, t := range []*time.Time{i.Delivered.Last, i.AckFloor.Last} {
			if t != nil && t.After(active) {
				active = *t
			}
		}
		if g.Pending+g.Lag > 0 {
			g.Idle = max(info.TimeStamp.Sub(active), 0)
		}
		if oldest && g.Pending > 0 {
			m, err := r.getAny(ctx, getRequest{Seq: i.AckFloor.Stream + 1, NextFor: EventsFilter(r.stream)})
			if err != nil {
				return nil, err
			}
			if m != nil {
				g.Oldest = max(info.TimeStamp.Sub(m.Time), 0)
			}
		}
		o.groups = append(o.groups, g)
	}
	return o, nil
}

// Observe reads the state of streams and their groups into the metrics.
func (s *Sink) Observe(ctx context.Context, streams []string) error {
	all, err := s.observe(ctx, "observe", streams, true)
	_ = s.m.Observe(streams, func(i int, _ map[string]struct{}) (int64, map[string]struct{}, error) {
		o := all[i]
		if o == nil {
			return 0, nil, err
		}
		if o.info == nil {
			return 0, nil, nil
		}
		groups := map[string]struct{}{}
		for _, g := range o.groups[:min(len(o.groups), metrics.MaxGroups)] {
			groups[g.Name] = struct{}{}
			s.m.Group(streams[i], g)
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
		if o == nil || o.info == nil {
			continue
		}
		n := count(o.info.State.Msgs)
		if n > int64(len(lanes)+1) && o.info.TimeStamp.Sub(o.info.Created) < foundWithin {
			list = append(list, outbox.Unread{Stream: streams[i], Entries: n})
		}
		for _, g := range o.groups {
			if n := g.Pending + g.Lag; n > 0 {
				list = append(list, outbox.Unread{Stream: streams[i], Group: g.Name, Entries: n, Idle: g.Idle})
			}
		}
	}
	return list, err
}

// Tail implements stream.Sink. An entry whose second half is 0 is a time.
func (s *Sink) Tail(ctx context.Context, stream, after string) (tail []outbox.Entry, err error) {
	err = s.on(ctx, "list", stream, func(r *remote) error {
		req := getRequest{Seq: seqOf(after) + 1, NextFor: EventsFilter(stream)}
		if half, _, _ := strings.Cut(after, "-"); after != "" && req.Seq == 1 {
			ms, err := strconv.ParseInt(half, 10, 64)
			if err != nil {
				return err
			}
			at := time.UnixMilli(ms)
			req.Seq, req.StartTime = 0, &at
		}
		for m, err := range r.scan(ctx, req) {
			if err != nil {
				return err
			}
			if id, ok := m.event(); ok {
				tail = append(tail, outbox.NewEntry(id, m.entry()))
			}
		}
		return nil
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
	return s.on(ctx, "trim", stream, func(r *remote) error { return s.trim(ctx, r) })
}

func (s *Sink) trim(ctx context.Context, r *remote) error {
	g, err := r.read(ctx)
	if err != nil || g.owner == nil {
		return err
	}
	keep := 2 * uint64(s.o.MaxLen) //nolint:gosec // positive
	if g.info.State.LastSeq <= keep {
		return nil
	}
	_, last := g.published()
	upTo := min(g.info.State.LastSeq-keep+1, last) // the first message that stays
	groups, err := r.consumers(ctx)
	if err != nil {
		return err
	}
	for _, i := range groups {
		if !s.o.TrimForce {
			upTo = min(upTo, i.AckFloor.Stream+1)
		}
	}
	spans, err := g.unsettled(ctx)
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
		if _, err := r.write(ctx, again); err != nil {
			if conflict(err) { // the next call trims
				err = nil
			}
			return err
		}
	}
	if err := r.call(ctx, "STREAM.PURGE."+r.name, map[string]uint64{"seq": upTo}, &struct{}{}); err != nil {
		return err
	}
	return s.countLost(ctx, r, upTo, groups)
}

// countLost counts the events before upTo that groups have not read, from their numbers before and after a purge.
// Events that are published or delivered again between make the count smaller.
func (s *Sink) countLost(ctx context.Context, r *remote, upTo uint64, before []js.ConsumerInfo) error {
	before = slices.DeleteFunc(before, func(i js.ConsumerInfo) bool {
		return i.Delivered.Stream+1 >= upTo || i.NumPending == 0
	})
	if len(before) == 0 {
		return nil
	}
	after, err := r.consumers(ctx)
	for _, now := range after {
		for _, was := range before {
			n := count(was.NumPending-now.NumPending) - count(now.Delivered.Consumer-was.Delivered.Consumer)
			if now.Name == was.Name && n > 0 {
				s.m.Lost(r.stream, GroupName(now.Name), n)
			}
		}
	}
	return err
}
