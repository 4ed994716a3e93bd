package jetstream

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/nats-io/nats.go"
	js "github.com/nats-io/nats.go/jetstream"

	"posthaste/outbox"
)

// lookEvents bounds the events after the table's last one that Look compares.
const lookEvents = 1000

// Look implements stream.Sink.
func (s *Sink) Look(ctx context.Context, source uuid.UUID, streams []string, noted map[string]string) (
	[]outbox.StreamState, error,
) {
	states := make([]outbox.StreamState, len(streams))
	errs, err := s.each(ctx, "look at", streams, func(r *remote, i int) (err error) {
		states[i], err = s.look(ctx, r, source, noted[r.stream])
		return err
	})
	for i, err := range errs {
		if err != nil {
			states[i] = outbox.StreamState{Stream: streams[i], Err: err}
		}
	}
	return states, gravest(errs, err)
}

func (s *Sink) look(ctx context.Context, r *remote, source uuid.UUID, noted string) (st outbox.StreamState, err error) {
	st = outbox.StreamState{Stream: r.stream, Now: time.Now()}
	g, err := r.read(ctx)
	if err != nil {
		return st, err
	}
	if g.owner != nil && g.owner.Source != source {
		return st, foreign(g.stream, g.owner.Source)
	}
	mem := s.memory(r.stream)
	newest := mem.newest()
	mem.seen(g)
	let, last := g.published()
	st.Missing = max(0, newest.let-let)
	if st.Forgot, err = g.missing(ctx, noted); err != nil || g.info == nil {
		return st, err
	}
	st.Now = g.info.TimeStamp
	// Without a gate, the stream's last event counts.
	lost := false
	if p := g.owner; p != nil {
		st.Gate, st.Epoch, st.Nonce = true, p.Epoch, p.Nonce
		if p.Next != nil {
			st.Epoch, st.Nonce = p.Next.Epoch, p.Next.Nonce
		}
		if lost, err = g.lost(ctx); err != nil {
			return st, err
		}
	}
	youngest, err := g.youngest(ctx, last)
	if err != nil {
		return st, err
	}
	st.Behind = youngest != ""
	st.Forgot = st.Forgot || lost
	switch {
	case lost:
	case g.owner == nil:
		st.Last = youngest
	case last > 0:
		m, err := g.get(ctx, getRequest{Seq: last})
		if err != nil {
			return st, err
		}
		if m != nil {
			st.Last = m.entry()
		}
	}
	if g.owner != nil && !st.Forgot && noted != "" {
		st.Unknown, err = g.wentBack(ctx, noted)
	}
	if err == nil && st.Intact() {
		// Adopt compares message as well: it may be that of a stream that was deleted, and made by another process.
		st.Forgot, err = g.lacks(ctx, newest.message)
	}
	return st, err
}

// youngest returns the last event after a sequence. Events that were published since the gate was read do not count.
func (g *gate) youngest(ctx context.Context, after uint64) (entry string, err error) {
	m, err := g.get(ctx, getRequest{LastFor: EventsFilter(g.stream)})
	if err != nil || m == nil || m.Seq <= after {
		return "", err
	}
	if _, ok := m.event(); ok && m.Seq <= g.info.State.LastSeq || !g.info.Config.AllowDirect {
		return m.entry(), nil
	}
	for m, err := range g.scan(ctx, getRequest{Seq: after + 1, NextFor: EventsFilter(g.stream)}) {
		if err != nil {
			return "", err
		}
		if m.Seq > g.info.State.LastSeq {
			break
		}
		if _, ok := m.event(); ok {
			entry = m.entry()
		}
	}
	return entry, nil
}

// missing reports whether a stream lacks an entry that it had. An entry before the first one was trimmed.
func (r *remote) missing(ctx context.Context, entry string) (bool, error) {
	if entry == "" {
		return false, nil
	}
	m, err := r.get(ctx, getRequest{Seq: seqOf(entry)})
	if err != nil || m != nil {
		return m != nil && m.entry() != entry, err
	}
	return r.lacks(ctx, seqOf(entry))
}

