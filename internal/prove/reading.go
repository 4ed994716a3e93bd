package prove

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"

	"posthaste/internal/pause"
)

// breach is a broken promise.
type breach struct {
	// Promise is which: lost, duplicated, phantom, reordered, corrupted, orders, overspent, effects, history, stuck,
	// dishonest, exit.
	Promise string `json:"promise"`
	// Event is the id of the event concerned, if it is one; Subject its aggregate.
	Event   string    `json:"event,omitempty"`
	Subject string    `json:"subject,omitempty"`
	Stream  string    `json:"stream,omitempty"`
	Entry   string    `json:"entry,omitempty"`
	At      time.Time `json:"at"`
	What    string    `json:"what"`
}

// entryID is a stream entry's id in comparable form.
type entryID struct{ ms, seq uint64 }

func parseEntryID(s string) entryID {
	ms, seq, _ := strings.Cut(s, "-")
	var id entryID
	id.ms, _ = strconv.ParseUint(ms, 10, 64) // Redis wrote it
	id.seq, _ = strconv.ParseUint(seq, 10, 64)
	return id
}

func (e entryID) String() string { return fmt.Sprintf("%d-%d", e.ms, e.seq) }

// entry is one stream entry.
type entry struct {
	at      entryID
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
		at: parseEntryID(m.ID), stream: stream, subject: get("subject"), typ: get("type"), data: get("data"),
		replay: get("replayed") == "1",
	}
	var err error
	e.id, err = uuid.Parse(get("id"))
	return e, err
}

// book is what is known of the entries of a stream that were read.
type book interface {
	// see takes the next entry. It returns what unsee needs, or the promise that it breaks.
	see(e entry) (undo uint32, b *breach)
	// unsee takes back an entry that is not in the stream any more: Redis has forgotten it.
	unsee(s sight)
	// forget takes back everything.
	forget()
}

// sight is an entry that was read.
type sight struct {
	at   entryID
	id   uuid.UUID
	undo uint32
}

// sightsMost bounds how far back a reader remembers: when Redis forgets more, it reads everything again.
const sightsMost = 200_000

// reader reads a stream all the time, and notices when Redis has gone back: it always reads its last entry again.
type reader struct {
	stream string
	book   book
	client *redis.Client
	broken func(*breach)
	// forgot is told how many entries Redis has forgotten; -1: more than the reader remembers.
	forgot func(stream string, entries int)
	// mayForget tells whether anything was done to Redis that may make it forget.
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

// page is how many entries are read at once: some have a megabyte.
const page = 200

// read takes the next entries, and returns how many.
func (r *reader) read(ctx context.Context) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	from := "-"
	if n := len(r.recent); n > 0 {
		from = r.recent[n-1].at.String()
	}
	list, err := r.client.XRangeN(ctx, r.stream, from, "+", page).Result()
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

// is tells whether the message is what was seen.
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
	s := sight{at: e.at, id: e.id}
	if !e.replay {
		var b *breach
		if s.undo, b = r.book.see(e); b != nil {
			b.Stream, b.Entry, b.At = r.stream, m.ID, time.Now()
			r.broken(b)
		}
	}
	r.recent = append(r.recent, s)
}

// goBack finds the last entry that is still there, and forgets what was behind it. What Redis loses is the end of what
// it had, or everything.
func (r *reader) goBack(ctx context.Context) error {
	n := len(r.recent)
	low, high := 0, n // the first low are there, from high on they are not
	for low < high {
		mid := (low + high) / 2
		list, err := r.client.XRangeN(ctx, r.stream, r.recent[mid].at.String(), r.recent[mid].at.String(), 1).Result()
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
			Promise: "lost", Event: gone.id.String(), Stream: r.stream, Entry: gone.at.String(), At: time.Now(),
			What: fmt.Sprintf("%d entries have left the stream, and nothing was done to Redis that explains it", n-low),
		})
		return nil
	}
	for i := n - 1; i >= low; i-- {
		r.book.unsee(r.recent[i])
	}
	r.recent = r.recent[:low]
	if low > 0 {
		r.forgot(r.stream, n-low)
		return nil
	}
	r.book.forget()
	r.forgot(r.stream, -1)
	return nil
}

