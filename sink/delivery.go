package sink

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"posthaste/internal/redisurl"
	"posthaste/outbox"
	"posthaste/sink/metrics"
)

// Bounds of one script call. Redis blocks all other clients while a script runs, and closes a connection that sends
// more than its buffer limit.
const (
	maxBatchEvents = 1000
	maxBatchBytes  = 4 << 20
)

// lane implements outbox.LanePublisher.
type lane struct {
	sink   *Sink
	stream string
	call   call
	// last is the number of the last completed batch.
	last int64
	// claim is the lane's, with settled batches up to settled; before it published, its worker had the claim earlier,
	// with settled batches up to known.
	claim, settled, earlier, known int64
	// let is the number of events that the stream's gate has let through. The stream's lanes share it.
	let *atomic.Int64
}

// Lane implements stream.Sink.
func (s *Sink) Lane(stream string, o outbox.Owner, l outbox.Lane) outbox.LanePublisher {
	return &lane{sink: s, stream: stream, call: newCall(s, stream, o, l), let: s.memory(stream), claim: l.Claim}
}

// Settled implements outbox.LanePublisher.
func (l *lane) Settled(number int64) { l.settled = max(l.settled, number) }

// Follows implements outbox.LanePublisher.
func (l *lane) Follows(claim, number int64) { l.earlier, l.known = claim, number }

// acknowledged returns the newest settled batch, and its claim.
func (l *lane) acknowledged() (claim, number int64) {
	if l.last == 0 && l.known > 0 {
		return l.earlier, l.known
	}
	return l.claim, l.settled
}

// raise sets v to the greater of v and to.
func raise(v *atomic.Int64, to int64) {
	for {
		old := v.Load()
		if to <= old || v.CompareAndSwap(old, to) {
			return
		}
	}
}

// Deliver implements outbox.LanePublisher.
func (l *lane) Deliver(events []*outbox.Record) outbox.Delivery {
	return &delivery{lane: l, events: events, most: maxBatchEvents}
}

// delivery implements outbox.Delivery as a sequence of numbered batches. The current batch is events[pos:end]; its
// number does not change until the gate has answered for it.
type delivery struct {
	lane   *lane
	events []*outbox.Record
	// last is the newest of the gate's entries in the stream.
	last string
	// pos is the first event that is not yet published or skipped.
	pos, end int
	// most bounds the next batch. It shrinks when connections break and recovers afterwards.
	most int
	// lost counts connections that broke during the current batch, strange replies that no class describes.
	lost, strange int
	// tried is the event, plus one, in whose place the gate took an empty batch after such replies.
	tried int
	// poison is the index of the event in the last *outbox.PoisonError, plus one.
	poison int
	// closing ends the current batch at pos, because the event after it was skipped.
	closing    bool
	skipped    outbox.Skipped
	suppressed int
	final      error
}

// Skip implements outbox.Delivery.
func (d *delivery) Skip(also func(e *outbox.Record) bool) []int {
	if d.poison == 0 || d.closing {
		return nil
	}
	d.closing = true
	return d.skipped.Skip(d.events, d.poison-1, also)
}

// Publish implements outbox.Delivery.
func (d *delivery) Publish(ctx context.Context) (outbox.Receipt, error) {
	for d.final == nil && d.more() {
		if err := d.step(ctx); err != nil {
			return outbox.Receipt{}, err
		}
	}
	if d.final != nil {
		return outbox.Receipt{}, d.final
	}
	d.lane.call.release()
	return outbox.Receipt{Number: d.lane.last, Last: d.last, Suppressed: d.suppressed}, nil
}

// more reports whether there is an event to publish or a batch to close. Between batches it advances past skipped
// events.
func (d *delivery) more() bool {
	for !d.closing && d.end == d.pos && d.skipped[d.pos] {
		d.pos++
		d.end = d.pos
	}
	return d.closing || d.pos < len(d.events)
}

// step makes one script call.
func (d *delivery) step(ctx context.Context) error {
	s := d.lane.sink
	if !d.closing && d.end == d.pos {
		d.end = d.cut()
	}
	end := d.end
	if d.closing {
		end = d.pos
	}
	if s.moved.Load() {
		d.final = s.failed(stepPublish, d.lane.stream, errOther)
		return d.final
	}
	claim, settled := d.lane.acknowledged()
	args := d.lane.call.encode(d.lane.last+1, claim, settled, d.lane.let.Load(), d.events[d.pos:end])
	start := time.Now()
	reply, err := process(ctx, s.o.Client, publishScript, args)
	s.m.Seconds.Observe(time.Since(start).Seconds())
	if err != nil {
		return d.broken(ctx, args, err)
	}
	return d.answer(reply, end)
}

// cut returns the end of the next batch.
func (d *delivery) cut() int {
	s := d.lane.sink
	limit, size := int(s.batchBytes.Load()), 0
	most := min(d.most, int(s.batchEvents.Load()))
	most = min(most, redisurl.Fit(argEvents+demandedKeys, width(d.events[d.pos:min(d.pos+most, len(d.events))])))
	end := d.pos
	for end < len(d.events) && end-d.pos < most && !d.skipped[end] {
		if size += d.events[end].Size() + headLen; size > limit && end > d.pos {
			break
		}
		end++
	}
	return end
}

