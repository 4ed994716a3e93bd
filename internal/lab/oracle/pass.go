package oracle

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"
)

// Breach is a broken promise.
type Breach struct {
	// Promise is the name of the promise: lost, duplicated, phantom, reordered, corrupted, orders, overspent, effects,
	// history, stuck, dishonest, exit.
	Promise string `json:"promise"`
	// Event is the id of the event concerned, if there is one; Subject is its aggregate.
	Event   string    `json:"event,omitempty"`
	Subject string    `json:"subject,omitempty"`
	Stream  string    `json:"stream,omitempty"`
	Entry   string    `json:"entry,omitempty"`
	At      time.Time `json:"at"`
	What    string    `json:"what"`
}

// Entry is one stream entry.
type Entry struct {
	At                          string // its id in the stream
	ID                          uuid.UUID
	Stream, Subject, Type, Data string
	Replay                      bool
}

func ParseEntry(stream string, m redis.XMessage) (Entry, error) {
	get := func(k string) string { s, _ := m.Values[k].(string); return s }
	e := Entry{
		At: m.ID, Stream: stream, Subject: get("subject"), Type: get("type"), Data: get("data"),
		Replay: get("replayed") == "1",
	}
	var err error
	e.ID, err = uuid.Parse(get("id"))
	return e, err
}

// Pass is one reading of all streams of events: it records which events they have, and in which order. It is safe for
// concurrent use.
type Pass struct {
	truth *Truth

	mu sync.Mutex
	of []passed
	// gone is the number of events that Redis has lost and that the relay must restore.
	gone int
	// seen is the number of events in the streams; read counts the entries, including those read again after a loss.
	seen, read int
	// marks are the positions of the aggregates at earlier times. They show which events are too old to be restored.
	marks []passMark
	// Late means that everything is written already. The caller then finds missing events by comparing the result with
	// the truth.
	Late bool
}

// passed records the events of an aggregate that were read.
type passed struct {
	last  uint32
	flags []byte
}

// The flags of an event.
const (
	FlagSeen    = 1 << iota
	FlagGone    // Redis has lost it, and the relay must restore it
	FlagExcused // Redis has lost it, and it is too old to be restored
)

// passMark is a mark: for each aggregate, the last event read (last) and the greatest one read so far (ever).
type passMark struct {
	at         time.Time
	last, ever []uint32
}

func NewPass(t *Truth) *Pass { return &Pass{truth: t} }

// flag returns a pointer to the flags of an event.
func (p *Pass) flag(r Ref) *byte {
	for int(r.Aggregate) >= len(p.of) {
		p.of = append(p.of, passed{})
	}
	a := &p.of[r.Aggregate]
	if short := int(r.N) - len(a.flags); short > 0 {
		a.flags = append(a.flags, make([]byte, short)...)
	}
	return &a.flags[r.N-1]
}

// See records the next entry, and returns the promise that it breaks.
func (p *Pass) See(e Entry) *Breach {
	breaks := func(promise, format string, args ...any) *Breach {
		return &Breach{Event: e.ID.String(), Subject: e.Subject, Promise: promise, What: fmt.Sprintf(format, args...)}
	}
	r, ours := p.truth.Of(e.ID)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.truth.mu.Lock()
	defer p.truth.mu.Unlock()
	switch s := p.truth.stateOf(r); {
	case !ours || s == StateNone:
		return breaks("phantom", "an event that no writer wrote")
	case s == StateRolledBack:
		return breaks("phantom", "an event whose transaction was rolled back")
	}
	if problem := p.truth.mismatch(r, e); problem != "" {
		return breaks("corrupted", "%s", problem)
	}
	f := p.flag(r)
	a := &p.of[r.Aggregate]
	switch {
	case *f&FlagSeen != 0:
		return breaks("duplicated", "an event that is in the stream already")
	case r.N < a.last:
		return breaks("reordered", "event %d of its aggregate is behind event %d", r.N, a.last)
	}
	// The writer of this event knew the outcomes of all earlier ones.
	for n := a.last + 1; n < r.N && !p.Late; n++ {
		before := Ref{r.Aggregate, n}
		if p.truth.stateOf(before) == StateCommitted && *p.flag(before)&(FlagSeen|FlagExcused) == 0 {
			return breaks("reordered", "event %d of its aggregate is there, and event %d, which was committed before, "+
				"is not", r.N, n)
		}
	}
	a.last = r.N
	p.seen++
	p.read++
	if *f&FlagGone != 0 {
		p.gone--
	}
	*f = FlagSeen
	return nil
}