// wentBack reports whether the gate has let through an event after the table's last one that is settled.
func (g *gate) wentBack(ctx context.Context, noted string) (bool, error) {
	spans, err := g.unsettled(ctx)
	if err != nil {
		return false, err
	}
	unsettled, err := g.events(ctx, spans)
	if err != nil {
		return false, err
	}
	n := 0
	_, last := g.published()
	for m, err := range g.scan(ctx, getRequest{Seq: seqOf(noted) + 1, NextFor: EventsFilter(g.stream)}) {
		if n++; err != nil || n > lookEvents || m.Seq > last {
			return false, err
		}
		if id, ok := m.event(); ok {
			if _, is := unsettled[id]; !is {
				return true, nil
			}
		}
	}
	return false, nil
}

// adoptions is how often an adoption is tried while an earlier owner publishes.
const adoptions = 50

// Adopt implements stream.Sink. If batches of an earlier owner are faster than the adoption, it first fences that owner
// with a message of the owner's subject.
func (s *Sink) Adopt(ctx context.Context, stream string, o outbox.Owner, intact bool) error {
	return s.on(ctx, "adopt", stream, func(r *remote) error {
		return repeated(ctx, adoptions, func() error { return s.adopt(ctx, r, holderOf(o), intact) })
	})
}

// adopt makes one attempt.
func (s *Sink) adopt(ctx context.Context, r *remote, ours holder, intact bool) error {
	mem := s.memory(r.stream)
	g, err := r.read(ctx)
	if err != nil {
		return err
	}
	if p := g.owner; p != nil {
		if p.Source != ours.Source {
			return foreign(g.stream, p.Source)
		}
		if p.holder == ours {
			mem.seen(g)
			return nil
		}
		for _, theirs := range []*holder{p.Next, &p.holder} {
			if theirs != nil && *theirs != ours && theirs.Epoch >= ours.Epoch {
				return &outbox.FencedError{Stream: g.stream, Epoch: theirs.Epoch}
			}
		}
	}
	lost, err := g.lost(ctx)
	if err != nil {
		return err
	}
	if intact {
		newest := mem.newest()
		if let, _ := g.published(); lost || let < newest.let {
			return outbox.ErrGap
		}
		if err := gapIf(g.lacks(ctx, newest.message)); err != nil {
			return err
		}
	}
	if err = s.ensure(ctx, g); err != nil {
		return err
	}
	if !lost && g.owner == nil { // it was purged since it was read
		return outbox.ErrGap
	}
	p := &ownerPost{holder: ours}
	if !lost { // it gets what the gate before has
		if p.Doubt, err = g.unsettled(ctx); err != nil {
			return err
		}
		let, last := g.published()
		p.Let, p.Last = let, g.owner.Last
		if last > seqOf(p.Last) {
			m, err := g.get(ctx, getRequest{Seq: last})
			if err != nil {
				return err
			}
			if m != nil { // otherwise it was trimmed
				p.Last = m.entry()
			}
		}
	}
	messages := make([]*nats.Msg, 0, len(lanes)+1)
	for _, lane := range lanes {
		post := lanePost{holder: ours, Claim: -1, Last: seqOf(p.Last)}
		messages = append(messages, expecting(g.subject(lane), g.lanes[lane].seq, post))
	}
	messages = append(messages, expecting(g.subject(ownerLane), g.at, p))
	ack, err := g.write(ctx, messages)
	switch {
	case err == nil:
		mem.adopted(p, ack.Sequence)
	case conflict(err) && g.owner != nil && g.owner.Next == nil:
		busy := *g.owner
		busy.Doubt, busy.Recalls, busy.Next = g.owner.spans(g.at), 0, &ours
		_, raised := g.commit(ctx, expecting(g.subject(ownerLane), g.at, busy))
		if raised != nil && !conflict(raised) {
			return raised
		}
	}
	return err
}

