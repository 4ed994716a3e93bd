package jetstream

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	"github.com/google/uuid"

	"posthaste/outbox"
)

// memory is what this process knows of a stream's gate: the gate must not be older.
type memory struct {
	mu sync.Mutex
	known
	// lanes has the counts of the lanes under holder, and count is their sum and what the gate had let through when
	// holder adopted it.
	lanes  map[string]int64
	holder holder
	count  int64

	doubt doubt
}

// known is the newest state of a gate that this process has seen.
type known struct {
	// let is how many events the gate had let through at least, and message the sequence of its newest message.
	let     int64
	message uint64
	// last is the entry of the newest event.
	last string
}

func (m *memory) newest() known {
	m.mu.Lock()
	defer m.mu.Unlock()
	return known{max(m.let, m.count), m.message, m.last}
}

// seen notes a gate that was read, unless more is known.
func (m *memory) seen(g *gate) {
	m.mu.Lock()
	defer m.mu.Unlock()
	let, _ := g.published()
	m.let, m.message = max(m.let, let), max(m.message, g.at)
	for _, l := range g.lanes {
		m.message = max(m.message, l.seq)
	}
}

// adopted notes the gate that an adoption has written, even if it has let through less.
func (m *memory) adopted(p *ownerPost, seq uint64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.known = known{p.Let, seq, p.Last}
	m.lanes, m.holder, m.count = map[string]int64{}, p.holder, p.Let
}

// under notes the owner of the gate, before a publish.
func (m *memory) under(p *ownerPost) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.last = later(m.last, p.Last)
	if m.holder != p.holder {
		m.lanes, m.holder, m.count = map[string]int64{}, p.holder, p.Let
	}
}

// published notes a batch of a lane, with its last event, "" if it stored none. It returns the newest event.
func (m *memory) published(h holder, lane string, at laneAt, last string) string {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.message, m.last = max(m.message, at.seq), later(m.last, last)
	if more := at.Let - m.lanes[lane]; m.holder == h && more > 0 {
		m.lanes[lane] = at.Let
		m.count += more
	}
	return m.last
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
	ids    map[uuid.UUID]string
	used   map[uuid.UUID]bool
}

// loaded reports whether the doubt under an owner was read.
func (d *doubt) loaded(h holder) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.holder == h
}

// load reads the events of spans under an owner, unless they are known.
func (d *doubt) load(ctx context.Context, r *remote, h holder, spans []span) (changed bool, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.holder == h && slices.Equal(d.spans, spans) {
		return false, nil
	}
	ids, err := r.events(ctx, spans)
	if err != nil {
		return false, err
	}
	if d.holder != h {
		d.used = map[uuid.UUID]bool{}
	}
	maps.DeleteFunc(ids, func(id uuid.UUID, _ string) bool { return d.used[id] })
	d.holder, d.spans, d.ids = h, spans, ids
	return true, nil
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

// unsettled returns the spans of a gate's doubt and of the batches that are not settled, of earlier claims as well. It
// reads messages of lanes only.
func (g *gate) unsettled(ctx context.Context) ([]span, error) {
	spans := slices.Clone(g.owner.spans(g.at))
	for lane, l := range g.own() {
		own, err := g.batches(ctx, lane, l, l.Settled)
		if err != nil {
			return nil, err
		}
		spans = append(spans, spansOf(slices.Concat(l.Inherited, own))...)
	}
	return join(spans), nil
}

func spansOf(batches []inherited) (spans []span) {
	for _, b := range batches {
		spans = append(spans, b.span)
	}
	return join(spans)
}

// join sorts spans and joins those without messages between them.
func join(spans []span) (joined []span) {
	slices.SortFunc(spans, func(a, b span) int { return cmp.Compare(a.From, b.From) })
	for _, s := range spans {
		if n := len(joined); n > 0 && s.From <= joined[n-1].To+1 {
			joined[n-1].To = max(joined[n-1].To, s.To)
			continue
		}
		joined = append(joined, s)
	}
	return joined
}

// spans returns the doubt of an owner's message, which is at seq.
func (p *ownerPost) spans(seq uint64) []span {
	if p.Recalls == 0 {
		return p.Doubt
	}
	return join(append(slices.Clone(p.Doubt), span{From: seq - p.Recalls, To: seq}))
}

// batches returns the batches of a lane's present claim with numbers after settled.
func (r *remote) batches(ctx context.Context, lane string, l laneAt, settled int64) (own []inherited, err error) {
	if l.Number <= settled {
		return nil, nil
	}
	for m, err := range r.scan(ctx, getRequest{Seq: l.Since + 1, NextFor: r.subject(lane)}) {
		if err != nil {
			return nil, err
		}
		p, err := parseLane(m)
		if err != nil {
			return nil, err
		}
		if p.holder == l.holder && p.Claim == l.Claim && p.Batch != "" && p.Number > settled {
			own = append(own, inherited{span{m.Seq - p.Stored, m.Seq}, p.Claim, p.Number})
		}
		if m.Seq >= l.seq {
			break
		}
	}
	return own, nil
}

// events returns the events of spans with their entries; "" for those that are only listed as repeated.
func (r *remote) events(ctx context.Context, spans []span) (map[uuid.UUID]string, error) {
	all := map[uuid.UUID]string{}
	for _, s := range spans {
		req := getRequest{Seq: s.From, Batch: int(min(s.To-s.From, pageMessages)) + 1}
		for m, err := range r.scan(ctx, req) {
			if err != nil {
				return nil, fmt.Errorf("read unsettled events: %w", err)
			}
			if m.Seq > s.To {
				break
			}
			if strings.HasPrefix(m.Subject, r.root+".") {
				var p lanePost
				if err := json.Unmarshal(m.Data, &p); err != nil {
					return nil, fmt.Errorf("read unsettled events: %w", err)
				}
				for list := p.Repeated; len(list) >= 16; list = list[16:] {
					id := uuid.UUID(list[:16])
					all[id] = later(all[id], "")
				}
			} else if id, ok := m.event(); ok {
				all[id] = later(all[id], m.entry())
			}
			if m.Seq == s.To {
				break
			}
		}
	}
	return all, nil
}
