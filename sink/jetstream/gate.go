package jetstream

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"strings"

	"github.com/google/uuid"
	js "github.com/nats-io/nats.go/jetstream"

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

// laneAt is a lane's message and its sequence.
type laneAt struct {
	lanePost
	seq uint64
}

func parseLane(m *message) (at laneAt, err error) {
	at.seq = m.Seq
	if err = json.Unmarshal(m.Data, &at.lanePost); err == nil && at.Stored > 0 {
		at.Prev, at.Last = at.Last, m.Seq-1
	}
	return at, err
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

// assess returns nil if a gate of theirs belongs to ours, and otherwise the error of the port.
func (r *remote) assess(theirs *holder, ours holder) error {
	switch {
	case theirs == nil || theirs.Source != ours.Source || theirs.Epoch < ours.Epoch:
		return outbox.ErrGap
	case *theirs != ours:
		return &outbox.FencedError{Stream: r.stream, Epoch: theirs.Epoch}
	}
	return nil
}

// rules returns the owner that calls are judged by: one that is adopting fences the others. An owner that adopts has
// the gate only afterwards.
func (p *ownerPost) rules(ours holder) *holder {
	switch {
	case p == nil:
		return nil
	case p.Next == nil:
		return &p.holder
	case *p.Next == ours:
		return nil
	}
	return p.Next
}

// gate is the state of a gate and its stream.
type gate struct {
	remote
	// info is nil if the stream does not exist.
	info *js.StreamInfo
	// owner is nil without a gate; at is its sequence.
	owner *ownerPost
	at    uint64
	lanes map[string]laneAt
}

// rooted returns the state of a stream, and sets root. Without that, it returns ErrGap.
func (r *remote) rooted(ctx context.Context) (*js.StreamInfo, error) {
	info, err := r.state(ctx)
	if err != nil {
		return nil, err
	}
	if r.root = rootOf(info); r.root == "" {
		return nil, outbox.ErrGap
	}
	return info, nil
}

// rootOf returns the subject of a stream's gate, by its configuration; "" without one.
func rootOf(info *js.StreamInfo) string {
	if info == nil {
		return ""
	}
	for _, subject := range info.Config.Subjects {
		if root, ok := strings.CutSuffix(subject, ".*"); ok && strings.HasPrefix(subject, gateRoot) {
			return root
		}
	}
	return ""
}

// read reads a gate and the state of its stream. A stream that does not exist has no gate. Any replica may answer for
// the lanes, so a caller that writes must expect the sequences that it has read.
func (r *remote) read(ctx context.Context) (*gate, error) {
	info, err := r.state(ctx)
	if err != nil {
		return nil, err
	}
	g := &gate{remote: *r, info: info, lanes: map[string]laneAt{}}
	if g.root = rootOf(info); g.root == "" || !info.Config.AllowDirect {
		return g, nil
	}
	for m, err := range g.scan(ctx, getRequest{MultiLast: []string{g.subject("*")}}) {
		switch {
		case err != nil:
		case m.Subject == g.subject(ownerLane):
			g.owner, g.at = new(ownerPost), m.Seq
			err = json.Unmarshal(m.Data, g.owner)
		case m.Subject != g.subject(recallLane):
			g.lanes[strings.TrimPrefix(m.Subject, g.subject(""))], err = parseLane(m)
		}
		if err != nil {
			return nil, fmt.Errorf("read the gate: %w", err)
		}
	}
	return g, nil
}

// own returns the lanes that the gate's owner has written.
func (g *gate) own() map[string]laneAt {
	own := maps.Clone(g.lanes)
	maps.DeleteFunc(own, func(_ string, l laneAt) bool { return g.owner == nil || l.holder != g.owner.holder })
	return own
}

// published returns how many events the gate has let through, and the newest of them.
func (g *gate) published() (let int64, last uint64) {
	if g.owner != nil {
		let, last = g.owner.Let, seqOf(g.owner.Last)
	}
	for _, l := range g.own() {
		let, last = let+l.Let, max(last, l.Last)
	}
	return let, last
}

// lost reports whether the stream lacks its gate, a message of seqs, the last event, or the one that its lane knew of
// before. A purge that a publish has overtaken removes the latter.
func (g *gate) lost(ctx context.Context, seqs ...uint64) (bool, error) {
	if g.owner == nil {
		return true, nil
	}
	_, last := g.published()
	events := []uint64{last}
	for _, l := range g.own() {
		if l.Last == last {
			events = append(events, l.Prev)
		}
	}
	return g.lacks(ctx, append(events, seqs...)...)
}

// lacks reports whether a stream has lost one of its messages. Those that are before its first one were trimmed.
func (r *remote) lacks(ctx context.Context, seqs ...uint64) (bool, error) {
	for _, seq := range seqs {
		if seq == 0 {
			continue
		}
		m, err := r.getAny(ctx, getRequest{Seq: seq})
		if m != nil {
			continue
		}
		var info *js.StreamInfo
		if err == nil {
			info, err = r.state(ctx)
		}
		switch {
		case err != nil:
			return false, err
		case info == nil || seq >= info.State.FirstSeq || info.State.LastSeq < seq:
			return true, nil
		}
	}
	return false, nil
}

// limited returns the setting by which a stream would remove messages that the gate needs; "" without one.
func limited(c *js.StreamConfig) string {
	switch {
	case c.Retention != js.LimitsPolicy:
		return "retention " + strings.ToLower(c.Retention.String())
	case c.MaxAge > 0:
		return "max_age"
	case c.MaxMsgsPerSubject > 0:
		return "max_msgs_per_subject"
	case c.MaxMsgs > 0 && c.Discard != js.DiscardNew:
		return "max_msgs without discard new"
	case c.MaxBytes > 0 && c.Discard != js.DiscardNew:
		return "max_bytes without discard new"
	}
	return ""
}

// ensure makes a stream that does not exist, and gives one that another program has made what the gate needs.
func (s *Sink) ensure(ctx context.Context, g *gate) error {
	cfg := js.StreamConfig{Name: g.name, Subjects: []string{EventsFilter(g.stream)}, AllowAtomicPublish: true}
	if g.info != nil {
		cfg = g.info.Config
	}
	limit := limited(&cfg)
	switch {
	case limit != "":
		return &outbox.StreamError{Stream: g.stream, Err: fmt.Errorf("the JetStream stream %s has %s, which removes "+
			"what the gate needs%sremove the setting: Trim shortens the stream", g.name, limit, outbox.RemedyMark)}
	case g.root != "" && cfg.AllowAtomicPublish && cfg.AllowDirect:
		return nil
	case g.root == "":
		cfg.Subjects = append(cfg.Subjects, gateRoot+g.name+"."+rand.Text()+".*")
	}
	var err error
	if g.info == nil {
		err = s.make(ctx, g.conn, cfg)
	} else {
		var info struct{ Config map[string]any } // the client may not know all settings
		if err = g.call(ctx, "STREAM.INFO."+g.name, struct{}{}, &info); err == nil {
			info.Config["subjects"], info.Config["allow_atomic"], info.Config["allow_direct"] = cfg.Subjects, true, true
			err = g.call(ctx, "STREAM.UPDATE."+g.name, info.Config, &js.StreamInfo{})
		}
	}
	if err != nil {
		return fmt.Errorf("configure the JetStream stream %s with allow_atomic, allow_direct and the subjects %s: %w",
			g.name, strings.Join(cfg.Subjects, ", "), err)
	}
	again, err := g.read(ctx)
	if err != nil {
		return err
	}
	if again.root == "" {
		return errors.New("the JetStream stream " + g.name + " is being made by another process")
	}
	*g = *again
	return nil
}
