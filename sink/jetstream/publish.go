package jetstream

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	js "github.com/nats-io/nats.go/jetstream"

	"posthaste/internal/pause"
	"posthaste/outbox"
	"posthaste/sink/metrics"
)

// lane implements outbox.LanePublisher.
type lane struct {
	sink *Sink
	remote
	holder holder
	of     outbox.Lane
	mem    *memory
	// events is what the subjects of the events begin with.
	events string
	// last is the number of the last completed batch.
	last int64
	// settled is the newest settled batch; earlier is a claim that the session had before, with settled batches up to
	// known.
	settled, earlier, known int64

	// at is what the gate has of the lane; its seq is 0 if that is unknown.
	at laneAt
	// tail is the subject of at.Last, if this process has stored that event. The next batch expects it, so the server
	// refuses a batch that a purge of the events overtakes.
	tail string
	// gates are the sequences of the messages of the last batches, as many as are not settled.
	gates []uint64
	// inherited are the events in doubt of the lane's earlier claims.
	inherited doubt
}

// Lane implements stream.Sink.
func (s *Sink) Lane(stream string, o outbox.Owner, l outbox.Lane) outbox.LanePublisher {
	return &lane{
		sink: s, remote: remote{stream: stream, name: StreamName(stream)}, holder: holderOf(o), of: l,
		mem: s.memory(stream), events: subjectOf(stream) + ".",
	}
}

// Settled implements outbox.LanePublisher.
func (l *lane) Settled(number int64) { l.settled = max(l.settled, number) }

// Follows implements outbox.LanePublisher.
func (l *lane) Follows(claim, number int64) { l.earlier, l.known = claim, number }

// check compares the gate with what this process knows, before a publish, and returns the owner's message. The next
// check, or Confirm, notices a purge of the events that overtakes the first publish of a claim.
func (l *lane) check(ctx context.Context) (p *ownerPost, at uint64, err error) {
	if l.root == "" {
		if _, err = l.rooted(ctx); err != nil {
			return nil, 0, err
		}
	}
	newest := l.mem.newest()
	if newest.message == l.at.seq { // the server compares it
		newest.message = 0
	}
	var lacks [2]bool
	var errs [3]error
	var all sync.WaitGroup
	for i, seq := range []uint64{newest.message, seqOf(newest.last)} {
		all.Go(func() { lacks[i], errs[i] = l.lacks(ctx, seq) })
	}
	p, at, errs[2] = l.readOwner(ctx, l.getAny)
	all.Wait()
	err = errors.Join(errs[:]...)
	if err == nil {
		err = l.assess(p.rules(l.holder), l.holder)
	}
	if err == nil && (lacks[0] || lacks[1]) {
		err = outbox.ErrGap
	}
	if err == nil && seqOf(p.Last) > seqOf(newest.last) { // this process does not know it yet
		err = gapIf(l.lacks(ctx, seqOf(p.Last)))
	}
	if err != nil {
		return nil, 0, err
	}
	l.mem.under(p)
	return p, at, nil
}

// readOwner reads the owner's message; nil without one.
func (r *remote) readOwner(ctx context.Context, get func(context.Context, getRequest) (*message, error)) (
	*ownerPost, uint64, error,
) {
	m, err := get(ctx, getRequest{LastFor: r.subject(ownerLane)})
	if err != nil || m == nil {
		return nil, 0, err
	}
	p := new(ownerPost)
	return p, m.Seq, json.Unmarshal(m.Data, p)
}

// readLane reads a lane's message; a sequence of 0 without one.
func (r *remote) readLane(ctx context.Context, lane string) (laneAt, error) {
	m, err := r.get(ctx, getRequest{LastFor: r.subject(lane)})
	if err != nil || m == nil {
		return laneAt{}, err
	}
	return parseLane(m)
}

