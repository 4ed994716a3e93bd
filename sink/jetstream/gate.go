package jetstream

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"github.com/google/uuid"

	"posthaste/outbox"
)

// holder is an owner as messages of the gate name it.
type holder struct {
	Source uuid.UUID `json:"source"`
	Epoch  int64     `json:"epoch"`
	Nonce  string    `json:"nonce"`
}

func holderOf(o outbox.Owner) holder {
	return holder{Source: o.Source, Epoch: o.Epoch, Nonce: o.Nonce.String()}
}

// span is a sequence of complete batches, from the first event of the first one to the lane's message of the last one.
// The events of the batches are those between, and those that the lanes' messages list as repeated.
type span struct {
	From uint64 `json:"from"`
	To   uint64 `json:"to"`
}

// ownerPost is a message of the owner's subject.
type ownerPost struct {
	holder
	// Next is an owner that is adopting the gate. It fences the present one.
	Next *holder `json:"next,omitempty"`
	// Doubt is what earlier owners left unsettled. Recalls is how many messages before this one belong to it as well:
	// they list recalled events.
	Doubt   []span `json:"doubt,omitempty"`
	Recalls uint64 `json:"recalls,omitempty"`
	// Let is the number of events that the gate had let through when the owner adopted it; Last is the last of them.
	Let  int64  `json:"let"`
	Last string `json:"entry,omitempty"`
}

// lanePost is a message of a lane's subject. If it has a Batch, the message ends that batch.
type lanePost struct {
	holder
	// Claim is -1 if no claim has published since the adoption.
	Claim      int64  `json:"claim"`
	ClaimNonce string `json:"claim_nonce,omitempty"`
	// Number is that of the last batch, and Settled that of the last settled one. The unsettled batches are in the
	// messages of the subject after Since.
	Number  int64  `json:"number"`
	Settled int64  `json:"settled"`
	Since   uint64 `json:"since"`
	// Batch identifies the batch, and Copy the batch of an earlier message that this one only repeats. Done is how many
	// events of the delivery it accounted for, and Stored how many of them are the messages before this one.
	Batch  string `json:"batch,omitempty"`
	Copy   string `json:"copy,omitempty"`
	Done   int    `json:"done"`
	Stored uint64 `json:"stored"`
	// Repeated are the ids, 16 bytes each, of events that were in doubt.
	Repeated []byte `json:"repeated,omitempty"`
	// Let is the number of events that the lane has let through since the adoption. Last is the sequence of the last
	// event that the lane knew of before the batch; in a copy, that of the batch, and Prev the one before.
	Let  int64  `json:"let"`
	Last uint64 `json:"last,omitempty"`
	Prev uint64 `json:"prev,omitempty"`
	// Inherited are unsettled batches of earlier claims.
	Inherited []inherited `json:"inherited,omitempty"`
}

// inherited is an unsettled batch of an earlier claim.
type inherited struct {
	span
	Claim  int64 `json:"claim"`
	Number int64 `json:"number"`
}

// parseLane decodes a lane's message, which is at seq.
func parseLane(m *message) (p lanePost, err error) {
	if err = json.Unmarshal(m.Data, &p); err == nil && p.Stored > 0 {
		p.Prev, p.Last = p.Last, m.Seq-1
	}
	return p, err
}

// copied returns the message as one that ends no batch.
func (p lanePost) copied() lanePost {
	p.Copy, p.Batch, p.Stored, p.Repeated = p.id(), "", 0, nil
	return p
}

// id returns the batch with the number of p.
func (p lanePost) id() string {
	if p.Batch != "" {
		return p.Batch
	}
	return p.Copy
}

// laneAt is a lane's last message and its sequence.
type laneAt struct {
	lanePost
	seq uint64
}

// gate is the state of a gate and its stream.
type gate struct {
	stream string
	name   string
	info   streamInfo
	// root is the gate's subject without the lane; "" if the stream is not configured to have a gate.
	root string
	// owner is nil without a gate; at is its sequence.
	owner *ownerPost
	at    uint64
	lanes map[string]laneAt
}

// subject returns the subject of a lane.
func (g *gate) subject(lane string) string { return g.root + "." + lane }

