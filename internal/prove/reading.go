package prove

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"

	"posthaste/internal/pause"
)

// breach is a broken promise.
type breach struct {
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

// entry is one stream entry.
type entry struct {
	at      string // its id in the stream
	id      uuid.UUID
	stream  string
	subject string
	typ     string
	data    string
	replay  bool
}

func parseEntry(stream string, m redis.XMessage) (entry, error) {
	get := func(k string) string { s, _ := m.Values[k].(string); return s }
	e := entry{
		at: m.ID, stream: stream, subject: get("subject"), typ: get("type"), data: get("data"),
		replay: get("replayed") == "1",
	}
	var err error
	e.id, err = uuid.Parse(get("id"))
	return e, err
}

// streams reads and changes the streams of the sink.
type streams interface {
	// Range returns up to n entries from an id on; "-" is the first one.
	Range(ctx context.Context, stream, from string, n int64) ([]redis.XMessage, error)
	// Newest returns up to n entries before an id, the newest first; "+" is the last one.
	Newest(ctx context.Context, stream, to string, n int64) ([]redis.XMessage, error)
	// Remove deletes an entry, Add adds a copy of one.
	Remove(ctx context.Context, stream, id string) error
	Add(ctx context.Context, stream string, m redis.XMessage) error
}

// redisStreams are those of Redis.
type redisStreams struct{ client *redis.Client }

// Range implements streams.
func (r redisStreams) Range(ctx context.Context, stream, from string, n int64) ([]redis.XMessage, error) {
	return r.client.XRangeN(ctx, stream, from, "+", n).Result()
}

// Newest implements streams.
func (r redisStreams) Newest(ctx context.Context, stream, to string, n int64) ([]redis.XMessage, error) {
	return r.client.XRevRangeN(ctx, stream, to, "-", n).Result()
}

// Remove implements streams.
func (r redisStreams) Remove(ctx context.Context, stream, id string) error {
	return r.client.XDel(ctx, stream, id).Err()
}

// Add implements streams.
func (r redisStreams) Add(ctx context.Context, stream string, m redis.XMessage) error {
	return r.client.XAdd(ctx, &redis.XAddArgs{Stream: stream, Values: m.Values}).Err()
}

// book records the entries read from a stream.
type book interface {
	// see records the next entry, and returns the promise that it breaks.
	see(e entry) *breach
	// unsee removes the last entry: Redis has lost it.
	unsee(id uuid.UUID)
	// forget removes all entries.
	forget()
}

// sight is an entry that was read.
type sight struct {
	at string
	id uuid.UUID
}

// sightsMost bounds the entries that a reader keeps. If Redis loses more, the reader reads the whole stream again.
const sightsMost = 200_000

// reader reads a stream continuously. It always reads its last entry again, and so detects that Redis has lost entries.
type reader struct {
	stream  string
	book    book
	streams streams
	broken  func(*breach)
	// forgot is called when Redis has lost entries.
	forgot func()
	// mayForget reports whether a fault may have made Redis lose data.
	mayForget func() bool

	mu     sync.Mutex
	recent []sight
}

// run reads until ctx ends.
func (r *reader) run(ctx context.Context) {
	for ctx.Err() == nil {
		n, err := r.read(ctx)
		switch {
		case err != nil:
			pause.For(ctx, 100*time.Millisecond)
		case n == 0:
			pause.For(ctx, 25*time.Millisecond)
		}
	}
}

// page is the number of entries read at once. It is small because some entries have a megabyte.
const page = 200

// read reads the next entries and returns their number.
func (r *reader) read(ctx context.Context) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	from := "-"
	if n := len(r.recent); n > 0 {
		from = r.recent[n-1].at
	}
	list, err := r.streams.Range(ctx, r.stream, from, page)
	if err != nil {
		return 0, err
	}
	if n := len(r.recent); n > 0 {
		if len(list) == 0 || !r.recent[n-1].is(r.stream, list[0]) {
			return 0, r.goBack(ctx)
		}
		list = list[1:]
	}
	for _, m := range list {
		r.take(m)
	}
	if over := len(r.recent) - sightsMost; over > sightsMost/4 {
		r.recent = append(r.recent[:0:0], r.recent[over:]...)
	}
	return len(list), nil
}

// is reports whether the message is the entry that was read before.
func (s sight) is(stream string, m redis.XMessage) bool {
	e, err := parseEntry(stream, m)
	return err == nil && e.at == s.at && e.id == s.id
}

