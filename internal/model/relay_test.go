package model

// This file has the steps of the relays. A step is atomic: a statement, a script, or a check of the process' memory.

// relay emits the next steps of the relays.
func (m *machine) relay(s *state) {
	if s.late != (call{}) {
		n := *s
		if !m.refuses(s, s.late) {
			m.arrive(&n, s.late)
		}
		n.late = call{}
		m.emit(&n, "a call of a dead relay arrives: event %d", s.late.event)
	}
	if s.hung.part > 0 {
		n := *s
		n.hung = statement{}
		if m.owner(s, s.hung.epoch, s.hung.nonce) {
			m.put(&n, s.hung.part, s.hung.to)
		}
		m.emit(&n, "a statement that nobody waits for any more arrives")
	}
	for i := range s.procs {
		p := &s.procs[i]
		if p.pc == idle {
			m.lead(s, i)
			m.assist(s, i)
			continue
		}
		if s.budget.crash > 0 {
			n := *s
			n.budget.crash--
			m.die(&n, i)
			m.emit(&n, "relay %d is killed", i+1)
		}
		if s.budget.lock > 0 && int(s.leader) == i+1 {
			n := *s
			n.budget.lock--
			n.leader = 0
			m.emit(&n, "relay %d loses its lock and does not know", i+1)
		}
		if p.flying != (call{}) {
			m.publish(s, i)
			continue
		}
		if p.server != s.server || p.adrift {
			n := *s
			m.die(&n, i)
			m.emit(&n, "relay %d has lost its sessions", i+1)
		}
		if p.server != s.server {
			m.drift(s, i)
			continue
		}
		if p.pc > raising && m.astray(s, p) {
			m.again(s, i, "finds another Redis")
			continue
		}
		switch p.pc {
		case raising:
			m.raise(s, i)
		case looking:
			m.look(s, i)
		case restoring:
			m.restore(s, i)
		case sweeping:
			m.sweep(s, i)
		case streaming:
			m.follow(s, i)
		}
		m.forget(s, i)
		if s.budget.toggle > 0 && p.pc >= sweeping && !p.assistant {
			n := *s
			n.budget.toggle--
			m.again(&n, i, "changes the mode")
		}
	}
}

// astray reports whether Redis is not the adopted one, or has lost data.
func (m *machine) astray(s *state, p *proc) bool {
	return s.rd.gate.epoch < p.epoch || s.rd.gate.n < p.n || p.pc >= sweeping && !s.rd.gate.whole
}

// die ends a process. Its call in flight arrives at any later time.
func (m *machine) die(s *state, i int) {
	if f := s.procs[i].flying; f != (call{}) {
		s.late = f
	}
	s.procs[i] = proc{}
	if int(s.leader) == i+1 {
		s.leader = 0
	}
}

// drift emits that a relay continues with new sessions, without knowing that it has lost its lock. It must not use
// snapshots of the old sessions; it still knows what it has published, and which writes succeeded.
func (m *machine) drift(s *state, i int) {
	n := *s
	p := &n.procs[i]
	if p.pc < sweeping {
		return
	}
	p.server, p.adrift = s.server, true
	if !m.without("evidence and mark are one session") {
		p.look = look{}
	}
	if !m.without("a pass ends in the session that began it") {
		p.part, p.claim, p.mark = 0, 0, mark{}
	}
	m.emit(&n, "relay %d goes on with new sessions", i+1)
}

// lead emits that an instance becomes the leader.
func (m *machine) lead(s *state, i int) {
	if s.leader == 0 && !s.pg.foreign && (m.observed || i == 0 || s.procs[0].pc != idle) {
		n := *s
		n.leader = int8(i + 1)
		m.adopt(&n, i, "leads")
	}
}

// adopt emits the first step of an adoption, which writes the epoch.
func (m *machine) adopt(s *state, i int, why string) {
	for _, poll := range []bool{false, true} {
		if poll && s.budget.toggle == 0 && s.budget.assist == 0 {
			continue
		}
		n := *s
		n.pg.epoch++
		n.pg.nonce, n.pg.adopted, n.pg.pass = s.server, s.timeline, bound{}
		n.pg.sync()
		n.procs[i] = proc{pc: raising, poll: poll, epoch: n.pg.epoch, nonce: s.server, server: s.server}
		m.emit(&n, "relay %d %s: epoch %d, polling %v", i+1, why, n.pg.epoch, poll)
	}
}

