package relay

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"

	"github.com/google/uuid"

	"posthaste/outbox"
)

// redis is the Redis of a world: streams and their gates, as the scripts in sink/lua keep them. It is guarded by
// world.mu.
type redis struct {
	// anonymous servers have no name.
	anonymous bool
	// noted are entries that Postgres knows, by stream.
	noted map[string]string
	// restored are the streams with restored events that Confirm has not covered. goesAt is a stream whose server goes
	// down with its next Tail.
	restored map[string]bool
	goesAt   string

	// alive is another one's sign of life.
	alive     *outbox.Sign
	w         *world
	run       int // which process it is
	ids       int64
	streams   map[string]*memStream
	gates     map[string]*gate
	wrongType map[string]bool // keys of another type
	away      map[string]bool // streams whose server is down
	// frozen are streams whose server does not answer, each until its channel is closed.
	frozen map[string]chan struct{}
	down   bool
	// neighbours are the gates of another database that shares the streams.
	neighbours map[string]*gate
	// groups are those that streams have, by name.
	groups map[string][]string
	// readers has, by stream, up to which entry a consumer group has acknowledged it; nil without one.
	readers map[string]int64
	// handled has what that has seen of aggregates, and of events.
	handled map[string]int64
	seen    map[uuid.UUID]bool
	// poisonous tells which events are refused for their own sake.
	poisonous func(e *outbox.Record) bool
}

type memStream struct {
	entries []entry
	last    int64
}

type entry struct {
	id    int64
	epoch int64
	// foreign is set in an entry of the neighbour.
	foreign bool
	outbox.Record
}

type gate struct {
	owner   outbox.Owner
	lanes   map[int]gateLane
	batches map[batchKey]gateBatch
	doubt   map[uuid.UUID]doubtful
	n, last int64
	// gone is set when the neighbour has seen that the stream lacks what this gate has let through; since is the last
	// entry that it had then.
	gone  bool
	since int64
}

type gateLane struct {
	claim         int64
	nonce         outbox.Nonce
	last, settled int64
}

type batchKey struct {
	part   int
	number int64
}

type gateBatch struct {
	complete bool
	items    []batchItem
}

type batchItem struct {
	id        uuid.UUID
	entry     int64
	inherited bool // it is an earlier owner's
}

// doubtful is an event in doubt, and the batch of an earlier claim that it is of; the zero batch: an earlier owner's.
type doubtful struct {
	entry, claim int64
	batch        batchKey
}

func newRedis(w *world) *redis {
	return &redis{
		w: w, run: 1, streams: map[string]*memStream{}, gates: map[string]*gate{}, wrongType: map[string]bool{},
		away: map[string]bool{}, restored: map[string]bool{}, frozen: map[string]chan struct{}{},
		neighbours: map[string]*gate{},
		groups:     map[string][]string{"outbox.order": {"group"}},
		poisonous:  func(e *outbox.Record) bool { return e.Type == "poison" },
	}
}

var (
	errDown      = errors.New("redis is down")
	errPoison    = errors.New("too large")
	errWrongType = errors.New("the key of the stream holds a string")
)

// judge tells whether the gate is o's.
func (r *redis) judge(name string, o outbox.Owner) (*gate, error) {
	g := r.gates[name]
	switch {
	case r.away[name]:
		return nil, &outbox.StreamError{Stream: name, Err: errDown}
	case g == nil, g.owner.Source != o.Source:
		return nil, outbox.ErrGap
	case g.owner.Epoch > o.Epoch, g.owner.Epoch == o.Epoch && g.owner.Nonce != o.Nonce:
		return nil, &outbox.FencedError{Stream: name, Epoch: g.owner.Epoch}
	case g.owner.Epoch < o.Epoch:
		return nil, outbox.ErrGap
	}
	return g, nil
}

// foreign is the error of a stream that is another database's.
func (r *redis) foreign(name string, source uuid.UUID) error {
	g := r.gates[name]
	if g == nil || g.owner.Source == source {
		return nil
	}
	return &outbox.ForeignError{
		Stream: name, Source: g.owner.Source.String(), Reason: "is another database's", Remedy: "posthaste adopt",
	}
}

// forgot tells whether the stream lacks what its gate has let through.
func (r *redis) forgot(name string) bool {
	g := r.gates[name]
	return g != nil && g.gone || r.lacks(name, g)
}