func foreign(stream string, source uuid.UUID) error {
	return &outbox.ForeignError{
		Stream: stream, Source: source.String(), Reason: "was last written by another database (source " +
			source.String() + ")",
		Remedy: "another --stream-prefix; databases cannot share a stream of JetStream",
	}
}

// owned reads the owner's message of a stream, and returns the error of the port if it is not ours.
func (r *remote) owned(ctx context.Context, ours holder) (*gate, error) {
	info, err := r.rooted(ctx)
	if err != nil {
		return nil, err
	}
	g := &gate{remote: *r, info: info}
	if g.owner, g.at, err = r.readOwner(ctx, r.get); err != nil {
		return nil, err
	}
	return g, r.assess(g.owner.rules(ours), ours)
}

// rewrite changes the owner's message of a gate that is o's. change returns the messages to write before it, and false
// if there is nothing to change.
func (s *Sink) rewrite(ctx context.Context, step, stream string, o outbox.Owner,
	change func(g *gate, p *ownerPost) (before []*nats.Msg, any bool),
) error {
	return s.on(ctx, step, stream, func(r *remote) error {
		return repeated(ctx, conflicts, func() error {
			g, err := r.owned(ctx, holderOf(o))
			if err != nil {
				return err
			}
			p := *g.owner
			p.Doubt, p.Recalls = p.spans(g.at), 0
			before, changed := change(g, &p)
			if changed {
				_, err = r.write(ctx, append(before, expecting(r.subject(ownerLane), g.at, p)))
			}
			return err
		})
	})
}

// ForgetDoubt implements stream.Sink.
func (s *Sink) ForgetDoubt(ctx context.Context, o outbox.Owner, stream string) error {
	return s.rewrite(ctx, "forget doubt", stream, o, func(_ *gate, p *ownerPost) ([]*nats.Msg, bool) {
		changed := len(p.Doubt) > 0
		p.Doubt = nil
		return nil, changed
	})
}

// recallEvents bounds the events of one message.
const recallEvents = 5000

// Recall implements stream.Sink. The stream lists the recalled events in messages of the gate.
func (s *Sink) Recall(ctx context.Context, o outbox.Owner, stream string, ids []uuid.UUID, last string) error {
	return s.rewrite(ctx, "recall", stream, o, func(g *gate, p *ownerPost) (before []*nats.Msg, changed bool) {
		for some := range slices.Chunk(ids, recallEvents) {
			post := lanePost{holder: p.holder}
			for _, id := range some {
				post.Repeated = append(post.Repeated, id[:]...)
			}
			m := expecting(g.subject(recallLane), 0, post)
			delete(m.Header, js.ExpectedLastSubjSeqHeader)
			before = append(before, m)
		}
		p.Recalls = uint64(len(before))
		changed = len(before) > 0 || outbox.CompareIDs(last, p.Last) > 0
		p.Last = later(p.Last, last)
		return before, changed
	})
}

// Check implements stream.Sink.
func (s *Sink) Check(ctx context.Context, o outbox.Owner, streams []string) error {
	return gravest(s.each(ctx, "check", streams, func(r *remote, _ int) error { return s.check(ctx, r, o) }))
}

func (s *Sink) check(ctx context.Context, r *remote, o outbox.Owner) error {
	own, err := r.owned(ctx, holderOf(o)) // as the leader of the stream knows it
	if err != nil {
		return err
	}
	g, err := r.read(ctx)
	if err != nil {
		return err
	}
	g.owner = own.owner
	return gapIf(g.lost(ctx, s.memory(r.stream).newest().message))
}

func gapIf(lost bool, err error) error {
	if err == nil && lost {
		return outbox.ErrGap
	}
	return err
}

// byStream groups marks.
func byStream(marks []outbox.Mark) (streams []string, of map[string][]outbox.Mark) {
	of = map[string][]outbox.Mark{}
	for _, m := range marks {
		of[m.Stream] = append(of[m.Stream], m)
	}
	return slices.Collect(maps.Keys(of)), of
}

