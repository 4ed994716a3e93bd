package model

import (
	"cmp"
	"math"
	"slices"
)

// assist emits that an instance sweeps along with a leader that polls.
func (m *machine) assist(s *state, i int) {
	if s.budget.assist == 0 || s.leader == 0 || int(s.leader) == i+1 {
		return
	}
	l := &s.procs[s.leader-1]
	if !l.poll || l.pc != sweeping || s.pg.epoch != l.epoch {
		return
	}
	n := *s
	n.budget.assist--
	n.procs[i] = proc{pc: sweeping, assistant: true, poll: true, epoch: l.epoch, server: s.server}
	m.emit(n, "relay %d sweeps along", i+1)
}

// due is what is owed of a part: the events that b holds, if there is one, and its mark does not, by number.
func (m *machine) due(pg *postgres, part int8, mk *mark, b *bound) (events []int8) {
	for e := range int8(len(m.plan.events)) {
		xid, seq, seen := m.row(pg, e)
		if m.part(pg, e) != part || !seen || pg.dead.has(e) || seq <= pg.base || mk.settled(xid, seq) ||
			b != nil && !b.holds(xid, seq) {
			continue
		}
		events = append(events, e)
	}
	// The events of a later transaction may have lower numbers.
	slices.SortFunc(events, func(a, b int8) int { return cmp.Compare(m.seqOf(pg, a), m.seqOf(pg, b)) })
	return events
}

func (m *machine) seqOf(pg *postgres, e int8) int8 {
	_, seq, _ := m.row(pg, e)
	return seq
}

func (m *machine) sweep(s *state, i int) {
	p := &s.procs[i]
	if p.part == 0 {
		m.claim(s, i)
		return
	}
	part := p.part - 1
	mine := m.owns(s, p) && (s.pg.claim[part] == p.claim || m.without("a mark's write asks for the claim"))
	if !p.mark.open {
		m.take(s, i)
		return
	}
	b := &p.mark.t
	if m.without("the pass keeps its snapshot") {
		b = nil
	}
	rows := m.due(&s.pg, part, &p.mark, b)
	// The mark's cursor settles what it has passed; what is due is behind it.
	if at := s.pg.mark[part].cursor; at < p.mark.cursor {
		if !mine {
			m.again(s, i, "may not write the cursor")
			return
		}
		n := *s
		n.pg.mark[part].cursor = p.mark.cursor
		n.pg.n = max(n.pg.n, p.n)
		n.pg.sync()
		m.settle(&n, i, part)
		m.emit(n, "relay %d writes cursor %d of part %d", i+1, p.mark.cursor, part)
	}
	if len(rows) > 0 {
		n := *s
		m.send(&n, i, rows[0], part, p.claim)
		return
	}
	if p.taking == 0 {
		n := *s
		n.procs[i].taking = 1
		m.emit(n, "relay %d has come to the end of part %d", i+1, part)
		return
	}
	if !mine {
		m.again(s, i, "may not end the pass")
		return
	}
	n := *s
	mk := &n.pg.mark[part]
	if m.without("a snapshot is written before it is used") {
		mk.t = p.mark.t
	}
	if m.without("the pass keeps its snapshot") {
		mk.t.snapshot, mk.t.hi = s.pg.snapshot(), s.pg.seq
	}
	mk.s, mk.t, mk.open, mk.cursor = mk.t, bound{}, false, 0
	if m.without("marks are per part") {
		for o := range n.pg.mark {
			n.pg.mark[o] = *mk
		}
	}
	n.pg.n = max(n.pg.n, p.n)
	n.pg.sync()
	m.settle(&n, i, part)
	q := &n.procs[i]
	q.part, q.mark, q.claim, q.taking = 0, mark{}, 0, 0
	q.swept = q.swept.with(part)
	m.emit(n, "relay %d has swept part %d", i+1, part)
}