func (r *reader) take(m redis.XMessage) {
	e, err := parseEntry(r.stream, m)
	if err != nil {
		r.broken(&breach{
			Promise: "phantom", Stream: r.stream, Entry: m.ID, At: time.Now(),
			What: "an entry without an event's id",
		})
		return
	}
	if !e.replay {
		if b := r.book.see(e); b != nil {
			b.Stream, b.Entry, b.At = r.stream, m.ID, time.Now()
			r.broken(b)
		}
	}
	r.recent = append(r.recent, sight{at: e.at, id: e.id})
}

// goBack finds the last entry that still exists and removes all later ones. Redis loses the newest entries of a stream,
// or all of them.
func (r *reader) goBack(ctx context.Context) error {
	n := len(r.recent)
	low, high := 0, n // the first low entries exist; those from high on do not
	for low < high {
		mid := (low + high) / 2
		list, err := r.streams.Range(ctx, r.stream, r.recent[mid].at, 1)
		if err != nil {
			return err
		}
		if len(list) == 1 && r.recent[mid].is(r.stream, list[0]) {
			low = mid + 1
		} else {
			high = mid
		}
	}
	if !r.mayForget() {
		gone := r.recent[low]
		r.broken(&breach{
			Promise: "lost", Event: gone.id.String(), Stream: r.stream, Entry: gone.at, At: time.Now(),
			What: fmt.Sprintf("%d entries have left the stream, and nothing was done to the server that explains it",
				n-low),
		})
		return nil
	}
	for i := n - 1; i >= low; i-- {
		r.book.unsee(r.recent[i].id)
	}
	r.recent = r.recent[:low]
	if low == 0 { // older entries are gone, too
		r.book.forget()
	}
	r.forgot()
	return nil
}

// pass is one reading of all streams of events: it records which events they have, and in which order. It is safe for
// concurrent use.
type pass struct {
	truth *truth

	mu sync.Mutex
	of []passed
	// gone is the number of events that Redis has lost and that the relay must restore.
	gone int
	// seen is the number of events in the streams; read counts the entries, including those read again after a loss.
	seen, read int
	// marks are the positions of the aggregates at earlier times. They show which events are too old to be restored.
	marks []passMark
	// late means that everything is written already. The caller then finds missing events by comparing the result with
	// the truth.
	late bool
}

// passed records the events of an aggregate that were read.
type passed struct {
	last  uint32
	flags []byte
}

// The flags of an event.
const (
	flagSeen    = 1 << iota
	flagGone    // Redis has lost it, and the relay must restore it
	flagExcused // Redis has lost it, and it is too old to be restored
)

// passMark is a mark: for each aggregate, the last event read (last) and the greatest one read so far (ever).
type passMark struct {
	at         time.Time
	last, ever []uint32
}

func newPass(t *truth) *pass { return &pass{truth: t} }

// flag returns a pointer to the flags of an event.
func (p *pass) flag(r ref) *byte {
	for int(r.aggregate) >= len(p.of) {
		p.of = append(p.of, passed{})
	}
	a := &p.of[r.aggregate]
	if short := int(r.n) - len(a.flags); short > 0 {
		a.flags = append(a.flags, make([]byte, short)...)
	}
	return &a.flags[r.n-1]
}

