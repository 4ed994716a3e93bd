package model

// advance passes records that the reader does not need: rows without their commit, roll-backs, unpublished tables.
func (m *machine) advance(s *state, p *proc) {
	for p.pos < s.pg.synced {
		r := s.pg.wal[p.pos]
		if r.end && r.ok && !s.pg.tx[r.tx].silent && p.next < m.plan.txs[r.tx].n {
			return
		}
		p.pos, p.next = p.pos+1, 0
	}
}

func (m *machine) step(p *proc, s *state) {
	p.next++
	m.advance(s, p)
}

func (m *machine) follow(s *state, i int) {
	p := &s.procs[i]
	n := *s
	q := &n.procs[i]
	m.advance(s, q)
	switch {
	case p.adrift: // its stream has ended
	case q.pos < s.pg.synced:
		e := m.plan.txs[s.pg.wal[q.pos].tx].first + q.next
		if m.holds(s, &p.settled, e) && !m.without("the stream checks the mark") {
			m.step(q, s)
			m.emit(&n, "relay %d passes event %d: it is settled", i+1, e+1)
		} else if m.stuck(s, e) {
			if q.pos != p.pos {
				m.emit(&n, "relay %d comes to event %d", i+1, e+1)
			}
		} else {
			m.send(&n, i, e, streamLane, 1)
		}
	case q.pos != p.pos:
		m.emit(&n, "relay %d passes what is not for it", i+1)
	}
	if s.pg.slot < 0 {
		m.again(s, i, "has no slot")
		return
	}
	if p.look.end > 0 {
		m.judgeLook(s, i)
		return
	}
	m.lookUp(s, i)
	m.confirm(s, i)
}

// lookUp emits that a stream takes a snapshot, lists the rows that it sees and the mark does not hold, and reads the
// end of the WAL: the commits of everything that the snapshot sees are before it. A stream that is far behind does
// not list rows that it has not reached.
func (m *machine) lookUp(s *state, i int) {
	p := &s.procs[i]
	var highest int8
	for e := range int8(len(m.plan.events)) {
		if p.published.has(e) {
			highest = max(highest, s.pg.tx[m.plan.events[e].tx].xid)
		}
	}
	look := m.take(s, p, s.pg.latest+1)
	if m.pointless(s, p, &look) {
		return
	}
	n := *s
	n.procs[i].look = look
	m.emit(&n, "relay %d looks: owed is %s", i+1, m.names(look.owed))
	below := highest + 1
	if !m.without("a scan goes as far as the mark") {
		below = max(below, p.settled.xmax)
	}
	if below < look.xmax && p.pos < s.pg.len {
		n.procs[i].look = m.take(s, p, below)
		m.emit(&n, "relay %d looks: owed is %s before id %d", i+1, m.names(n.procs[i].look.owed), below)
	}
}

// take returns a reading of the current state.
func (m *machine) take(s *state, p *proc, below int8) look {
	look := look{bound: bound{s.pg.snapshot(), s.pg.seq}, end: s.pg.len + 1, below: below}
	for e := range int8(len(m.plan.events)) {
		xid, seq, seen := m.row(&s.pg, e)
		if seen && xid < below && look.holds(xid, seq) && !p.settled.sees(xid) {
			look.owed = look.owed.with(e)
		}
	}
	return look
}

// pointless reports whether a reading cannot have an effect.
func (m *machine) pointless(s *state, p *proc, look *look) bool {
	missing := m.missing(s, p, look)
	_, releases := m.construct(s, p, look)
	return !releases && (missing == 0 || p.adrift ||
		p.pos == s.pg.len && (m.without("a missed row is noticed") || m.without("a mark moves on evidence")))
}

// missing returns the rows of a reading that are not published or parked. A row is identified by transaction and
// number.
func (m *machine) missing(s *state, p *proc, look *look) (missing set) {
	for e := range int8(len(m.plan.events)) {
		if !look.owed.has(e) {
			continue
		}
		xid, seq, _ := m.row(&s.pg, e)
		found := false
		for o := range int8(len(m.plan.events)) {
			x, n, _ := m.row(&s.pg, o)
			found = found || p.published.has(o) && x == xid && n == seq
		}
		if !found {
			missing = missing.with(e)
		}
	}
	return missing
}