// pass is one reading of the streams of events: which are there, in which order. It is safe for concurrent use.
type pass struct {
	truth *truth

	mu sync.Mutex
	of []passed
	// gone is how many events Redis has forgotten, and which have to come back.
	gone int
	// seen is how many events are there, read how many entries were taken: what is forgotten is taken again.
	seen, read int
	// marks are how far each aggregate was at a time, for what is older than what has to come back.
	marks []passMark
	// late: everything is written already, so what is missing is found by whoever looks at what was seen in the end.
	late bool
}

// passed is what was seen of an aggregate.
type passed struct {
	last  uint32
	flags []byte
}

// The flags of an event.
const (
	flagSeen    = 1 << iota
	flagGone    // Redis has forgotten it, and it has to come back
	flagExcused // Redis has forgotten it, and it is too old to have to come back
)

// passMark is how far each aggregate was, and how far it had ever been.
type passMark struct {
	at         time.Time
	last, ever []uint32
}

func newPass(t *truth) *pass { return &pass{truth: t} }

// flag returns where the flags of an event are.
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
func (p *pass) see(e entry) (uint32, *breach) {
	b := &breach{Event: e.id.String(), Subject: e.subject}
	r, ours := p.truth.of(e.id)
	if !ours {
		b.Promise, b.What = "phantom", "an event that nobody has written"
		return 0, b
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.truth.mu.Lock()
	defer p.truth.mu.Unlock()
	switch p.truth.stateOf(r) {
	case stateNone:
		b.Promise, b.What = "phantom", "an event that nobody has written"
		return 0, b
	case stateRolledBack:
		b.Promise, b.What = "phantom", "an event whose transaction was rolled back"
		return 0, b
	case stateOpen, stateCommitted:
	}
	if problem := p.truth.mismatch(r, e); problem != "" {
		b.Promise, b.What = "corrupted", problem
		return 0, b
	}
	f := p.flag(r)
	a := &p.of[r.aggregate]
	if *f&flagSeen != 0 {
		b.Promise, b.What = "duplicated", "an event that is in the stream already"
		return 0, b
	}
	undo := a.last
	if r.n < a.last {
		b.Promise, b.What = "reordered", fmt.Sprintf("event %d of its aggregate is behind event %d", r.n, a.last)
		return 0, b
	}
	// Whoever wrote this one knew what had become of those before.
	for n := a.last + 1; n < r.n && !p.late; n++ {
		before := ref{r.aggregate, n}
		if p.truth.stateOf(before) == stateCommitted && *p.flag(before)&(flagSeen|flagExcused) == 0 {
			b.Promise = "reordered"
			b.What = fmt.Sprintf("event %d of its aggregate is there, and event %d, which was committed before, is not",
				r.n, n)
			return 0, b
		}
	}
	a.last = r.n
	p.seen++
	p.read++
	if *f&flagGone != 0 {
		p.gone--
	}
	*f = flagSeen
	return undo, nil
}

// mismatch says what is wrong with the content of an entry; "" is nothing. The caller holds mu.
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
func (p *pass) unsee(s sight) {
	r, ours := p.truth.of(s.id)
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
	p.of[r.aggregate].last = s.undo
	p.miss(r, f, p.bound(time.Now()))
}

// miss notes that an event is gone.
func (p *pass) miss(r ref, f *byte, old []uint32) {
	*f = flagExcused
	if int(r.aggregate) >= len(old) || r.n > old[r.aggregate] {
		*f = flagGone
		p.gone++
	}
}

// forgetType takes back every event of a type: its stream is gone.
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

// typed is the book of one stream, which has the events of one type.
type typed struct {
	*pass
	typ string
}

// forget implements book.
func (t typed) forget() { t.forgetType(t.typ) }

// excusedAfter is from what age on an event that Redis forgets may stay away: --restore counts from when a relay
// notices. excusedForGood is the same for one that has come back before.
const (
	excusedAfter   = restoreSpan - 2*time.Minute
	excusedForGood = 2*restoreSpan - 2*time.Minute
)

// markEvery is how often a pass notes how far it is.
const markEvery = 10 * time.Second

// mark notes how far it is, if it is time.
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

// bound returns how far each aggregate was when what was lost at now need not come back.
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

// excused tells whether an event may be missing.
func (p *pass) excused(r ref) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return *p.flag(r)&flagExcused != 0
}

// behind tells since when the oldest event waits that is committed and was never seen; zero if none does. It counts
// what waits, among it what Redis has forgotten.
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

// lacks tells whether something that Redis has forgotten has not come back yet.
func (p *pass) lacks() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.gone > 0
}

// reads is how many entries were taken.
func (p *pass) reads() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.read
}