// again emits that a relay adopts again, or stands down if it may not.
func (m *machine) again(s *state, i int, why string) {
	p := &s.procs[i]
	if int(s.leader) == i+1 && !p.assistant && p.server == s.server && s.pg.epoch == p.epoch {
		m.adopt(s, i, why)
		return
	}
	n := *s
	m.die(&n, i)
	m.emit(&n, "relay %d %s: stands down", i+1, why)
}

// owns reports whether a statement that requires the owner succeeds.
func (m *machine) owns(s *state, p *proc) bool {
	return p.server == s.server && m.owner(s, p.epoch, p.nonce)
}

func (m *machine) owner(s *state, epoch, nonce int8) bool {
	return (s.pg.epoch == epoch || m.without("a mark's write checks the epoch")) &&
		(s.pg.nonce == nonce || m.without("a mark's write checks the nonce")) &&
		(s.pg.adopted == s.timeline && !s.pg.foreign || m.without("a mark's write checks the server"))
}

// put writes a mark of one part, or of every part.
func (m *machine) put(n *state, part int8, to mark) {
	for k := range n.pg.mark {
		if part > maxPart || int(part) == k+1 {
			n.pg.mark[k] = to
		}
	}
	n.pg.sync()
}

// hang emits that a relay stops waiting for the write of a mark, which still arrives, or does not.
func (m *machine) hang(s *state, i int, part int8, to mark) {
	if s.budget.hang == 0 || s.hung.part > 0 {
		return
	}
	p := &s.procs[i]
	n := *s
	n.budget.hang--
	n.hung = statement{to, part, p.epoch, p.nonce, s.server}
	if part <= maxPart {
		q := &n.procs[i]
		q.part, q.claim, q.mark = 0, 0, mark{}
	} else if p.pc == streaming {
		n.procs[i].look = look{}
	}
	if part > maxPart && !m.without("an unknown end of a mark's write is an adoption") {
		m.again(&n, i, "does not know whether its mark is written")
		m.put(&n, part, to)
		n.hung = statement{}
		m.again(&n, i, "does not know that its mark is written")
		return
	}
	m.emit(&n, "relay %d does not wait for its mark any more", i+1)
}

func (m *machine) raise(s *state, i int) {
	p := &s.procs[i]
	n := *s
	g := &n.rd.gate
	if g.epoch >= p.epoch {
		if !m.owns(s, p) || int(s.leader) != i+1 {
			m.again(s, i, "is fenced")
			return
		}
		n.pg.epoch = g.epoch + 1
		n.pg.nonce = p.nonce
		n.pg.sync()
		n.procs[i].epoch = n.pg.epoch
		m.emit(&n, "relay %d overtakes the gate: epoch %d", i+1, n.pg.epoch)
		return
	}
	q := &n.procs[i]
	g.epoch, g.nonce = q.epoch, q.nonce
	if !m.without("unsettled ids become doubt") {
		for _, u := range g.unsettled {
			g.doubt |= u
		}
		g.doubt |= g.inherited
	}
	g.inherited = 0
	g.claim, g.last, g.unsettled = [lanes]int8{}, [lanes]int8{}, [lanes]set{}
	if g.n < s.pg.n && !m.without("the gate's count is noted") ||
		s.rd.gate.epoch < s.pg.raised && !m.without("the gate's epoch is noted") ||
		s.pg.timeline != s.timeline && !m.without("the timeline is noted") {
		g.whole = false
	}
	g.whole = g.whole || m.without("a gate that is new is not whole") && s.rd.gate.epoch == 0
	g.looked = false
	q.pc = looking
	q.doubtUntil = n.pg.next
	q.last, q.n = [lanes]int8{}, g.n
	m.emit(&n, "relay %d raises the gate", i+1)
}

