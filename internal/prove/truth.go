package prove

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"sync"
	"time"

	"github.com/google/uuid"
)

// ref identifies an event: its aggregate, and its number within the aggregate, from 1.
type ref struct{ aggregate, n uint32 }

// state is the writer's knowledge of an event.
type state byte

// The states of an event. An open event is being written, or its commit got no answer.
const (
	stateNone state = iota
	stateOpen
	stateCommitted
	stateRolledBack
)

// truth is the knowledge of all writers. It is safe for concurrent use.
type truth struct {
	// name is the first part of all ids of this campaign; the rest of an id identifies the event.
	name [8]byte

	mu         sync.Mutex
	aggregates []*aggregate
	// flow are the committed events in the order of their commits, without the leading ones that were read.
	flow      []committed
	committed int
	rolled    int
	unclear   int
}

// aggregate has the events of one aggregate.
type aggregate struct {
	// lock is held by the writer of the aggregate, like the lock in Postgres.
	lock   sync.Mutex
	number uint32
	typ    string
	id     string
	// states are the states of the events, the first at 0. truth.mu guards it.
	states []state
}

// committed is a committed event, with the time at which the writer learned of the commit.
type committed struct {
	ref
	at time.Time
}

func newTruth(seed uint64, at time.Time) *truth {
	t := &truth{}
	// As in a UUIDv7: 48 bits of time; then 12 bits of the seed.
	binary.BigEndian.PutUint64(t.name[:], uint64(at.UnixMilli())<<16|7<<12|seed&0xfff)
	return t
}

// id returns the id of an event.
func (t *truth) id(r ref) uuid.UUID {
	var id uuid.UUID
	copy(id[:8], t.name[:])
	binary.BigEndian.PutUint32(id[8:], 0x80<<24|r.aggregate&0xffffff)
	binary.BigEndian.PutUint32(id[12:], r.n)
	return id
}

// of returns the event that has the id, and whether this campaign wrote it.
func (t *truth) of(id uuid.UUID) (ref, bool) {
	r := ref{binary.BigEndian.Uint32(id[8:]) & 0xffffff, binary.BigEndian.Uint32(id[12:])}
	return r, t.id(r) == id
}

// newAggregate creates an aggregate of a type.
func (t *truth) newAggregate(typ string) *aggregate {
	t.mu.Lock()
	defer t.mu.Unlock()
	n := uint32(len(t.aggregates)) //nolint:gosec // at most 2^24, which ids have room for
	a := &aggregate{number: n, typ: typ, id: fmt.Sprintf("%s-%d", typ, n)}
	t.aggregates = append(t.aggregates, a)
	return a
}

// aggregate returns the aggregate with the number, or nil.
func (t *truth) aggregate(number uint32) *aggregate {
	t.mu.Lock()
	defer t.mu.Unlock()
	if int(number) >= len(t.aggregates) {
		return nil
	}
	return t.aggregates[number]
}

// open adds n open events to an aggregate, whose lock the caller holds, and returns the first.
func (t *truth) open(a *aggregate, n int) ref {
	t.mu.Lock()
	defer t.mu.Unlock()
	first := ref{a.number, uint32(len(a.states)) + 1} //nolint:gosec // at most 2^32 events of one aggregate
	for range n {
		a.states = append(a.states, stateOpen)
	}
	return first
}

// outcome is how a transaction ended.
type outcome int

// The outcomes. unknown means that the commit got no answer.
const (
	unknown outcome = iota
	yes
	no
)

// end records the outcome of n events, beginning with first.
func (t *truth) end(first ref, n int, o outcome) {
	t.mu.Lock()
	defer t.mu.Unlock()
	states := t.aggregates[first.aggregate].states
	now := time.Now()
	for i := range uint32(n) { //nolint:gosec // of one transaction
		r := ref{first.aggregate, first.n + i}
		switch o {
		case yes:
			states[r.n-1] = stateCommitted
			t.flow = append(t.flow, committed{r, now})
			t.committed++
		case no:
			states[r.n-1] = stateRolledBack
			t.rolled++
		case unknown:
			t.unclear++
		}
	}
}

// settle records whether an event whose commit got no answer is in Postgres.
func (t *truth) settle(r ref, there bool) {
	if t.state(r) == stateOpen {
		t.end(r, 1, map[bool]outcome{true: yes, false: no}[there])
	}
}

// state returns the state of an event; stateNone if it does not exist.
func (t *truth) state(r ref) state {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.stateOf(r)
}

// stateOf is state for callers that hold mu.
func (t *truth) stateOf(r ref) state {
	if int(r.aggregate) >= len(t.aggregates) {
		return stateNone
	}
	a := t.aggregates[r.aggregate]
	if r.n == 0 || int(r.n) > len(a.states) {
		return stateNone
	}
	return a.states[r.n-1]
}

// counts returns how many events were committed, were rolled back, or got no answer to their commit.
func (t *truth) counts() (committed, rolled, unclear int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.committed, t.rolled, t.unclear
}

// checksum is part of every payload. It shows whether a payload belongs to another event.
func checksum(r ref, pad string) uint32 {
	var b [8]byte
	binary.BigEndian.PutUint32(b[:4], r.aggregate)
	binary.BigEndian.PutUint32(b[4:], r.n)
	return crc32.Update(crc32.ChecksumIEEE(b[:]), crc32.IEEETable, []byte(pad))
}

// payload returns the payload of an event, in the format of Postgres.
func payload(r ref, pad string) []byte {
	return fmt.Appendf(nil, `{"n": %d, "crc": %d, "pad": "%s"}`, r.n, checksum(r, pad), pad)
}
