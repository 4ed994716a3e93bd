package prove

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"sync"
	"time"

	"github.com/google/uuid"
)

// ref names an event: its aggregate, and its number in there, from 1.
type ref struct{ aggregate, n uint32 }

// state is what its writer knows of an event.
type state byte

// The states of an event. An open one is being written, or its commit was not answered.
const (
	stateNone state = iota
	stateOpen
	stateCommitted
	stateRolledBack
)

// truth is what the writers know. It is safe for concurrent use.
type truth struct {
	// name makes the ids of this campaign's events: an event's id says which event it is.
	name [8]byte

	mu         sync.Mutex
	aggregates []*aggregate
	// flow are the committed events in the order of their commits, without those at its beginning that were seen.
	flow      []committed
	committed int
	rolled    int
	unclear   int
}

// aggregate is one aggregate's events.
type aggregate struct {
	// lock is held by whoever writes to it, as the lock in Postgres is.
	lock   sync.Mutex
	number uint32
	typ    string
	id     string
	// states are those of its events, the first at 0. truth.mu guards it.
	states []state
}

// committed is an event that is committed, and since when that is known.
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

// id is the id of an event.
func (t *truth) id(r ref) uuid.UUID {
	var id uuid.UUID
	copy(id[:8], t.name[:])
	binary.BigEndian.PutUint32(id[8:], 0x80<<24|r.aggregate&0xffffff)
	binary.BigEndian.PutUint32(id[12:], r.n)
	return id
}

// of tells which event of this campaign has the id.
func (t *truth) of(id uuid.UUID) (ref, bool) {
	r := ref{binary.BigEndian.Uint32(id[8:]) & 0xffffff, binary.BigEndian.Uint32(id[12:])}
	return r, t.id(r) == id
}

// newAggregate makes an aggregate of a type.
func (t *truth) newAggregate(typ string) *aggregate {
	t.mu.Lock()
	defer t.mu.Unlock()
	n := uint32(len(t.aggregates)) //nolint:gosec // at most 2^24, which ids have room for
	a := &aggregate{number: n, typ: typ, id: fmt.Sprintf("%s-%d", typ, n)}
	t.aggregates = append(t.aggregates, a)
	return a
}

// aggregate returns the one with the number, nil if there is none.
func (t *truth) aggregate(number uint32) *aggregate {
	t.mu.Lock()
	defer t.mu.Unlock()
	if int(number) >= len(t.aggregates) {
		return nil
	}
	return t.aggregates[number]
}

// open begins n events of an aggregate, whose lock the caller holds, and returns the first.
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

// The outcomes: unknown is one whose commit was not answered.
const (
	unknown outcome = iota
	yes
	no
)

// end says what became of n events from first on.
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

// settle says of an event whose commit was not answered what became of it.
func (t *truth) settle(r ref, there bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	states := t.aggregates[r.aggregate].states
	if states[r.n-1] != stateOpen {
		return
	}
	if there {
		states[r.n-1] = stateCommitted
		t.committed++
	} else {
		states[r.n-1] = stateRolledBack
		t.rolled++
	}
}

// state of an event; stateNone of one that never was.
func (t *truth) state(r ref) state {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.stateOf(r)
}

// stateOf is state for a caller that holds mu.
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

// counts are how many events were committed, rolled back, and whose commit was not answered.
func (t *truth) counts() (committed, rolled, unclear int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.committed, t.rolled, t.unclear
}

// checksum is in every payload, so that content which belongs to another event is noticed.
func checksum(r ref, pad string) uint32 {
	var b [8]byte
	binary.BigEndian.PutUint32(b[:4], r.aggregate)
	binary.BigEndian.PutUint32(b[4:], r.n)
	return crc32.Update(crc32.ChecksumIEEE(b[:]), crc32.IEEETable, []byte(pad))
}

// payload of an event, as Postgres prints it.
func payload(r ref, pad string) []byte {
	return fmt.Appendf(nil, `{"n": %d, "crc": %d, "pad": "%s"}`, r.n, checksum(r, pad), pad)
}