// mismatch describes the error in the content of an entry; it returns "" if there is no error. The caller holds mu.
func (t *Truth) mismatch(r Ref, e Entry) string {
	a := t.aggregates[r.Aggregate]
	var body struct {
		N   uint32
		CRC uint32
		Pad string
	}
	switch err := json.Unmarshal([]byte(e.Data), &body); {
	case err != nil:
		return "its data is no JSON"
	case e.Subject != a.ID || e.Type != a.Type+".changed" || !strings.HasSuffix(e.Stream, a.Type):
		return fmt.Sprintf("it has type %q and subject %q, in stream %q", e.Type, e.Subject, e.Stream)
	case body.N != r.N || body.CRC != checksum(r, body.Pad):
		return "its data is another event's, or was changed"
	}
	return ""
}

// Unsee removes the last entry: Redis has lost it.
func (p *Pass) Unsee(id uuid.UUID) {
	r, ours := p.truth.Of(id)
	if !ours {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	f := p.flag(r)
	if *f&FlagSeen == 0 {
		return
	}
	p.seen--
	p.miss(r, f, p.bound(time.Now()))
	a := &p.of[r.Aggregate]
	for a.last > 0 && a.flags[a.last-1]&FlagSeen == 0 { // the entries of an aggregate are in order
		a.last--
	}
}

// miss records that Redis has lost an event.
func (p *Pass) miss(r Ref, f *byte, old []uint32) {
	*f = FlagExcused
	if int(r.Aggregate) >= len(old) || r.N > old[r.Aggregate] {
		*f = FlagGone
		p.gone++
	}
}

// ForgetType removes every event of a type: its stream no longer exists.
func (p *Pass) ForgetType(typ string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	old := p.bound(time.Now())
	for i := range p.of {
		a := p.truth.Aggregate(uint32(i))
		if a == nil || a.Type != typ {
			continue
		}
		p.of[i].last = 0
		for n := range p.of[i].flags {
			if f := &p.of[i].flags[n]; *f&FlagSeen != 0 {
				p.seen--
				p.miss(Ref{uint32(i), uint32(n) + 1}, f, old)
			}
		}
	}
}

// RestoreSpan is the --restore of the relays: they restore events that Redis loses within this time.
const RestoreSpan = 10 * time.Minute

// ExcusedAfter is the age from which an event that Redis loses need not be restored: --restore counts from the time at
// which a relay detects the loss. ExcusedForGood is the same for an event that was restored before.
const (
	ExcusedAfter   = RestoreSpan - 2*time.Minute
	ExcusedForGood = 2*RestoreSpan - 2*time.Minute
)

// markEvery is the interval of the marks.
const markEvery = 10 * time.Second

// Mark adds a mark if the last one is old enough.
func (p *Pass) Mark(now time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if n := len(p.marks); n > 0 && now.Sub(p.marks[n-1].at) < markEvery {
		return
	}
	m := passMark{at: now, last: make([]uint32, len(p.of)), ever: make([]uint32, len(p.of))}
	for i := range p.of {
		m.last[i], m.ever[i] = p.of[i].last, uint32(len(p.of[i].flags)) //nolint:gosec // as many as there are numbers
	}
	p.marks = append(p.marks, m)
	for len(p.marks) > 1 && now.Sub(p.marks[1].at) > ExcusedForGood {
		p.marks = p.marks[1:]
	}
}

// bound returns, for each aggregate, the last event that need not be restored if it is lost at now.
func (p *Pass) bound(now time.Time) (old []uint32) {
	for _, m := range slices.Backward(p.marks) {
		if age := now.Sub(m.at); age > ExcusedForGood {
			for i := range min(len(old), len(m.ever)) {
				old[i] = max(old[i], m.ever[i])
			}
			return old
		} else if age > ExcusedAfter && old == nil {
			old = slices.Clone(m.last)
		}
	}
	return old
}

// Is reports whether an event has a flag.
func (p *Pass) Is(r Ref, flag byte) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return *p.flag(r)&flag != 0
}

// Behind returns the time of the oldest committed event that was never read, or zero; and the number of waiting events,
// including those that Redis has lost.
func (p *Pass) Behind() (since time.Time, waiting int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	t := p.truth
	t.mu.Lock()
	defer t.mu.Unlock()
	i := 0
	for i < len(t.flow) && *p.flag(t.flow[i].Ref) != 0 {
		i++
	}
	t.flow = t.flow[i:]
	waiting = p.gone
	for _, c := range t.flow {
		if *p.flag(c.Ref) == 0 {
			waiting++
		}
	}
	if len(t.flow) > 0 {
		since = t.flow[0].at
	}
	return since, waiting
}

// Counts returns the number of events in the streams, that of entries read, and that of lost events which are not
// restored yet.
func (p *Pass) Counts() (seen, read, gone int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.seen, p.read, p.gone
}