// settle has the gate forget what of a lane is settled now.
func (m *machine) settle(n *state, i int, lane int8) {
	p, g := &n.procs[i], &n.rd.gate
	if g.epoch != p.epoch || lane < streamLane && g.claim[lane] != p.claim {
		return
	}
	for e := range int8(len(m.plan.events)) {
		xid, seq, seen := m.row(&n.pg, e)
		if g.unsettled[lane].has(e) && seen && n.pg.mark[m.part(&n.pg, e)].settled(xid, seq) ||
			m.without("the gate remembers until the mark has moved") {
			g.unsettled[lane] &^= set(1) << e
		}
	}
}

// claim emits that a sweeper takes a part that has something to do, or that a leader begins to stream.
func (m *machine) claim(s *state, i int) {
	p := &s.procs[i]
	all := true
	for part := range m.parts {
		mk := &s.pg.mark[part]
		work := mk.open || len(m.due(&s.pg, part, mk, nil)) > 0 ||
			s.pg.barrier > 0 && !mk.s.allBelow(s.pg.barrier) && s.pg.snapshot().allBelow(s.pg.barrier)
		all = all && !mk.open && (!work || p.swept.has(part))
		if !work || !p.poll && !mk.open && p.swept.has(part) && s.pg.barrier == 0 {
			continue
		}
		if !m.owns(s, p) {
			m.again(s, i, "may not claim")
			return
		}
		n := *s
		n.pg.claim[part]++
		n.pg.sync()
		q := &n.procs[i]
		q.part, q.claim, q.mark = part+1, n.pg.claim[part], *mk
		q.last[part] = 0
		if m.without("a pass goes on where it stopped") {
			q.mark.cursor = 0
			q.mark.open = false
			n.pg.mark[part].open, n.pg.mark[part].cursor = false, 0
		}
		m.emit(n, "relay %d claims part %d", i+1, part)
	}
	if p.assistant || p.poll || !all {
		return
	}
	n := *s
	if s.pg.slot < 0 {
		if !m.owns(s, p) {
			m.again(s, i, "may not make a slot")
			return
		}
		n.pg.slot = s.pg.len
		n.pg.barrier = s.pg.next
		if m.without("a new slot has a barrier") {
			n.pg.barrier = 0
		}
		n.pg.sync()
		m.emit(n, "relay %d makes a slot at %d", i+1, n.pg.slot)
		return
	}
	if s.pg.barrier > 0 {
		for part := range m.parts {
			if !s.pg.mark[part].s.allBelow(s.pg.barrier) {
				return
			}
		}
		n.pg.barrier = 0
	}
	q := &n.procs[i]
	q.pc, q.pos, q.marks = streaming, s.pg.slot, s.pg.mark
	m.advance(&n, q)
	m.emit(n, "relay %d streams from %d", i+1, s.pg.slot)
}

// take emits one of the steps in which a bound is taken and written: the snapshot, then the last number, with the row
// that keeps both.
func (m *machine) take(s *state, i int) {
	n := *s
	p := &n.procs[i]
	p.taking++
	if p.taking == 1 {
		p.b.snapshot = s.pg.snapshot()
		m.emit(n, "relay %d takes a snapshot before id %d", i+1, p.b.xmax)
		return
	}
	p.b.hi = s.pg.seq
	if m.without("hi bounds what is settled") {
		p.b.hi = math.MaxInt8
	}
	m.note(s, n, i)
}

// note writes the bound that was taken: of a part, or of all of them.
func (m *machine) note(s *state, n state, i int) {
	p := &n.procs[i]
	first, end := p.part-1, p.part
	if p.pc == streaming {
		first, end = 0, m.parts
	}
	for part := first; part < end; part++ {
		if !m.owns(s, p) || p.pc == sweeping && s.pg.claim[part] != p.claim &&
			!m.without("a mark's write asks for the claim") {
			m.again(s, i, "may not write the mark")
			return
		}
		mk := n.pg.mark[part]
		mk.t, mk.open, mk.cursor = p.b, true, 0
		if !m.without("a snapshot is written before it is used") {
			n.pg.mark[part] = mk
		}
		if p.pc == streaming {
			p.marks[part] = mk
		} else {
			p.mark = mk
		}
	}
	if !m.without("a snapshot is written before it is used") {
		n.pg.sync()
		p.b = bound{}
	}
	if p.pc == sweeping {
		p.taking = 0
	}
	m.emit(n, "relay %d writes it", i+1)
}