// lacks reports whether the stream has lost entries that its gate has let through. Unlike forgot, it ignores a loss
// that was reported before.
func (r *redis) lacks(name string, g *gate) bool {
	s := r.streams[name]
	switch {
	case g == nil:
		return false
	case s == nil:
		return g.n > 0 || g.last > 0
	}
	return s.last < g.last
}

// reaches reports whether the stream has had an entry with the id or a later one.
func (r *redis) reaches(name, id string) bool {
	s := r.streams[name]
	if r.noted != nil { // gate.lua's misses: the entry itself is looked for
		return s != nil && slices.ContainsFunc(s.entries, func(e entry) bool { return entryID(e.id) == id })
	}
	return s != nil && outbox.CompareIDs(entryID(s.last), id) >= 0
}

// regroup gives a stream the groups that it lacks.
func (r *redis) regroup(name string, groups []string) {
	for _, group := range groups {
		if !slices.Contains(r.groups[name], group) {
			r.groups[name] = append(r.groups[name], group)
		}
	}
}

func (r *redis) has(name string, id uuid.UUID) bool {
	return r.entry(name, id) > 0
}

// entry is the number of an event's entry, or 0 if the stream does not have it.
func (r *redis) entry(name string, id uuid.UUID) int64 {
	if s := r.streams[name]; s != nil {
		if n := slices.IndexFunc(s.entries, func(e entry) bool { return e.ID == id }); n >= 0 {
			return s.entries[n].id
		}
	}
	return 0
}

// adopt raises a gate: adopt.lua.
func (r *redis) adopt(name string, o outbox.Owner) (n int64, err error) {
	w := r.w
	if w.owners[o.Epoch] != o {
		w.wrongly("the gate of %s is raised to epoch %d before the table was", name, o.Epoch)
	}
	g := r.gates[name]
	switch {
	case r.away[name]:
		return 0, &outbox.StreamError{Stream: name, Err: errDown}
	case g == nil:
		g = &gate{}
	case r.foreign(name, o.Source) != nil:
		return 0, r.foreign(name, o.Source)
	case g.owner == o:
		return g.n, nil
	case g.gone && g.owner.Epoch+1 == o.Epoch:
		return 0, outbox.ErrGap
	case g.owner.Epoch >= o.Epoch:
		return 0, &outbox.FencedError{Stream: name, Epoch: g.owner.Epoch}
	}
	next := &gate{
		owner: o, lanes: map[int]gateLane{}, batches: map[batchKey]gateBatch{}, doubt: map[uuid.UUID]doubtful{},
		n: g.n, last: g.last,
	}
	if r.forgot(name) {
		next.n, next.last = 0, 0
	} else {
		for id, d := range g.doubt {
			next.doubt[id] = doubtful{entry: d.entry}
		}
		for _, b := range g.batches {
			for _, it := range b.items {
				next.doubt[it.id] = doubtful{entry: it.entry}
			}
		}
	}
	r.gates[name] = next
	r.tell(name, r.neighbours[name])
	if w.raised[o.Epoch] == nil {
		w.raised[o.Epoch] = map[string]bool{}
	}
	w.raised[o.Epoch][name] = true
	return next.n, nil
}

// tell records in a gate that another instance has found its stream to lack published events.
func (r *redis) tell(name string, g *gate) {
	if !r.lacks(name, g) {
		return
	}
	g.gone, g.since, g.n, g.last = true, 0, 0, 0
	if s := r.streams[name]; s != nil {
		g.since = s.last
	}
	g.owner = outbox.Owner{Source: g.owner.Source, Epoch: g.owner.Epoch - 1}
}

// neighbour has another database, which shares the stream, publish an event. It adopts and tells first, as its relay
// does, if the stream is empty and it or we have lost something.
func (r *redis) neighbour(name string) {
	g := r.neighbours[name]
	if g == nil || g.gone || r.lacks(name, g) || r.streams[name] == nil && r.lacks(name, r.gates[name]) {
		g = &gate{}
		r.neighbours[name] = g
		r.tell(name, r.gates[name])
	}
	s := r.streams[name]
	if s == nil {
		s = &memStream{}
		r.streams[name] = s
	}
	r.ids++
	s.entries, s.last = append(s.entries, entry{id: r.ids, foreign: true, Record: outbox.Record{ID: uuid.New()}}), r.ids
	g.n, g.last = g.n+1, r.ids
}

