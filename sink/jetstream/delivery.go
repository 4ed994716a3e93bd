package jetstream

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/nats-io/nats.go"
	js "github.com/nats-io/nats.go/jetstream"

	"posthaste/internal/pause"
	"posthaste/outbox"
	"posthaste/sink/metrics"
)

// Bounds of one batch. A server accepts 1,000 messages, of which one is the gate's.
const (
	maxBatchEvents = 999
	maxBatchBytes  = 8 << 20
)

// conflicts is how often one call of Publish repeats a batch whose expectation was wrong. Other calls rewrite the
// message of a lane now and then.
const conflicts = 20

// Deliver implements outbox.LanePublisher.
func (l *lane) Deliver(events []*outbox.Record) outbox.Delivery {
	return &delivery{lane: l, events: events, most: maxBatchEvents}
}

// delivery implements outbox.Delivery as a sequence of numbered batches.
type delivery struct {
	lane   *lane
	events []*outbox.Record
	// pos is the first event that is not yet published or skipped.
	pos  int
	last string
	// most bounds the next batch. A refusal halves it, until the batch has one event.
	most int
	// tries has, by the id of each attempt to publish the current batch, the end of its events.
	tries map[string]int
	// careful makes the server answer for the message of the event. Otherwise it answers for the lane's message only,
	// and does not give the reason.
	careful bool
	// poison is the index of the event in the last *outbox.PoisonError, plus one.
	poison     int
	skipped    outbox.Skipped
	suppressed int
	final      error
}

// batch is one attempt.
type batch struct {
	id         string
	begin, end int
	// messages are those of the events, and then the lane's.
	messages []*nats.Msg
	repeated []byte
	// last is the newest entry of the repeated events.
	last string
}

// post returns the lane's message.
func (b *batch) post() *nats.Msg { return b.messages[len(b.messages)-1] }

// Skip implements outbox.Delivery.
func (d *delivery) Skip(also func(e *outbox.Record) bool) (places []int) {
	if d.poison == 0 {
		return nil
	}
	places = d.skipped.Skip(d.events, d.poison-1, also)
	d.poison, d.careful = 0, false
	return places
}

// Publish implements outbox.Delivery.
func (d *delivery) Publish(ctx context.Context) (outbox.Receipt, error) {
	for wrong := 0; d.final == nil && d.more(); {
		progress, err := d.step(ctx)
		if err != nil {
			return outbox.Receipt{}, err
		}
		if progress {
			wrong = 0
		} else if wrong++; wrong > conflicts {
			return outbox.Receipt{}, fmt.Errorf("publish to stream %q: the lane's message changes all the time",
				d.lane.stream)
		}
	}
	if d.final != nil {
		return outbox.Receipt{}, d.final
	}
	return outbox.Receipt{Number: d.lane.last, Last: d.last, Suppressed: d.suppressed}, nil
}

// more reports whether there is an event to publish.
func (d *delivery) more() bool {
	for d.skipped[d.pos] {
		d.pos++
	}
	return d.pos < len(d.events)
}

// step makes one attempt to publish one batch.
func (d *delivery) step(ctx context.Context) (progress bool, err error) {
	l := d.lane
	c, err := l.sink.open(ctx)
	if err == nil {
		progress, err = d.attempt(ctx, c)
	}
	if err != nil && metrics.Permanent(err) {
		d.final = err
	}
	return progress, l.sink.failed(c, "publish to", l.stream, err)
}

// attempt stages a batch while it compares the gate with what this process knows, and then commits it.
func (d *delivery) attempt(ctx context.Context, c *conn) (progress bool, err error) {
	l := d.lane
	var b *batch
	if l.seq != 0 && l.mem.doubt.known(l.holder) {
		if b, err = d.stage(ctx, c); err != nil {
			return false, err
		}
	}
	p, at, err := l.check(ctx, c)
	if err != nil {
		return false, err
	}
	if l.seq == 0 {
		done, err := l.resolve(ctx, c, d.tries)
		if err != nil {
			l.seq = 0
			return false, err
		}
		if done {
			return true, d.complete(ctx, c, l.post, l.seq, "")
		}
	}
	changed, err := l.mem.doubt.load(ctx, c, l.name, l.root, p.holder, p.spans(at))
	if err == nil && (changed || b == nil) {
		b, err = d.stage(ctx, c) // another one that was staged ends on its own
	}
	if err != nil {
		return false, err
	}
	if d.tries == nil {
		d.tries = map[string]int{}
	}
	d.tries[b.id] = b.end
	seq := l.seq
	l.seq, l.tail = 0, "" // unknown until the server has answered
	ack, err := d.commit(ctx, c, b)
	switch {
	case errors.Is(err, nats.ErrNoResponders):
		_ = pause.For(ctx, electionPause)
		return false, nil
	case conflict(err):
		return false, nil
	case err != nil:
		if denied := c.take(l.events); denied != nil {
			return false, denied
		}
		return false, d.broken(b, err)
	}
	_ = c.take(l.events) // of before the right was granted
	done, err := parseLane(&message{Seq: ack.Sequence, Data: b.post().Data})
	if err != nil || ack.Sequence <= seq {
		return false, errors.Join(err, errors.New("jetstream gave no sequence"))
	}
	if n := len(b.messages); n > 1 {
		l.tail, l.tailSeq = b.messages[n-2].Subject, done.Last
	}
	return true, d.complete(ctx, c, done, ack.Sequence, b.last)
}