// resolve reads what the gate has of the lane, and reports whether it is the batch that follows the last one. The
// batch must be one of tries, the attempts of this process.
func (l *lane) resolve(ctx context.Context, tries map[string]int) (done bool, err error) {
	at, err := l.readLane(ctx, l.of.Name())
	if err != nil {
		return false, err
	}
	if at.seq == 0 {
		return false, outbox.ErrGap
	}
	if err := l.assess(&at.holder, l.holder); err != nil {
		return false, err
	}
	switch {
	case at.Claim > l.of.Claim || at.Claim == l.of.Claim && at.ClaimNonce != l.of.Nonce.String():
		return false, &outbox.FencedError{Stream: l.stream, Epoch: l.holder.Epoch}
	case at.Claim == l.of.Claim:
		_, ours := tries[at.id()]
		switch {
		case at.Number == l.last+1 && ours:
			done = true
		case at.Number != l.last:
			return false, outbox.ErrGap
		}
	case l.last > 0:
		return false, outbox.ErrGap
	default:
		if at.lanePost, err = l.inherit(ctx, at); err != nil {
			return false, err
		}
	}
	l.at = at
	_, err = l.inherited.load(ctx, &l.remote, l.holder, spansOf(at.Inherited))
	return done, err
}

// inherit returns what a new claim begins with: the unsettled batches of the earlier one are in doubt.
func (l *lane) inherit(ctx context.Context, at laneAt) (p lanePost, err error) {
	p = lanePost{
		holder: at.holder, Claim: l.of.Claim, ClaimNonce: l.of.Nonce.String(), Since: at.seq, Let: at.Let,
		Last: at.Last, Inherited: at.Inherited,
	}
	if at.Claim < 0 {
		return p, nil
	}
	settled := at.Settled
	if l.earlier < l.of.Claim && l.known > 0 {
		if at.Claim < l.earlier || at.Number < l.known {
			return p, outbox.ErrGap // the gate lacks settled batches
		}
		if at.Claim == l.earlier && at.ClaimNonce == p.ClaimNonce {
			settled = max(settled, l.known)
		}
	}
	own, err := l.batches(ctx, l.of.Name(), at, settled)
	p.Inherited = append(slices.Clone(at.Inherited), own...)
	return p, err
}

// next returns the lane's message for a batch.
func (l *lane) next(b *batch) *nats.Msg {
	p := l.at.lanePost
	p.Number, p.Batch, p.Copy = l.last+1, b.id, ""
	p.Done, p.Stored, p.Repeated = b.end-b.begin, uint64(len(b.messages)), b.repeated
	p.Let += int64(len(b.messages))
	p.Last, p.Prev = max(p.Last, seqOf(l.mem.newest().last)), 0
	p.Settled = max(p.Settled, min(l.settled, l.last))
	for len(l.gates) > 0 && l.last-int64(len(l.gates)) < p.Settled { // the first of them is settled
		p.Since, l.gates = max(p.Since, l.gates[0]), l.gates[1:]
	}
	l.at.Settled, l.at.Since = p.Settled, p.Since
	return expecting(l.subject(l.of.Name()), l.at.seq, p)
}

// Bounds of one batch. A server accepts 1,000 messages, of which one is the gate's.
const (
	maxBatchEvents = 999
	maxBatchBytes  = 8 << 20
)

// Deliver implements outbox.LanePublisher.
func (l *lane) Deliver(events []*outbox.Record) outbox.Delivery {
	return &delivery{lane: l, events: events, most: maxBatchEvents, tries: map[string]int{}}
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
	if d.final != nil {
		return outbox.Receipt{}, d.final
	}
	l := d.lane
	for wrong := 0; ; {
		for d.skipped[d.pos] {
			d.pos++
		}
		if d.pos >= len(d.events) {
			return outbox.Receipt{Number: l.last, Last: d.last, Suppressed: d.suppressed}, nil
		}
		progress, err := d.attempt(ctx)
		if metrics.Permanent(err) {
			d.final = err
		}
		switch {
		case err != nil:
			return outbox.Receipt{}, l.sink.failed(&l.remote, "publish to", err)
		case progress:
			wrong = 0
		case wrong == conflicts:
			return outbox.Receipt{}, fmt.Errorf("publish to stream %q: the lane's message changes all the time",
				l.stream)
		default:
			wrong++
		}
	}
}

