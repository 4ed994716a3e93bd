package model

import (
	"cmp"
	"math"
	"slices"
)

// assist emits that an instance sweeps with a leader that polls.
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
	n.procs[i] = proc{
		pc: sweeping, assistant: true, poll: true, epoch: l.epoch, nonce: l.nonce,
		server: s.server,
	}
	m.emit(&n, "relay %d sweeps along", i+1)
}

// due returns the unsettled events of a part by number: those that b holds, if b is not nil, and the mark does not.
// Rows with an id that the mark sees are skipped.
func (m *machine) due(pg *postgres, part int8, mk *mark, b *bound) (events []int8) {
	for e := range int8(len(m.plan.events)) {
		xid, seq, seen := m.row(pg, e)
		if m.part(pg, e) != part || !seen || pg.dead.has(e) || mk.s.sees(xid) || mk.settled(xid, seq) ||
			b != nil && !b.holds(xid, seq) {
			continue
		}
		events = append(events, e)
	}
	// Events of a later transaction may have lower numbers.
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
	if s.budget.give > 0 { // the sweep ends, for a drain or another mode, and the relay continues
		n := *s
		n.budget.give--
		q := &n.procs[i]
		q.part, q.claim, q.mark = 0, 0, mark{}
		m.emit(&n, "relay %d gives part %d back, whatever it has published", i+1, p.part-1)
	}
	part := p.part - 1
	mine := m.owns(s, p) && (s.pg.claim[part] == p.claim || m.without("a mark's write checks the claim"))
	b := &p.mark.t
	if m.without("the pass keeps its snapshot") {
		b = nil
	}
	rows := m.due(&s.pg, part, &p.mark, b)
	// The mark's cursor settles the rows that it has passed; all due rows are after it.
	if at := s.pg.mark[part].cursor; at < p.mark.cursor {
		m.settlePart(s, i, mine, p.mark)
	}
	if len(rows) > 0 && m.stuck(s, rows[0]) {
		n := *s
		q := &n.procs[i]
		if q.part, q.claim, q.mark = 0, 0, (mark{}); s.pg.mark[part].cursor == p.mark.cursor {
			m.emit(&n, "relay %d gives part %d back: event %d is stuck", i+1, part, rows[0]+1)
		}
		return
	}
	if len(rows) > 0 {
		n := *s
		m.send(&n, i, rows[0], part, p.claim)
		return
	}
	end := mark{s: p.mark.t}
	if m.without("the pass keeps its snapshot") {
		end.s = bound{s.pg.snapshot(), s.pg.seq}
	}
	m.settlePart(s, i, mine, end)
}

// settlePart emits that a sweep writes the mark of its part: a cursor, or the end of the pass.
func (m *machine) settlePart(s *state, i int, mine bool, to mark) {
	p := &s.procs[i]
	part := p.part
	if !mine {
		m.again(s, i, "may not write the mark")
		return
	}
	m.hang(s, i, part, to)
	n := *s
	if m.without("marks are per part") && !to.open {
		part = maxPart + 1
	}
	m.put(&n, part, to)
	n.pg.n = max(n.pg.n, p.n)
	m.settle(&n, i, p.part-1)
	q := &n.procs[i]
	q.part, q.mark, q.claim = 0, mark{}, 0
	if to.open { // each page has a claim
		m.emit(&n, "relay %d writes cursor %d of part %d", i+1, to.cursor, p.part-1)
		return
	}
	q.swept = q.swept.with(p.part - 1)
	m.emit(&n, "relay %d has swept part %d", i+1, p.part-1)
}

// settle removes the settled events of a lane from the gate.
func (m *machine) settle(n *state, i int, lane int8) {
	p, g := &n.procs[i], &n.rd.gate
	if g.epoch != p.epoch || lane < streamLane && g.claim[lane] != p.claim {
		return
	}
	for e := range int8(len(m.plan.events)) {
		id := m.plan.events[e].of
		_, _, seen := m.row(&n.pg, e)
		if seen && !n.pg.dead.has(e) && m.settled(&n.pg, e) ||
			m.without("the gate keeps doubt until the mark has moved") {
			g.unsettled[lane] &^= set(1) << id
			g.inherited &^= set(1) << id
		}
	}
}