// stage makes the next batch, and sends it except for its last message.
func (d *delivery) stage(ctx context.Context, c *conn) (*batch, error) {
	b, err := d.cut(c)
	if err != nil {
		return nil, err
	}
	b.messages = append(b.messages, d.lane.next(b))
	if l := d.lane; l.tail != "" && len(b.messages) > 1 {
		b.messages[0].Header[js.ExpectedLastSubjSeqHeader] = []string{strconv.FormatUint(l.tailSeq, 10)}
		b.messages[0].Header[js.ExpectedLastSubjSeqSubjHeader] = []string{l.tail}
	}
	careful := d.careful && b.end-b.begin == 1
	err = c.stage(ctx, b.id, b.messages, careful)
	if careful && hasCode(err, js.JSErrCodeStreamMessageExceedsMaximum, codeHeaderLarge) {
		err = d.poisoned(b.end-1, err)
	}
	return b, err
}

func (d *delivery) poisoned(i int, err error) error {
	d.poison = i + 1
	return &outbox.PoisonError{Index: i, ID: d.events[i].ID, Class: classTooLarge, Err: err}
}

// commit publishes a staged batch.
func (d *delivery) commit(ctx context.Context, c *conn, b *batch) (js.PubAck, error) {
	send := func() (js.PubAck, error) { return c.commit(ctx, b.post()) }
	start := time.Now()
	defer func() { d.lane.sink.m.Seconds.Observe(time.Since(start).Seconds()) }()
	if fault := d.lane.sink.fault; fault != nil {
		return fault(b.messages, send)
	}
	return send()
}

// cut makes the next batch: consecutive events, without those in doubt.
func (d *delivery) cut(c *conn) (*batch, error) {
	l := d.lane
	b := &batch{id: rand.Text(), begin: d.pos, end: d.pos}
	bytes := 0
	for ; b.end < len(d.events) && b.end-b.begin < d.most && !d.skipped[b.end]; b.end++ {
		e := d.events[b.end]
		entry, known := l.inherited.has(e.ID)
		if !known {
			entry, known = l.mem.doubt.has(e.ID)
		}
		if known {
			b.repeated = append(b.repeated, e.ID[:]...)
			b.last = later(b.last, entry)
			continue
		}
		m := l.sink.encode(l.events, e)
		err := refuses(m, c.nc.MaxPayload())
		if err != nil && b.end > b.begin {
			break
		}
		if err != nil {
			return nil, d.poisoned(b.end, err)
		}
		if bytes += len(m.Data); bytes > maxBatchBytes && b.end > b.begin {
			break
		}
		b.messages = append(b.messages, m)
	}
	return b, nil
}

// complete notes that the gate has a batch.
func (d *delivery) complete(ctx context.Context, c *conn, p lanePost, seq uint64, last string) error {
	l := d.lane
	if _, known := l.mem.newest(); p.Last > seqOf(known) {
		m, err := c.getAny(ctx, l.name, getRequest{Seq: p.Last})
		if err != nil {
			l.seq = 0 // the next attempt reads it again
			return err
		}
		if m == nil {
			return outbox.ErrGap
		}
		last = later(last, m.entry())
	}
	l.mem.published(l.holder, l.lane, p.Let, seq, last)
	l.mem.doubt.use(p.Repeated)
	l.inherited.use(p.Repeated)
	_, newest := l.mem.newest()
	d.last = later(d.last, later(last, newest))
	n := len(p.Repeated) / 16
	l.sink.m.Suppressed.Add(float64(n))
	d.suppressed += n
	d.pos = d.tries[p.id()]
	d.tries, d.careful = nil, false
	d.most = min(d.most*2, maxBatchEvents)
	l.last++
	l.post, l.seq = p, seq
	l.gates = append(l.gates, numbered{l.last, seq})
	return nil
}

// broken handles a refusal of a batch, or a lost reply. It returns nil if the next attempt finds out more about the
// refusal: the server has not accepted one of the messages.
func (d *delivery) broken(b *batch, err error) error {
	if !errors.As(err, new(*js.APIError)) {
		return err
	}
	known := d.careful
	if n := b.end - b.begin; n > 1 {
		d.most = n / 2
	} else {
		d.careful = true
	}
	if !known && hasCode(err, codeIncomplete, js.JSErrCodeStreamMessageExceedsMaximum, codeHeaderLarge) {
		return nil
	}
	return err
}
