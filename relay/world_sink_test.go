package relay

import (
	"context"
	"slices"
	"time"

	"github.com/google/uuid"

	"posthaste/outbox"
	"posthaste/relay/stream"
)

// memSink is an instance's Sink. Only operations that cross the network are calls; the instance itself keeps the
// numbers and the results.
type memSink struct{ i *instance }

var _ stream.Sink = memSink{}

// sinkCall is a call of Redis, which is refused by another process than the one that the instance is bound to.
func sinkCall[T any](ctx context.Context, i *instance, name string, effect func(r *redis) (T, error)) (T, error) {
	return call(ctx, i, name, func() (v T, err error) {
		r := i.w.rd
		switch {
		case r.down:
			return v, errDown
		case !i.anyone && i.bound != r.server():
			return v, outbox.ErrMoved
		}
		return effect(r)
	})
}

func sinkCommand(ctx context.Context, i *instance, name string, effect func(r *redis) error) error {
	_, err := sinkCall(ctx, i, name, func(r *redis) (struct{}, error) { return struct{}{}, effect(r) })
	return err
}

// thawed waits until the server of a stream answers. What it was asked before then is not done.
func (i *instance) thawed(ctx context.Context, stream string) error {
	var frozen chan struct{}
	i.w.do(func() { frozen = i.w.rd.frozen[stream] })
	if frozen == nil {
		return nil
	}
	select {
	case <-frozen:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (s memSink) Bind(ctx context.Context) (string, error) {
	s.i.w.do(func() { s.i.anyone = true })
	return sinkCall(ctx, s.i, "Sink.Bind", func(r *redis) (string, error) {
		s.i.anyone, s.i.bound = false, r.server()
		return s.i.bound, nil
	})
}

// Alive is not modelled as a network call: it is repeated in the background, and a lost one has no effect.
func (s memSink) Alive(_ context.Context, _ uuid.UUID, m outbox.Member, _ *outbox.Sign) (sign *outbox.Sign, _ error) {
	s.i.w.do(func() {
		if other := s.i.w.rd.alive; other != nil && other.Server != m.Server {
			sign = other
		}
	})
	return sign, nil
}

func (s memSink) Release() { s.i.w.do(func() { s.i.anyone = true }) }

func (s memSink) Look(ctx context.Context, source uuid.UUID, streams []string, noted map[string]string) (
	[]outbox.StreamState, error,
) {
	return sinkCall(ctx, s.i, "Sink.Look", func(r *redis) (_ []outbox.StreamState, alone error) {
		out := make([]outbox.StreamState, len(streams))
		for n, name := range streams {
			if r.away[name] {
				alone = &outbox.StreamError{Stream: name, Err: errDown}
				out[n] = outbox.StreamState{Stream: name, Err: alone}
				continue
			}
			st := outbox.StreamState{Stream: name, Forgot: r.forgot(name), Now: time.Now(), Missing: s.i.let[name]}
			if g := r.gates[name]; g != nil {
				if err := r.foreign(name, source); err != nil {
					return nil, err
				}
				st.Gate, st.Missing = true, max(s.i.let[name]-g.n, 0)
				s.i.let[name] = max(s.i.let[name], g.n)
				st.Epoch, st.Nonce = g.owner.Epoch, g.owner.Nonce.String()
			}
			if st.Last, st.Behind = r.last(name); noted[name] != "" && !r.reaches(name, noted[name]) {
				st.Forgot = true
			}
			out[n] = st
		}
		return out, alone
	})
}

func (s memSink) Tail(ctx context.Context, stream, after string) ([]outbox.Entry, error) {
	return sinkCall(ctx, s.i, "Sink.Tail", func(r *redis) (tail []outbox.Entry, err error) {
		if r.away[stream] {
			return nil, &outbox.StreamError{Stream: stream, Err: errDown}
		}
		if stream == r.goesAt { // with this answer
			r.away[stream] = true
		}
		if st := r.streams[stream]; st != nil {
			for _, e := range st.entries {
				if !e.foreign && outbox.CompareIDs(entryID(e.id), after) > 0 {
					tail = append(tail, outbox.NewEntry(e.ID, entryID(e.id)))
				}
			}
		}
		return tail, nil
	})
}

func (s memSink) Recall(ctx context.Context, o outbox.Owner, stream string, ids []uuid.UUID, last string) error {
	ids = slices.Clone(ids)
	return sinkCommand(ctx, s.i, "Sink.Recall", func(r *redis) error {
		g, err := r.judge(stream, o)
		if err != nil {
			return err
		}
		for _, id := range ids { // also those that have gone since they were seen: the last entry tells
			g.doubt[id] = doubtful{entry: r.entry(stream, id)}
		}
		if e := outbox.NewEntry(uuid.UUID{}, last); int64(e.Millis) > g.last {
			g.last = int64(e.Millis)
		}
		return nil
	})
}

func (s memSink) Missed(int) {}

func (s memSink) Adopt(ctx context.Context, stream string, o outbox.Owner, intact bool) error {
	n, err := sinkCall(ctx, s.i, "Sink.Adopt", func(r *redis) (int64, error) {
		g := r.gates[stream]
		if intact && !r.away[stream] && (g == nil || r.forgot(stream) || g.n < s.i.let[stream]) {
			return 0, outbox.ErrGap
		}
		return r.adopt(stream, o)
	})
	if err == nil { // who is not answered learns nothing
		s.i.w.do(func() { s.i.let[stream] = n })
	}
	return err
}

func (s memSink) Check(ctx context.Context, o outbox.Owner, streams []string) error {
	return sinkCommand(ctx, s.i, "Sink.Check", func(r *redis) (down error) {
		for _, name := range streams {
			_, err := r.judge(name, o)
			if r.away[name] { // which hides nothing of the others
				down = err
				continue
			}
			if err == nil && r.forgot(name) {
				err = outbox.ErrGap
			}
			if err != nil {
				return err
			}
		}
		return down
	})
}

func (s memSink) Confirm(ctx context.Context, o outbox.Owner, marks []outbox.Mark) error {
	return s.marks(ctx, "Sink.Confirm", marks, func(r *redis, marks []outbox.Mark) error { return r.confirm(o, marks) })
}

// marks makes a call about marks.
func (s memSink) marks(
	ctx context.Context, name string, marks []outbox.Mark, effect func(r *redis, marks []outbox.Mark) error,
) error {
	marks = slices.Clone(marks)
	for _, m := range marks {
		if err := s.i.thawed(ctx, m.Stream); err != nil {
			return err
		}
	}
	return sinkCommand(ctx, s.i, name, func(r *redis) error { return effect(r, marks) })
}

func (s memSink) Settled(ctx context.Context, o outbox.Owner, marks []outbox.Mark) error {
	return s.marks(ctx, "Sink.Settled", marks, func(r *redis, marks []outbox.Mark) error { return r.settle(o, marks) })
}

func (s memSink) ForgetDoubt(ctx context.Context, o outbox.Owner, stream string) error {
	if err := s.i.thawed(ctx, stream); err != nil {
		return err
	}
	return sinkCommand(ctx, s.i, "Sink.ForgetDoubt", func(r *redis) error {
		return r.forgetDoubt(o, stream)
	})
}

func (s memSink) Sharded(ctx context.Context, base string) error {
	return sinkCommand(ctx, s.i, "Sink.Sharded", func(r *redis) error {
		if r.away[base+"#sharded"] {
			return &outbox.StreamError{Stream: base, Err: errDown}
		}
		return nil
	})
}

func (s memSink) Follow(ctx context.Context, stream string, others []string) error {
	others = slices.Clone(others)
	return sinkCommand(ctx, s.i, "Sink.Follow", func(r *redis) error {
		if r.away[stream] {
			return errDown
		}
		for _, other := range others {
			r.regroup(stream, r.groups[other])
		}
		return nil
	})
}

func (s memSink) Groups(ctx context.Context, o outbox.Owner, streams []string) (map[string][]string, error) {
	return sinkCall(ctx, s.i, "Sink.Groups", func(r *redis) (map[string][]string, error) {
		list := map[string][]string{}
		for _, name := range streams {
			if r.away[name] { // one that hangs takes the answers of the others with it
				return nil, errDown
			}
			if _, err := r.judge(name, o); err == nil && !r.forgot(name) {
				list[name] = slices.Clone(r.groups[name])
			}
		}
		return list, nil
	})
}

func (s memSink) Regroup(ctx context.Context, stream string, groups []string) error {
	groups = slices.Clone(groups)
	return sinkCommand(ctx, s.i, "Sink.Regroup", func(r *redis) error {
		if r.away[stream] {
			return errDown
		}
		r.regroup(stream, groups)
		return nil
	})
}

func (s memSink) Unread(ctx context.Context, _ uuid.UUID, streams []string) ([]outbox.Unread, error) {
	return sinkCall(ctx, s.i, "Sink.Unread", func(r *redis) (list []outbox.Unread, _ error) {
		for _, name := range streams {
			if n := r.unread(name); n > 0 {
				list = append(list, outbox.Unread{Stream: name, Group: "group", Entries: int64(n)})
			}
		}
		return list, nil
	})
}

func (s memSink) Trim(ctx context.Context, stream string) error {
	return sinkCommand(ctx, s.i, "Sink.Trim", func(r *redis) error {
		if r.away[stream] {
			return errDown
		}
		s.i.trimmed = append(s.i.trimmed, stream)
		return nil
	})
}

func (s memSink) Lane(stream string, o outbox.Owner, l outbox.Lane) outbox.LanePublisher {
	return &memLane{i: s.i, stream: stream, owner: o, lane: l}
}

// memLane numbers the batches of a lane.
type memLane struct {
	i             *instance
	stream        string
	owner         outbox.Owner
	lane          outbox.Lane
	last, settled int64
}

func (l *memLane) Settled(number int64) { l.settled = max(l.settled, number) }

func (l *memLane) Follows(int64, int64) {} // the sweeper here has a claim for a turn

func (l *memLane) Deliver(events []*outbox.Record) outbox.Delivery {
	return &memDelivery{lane: l, events: events}
}

// batchEvents is small, so that deliveries are cut.
const batchEvents = 3

// memDelivery is a sequence of numbered batches, as in sink/delivery.go. The batch under way is events[pos:end].
type memDelivery struct {
	lane     *memLane
	events   []*outbox.Record
	pos, end int
	// poison is the place of the event that was refused last, plus one; closing ends the batch before it.
	poison  int
	closing bool
	skipped outbox.Skipped
	receipt outbox.Receipt
	final   error
}

func (d *memDelivery) Skip(also func(e *outbox.Record) bool) []int {
	if d.poison == 0 || d.closing {
		return nil
	}
	d.closing = true
	return d.skipped.Skip(d.events, d.poison-1, also)
}

func (d *memDelivery) Publish(ctx context.Context) (outbox.Receipt, error) {
	for d.final == nil && d.more() {
		if err := d.step(ctx); err != nil {
			return outbox.Receipt{}, err
		}
	}
	d.receipt.Number = d.lane.last
	return d.receipt, d.final
}

func (d *memDelivery) more() bool {
	for !d.closing && d.end == d.pos && d.skipped[d.pos] {
		d.pos++
		d.end = d.pos
	}
	return d.closing || d.pos < len(d.events)
}

func (d *memDelivery) step(ctx context.Context) error {
	if !d.closing && d.end == d.pos {
		for d.end < len(d.events) && d.end-d.pos < batchEvents && !d.skipped[d.end] {
			d.end++
		}
	}
	end := d.end
	if d.closing {
		end = d.pos
	}
	l := d.lane
	p := publication{
		stream: l.stream, owner: l.owner, lane: l.lane, number: l.last + 1, settled: l.settled,
		events: slices.Clone(d.events[d.pos:end]),
	}
	l.i.w.do(func() { p.least = l.i.let[l.stream] })
	if err := l.i.thawed(ctx, l.stream); err != nil {
		return err
	}
	v, err := sinkCall(ctx, l.i, "Sink.Publish", func(r *redis) (verdict, error) {
		v, err := r.publish(p)
		return v, err
	})
	if err != nil {
		if finished(err) {
			d.final = err
		}
		return err
	}
	l.i.w.do(func() { l.i.let[l.stream] = max(l.i.let[l.stream], v.n) })
	return d.answer(v)
}

// answer takes the gate's answer to a batch.
func (d *memDelivery) answer(v verdict) error {
	for n, it := range v.items {
		at := d.pos + n
		if at >= len(d.events) || d.events[at].ID != it.id {
			d.final = outbox.ErrGap
			return d.final
		}
		d.receipt.Last = entryID(it.entry)
	}
	if v.failed != nil {
		at := d.pos + len(v.items)
		d.poison = at + 1
		class := "too_large"
		if v.failed == errWrongType { //nolint:errorlint // it is ours, and not wrapped
			class = "wrongtype"
		}
		all := class == "wrongtype"
		return &outbox.PoisonError{Index: at, ID: d.events[at].ID, Class: class, All: all, Err: v.failed}
	}
	for _, it := range v.items {
		if it.inherited {
			d.receipt.Suppressed++
		}
	}
	d.pos += len(v.items)
	if d.closing || d.poison <= d.pos {
		d.closing, d.poison = false, 0
	}
	d.end = d.pos
	d.lane.last++
	return nil
}