// see implements book.
func (p *pass) see(e entry) *breach {
	breaks := func(promise, format string, args ...any) *breach {
		return &breach{
			Event: e.id.String(), Subject: e.subject, Promise: promise, What: fmt.Sprintf(format, args...),
		}
	}
	r, ours := p.truth.of(e.id)
	if !ours {
		return breaks("phantom", "an event that no writer wrote")
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.truth.mu.Lock()
	defer p.truth.mu.Unlock()
	switch p.truth.stateOf(r) {
	case stateNone:
		return breaks("phantom", "an event that no writer wrote")
	case stateRolledBack:
		return breaks("phantom", "an event whose transaction was rolled back")
	case stateOpen, stateCommitted:
	}
	if problem := p.truth.mismatch(r, e); problem != "" {
		return breaks("corrupted", "%s", problem)
	}
	f := p.flag(r)
	a := &p.of[r.aggregate]
	switch {
	case *f&flagSeen != 0:
		return breaks("duplicated", "an event that is in the stream already")
	case r.n < a.last:
		return breaks("reordered", "event %d of its aggregate is behind event %d", r.n, a.last)
	}
	// The writer of this event knew the outcomes of all earlier ones.
	for n := a.last + 1; n < r.n && !p.late; n++ {
		before := ref{r.aggregate, n}
		if p.truth.stateOf(before) == stateCommitted && *p.flag(before)&(flagSeen|flagExcused) == 0 {
			return breaks("reordered", "event %d of its aggregate is there, and event %d, which was committed before, "+
				"is not", r.n, n)
		}
	}
	a.last = r.n
	p.seen++
	p.read++
	if *f&flagGone != 0 {
		p.gone--
	}
	*f = flagSeen
	return nil
}

// mismatch describes the error in the content of an entry; it returns "" if there is no error. The caller holds mu.
func (t *truth) mismatch(r ref, e entry) string {
	a := t.aggregates[r.aggregate]
	var body struct {
		N   uint32
		CRC uint32
		Pad string
	}
	switch err := json.Unmarshal([]byte(e.data), &body); {
	case err != nil:
		return "its data is no JSON"
	case e.subject != a.id || e.typ != a.typ+".changed" || !strings.HasSuffix(e.stream, a.typ):
		return fmt.Sprintf("it has type %q and subject %q, in stream %q", e.typ, e.subject, e.stream)
	case body.N != r.n || body.CRC != checksum(r, body.Pad):
		return "its data is another event's, or was changed"
	}
	return ""
}

// unsee implements book.
func (p *pass) unsee(id uuid.UUID) {
	r, ours := p.truth.of(id)
	if !ours {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	f := p.flag(r)
	if *f&flagSeen == 0 {
		return
	}
	p.seen--
	p.miss(r, f, p.bound(time.Now()))
	a := &p.of[r.aggregate]
	for a.last > 0 && a.flags[a.last-1]&flagSeen == 0 { // the entries of an aggregate are in order
		a.last--
	}
}

// miss records that Redis has lost an event.
func (p *pass) miss(r ref, f *byte, old []uint32) {
	*f = flagExcused
	if int(r.aggregate) >= len(old) || r.n > old[r.aggregate] {
		*f = flagGone
		p.gone++
	}
}

// forgetType removes every event of a type: its stream no longer exists.
func (p *pass) forgetType(typ string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	old := p.bound(time.Now())
	for i := range p.of {
		a := p.truth.aggregate(uint32(i))
		if a == nil || a.typ != typ {
			continue
		}
		p.of[i].last = 0
		for n := range p.of[i].flags {
			if f := &p.of[i].flags[n]; *f&flagSeen != 0 {
				p.seen--
				p.miss(ref{uint32(i), uint32(n) + 1}, f, old)
			}
		}
	}
}

// typed is the book of one stream, whose events have one type.
type typed struct {
	*pass
	typ string
}

// forget implements book.
func (t typed) forget() { t.forgetType(t.typ) }

// excusedAfter is the age from which an event that Redis loses need not be restored: --restore counts from the time at
// which a relay detects the loss. excusedForGood is the same for an event that was restored before.
const (
	excusedAfter   = restoreSpan - 2*time.Minute
	excusedForGood = 2*restoreSpan - 2*time.Minute
)

// markEvery is the interval of the marks.
const markEvery = 10 * time.Second

// mark adds a mark if the last one is old enough.
func (p *pass) mark(now time.Time) {
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
	for len(p.marks) > 1 && now.Sub(p.marks[1].at) > excusedForGood {
		p.marks = p.marks[1:]
	}
}

// bound returns, for each aggregate, the last event that need not be restored if it is lost at now.
func (p *pass) bound(now time.Time) (old []uint32) {
	for _, m := range slices.Backward(p.marks) {
		if age := now.Sub(m.at); age > excusedForGood {
			for i := range min(len(old), len(m.ever)) {
				old[i] = max(old[i], m.ever[i])
			}
			return old
		} else if age > excusedAfter && old == nil {
			old = slices.Clone(m.last)
		}
	}
	return old
}

// is reports whether an event has a flag.
func (p *pass) is(r ref, flag byte) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return *p.flag(r)&flag != 0
}

// behind returns the time of the oldest committed event that was never read, or zero; and the number of waiting events,
// including those that Redis has lost.
func (p *pass) behind() (since time.Time, waiting int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	t := p.truth
	t.mu.Lock()
	defer t.mu.Unlock()
	i := 0
	for i < len(t.flow) && *p.flag(t.flow[i].ref) != 0 {
		i++
	}
	t.flow = t.flow[i:]
	waiting = p.gone
	for _, c := range t.flow {
		if *p.flag(c.ref) == 0 {
			waiting++
		}
	}
	if len(t.flow) > 0 {
		since = t.flow[0].at
	}
	return since, waiting
}

// counts returns the number of events in the streams, that of entries read, and that of lost events which are not
// restored yet.
func (p *pass) counts() (seen, read, gone int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.seen, p.read, p.gone
}