// look emits the comparison of the stream with the settled events, if either side may have lost data.
func (m *machine) look(s *state, i int) {
	if !m.owns(s, &s.procs[i]) {
		m.again(s, i, "may not note the gate's epoch")
		return
	}
	n := *s
	p := &n.procs[i]
	n.pg.raised = p.epoch
	n.pg.sync()
	p.pc = sweeping
	if !s.rd.gate.whole {
		p.pc = restoring
		n.rd.gate.looked = true
		ids := s.rd.ids()
		for e := range int8(len(m.plan.events)) {
			_, _, seen := m.row(&s.pg, e)
			t, id := s.pg.tx[m.plan.events[e].tx].phase, m.plan.events[e].of
			settled := t == visible && m.settled(&s.pg, e)
			switch {
			case s.pg.dead.has(e) || id != e && t == planned:
			case ids.has(id) && !settled && !m.without("events in the stream are in doubt"):
				n.rd.gate.doubt = n.rd.gate.doubt.with(id)
			case !ids.has(id) && settled && seen && !m.without("missing events are published again"):
				p.missing = p.missing.with(e)
			}
		}
	}
	m.emit(&n, "relay %d looks: missing %s, in doubt %s", i+1, m.names(p.missing), m.names(n.rd.gate.doubt))
}

func (m *machine) restore(s *state, i int) {
	p := &s.procs[i]
	for e := range int8(len(m.plan.events)) {
		if p.missing.has(e) {
			n := *s
			n.procs[i].missing &^= set(1) << e
			m.send(&n, i, e, restoreLane, 1)
			return
		}
	}
	n := *s
	if !m.owns(s, p) {
		m.again(s, i, "may not say that the stream is whole")
		return
	}
	if !s.rd.gate.looked && !m.without("a gate that has not been compared is not whole") {
		m.again(s, i, "finds a gate that was not looked at")
		return
	}
	n.pg.timeline = s.timeline
	n.pg.n = p.n
	n.pg.sync()
	n.rd.gate.whole = true
	n.procs[i].pc = sweeping
	m.emit(&n, "relay %d has made the stream whole", i+1)
}

// send emits that an event is sent.
func (m *machine) send(n *state, i int, e, lane, claim int8) {
	p := &n.procs[i]
	p.flying = call{e + 1, lane, p.epoch, claim, p.last[lane] + 1, p.n, p.nonce}
	m.emit(n, "relay %d sends event %d in lane %d", i+1, e+1, lane)
}

// publish emits that the call arrives and is answered.
func (m *machine) publish(s *state, i int) {
	n := *s
	p := &n.procs[i]
	c := p.flying
	p.flying = call{}
	if p.refused || m.refuses(s, c) {
		m.park(s, i, c)
		return
	}
	if s.budget.reply > 0 {
		lost := n
		lost.budget.reply--
		lost.procs[i].flying = c
		m.arrive(&lost, c)
		m.emit(&lost, "event %d arrives, and the answer does not: the stream is %s", c.event, m.stream(&lost.rd))
	}
	if !m.arrive(&n, c) {
		if p.assistant && s.rd.gate.epoch == p.epoch {
			p.part = 0 // another sweeper has claimed it
			m.emit(&n, "relay %d is refused: the part is another's", i+1)
			return
		}
		m.again(&n, i, "is refused")
		return
	}
	p.last[c.lane]++
	p.n = n.rd.gate.n
	m.passed(s, p, c.event-1)
	m.emit(&n, "event %d arrives: the stream is %s", c.event, m.stream(&n.rd))
}

// raise fences the earlier claims of a lane. The events that they have published are in doubt.
func (g *gate) raise(lane, claim int8) {
	if g.claim[lane] < claim {
		g.inherited |= g.unsettled[lane]
		g.claim[lane], g.last[lane], g.unsettled[lane] = claim, 0, 0
	}
}

// passed updates a relay that knows that an event is published or parked.
func (m *machine) passed(s *state, p *proc, e int8) {
	switch p.pc {
	case sweeping:
		_, seq, _ := m.row(&s.pg, e)
		p.mark.cursor = seq
	case streaming:
		p.published = p.published.with(e)
		m.step(p, s)
	}
}