// answer processes the gate's reply to the batch events[pos:end].
func (d *delivery) answer(reply []any, end int) error {
	s := d.lane.sink
	if err := verdict(d.lane.stream, reply); err != nil {
		d.final = s.failed(stepPublish, d.lane.stream, err)
		return d.final
	}
	done, suppressed := int(number(reply, 1)), int(number(reply, 2))
	s.m.Suppressed.Add(float64(suppressed))
	d.suppressed += suppressed
	s.m.pubsub.Add(float64(number(reply, 3)))
	raise(d.lane.let, number(reply, 4))
	d.lost, d.strange, d.last = 0, 0, text(reply, 5)
	if d.pos+done > len(d.events) {
		d.final = s.failed(stepPublish, d.lane.stream,
			fmt.Errorf("the gate accounts for more events: %w", outbox.ErrGap))
		return d.final
	}
	if reply[0] == "XADD" {
		i, err := d.pos+done, replyError(text(reply, 6))
		if class, poison := classify(string(err)); poison && i < len(d.events) {
			return d.poisoned(i, class, err)
		}
		return s.failed(stepPublish, d.lane.stream, err)
	}
	if why := text(reply, 6); why != "" {
		s.unannounced(why)
	}
	if d.pos+done < end {
		return s.failed(stepPublish, d.lane.stream, fmt.Errorf("the gate accounts for %d of %d events", done,
			end-d.pos))
	}
	// The repetition of a halved batch may be answered with the whole batch, which then counts.
	d.pos += done
	if d.closing || d.poison <= d.pos {
		d.closing, d.poison = false, 0
	}
	d.end = d.pos
	d.most = min(d.most*2, maxBatchEvents)
	s.batchEvents.Store(min(s.batchEvents.Load()+1, maxBatchEvents))
	d.lane.last++
	return nil
}

// unannounced logs that Redis refuses to publish on channels. Those of some types may be permitted, so a published
// message does not end the run of refusals; a minute without one does.
func (s *Sink) unannounced(why string) {
	now := time.Now().UnixNano()
	if before := s.refused.Swap(now); now-before > int64(time.Minute) {
		s.refusals.Over()
	}
	if attrs, say := s.refusals.Failed(errors.New(why)); say {
		s.log.Warn("redis refuses to publish events on their channels; the streams have them", append(attrs, "remedy",
			"give the relay's user the channels by ACL SETUSER, or set --pubsub=off")...)
	}
}

func (d *delivery) poisoned(i int, class string, err error) error {
	d.poison = i + 1
	d.lane.sink.m.Errors.WithLabelValues(class).Inc()
	return &outbox.PoisonError{
		Index: i, ID: d.events[i].ID, Class: class, All: class == classWrongType,
		Guessed: class == classOther, Err: err,
	}
}

// broken handles a call without an answer, whose execution is unknown.
func (d *delivery) broken(ctx context.Context, args []any, err error) error {
	s := d.lane.sink
	err = s.failed(stepPublish, d.lane.stream, err)
	if errors.Is(err, outbox.ErrMoved) {
		d.final = err
	}
	switch {
	case metrics.Permanent(err) || d.closing:
		return err
	case redisurl.IsReply(err) && Class(err) == classOther:
		return d.refusedAll(ctx, err)
	case !lostConnection(err):
		return err
	}
	if d.lost++; d.lost < 2 {
		return err
	}
	d.lost = 0
	limits, lerr := s.limits(ctx, d.lane.stream)
	if lerr != nil {
		s.log.WarnContext(ctx, "the limits of the server are unknown", "stream", d.lane.stream, "err", lerr)
	}
	if d.end-d.pos > 1 {
		d.halve(ctx, "a lost connection")
		if limits.query > 0 && limits.query < s.batchBytes.Load() {
			s.batchBytes.Store(max(limits.query/2, 1))
		}
		return err
	}
	if reason := limits.exceeded(wireSize(args), len(d.events[d.pos].Payload)); reason != "" {
		return d.poisoned(d.pos, classTooLarge, errors.New(reason))
	}
	return err
}

// halve halves the current batch and keeps its number. If the whole batch was executed after all, the gate answers the
// half with the result of the whole.
func (d *delivery) halve(ctx context.Context, why string) {
	d.most = (d.end - d.pos + 1) / 2
	d.end = d.pos + d.most
	d.lane.sink.log.WarnContext(ctx, "a batch is not accepted and is halved", "why", why, "stream", d.lane.stream,
		"events", d.most)
}

// strangeReplies is how often a batch is repeated after replies of an unknown kind before it counts as their cause.
const strangeReplies = 3

// refusedAll handles a reply of an unknown kind to a whole call. It may be due to the size of the call or to one event,
// so the batch is halved. The size recovers slowly, because a limit stays. If one event is left, the gate gets an empty
// batch in its place: a server that takes that and refuses the event again refuses the event for its own sake. One that
// refuses both refuses the stream.
func (d *delivery) refusedAll(ctx context.Context, err error) error {
	if d.strange++; d.strange < strangeReplies {
		return err
	}
	d.strange = 0
	if d.end-d.pos > 1 {
		d.halve(ctx, err.Error())
		d.lane.sink.batchEvents.Store(int64(d.most))
		return err
	}
	if d.tried == d.end {
		d.tried = 0
		return d.poisoned(d.pos, classOther, err)
	}
	d.tried, d.closing = d.end, true
	return err
}
