package jetstream

import (
	"context"
	"encoding/json"
	"errors"
	"slices"
	"sync"

	"github.com/nats-io/nats.go"

	"posthaste/outbox"
)

// lane implements outbox.LanePublisher.
type lane struct {
	sink   *Sink
	stream string
	name   string
	lane   string
	owner  outbox.Owner
	holder holder
	of     outbox.Lane
	mem    *memory
	// root is the gate's subject, events what the subjects of the events begin with.
	root, events string
	// last is the number of the last completed batch.
	last int64
	// settled is the newest settled batch; earlier is a claim that the session had before, with settled batches up to
	// known.
	settled, earlier, known int64

	// post is what the gate has of the lane, at seq; seq is 0 if that is unknown.
	post lanePost
	seq  uint64
	// tail and tailSeq are the subject and the sequence of the last event of the batch at seq, if this process has
	// stored one. The next batch expects it, so the server refuses a batch that a purge of the events overtakes.
	tail    string
	tailSeq uint64
	// gates are the messages of the batches that are not settled.
	gates []numbered
	// inherited are the events in doubt of the lane's earlier claims.
	inherited doubt
}

// numbered is the message of a batch.
type numbered struct {
	number int64
	seq    uint64
}

// Lane implements stream.Sink.
func (s *Sink) Lane(stream string, o outbox.Owner, l outbox.Lane) outbox.LanePublisher {
	return &lane{
		sink: s, stream: stream, name: StreamName(stream), lane: l.Name(), owner: o, holder: holderOf(o), of: l,
		mem: s.memory(stream), events: subjectOf(stream) + ".",
	}
}

// Settled implements outbox.LanePublisher.
func (l *lane) Settled(number int64) { l.settled = max(l.settled, number) }

// Follows implements outbox.LanePublisher.
func (l *lane) Follows(claim, number int64) { l.earlier, l.known = claim, number }

func (l *lane) subject() string { return l.root + "." + l.lane }

// check compares the gate with what this process knows, before a publish, and returns the owner's message. The next
// check, or Confirm, notices a purge of the events that overtakes the first publish of a claim.
func (l *lane) check(ctx context.Context, c *conn) (p *ownerPost, at uint64, err error) {
	if l.root == "" {
		if _, l.root, err = c.rooted(ctx, l.name); err != nil {
			return nil, 0, err
		}
	}
	message, last := l.mem.newest()
	if message == l.seq { // the server compares it
		message = 0
	}
	var lacks [2]bool
	var errs [3]error
	var all sync.WaitGroup
	for i, seq := range []uint64{message, seqOf(last)} {
		all.Go(func() { lacks[i], errs[i] = c.lacks(ctx, l.name, seq) })
	}
	p, at, errs[2] = ownerOf(ctx, c.getAny, l.name, l.root)
	all.Wait()
	if err := errors.Join(errs[:]...); err != nil {
		return nil, 0, err
	}
	if err := assess(l.stream, p.rules(l.owner), l.owner); err != nil {
		return nil, 0, err
	}
	if lacks[0] || lacks[1] {
		return nil, 0, outbox.ErrGap
	}
	if seqOf(p.Last) > seqOf(last) { // this process does not know it yet
		if err := gapIf(c.lacks(ctx, l.name, seqOf(p.Last))); err != nil {
			return nil, 0, err
		}
	}
	l.mem.under(p)
	return p, at, nil
}

// ownerOf reads the owner's message; nil without one.
func ownerOf(
	ctx context.Context, get func(context.Context, string, getRequest) (*message, error), name, root string,
) (*ownerPost, uint64, error) {
	m, err := get(ctx, name, getRequest{LastFor: root + "." + ownerLane})
	if err != nil || m == nil {
		return nil, 0, err
	}
	p := new(ownerPost)
	return p, m.Seq, json.Unmarshal(m.Data, p)
}

// laneOf reads a lane's message; a sequence of 0 without one.
func (c *conn) laneOf(ctx context.Context, name, subject string) (laneAt, error) {
	m, err := c.get(ctx, name, getRequest{LastFor: subject})
	if err != nil || m == nil {
		return laneAt{}, err
	}
	p, err := parseLane(m)
	return laneAt{p, m.Seq}, err
}

// resolve reads what the gate has of the lane, and reports whether it is the batch that follows the last one. The
// batch must be one of tries, the attempts of this process.
func (l *lane) resolve(ctx context.Context, c *conn, tries map[string]int) (done bool, err error) {
	at, err := c.laneOf(ctx, l.name, l.subject())
	if err != nil {
		return false, err
	}
	if at.seq == 0 {
		return false, outbox.ErrGap
	}
	if err := assess(l.stream, &at.holder, l.owner); err != nil {
		return false, err
	}
	p := at.lanePost
	switch {
	case p.Claim > l.of.Claim || p.Claim == l.of.Claim && p.ClaimNonce != l.of.Nonce.String():
		return false, &outbox.FencedError{Stream: l.stream, Epoch: l.owner.Epoch}
	case p.Claim == l.of.Claim:
		_, ours := tries[p.id()]
		switch {
		case p.Number == l.last+1 && ours:
			done = true
		case p.Number != l.last:
			return false, outbox.ErrGap
		}
	case l.last > 0:
		return false, outbox.ErrGap
	default:
		if at, err = l.inherit(ctx, c, at); err != nil {
			return false, err
		}
		p = at.lanePost
	}
	l.post, l.seq = p, at.seq
	_, err = l.inherited.load(ctx, c, l.name, l.root, l.holder, spansOf(p.Inherited))
	return done, err
}

// inherit returns what a new claim begins with: the unsettled batches of the earlier one are in doubt.
func (l *lane) inherit(ctx context.Context, c *conn, at laneAt) (laneAt, error) {
	p := at.lanePost
	if p.Claim >= 0 {
		settled := p.Settled
		if l.earlier < l.of.Claim && l.known > 0 {
			if p.Claim < l.earlier || p.Number < l.known {
				return at, outbox.ErrGap // the gate lacks settled batches
			}
			if p.Claim == l.earlier && p.ClaimNonce == l.of.Nonce.String() {
				settled = max(settled, l.known)
			}
		}
		own, err := c.batches(ctx, l.name, l.subject(), at, settled)
		if err != nil {
			return at, err
		}
		p.Inherited = append(slices.Clone(p.Inherited), own...)
	}
	at.lanePost = lanePost{
		holder: p.holder, Claim: l.of.Claim, ClaimNonce: l.of.Nonce.String(), Since: at.seq, Let: p.Let, Last: p.Last,
		Inherited: p.Inherited,
	}
	return at, nil
}

// next returns the lane's message for a batch.
func (l *lane) next(b *batch) *nats.Msg {
	p := l.post
	p.Number, p.Batch, p.Copy = l.last+1, b.id, ""
	p.Done, p.Stored, p.Repeated = b.end-b.begin, uint64(len(b.messages)), b.repeated
	p.Let += int64(len(b.messages))
	_, last := l.mem.newest()
	p.Last, p.Prev = max(p.Last, seqOf(last)), 0
	p.Settled = max(p.Settled, min(l.settled, l.last))
	for len(l.gates) > 0 && l.gates[0].number <= p.Settled {
		p.Since, l.gates = max(p.Since, l.gates[0].seq), l.gates[1:]
	}
	l.post.Settled, l.post.Since = p.Settled, p.Since
	return expecting(l.subject(), l.seq, p)
}