// refuses reports whether Redis refuses the event itself. The gate is checked first, and an event in doubt is in the
// stream.
func (m *machine) refuses(s *state, c call) bool {
	return m.plan.txs[m.plan.events[c.event-1].tx].poison && !s.cured &&
		s.rd.gate.epoch == c.epoch && s.rd.gate.claim[c.lane] <= c.claim &&
		!(s.rd.gate.doubt | s.rd.gate.inherited).has(m.plan.events[c.event-1].of)
}

// park emits that the relay parks a refused event.
func (m *machine) park(s *state, i int, c call) {
	n := *s
	p := &n.procs[i]
	if !p.refused {
		p.refused = true
		if !m.without("a refusal raises the claim") {
			n.rd.gate.raise(c.lane, c.claim)
		}
		m.emit(&n, "event %d is refused", c.event)
		return
	}
	p.refused, p.flying = false, call{}
	_, _, there := m.row(&s.pg, c.event-1)
	if t := s.pg.tx[m.plan.events[c.event-1].tx].phase; t == written || t == committed {
		return // it is not visible yet
	}
	mine := m.owns(s, p) || m.without("a park checks the epoch") && p.server == s.server
	if p.pc == sweeping && s.pg.claim[p.part-1] != p.claim && !m.without("a park checks the claim") {
		mine = false
	}
	if !mine {
		m.again(&n, i, "may not park")
		return
	}
	if there {
		n.pg.dead = n.pg.dead.with(c.event - 1)
	}
	n.pg.sync()
	m.passed(s, p, c.event-1)
	m.emit(&n, "relay %d parks event %d", i+1, c.event)
}

// arrive is the publishing script. It reports whether the call was let through.
func (m *machine) arrive(n *state, c call) bool {
	g := &n.rd.gate
	id := m.plan.events[c.event-1].of
	if g.epoch != c.epoch && !m.without("the gate checks the epoch") ||
		g.nonce != c.nonce && g.epoch == c.epoch && !m.without("the gate checks the nonce") {
		return false
	}
	if !g.whole && c.lane != restoreLane && !m.without("nothing is published before the stream is whole") {
		return false
	}
	if g.n < c.least && !m.without("the gate checks how far it has come") {
		return false
	}
	l := c.lane
	if g.claim[l] > c.claim && !m.without("the gate checks the claim") {
		return false
	}
	if g.claim[l] < c.claim {
		if c.number != 1 {
			return false
		}
		if m.without("a claim inherits doubt") {
			g.unsettled[l] = 0
		}
		g.raise(l, c.claim)
	}
	if !m.without("the gate checks the number") {
		switch c.number {
		case g.last[l]: // the same call again
			return g.unsettled[l].has(id)
		case g.last[l] + 1:
		default:
			return false
		}
	}
	g.last[l] = c.number
	g.unsettled[l] = g.unsettled[l].with(id)
	if (g.doubt | g.inherited).has(id) {
		g.doubt &^= set(1) << id
		g.inherited &^= set(1) << id
		return true
	}
	if n.rd.len < maxEv { // otherwise it is there twice, which judge has detected
		n.rd.stream[n.rd.len] = id + 1
		n.rd.len++
		g.n++
	}
	return true
}

// The doubt is dropped when all events in it are settled, or the stream has passed them.
func (m *machine) forget(s *state, i int) {
	p := &s.procs[i]
	if p.pc < sweeping || p.assistant || s.rd.gate.doubt == 0 || s.rd.gate.epoch != p.epoch || p.adrift {
		return
	}
	keep := p.pc == streaming && !p.settled.allBelow(p.doubtUntil)
	if m.without("doubt stays until the mark has it") {
		keep = p.pc == streaming && p.pos < p.begun
	}
	if p.pc == sweeping {
		keep = !s.pg.snapshot().allBelow(p.doubtUntil)
		for part := range m.parts {
			for _, e := range m.due(&s.pg, part, &s.pg.mark[part], nil) {
				keep = keep || s.pg.tx[m.plan.events[e].tx].xid < p.doubtUntil
			}
		}
	}
	if keep && !m.without("doubt stays until it is settled") {
		return
	}
	n := *s
	n.rd.gate.doubt = 0
	m.emit(&n, "relay %d forgets the doubt", i+1)
}