// verdict is what a publish answers: how far the batch is, and what stopped it.
type verdict struct {
	items  []batchItem
	n      int64
	failed error
}

// publication is one call of publish.lua.
type publication struct {
	stream  string
	owner   outbox.Owner
	lane    outbox.Lane
	number  int64
	settled int64
	least   int64 // how many events the gate let through at least
	events  []*outbox.Record
}

func (r *redis) publish(p publication) (v verdict, err error) {
	g, err := r.judge(p.stream, p.owner)
	if err != nil {
		return v, err
	}
	if g.n < p.least {
		return v, outbox.ErrGap
	}
	var last, gone int64
	old, known := g.lanes[p.lane.Part]
	switch {
	case !known:
	case old.claim > p.lane.Claim, old.claim == p.lane.Claim && old.nonce != p.lane.Nonce:
		return v, &outbox.FencedError{Stream: p.stream, Epoch: p.owner.Epoch}
	case old.claim == p.lane.Claim:
		last, gone = old.last, old.settled
		known = false
	}
	at := batchKey{p.lane.Part, p.number}
	var b gateBatch
	switch {
	case p.number == last && last > 0:
		var there bool
		if b, there = g.batches[at]; !there {
			return v, outbox.ErrGap
		}
		if b.complete {
			return verdict{items: b.items, n: g.n}, nil
		}
	case p.number != last+1:
		return v, outbox.ErrGap
	}
	from := len(b.items)
	if from < len(p.events) {
		switch {
		case r.wrongType[p.stream]:
			return verdict{items: b.items, n: g.n, failed: errWrongType}, nil
		case r.streams[p.stream] == nil && (g.n > 0 || g.last > 0 || r.lacks(p.stream, r.neighbours[p.stream])):
			return v, outbox.ErrGap
		}
	}
	if known { // an earlier claim's: what it left is in doubt
		r.inherit(g, old, at)
	}
	settled := max(gone, min(p.settled, p.number-1))
	g.forget(p.lane.Part, gone, settled)
	g.lanes[p.lane.Part] = gateLane{p.lane.Claim, p.lane.Nonce, p.number, settled}
	for _, e := range p.events[min(from, len(p.events)):] {
		d, doubt := g.doubt[e.ID]
		switch {
		case doubt:
			delete(g.doubt, e.ID)
			b.items = append(b.items, batchItem{e.ID, d.entry, true})
			continue
		case r.poisonous(e):
			g.batches[at] = b
			return verdict{items: b.items, n: g.n, failed: errPoison}, nil
		}
		b.items = append(b.items, batchItem{id: e.ID, entry: r.add(p, g, e)})
		r.restored[p.stream] = r.restored[p.stream] || p.lane.Part == outbox.RestoreLane
	}
	b.complete = true
	g.batches[at] = b
	return verdict{items: b.items, n: g.n}, nil
}

// inherit turns into doubt what an earlier claim of the part left.
func (r *redis) inherit(g *gate, old gateLane, at batchKey) {
	for n := old.settled + 1; n <= old.last; n++ {
		k := batchKey{at.part, n}
		for _, it := range g.batches[k].items {
			g.doubt[it.id] = doubtful{entry: it.entry, claim: old.claim, batch: k}
		}
		delete(g.batches, k)
	}
}

// forget deletes the batches of a lane after from, up to and including to.
func (g *gate) forget(part int, from, to int64) {
	for n := from + 1; n <= to; n++ {
		delete(g.batches, batchKey{part, n})
	}
}

