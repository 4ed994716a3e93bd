package jetstream

import (
	"context"
	"slices"
	"sync"

	"github.com/google/uuid"

	"posthaste/outbox"
)

// memory is what this process knows of a stream's gate: the gate must not be older.
type memory struct {
	mu sync.Mutex
	// let is how many events the gate had let through, and message the sequence of its newest message.
	let     int64
	message uint64
	// last is the entry of the newest event.
	last string
	// lanes has the counts of the lanes under the owner that adopted the gate with base.
	lanes  map[string]int64
	holder holder
	base   int64

	doubt doubt
}

// total returns how many events the gate has let through at least.
func (m *memory) total() int64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	n := m.base
	for _, let := range m.lanes {
		n += let
	}
	return max(n, m.let)
}

// newest returns the sequence of the newest message of the gate, and the entry of the newest event.
func (m *memory) newest() (message uint64, last string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.message, m.last
}

// seen notes a gate that was read, unless more is known.
func (m *memory) seen(g *gate) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.let, m.message = max(m.let, g.let()), max(m.message, g.at)
	for _, l := range g.lanes {
		m.message = max(m.message, l.seq)
	}
}

// adopted notes the gate that an adoption has written, even if it has let through less.
func (m *memory) adopted(p *ownerPost, seq uint64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.let, m.message, m.last = p.Let, seq, p.Last
	m.lanes, m.holder, m.base = map[string]int64{}, p.holder, p.Let
}

// under notes the owner of the gate, before a publish.
func (m *memory) under(p *ownerPost) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.last = later(m.last, p.Last)
	if m.holder != p.holder {
		m.lanes, m.holder, m.base = map[string]int64{}, p.holder, p.Let
	}
}

// published notes a batch of a lane: its message, and its last event, "" if it stored none.
func (m *memory) published(h holder, lane string, let int64, message uint64, last string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.message, m.last = max(m.message, message), later(m.last, last)
	if m.holder == h {
		m.lanes[lane] = max(m.lanes[lane], let)
	}
}

// later returns the later one of two entries.
func later(a, b string) string {
	if outbox.CompareIDs(a, b) < 0 {
		return b
	}
	return a
}

// doubt has events that are in the stream, and whose rows may not be settled, as messages of the gate list them: those
// that earlier owners left, or those that a lane has inherited. Events that this process has already suppressed are not
// among them. Suppressing an event twice loses nothing.
type doubt struct {
	mu     sync.Mutex
	holder holder
	spans  []span
	read   bool // ids has what spans list
	ids    map[uuid.UUID]string
	used   map[uuid.UUID]bool
}

// known reports whether the doubt under an owner was read.
func (d *doubt) known(h holder) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.holder == h && d.read
}

// load reads the events of spans under an owner, unless they are known.
func (d *doubt) load(ctx context.Context, c *conn, name, root string, h holder, spans []span) (
	changed bool, err error,
) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.holder == h && d.read && slices.Equal(d.spans, spans) {
		return false, nil
	}
	if d.holder != h {
		d.used = map[uuid.UUID]bool{}
	}
	d.read, d.holder, d.spans, d.ids = false, h, spans, map[uuid.UUID]string{}
	err = c.ids(ctx, name, root, spans, func(id uuid.UUID, entry string) {
		if !d.used[id] {
			d.ids[id] = later(d.ids[id], entry)
		}
	})
	d.read = err == nil
	return true, err
}

// has reports whether an event is in doubt, and its entry if it is known.
func (d *doubt) has(id uuid.UUID) (entry string, ok bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	entry, ok = d.ids[id]
	return entry, ok
}

// use takes events out of the doubt: 16 bytes for each.
func (d *doubt) use(ids []byte) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for ; len(ids) >= 16; ids = ids[16:] {
		id := uuid.UUID(ids[:16])
		if d.used != nil {
			d.used[id] = true
		}
		delete(d.ids, id)
	}
}