// Confirm implements stream.Sink. A message is acknowledged when it is as durable as the server's settings make it, so
// Confirm only verifies these, as far as a client can.
func (s *Sink) Confirm(ctx context.Context, o outbox.Owner, marks []outbox.Mark) error {
	streams, of := byStream(marks)
	return gravest(s.each(ctx, "confirm", streams, func(r *remote, _ int) error {
		g, err := r.owned(ctx, holderOf(o))
		if err != nil {
			return err
		}
		for _, m := range of[g.stream] {
			if m.Number == 0 {
				continue
			}
			at, err := g.readLane(ctx, m.Lane.Name())
			if err != nil {
				return err
			}
			switch {
			case at.seq == 0 || at.holder != g.owner.holder:
				return outbox.ErrGap
			case at.Claim > m.Lane.Claim || at.Claim == m.Lane.Claim && at.ClaimNonce != m.Lane.Nonce.String():
				return &outbox.FencedError{Stream: g.stream, Epoch: o.Epoch}
			case at.Claim < m.Lane.Claim || at.Number < m.Number:
				return outbox.ErrGap
			}
			if err := gapIf(g.lacks(ctx, at.Last, at.Prev)); err != nil {
				return err
			}
		}
		return s.durable(g)
	}))
}

// DurabilityError means that a stream cannot have the durability that is configured.
type DurabilityError struct{ Stream, Reason, Remedy string }

func (e *DurabilityError) Error() string {
	return fmt.Sprintf("the JetStream stream %s %s%s%s", e.Stream, e.Reason, outbox.RemedyMark, e.Remedy)
}

// durable verifies what a client can know about the durability of a stream.
func (s *Sink) durable(g *gate) error {
	cfg := g.info.Config
	switch {
	case !s.o.Fsync:
	case cfg.Storage != js.FileStorage:
		return &DurabilityError{g.name, "is stored in memory", "make it with storage: file"}
	case cfg.PersistMode == js.AsyncPersistMode:
		return &DurabilityError{
			g.name, "acknowledges before it writes (persist_mode: async)", "make it with persist_mode: default",
		}
	case cfg.Replicas < s.o.Replicas:
		reason := fmt.Sprintf("has %d replicas, and %d are configured", max(cfg.Replicas, 1), s.o.Replicas)
		return &DurabilityError{g.name, reason, "raise num_replicas of the stream"}
	}
	return nil
}

// Settled implements stream.Sink.
func (s *Sink) Settled(ctx context.Context, o outbox.Owner, marks []outbox.Mark) error {
	streams, of := byStream(marks)
	return gravest(s.each(ctx, "settle", streams, func(r *remote, _ int) error {
		g, err := r.owned(ctx, holderOf(o))
		for _, m := range of[r.stream] {
			if err == nil {
				err = g.settle(ctx, m)
			}
		}
		return err
	}))
}

// settle reports that batches of one lane are settled.
func (g *gate) settle(ctx context.Context, m outbox.Mark) error {
	err := repeated(ctx, conflicts, func() error {
		at, err := g.readLane(ctx, m.Lane.Name())
		if err != nil || at.seq == 0 || at.holder != g.owner.holder {
			return err
		}
		p, n := at.copied(), len(at.Inherited)
		switch {
		case p.Claim == m.Lane.Claim && p.ClaimNonce == m.Lane.Nonce.String():
			p.Settled = max(p.Settled, min(m.Number, p.Number))
		case p.Claim > m.Lane.Claim:
			p.Inherited = slices.DeleteFunc(p.Inherited, func(b inherited) bool {
				return b.Claim == m.Lane.Claim && b.Number <= m.Number
			})
		}
		if p.Settled == at.Settled && len(p.Inherited) == n {
			return nil
		}
		if p.Settled == p.Number {
			p.Since = at.seq
		}
		_, err = g.commit(ctx, expecting(g.subject(m.Lane.Name()), at.seq, p))
		return err
	})
	if conflict(err) {
		err = fmt.Errorf("settle batches of %s: the lane's message changes all the time", g.name)
	}
	return err
}