// add appends an entry. Whatever must never be in a stream is seen here.
func (r *redis) add(p publication, g *gate, e *outbox.Record) int64 {
	s := r.streams[p.stream]
	if s == nil {
		s = &memStream{}
		r.streams[p.stream] = s
	}
	for name, other := range r.streams {
		for _, o := range other.entries {
			if name != p.stream && o.ID == e.ID {
				r.w.wrongly("event %d is published to %s, and is in %s", e.Seq, p.stream, name)
			}
		}
	}
	for _, o := range s.entries {
		switch {
		case o.foreign:
		case o.ID == e.ID:
			r.w.wrongly("event %d is published a second time, by epoch %d after %d", e.Seq, p.owner.Epoch, o.epoch)
		case o.AggregateID == e.AggregateID && o.Seq > e.Seq:
			r.w.wrongly("event %d of %s is published behind %d", e.Seq, e.AggregateID, o.Seq)
		case o.epoch > p.owner.Epoch:
			r.w.wrongly("epoch %d publishes to %s after epoch %d", p.owner.Epoch, p.stream, o.epoch)
		}
	}
	if slices.ContainsFunc(r.w.pg.dead, func(d outbox.Dead) bool { return d.ID == e.ID }) {
		r.w.wrongly("event %d is published, and is parked", e.Seq)
	}
	if r.w.pg.rolledBack[e.ID] {
		r.w.wrongly("event %d is published although its transaction was rolled back", e.Seq)
	}
	r.ids++
	s.entries, s.last = append(s.entries, entry{id: r.ids, epoch: p.owner.Epoch, Record: *e}), r.ids
	g.n, g.last = g.n+1, r.ids
	return r.ids
}

// unread is how many of our entries the consumer group has before it.
func (r *redis) unread(name string) (n int) {
	if s := r.streams[name]; s != nil && r.readers != nil {
		for _, e := range s.entries {
			if e.id > r.readers[name] && !e.foreign {
				n++
			}
		}
	}
	return n
}

// read makes the consumer group handle its unread entries of a stream. The order within an aggregate must be the order
// of commits, across streams.
func (r *redis) read(name string) {
	for _, e := range r.streams[name].entries {
		if e.id <= r.readers[name] {
			continue
		}
		r.readers[name] = e.id
		of := e.AggregateType + " " + e.AggregateID
		if !r.seen[e.ID] && e.Seq < r.handled[of] {
			r.w.wrongly("event %d of %s is read from %s behind %d", e.Seq, of, name, r.handled[of])
		}
		r.seen[e.ID], r.handled[of] = true, max(r.handled[of], e.Seq)
	}
}

// confirm is the barrier: confirm.lua.
func (r *redis) confirm(o outbox.Owner, marks []outbox.Mark) error {
	for _, m := range marks {
		g, err := r.judge(m.Stream, o)
		if err != nil {
			return err
		}
		l, ok := g.lanes[m.Lane.Part]
		switch {
		case m.Number == 0:
		case !ok, l.claim < m.Lane.Claim:
			return outbox.ErrGap
		case l.claim > m.Lane.Claim, l.nonce != m.Lane.Nonce:
			return &outbox.FencedError{Stream: m.Stream, Epoch: o.Epoch}
		case l.last < m.Number:
			return outbox.ErrGap
		}
	}
	for _, m := range marks {
		delete(r.restored, m.Stream)
		for n := int64(1); n <= m.Number; n++ {
			for _, it := range r.gates[m.Stream].batches[batchKey{m.Lane.Part, n}].items {
				r.w.confirmed[it.id] = true
			}
		}
	}
	return nil
}

// settle deletes batches whose rows are settled: settle.lua.
func (r *redis) settle(o outbox.Owner, marks []outbox.Mark) error {
	for _, m := range marks {
		g, err := r.judge(m.Stream, o)
		if err != nil {
			return err
		}
		l, ok := g.lanes[m.Lane.Part]
		switch {
		case !ok:
		case l.claim > m.Lane.Claim:
			maps.DeleteFunc(g.doubt, func(_ uuid.UUID, d doubtful) bool {
				n := d.batch.number
				return n > 0 && n <= m.Number && d.batch.part == m.Lane.Part && d.claim == m.Lane.Claim
			})
		case l.claim == m.Lane.Claim && l.nonce == m.Lane.Nonce && m.Number > l.settled:
			number := min(m.Number, l.last)
			g.forget(m.Lane.Part, l.settled, number)
			l.settled = number
			g.lanes[m.Lane.Part] = l
		}
	}
	r.w.checkUnsettled()
	return nil
}

// checkUnsettled checks that the gate keeps every event that is in its stream and whose row is unsettled.
func (w *world) checkUnsettled() {
	for name, s := range w.rd.streams {
		g, remembered := w.rd.gates[name], map[uuid.UUID]bool{}
		if g == nil {
			continue
		}
		for id := range g.doubt {
			remembered[id] = true
		}
		for _, b := range g.batches {
			for _, it := range b.items {
				remembered[it.id] = true
			}
		}
		for _, e := range s.entries {
			if !e.foreign && !remembered[e.ID] && !g.gone && w.owed(e.ID) {
				w.wrongly("the gate of %s has forgotten event %d, whose row is still owed", name, e.Seq)
			}
		}
	}
}