// claim emits that a sweeper takes a part with work, with the snapshot of its pass, or starts the hand-over.
func (m *machine) claim(s *state, i int) {
	p := &s.procs[i]
	all := true
	for part := range m.parts {
		mk := s.pg.mark[part]
		own := p.pass == bound{}
		within := &p.pass
		if own {
			within = nil
		}
		under := within
		if mk.open {
			under = &mk.t
		}
		rows := m.due(&s.pg, part, &mk, within)
		if first := m.due(&s.pg, part, &mk, under); len(first) > 0 && m.stuck(s, first[0]) {
			all = all && !own && len(rows) == 0
			continue
		}
		work := len(rows) > 0
		if own {
			work = work || mk.open
			all = all && !mk.open && (!work || p.swept.has(part))
			if !work || !p.poll && !mk.open && p.swept.has(part) && s.pg.barrier == 0 {
				continue
			}
		} else {
			all = all && !work
			if !work {
				continue
			}
		}
		if s.hung.part == part+1 && s.hung.server == s.server &&
			!m.without("a part is claimed while no write of its mark runs") {
			continue
		}
		if !m.owns(s, p) || !own && !m.passWritten(s, p) {
			m.again(s, i, "may not claim")
			return
		}
		n := *s
		n.pg.claim[part]++
		q := &n.procs[i]
		if m.without("a pass continues where it stopped") {
			mk.open = false
		}
		if !mk.open {
			mk.t, mk.open, mk.cursor = bound{s.pg.snapshot(), s.pg.seq}, true, 0
			if !own {
				mk.t = p.pass
			}
			if m.without("hi bounds what is settled") {
				mk.t.hi = math.MaxInt8
			}
		}
		q.part, q.claim, q.mark = part+1, n.pg.claim[part], mk
		q.last[part] = 0
		m.emit(&n, "relay %d claims part %d, with a pass before id %d", i+1, part, mk.t.xmax)
	}
	if !p.assistant && !p.adrift || p.pass != (bound{}) {
		m.handOver(s, i, all)
	}
}

// passWritten reports whether the pass of a hand-over is in the table.
func (m *machine) passWritten(s *state, p *proc) bool {
	return s.pg.pass == p.pass || m.without("the pass of a hand-over is written before it is used")
}

// handOver emits the steps from the sweep to the stream: a slot, a pass, one mark of it for every part. A hand-over
// that drains more than once writes a pass each time. While polling there is one pass, without a mark: it settles the
// doubt.
func (m *machine) handOver(s *state, i int, drained bool) {
	p := &s.procs[i]
	n := *s
	q := &n.procs[i]
	if p.poll {
		switch {
		case p.pass != (bound{}) && drained:
			q.pass, q.cleared = bound{}, true
			m.emit(&n, "relay %d has drained its pass", i+1)
		case p.pass == (bound{}) && !p.cleared:
			m.writePass(s, i)
		}
		return
	}
	if p.pass == (bound{}) {
		if !m.owns(s, p) {
			m.again(s, i, "may not begin the hand-over")
			return
		}
		if s.pg.slot < 0 {
			if !drained {
				return
			}
			n.pg.slot = s.pg.len
			n.pg.barrier = s.pg.next
			if m.without("a new slot has a barrier") {
				n.pg.barrier = 0
			}
			n.pg.sync()
			m.emit(&n, "relay %d makes a slot at %d", i+1, n.pg.slot)
			return
		}
	}
	if s.pg.barrier > 0 && !s.pg.snapshot().allBelow(s.pg.barrier) {
		return
	}
	if p.pass == (bound{}) || p.pass != (bound{s.pg.snapshot(), s.pg.seq}) && !p.adrift {
		m.writePass(s, i)
	}
	if p.pass == (bound{}) {
		return
	}
	if !drained && !m.without("all parts are drained before one mark is made") {
		return
	}
	if s.hung.part > 0 && s.hung.server == s.server && !m.without("one mark is made while no write of a part's runs") {
		return
	}
	if !m.owns(s, p) || !m.passWritten(s, p) {
		m.again(s, i, "may not make one mark of the pass")
		return
	}
	m.hang(s, i, maxPart+1, mark{s: p.pass})
	m.put(&n, maxPart+1, mark{s: p.pass})
	n.pg.n = max(n.pg.n, p.n)
	n.pg.pass, n.pg.barrier = bound{}, 0
	q.pc, q.pos, q.settled, q.pass, q.begun = streaming, s.pg.slot, p.pass, bound{}, s.pg.len
	if s.pg.slot < 0 {
		q.pos = 0
	}
	if p.adrift {
		q.pos = s.pg.len
	}
	m.advance(&n, q)
	m.emit(&n, "relay %d makes one mark of the pass, and streams from %d", i+1, s.pg.slot)
}

func (m *machine) writePass(s *state, i int) {
	if !m.owns(s, &s.procs[i]) {
		m.again(s, i, "may not write a pass")
		return
	}
	n := *s
	q := &n.procs[i]
	q.pass = bound{s.pg.snapshot(), s.pg.seq}
	if !m.without("the pass of a hand-over is written before it is used") {
		n.pg.pass = q.pass
		n.pg.sync()
	}
	m.emit(&n, "relay %d writes a pass before id %d", i+1, q.pass.xmax)
}
