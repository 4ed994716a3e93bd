package jetstream

import (
	"encoding/json"

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