// owed reports whether the event's row is unsettled, visible or not.
func (w *world) owed(id uuid.UUID) bool {
	return len(w.pg.rows(func(r *tableRow) bool { return r.ID == id && w.pg.owed(r) })) > 0
}

// forgetDoubt is forget.lua.
func (r *redis) forgetDoubt(o outbox.Owner, name string) error {
	g, err := r.judge(name, o)
	if err != nil {
		return err
	}
	maps.DeleteFunc(g.doubt, func(_ uuid.UUID, d doubtful) bool { return d.batch.number == 0 })
	r.w.checkUnsettled()
	return nil
}

// restart makes it another process, with all its data.
func (r *redis) restart() { r.run++ }

// flush deletes everything. Events that were confirmed before are lost and must be restored.
func (r *redis) flush() {
	for _, s := range r.streams {
		r.loses(s.entries)
	}
	r.streams, r.gates, r.neighbours = map[string]*memStream{}, map[string]*gate{}, map[string]*gate{}
	r.groups = map[string][]string{}
}

// drop deletes a stream but not its gate, which continues to confirm the events that were there.
func (r *redis) drop(name string) {
	if s := r.streams[name]; s != nil {
		for _, e := range s.entries {
			r.w.lost[e.ID] = true
		}
	}
	delete(r.streams, name)
	delete(r.groups, name)
	delete(r.restored, name)
}

func (r *redis) loses(entries []entry) {
	for _, e := range entries {
		if !e.foreign && (r.w.confirmed[e.ID] || !r.w.owed(e.ID)) {
			r.w.lost[e.ID] = true
		}
	}
}

// copy is a dump of all that there is.
func (r *redis) copy() *redis {
	c := &redis{streams: map[string]*memStream{}, gates: map[string]*gate{}, neighbours: map[string]*gate{}}
	for name, s := range r.streams {
		c.streams[name] = &memStream{slices.Clone(s.entries), s.last}
	}
	for name, g := range r.gates {
		c.gates[name] = g.copy()
	}
	for name, g := range r.neighbours {
		c.neighbours[name] = g.copy()
	}
	return c
}

func (g *gate) copy() *gate {
	c := *g
	c.lanes, c.batches, c.doubt = maps.Clone(g.lanes), maps.Clone(g.batches), maps.Clone(g.doubt)
	return &c
}

// back restores a dump: another process has it.
func (r *redis) back(old *redis) {
	for name, s := range r.streams {
		if o := old.streams[name]; o != nil {
			r.loses(s.entries[min(len(o.entries), len(s.entries)):])
		} else {
			r.loses(s.entries)
		}
	}
	r.streams, r.gates, r.neighbours = old.streams, old.gates, old.neighbours
	clear(r.restored)
	r.restart()
}

// revert restores one stream and its gate from a dump.
func (r *redis) revert(name string, old *redis) {
	if s := r.streams[name]; s != nil {
		kept := 0
		if o := old.streams[name]; o != nil {
			kept = len(o.entries)
		}
		r.loses(s.entries[min(kept, len(s.entries)):])
	}
	delete(r.streams, name)
	delete(r.gates, name)
	delete(r.restored, name)
	if s, g := old.streams[name], old.gates[name]; s != nil && g != nil {
		r.streams[name], r.gates[name] = s, g
	}
}

// last is the last entry of ours that is there, as far as is known, "" without one; and whether it is one that the gate
// does not know: look.lua.
func (r *redis) last(name string) (last string, behind bool) {
	g, s := r.gates[name], r.streams[name]
	if s == nil {
		return "", false
	}
	for _, e := range s.entries {
		if !e.foreign && (g == nil || e.id > g.last) {
			last, behind = entryID(e.id), true
		}
	}
	switch {
	case g == nil:
	case g.gone && g.since == 0:
		last = ""
	case g.gone:
		last = entryID(g.since)
	case r.forgot(name):
		last = entryID(s.last)
	case g.last > 0:
		last = entryID(g.last)
	}
	return last, behind
}

func entryID(id int64) string { return strconv.FormatInt(id, 10) + "-0" }

func (r *redis) server() string {
	if r.anonymous {
		return ""
	}
	return fmt.Sprintf("run %d", r.run)
}