// root returns the subject of a stream's gate, by its configuration.
func (c streamConfig) root() string {
	for _, subject := range c.Subjects {
		if strings.HasPrefix(subject, gateRoot) && strings.HasSuffix(subject, ".*") {
			return strings.TrimSuffix(subject, ".*")
		}
	}
	return ""
}

// read reads a gate and the state of its stream. A stream that does not exist has no gate. Any replica may answer for
// the lanes, so a caller that writes must expect the sequences that it has read.
func (c *conn) read(ctx context.Context, stream string) (*gate, error) {
	g := &gate{stream: stream, name: StreamName(stream), lanes: map[string]laneAt{}}
	var err error
	if g.info, err = c.info(ctx, g.name); err != nil {
		if hasCode(err, codeNoStream) {
			return g, nil
		}
		return nil, err
	}
	if g.root = g.info.cfg.root(); g.root == "" || !g.info.cfg.Direct {
		return g, nil
	}
	req := getRequest{MultiLast: []string{g.root + ".*"}}
	err = c.scan(ctx, g.name, req, func(m *message) error {
		lane := strings.TrimPrefix(m.Subject, g.root+".")
		switch lane {
		case ownerLane:
			g.owner, g.at = new(ownerPost), m.Seq
			return json.Unmarshal(m.Data, g.owner)
		case recallLane:
			return nil
		}
		p, err := parseLane(m)
		g.lanes[lane] = laneAt{p, m.Seq}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("read the gate: %w", err)
	}
	return g, nil
}

// assess returns nil if a gate of theirs belongs to o, and otherwise the error of the port.
func assess(stream string, theirs *holder, o outbox.Owner) error {
	switch {
	case theirs == nil || theirs.Source != o.Source || theirs.Epoch < o.Epoch:
		return outbox.ErrGap
	case theirs.Epoch > o.Epoch || theirs.Nonce != o.Nonce.String():
		return &outbox.FencedError{Stream: stream, Epoch: theirs.Epoch}
	}
	return nil
}

// rules returns the owner that calls are judged by: one that is adopting fences the others. An owner that adopts has
// the gate only afterwards.
func (p *ownerPost) rules(o outbox.Owner) *holder {
	switch {
	case p == nil:
		return nil
	case p.Next == nil:
		return &p.holder
	case p.Next.Epoch == o.Epoch && p.Next.Nonce == o.Nonce.String():
		return nil
	}
	return p.Next
}

// last returns the newest event that the gate has let through.
func (g *gate) last() uint64 {
	if g.owner == nil {
		return 0
	}
	last := seqOf(g.owner.Last)
	for _, l := range g.lanes {
		if l.holder == g.owner.holder {
			last = max(last, l.Last)
		}
	}
	return last
}

// let returns how many events the gate has let through.
func (g *gate) let() int64 {
	if g.owner == nil {
		return 0
	}
	n := g.owner.Let
	for _, l := range g.lanes {
		if l.holder == g.owner.holder {
			n += l.Let
		}
	}
	return n
}

// events returns the sequences of events that must be in the stream if it has lost nothing: the last one, and the one
// that its lane knew of before. A purge that a publish has overtaken removes the latter.
func (g *gate) events() []uint64 {
	list := []uint64{g.last()}
	for _, l := range g.lanes {
		if g.owner != nil && l.holder == g.owner.holder && l.Last == list[0] {
			list = append(list, l.Prev)
		}
	}
	return list
}

// lacks reports whether a stream has lost one of its messages. Those that are before its first one were trimmed.
func (c *conn) lacks(ctx context.Context, name string, seqs ...uint64) (bool, error) {
	for _, seq := range seqs {
		if seq == 0 {
			continue
		}
		m, err := c.getAny(ctx, name, getRequest{Seq: seq})
		if m != nil {
			continue
		}
		var info streamInfo
		if err == nil {
			info, err = c.info(ctx, name)
		}
		switch {
		case hasCode(err, codeNoStream):
			return true, nil
		case err != nil:
			return false, err
		case seq >= info.State.First || info.State.Last < seq:
			return true, nil
		}
	}
	return false, nil
}

// unsettled returns the spans of a lane's batches that are not settled, those of earlier claims included. It reads the
// lane's messages only.
func (c *conn) unsettled(ctx context.Context, g *gate, lane string) ([]inherited, error) {
	l := g.lanes[lane]
	if l.Claim < 0 {
		return nil, nil
	}
	own, err := c.batches(ctx, g.name, g.subject(lane), l, l.Settled)
	return append(append([]inherited{}, l.Inherited...), own...), err
}

// batches returns the batches of the lane's present claim with numbers after settled.
func (c *conn) batches(ctx context.Context, name, subject string, l laneAt, settled int64) (
	own []inherited, err error,
) {
	if l.Number <= settled {
		return nil, nil
	}
	req := getRequest{Seq: l.Since + 1, NextFor: subject}
	err = c.scan(ctx, name, req, func(m *message) error {
		p, err := parseLane(m)
		if err != nil {
			return err
		}
		if p.holder == l.holder && p.Claim == l.Claim && p.Batch != "" && p.Number > settled {
			own = append(own, inherited{
				span: span{From: m.Seq - p.Stored, To: m.Seq}, Claim: p.Claim, Number: p.Number,
			})
		}
		if m.Seq >= l.seq {
			return errStop
		}
		return nil
	})
	return own, err
}

// ids passes the events of spans to visit, with their entries; "" for those that are only listed as repeated.
func (c *conn) ids(ctx context.Context, name, root string, spans []span, visit func(id uuid.UUID, entry string)) error {
	for _, s := range spans {
		err := c.scan(ctx, name, getRequest{Seq: s.From}, func(m *message) error {
			if m.Seq > s.To {
				return errStop
			}
			if strings.HasPrefix(m.Subject, root+".") {
				var p lanePost
				if err := json.Unmarshal(m.Data, &p); err != nil {
					return err
				}
				for list := p.Repeated; len(list) >= 16; list = list[16:] {
					visit(uuid.UUID(list[:16]), "")
				}
			} else if id, ok := m.event(); ok {
				visit(id, m.entry())
			}
			if m.Seq == s.To {
				return errStop
			}
			return nil
		})
		if err != nil {
			return fmt.Errorf("read unsettled events: %w", err)
		}
	}
	return nil
}

// spans returns the doubt of an owner's message, which is at seq.
func (p *ownerPost) spans(seq uint64) []span {
	spans := p.Doubt
	if p.Recalls > 0 {
		spans = join(append(append([]span{}, spans...), span{From: seq - p.Recalls, To: seq}))
	}
	return spans
}

// ensure makes a stream that does not exist, and gives one that another program has made what the gate needs.
func (s *Sink) ensure(ctx context.Context, c *conn, stream string, g *gate) error {
	if g.root != "" && g.info.cfg.Atomic && g.info.cfg.Direct {
		return nil
	}
	name := StreamName(stream)
	body, step := map[string]any{}, "STREAM.CREATE."
	subjects := []string{}
	if g.info.Config != nil {
		step, subjects = "STREAM.UPDATE.", g.info.cfg.Subjects
		if err := json.Unmarshal(g.info.Config, &body); err != nil {
			return err
		}
	} else {
		body["storage"], body["retention"] = "file", "limits"
		body["num_replicas"] = max(s.o.Replicas, 1)
		body["max_msgs"], body["max_bytes"], body["max_age"] = -1, -1, 0
		subjects = append(subjects, EventsFilter(stream))
	}
	if g.root == "" {
		subjects = append(subjects, newGate(stream)+".*")
	}
	body["name"], body["subjects"], body["allow_atomic"], body["allow_direct"] = name, subjects, true, true
	var made streamInfo
	err := c.call(ctx, step+name, body, &made)
	if hasCode(err, codeNameInUse) { // another process has just made it
		err = nil
	}
	if err != nil {
		return fmt.Errorf("configure the JetStream stream %s with allow_atomic, allow_direct and the subjects %s: %w",
			name, strings.Join(subjects, ", "), err)
	}
	again, err := c.read(ctx, stream)
	if err != nil {
		return err
	}
	if again.root == "" {
		return errors.New("the JetStream stream " + name + " is being made by another process")
	}
	*g = *again
	return nil
}
