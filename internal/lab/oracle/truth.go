package oracle

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"slices"
	"sync"
	"time"

	"github.com/google/uuid"
)

// Ref identifies an event: its aggregate, and its number within the aggregate, from 1.
type Ref struct{ Aggregate, N uint32 }

// State is the writer's knowledge of an event.
type State byte

// The states of an event. An open event is being written, or its commit got no answer.
const (
	StateNone State = iota
	StateOpen
	StateCommitted
	StateRolledBack
)

// Truth is the knowledge of all writers. It is safe for concurrent use.
type Truth struct {
	// name is the first part of all ids of this truth; the rest of an id identifies the event.
	name [8]byte

	mu         sync.Mutex
	aggregates []*Aggregate
	// flow are the committed events in the order of their commits, without the leading ones that were read.
	flow      []committed
	committed int
	rolled    int
	unclear   int
}

// Aggregate has the events of one aggregate.
type Aggregate struct {
	// The writer of the aggregate holds the lock, like that in Postgres.
	sync.Mutex
	Number   uint32
	Type, ID string
	// states are the states of the events, the first at 0. truth.mu guards it.
	states []State
}

// committed is a committed event, with the time at which the writer learned of the commit.
type committed struct {
	Ref
	at time.Time
}

// New returns a truth without events. The time and 12 bits of the seed distinguish its ids from those of others.
func New(seed uint64, at time.Time) *Truth {
	t := &Truth{}
	// As in a UUIDv7: 48 bits of time; then 12 bits of the seed.
	binary.BigEndian.PutUint64(t.name[:], uint64(at.UnixMilli())<<16|7<<12|seed&0xfff)
	return t
}

// ID returns the id of an event.
func (t *Truth) ID(r Ref) uuid.UUID {
	var id uuid.UUID
	copy(id[:8], t.name[:])
	binary.BigEndian.PutUint32(id[8:], 0x80<<24|r.Aggregate&0xffffff)
	binary.BigEndian.PutUint32(id[12:], r.N)
	return id
}

// Of returns the event that has the id, and whether it is of this truth.
func (t *Truth) Of(id uuid.UUID) (Ref, bool) {
	r := Ref{binary.BigEndian.Uint32(id[8:]) & 0xffffff, binary.BigEndian.Uint32(id[12:])}
	return r, t.ID(r) == id
}

// NewAggregate creates an aggregate of a type. Its name begins with the tag.
func (t *Truth) NewAggregate(tag, typ string) *Aggregate {
	t.mu.Lock()
	defer t.mu.Unlock()
	n := uint32(len(t.aggregates)) //nolint:gosec // at most 2^24, which ids have room for
	a := &Aggregate{Number: n, Type: typ, ID: fmt.Sprintf("%s%s-%d", tag, typ, n)}
	t.aggregates = append(t.aggregates, a)
	return a
}

// NewAggregates creates n aggregates of each type.
func (t *Truth) NewAggregates(tag string, n int, types []string) map[string][]*Aggregate {
	list := map[string][]*Aggregate{}
	for _, typ := range types {
		for range n {
			list[typ] = append(list[typ], t.NewAggregate(tag, typ))
		}
	}
	return list
}

// Aggregate returns the aggregate with the number, or nil.
func (t *Truth) Aggregate(number uint32) *Aggregate {
	t.mu.Lock()
	defer t.mu.Unlock()
	if int(number) >= len(t.aggregates) {
		return nil
	}
	return t.aggregates[number]
}

// Open adds n open events to an aggregate, whose lock the caller holds, and returns the first.
func (t *Truth) Open(a *Aggregate, n int) Ref {
	t.mu.Lock()
	defer t.mu.Unlock()
	first := Ref{a.Number, uint32(len(a.states)) + 1} //nolint:gosec // at most 2^32 events of one aggregate
	for range n {
		a.states = append(a.states, StateOpen)
	}
	return first
}

// Outcome is how a transaction ended.
type Outcome int

// The outcomes. Unknown means that the commit got no answer.
const (
	Unknown Outcome = iota
	Yes
	No
)

// End records the outcome of n events, beginning with first.
func (t *Truth) End(first Ref, n int, o Outcome) {
	t.mu.Lock()
	defer t.mu.Unlock()
	states := t.aggregates[first.Aggregate].states
	now := time.Now()
	for i := range uint32(n) { //nolint:gosec // of one transaction
		r := Ref{first.Aggregate, first.N + i}
		switch o {
		case Yes:
			states[r.N-1] = StateCommitted
			t.flow = append(t.flow, committed{r, now})
			t.committed++
		case No:
			states[r.N-1] = StateRolledBack
			t.rolled++
		case Unknown:
			t.unclear++
		}
	}
}

// State returns the state of an event; StateNone if it does not exist.
func (t *Truth) State(r Ref) State {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.stateOf(r)
}

// stateOf is state for callers that hold mu.
func (t *Truth) stateOf(r Ref) State {
	if int(r.Aggregate) >= len(t.aggregates) {
		return StateNone
	}
	a := t.aggregates[r.Aggregate]
	if r.N == 0 || int(r.N) > len(a.states) {
		return StateNone
	}
	return a.states[r.N-1]
}

// Counts returns how many events were committed, were rolled back, or got no answer to their commit.
func (t *Truth) Counts() (committed, rolled, unclear int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.committed, t.rolled, t.unclear
}

// checksum is part of every payload. It shows whether a payload belongs to another event.
func checksum(r Ref, pad string) uint32 {
	var b [8]byte
	binary.BigEndian.PutUint32(b[:4], r.Aggregate)
	binary.BigEndian.PutUint32(b[4:], r.N)
	return crc32.Update(crc32.ChecksumIEEE(b[:]), crc32.IEEETable, []byte(pad))
}

// Payload returns the payload of an event, in the format of Postgres.
func Payload(r Ref, pad string) []byte {
	return fmt.Appendf(nil, `{"n": %d, "crc": %d, "pad": "%s"}`, r.N, checksum(r, pad), pad)
}

// Each calls do for every event. do may call methods of truth.
func (t *Truth) Each(do func(r Ref, s State)) {
	t.mu.Lock()
	list := t.aggregates
	t.mu.Unlock()
	for _, a := range list {
		t.mu.Lock()
		states := slices.Clone(a.states)
		t.mu.Unlock()
		for i, s := range states {
			do(Ref{a.Number, uint32(i) + 1}, s)
		}
	}
}

// String describes a state in words.
func (s State) String() string {
	return map[State]string{
		StateNone: "never written", StateOpen: "its commit was not answered", StateCommitted: "committed",
		StateRolledBack: "rolled back",
	}[s]
}