// attempt stages a batch while it compares the gate with what this process knows, and then commits it.
func (d *delivery) attempt(ctx context.Context) (progress bool, err error) {
	l := d.lane
	if l.conn, err = l.sink.open(ctx); err != nil {
		return false, err
	}
	var b *batch
	if l.at.seq != 0 && l.mem.doubt.loaded(l.holder) {
		if b, err = d.stage(ctx); err != nil {
			return false, err
		}
	}
	p, at, err := l.check(ctx)
	if err != nil {
		return false, err
	}
	if l.at.seq == 0 {
		done, err := l.resolve(ctx, d.tries)
		if err != nil {
			l.at.seq = 0
			return false, err
		}
		if done {
			return true, d.complete(ctx, l.at, "")
		}
	}
	changed, err := l.mem.doubt.load(ctx, &l.remote, p.holder, p.spans(at))
	if err == nil && (changed || b == nil) {
		b, err = d.stage(ctx) // another one that was staged ends on its own
	}
	if err != nil {
		return false, err
	}
	d.tries[b.id] = b.end
	seq := l.at.seq
	l.at.seq, l.tail = 0, "" // unknown until the server has answered
	n := len(b.messages)
	post := b.messages[n-1]
	start := time.Now()
	ack, err := l.sink.send(b.messages, func() (js.PubAck, error) { return l.commit(ctx, post) })
	l.sink.m.Seconds.Observe(time.Since(start).Seconds())
	switch {
	case errors.Is(err, nats.ErrNoResponders):
		_ = pause.For(ctx, electionPause)
		return false, nil
	case conflict(err):
		return false, nil
	case err != nil:
		if denied := l.take(l.events); denied != nil {
			return false, denied
		}
		return false, d.broken(b, err)
	}
	_ = l.take(l.events) // of before the right was granted
	done, err := parseLane(&message{Seq: ack.Sequence, Data: post.Data})
	if err != nil || ack.Sequence <= seq {
		return false, errors.Join(err, errors.New("jetstream gave no sequence"))
	}
	if n > 1 {
		l.tail = b.messages[n-2].Subject
	}
	return true, d.complete(ctx, done, b.last)
}

// stage makes the next batch, and sends it except for its last message.
func (d *delivery) stage(ctx context.Context) (*batch, error) {
	l := d.lane
	b, err := d.cut()
	if err != nil {
		return nil, err
	}
	b.messages = append(b.messages, l.next(b))
	if l.tail != "" && len(b.messages) > 1 {
		b.messages[0].Header[js.ExpectedLastSubjSeqHeader] = []string{strconv.FormatUint(l.at.Last, 10)}
		b.messages[0].Header[js.ExpectedLastSubjSeqSubjHeader] = []string{l.tail}
	}
	careful := d.careful && b.end-b.begin == 1
	err = l.stage(ctx, b.id, b.messages, careful)
	if careful && hasCode(err, js.JSErrCodeStreamMessageExceedsMaximum, codeHeaderLarge) {
		err = d.poisoned(b.end-1, err)
	}
	return b, err
}

func (d *delivery) poisoned(i int, err error) error {
	d.poison = i + 1
	return &outbox.PoisonError{Index: i, ID: d.events[i].ID, Class: classTooLarge, Err: err}
}

// cut makes the next batch: consecutive events, without those in doubt.
func (d *delivery) cut() (*batch, error) {
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
		err := refuses(m, l.nc.MaxPayload())
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
func (d *delivery) complete(ctx context.Context, at laneAt, last string) error {
	l := d.lane
	if at.Last > seqOf(l.mem.newest().last) {
		m, err := l.getAny(ctx, getRequest{Seq: at.Last})
		if err != nil {
			l.at.seq = 0 // the next attempt reads it again
			return err
		}
		if m == nil {
			return outbox.ErrGap
		}
		last = later(last, m.entry())
	}
	d.last = later(d.last, l.mem.published(l.holder, l.of.Name(), at, last))
	l.mem.doubt.use(at.Repeated)
	l.inherited.use(at.Repeated)
	n := len(at.Repeated) / 16
	l.sink.m.Suppressed.Add(float64(n))
	d.suppressed += n
	d.pos = d.tries[at.id()]
	d.tries, d.careful = map[string]int{}, false
	d.most = min(d.most*2, maxBatchEvents)
	l.last++
	l.at = at
	l.gates = append(l.gates, at.seq)
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