// construct makes the next mark from a reading, without the transactions that are not published completely. It
// reports whether the mark holds published rows that the last one did not hold.
func (m *machine) construct(s *state, p *proc, look *look) (to bound, releases bool) {
	missing := m.missing(s, p, look)
	to = look.bound
	if m.without("the mark sees nothing that its scan did not see") {
		to.snapshot = s.pg.snapshot()
	}
	var undone, whole, part set // by id
	for e := range int8(len(m.plan.events)) {
		if look.owed.has(e) {
			if xid, _, _ := m.row(&s.pg, e); missing.has(e) {
				undone = undone.with(xid)
			} else {
				part = part.with(xid)
			}
		}
	}
	whole = part &^ undone
	if m.without("a transaction is done as a whole") {
		undone, whole = undone&^part, part
	}
	if look.below < look.xmax {
		to.xmax = 0
		for xid := range look.xmax {
			if whole.has(xid) {
				to.xmax = xid + 1
			}
		}
		if !m.without("the mark never sees less than before") {
			to.xmax = max(to.xmax, p.settled.xmax)
		}
	}
	if m.without("an undone transaction is left out") ||
		m.without("a mark moves on evidence") && p.pos >= look.end-1 {
		undone = 0
	}
	to.ended &= (set(1)<<to.xmax - 1) &^ undone
	for e := range int8(len(m.plan.events)) {
		releases = releases || p.published.has(e) && m.holds(s, &to, e)
	}
	if m.without("a mark moves on evidence") {
		releases = releases || to.ended&^p.settled.ended != 0
	}
	return to, releases
}

// judgeLook emits the stream's reaction to a reading.
func (m *machine) judgeLook(s *state, i int) {
	p := &s.procs[i]
	missing := m.missing(s, p, &p.look)
	to, releases := m.construct(s, p, &p.look)
	if releases {
		m.move(s, i, to)
	}
	switch {
	case missing != 0 && p.pos >= p.look.end-1 && !p.adrift && !m.without("a missed row is noticed") &&
		!m.without("a mark moves on evidence"):
		n := *s
		for e := range int8(len(m.plan.events)) {
			n.needless = n.needless || missing.has(e) && !s.pg.tx[m.plan.events[e].tx].silent && !s.pg.moved.has(e)
		}
		m.again(&n, i, "misses "+m.names(missing))
	case !releases && (missing == 0 || p.adrift || p.pos >= p.look.end-1 || m.stale(s, p)):
		n := *s
		n.procs[i].look = look{}
		m.emit(&n, "relay %d has nothing to move", i+1)
	}
}

// stale reports whether a newer reading would achieve more.
func (m *machine) stale(s *state, p *proc) bool {
	next := m.take(s, p, s.pg.latest+1)
	_, releases := m.construct(s, p, &next)
	return releases
}

// holds reports whether a mark holds the row of an event.
func (m *machine) holds(s *state, b *bound, e int8) bool {
	xid, seq, _ := m.row(&s.pg, e)
	return b.holds(xid, seq)
}

// move emits that a mark is written for every part.
func (m *machine) move(s *state, i int, to bound) {
	n := *s
	p := &n.procs[i]
	if !m.owns(s, p) {
		m.again(s, i, "may not move the mark")
		return
	}
	m.hang(s, i, maxPart+1, mark{s: to})
	m.put(&n, maxPart+1, mark{s: to})
	p.settled, p.look = to, look{}
	for e := range int8(len(m.plan.events)) {
		if m.holds(s, &to, e) {
			p.published &^= set(1) << e
		}
	}
	n.pg.n = max(n.pg.n, p.n)
	m.settle(&n, i, streamLane)
	m.emit(&n, "relay %d moves the mark: it sees %b before id %d", i+1, to.ended, to.xmax)
}

// confirm emits that the slot moves past the transactions that the mark holds.
func (m *machine) confirm(s *state, i int) {
	p := &s.procs[i]
	to := s.pg.slot
	for ; to < p.pos && !p.adrift; to++ {
		r := s.pg.wal[to]
		if r.end && r.ok && !s.pg.tx[r.tx].silent && !m.held(s, p, r.tx) &&
			!m.without("only what is settled is confirmed") {
			break
		}
	}
	if to > s.pg.slot {
		n := *s
		n.pg.slot = to
		m.emit(&n, "relay %d confirms %d", i+1, to)
	}
}

// held reports whether the mark holds all of a transaction.
func (m *machine) held(s *state, p *proc, k int8) bool {
	w := m.plan.txs[k]
	for e := w.first; e < w.first+w.n; e++ {
		if !m.holds(s, &p.settled, e) {
			return false
		}
	}
	return true
}
