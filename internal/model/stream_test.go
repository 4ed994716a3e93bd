package model

// advance passes what the reader has nothing to do with: rows without their commit, roll-backs, what was not published.
func (m *machine) advance(s *state, p *proc) {
	for p.pos < s.pg.synced {
		r := s.pg.wal[p.pos]
		if r.end && r.ok && !s.pg.tx[r.tx].silent && p.next < m.plan.txs[r.tx].n {
			return
		}
		p.pos, p.next = p.pos+1, 0
	}
}

// step passes the event that was published.
func (m *machine) step(p *proc, s *state) {
	p.next++
	m.advance(s, p)
}

// settledIn reports whether a streamed event is not owed.
func (m *machine) settledIn(s *state, p *proc, e int8) bool {
	return m.holds(s, p, e) || s.pg.dead.has(e)
}

func (m *machine) follow(s *state, i int) {
	p := &s.procs[i]
	n := *s
	q := &n.procs[i]
	m.advance(s, q)
	switch {
	case q.pos < s.pg.synced:
		e := m.plan.txs[s.pg.wal[q.pos].tx].first + q.next
		if m.settledIn(s, p, e) && !m.without("the stream asks the mark") {
			m.step(q, s)
			m.emit(n, "relay %d passes event %d: it is settled", i+1, e+1)
		} else {
			m.send(&n, i, e, streamLane, 1)
		}
	case q.pos != p.pos:
		m.emit(n, "relay %d passes what is not for it", i+1)
	}
	if s.pg.slot < 0 {
		m.again(s, i, "has no slot")
		return
	}
	switch p.taking {
	case 0:
		switch {
		case !m.behind(s, p):
		case m.without("the snapshot before the position") && p.lsn == 0:
			m.position(s, i)
		default:
			m.take(s, i)
		}
		m.confirm(s, i)
	case 1:
		m.take(s, i)
	case 2:
		m.position(s, i)
	case 3:
		if p.pos >= p.lsn-1 {
			m.prove(s, i)
		}
	case 4:
		m.move(s, i)
	}
}

// position reads the end of the WAL: the commit of everything that the snapshot sees is before it.
func (m *machine) position(s *state, i int) {
	n := *s
	p := &n.procs[i]
	if p.lsn == 0 {
		p.lsn = s.pg.len + 1
	}
	if p.taking > 0 {
		p.taking++
	}
	m.emit(n, "relay %d reads position %d", i+1, s.pg.len)
}

// behind reports whether the marks could be moved: they do not hold something that can be seen, published or not.
func (m *machine) behind(s *state, p *proc) bool {
	for part := range m.parts {
		if len(m.due(&s.pg, part, &p.marks[part], nil)) > 0 {
			return true
		}
	}
	for at := max(s.pg.slot, 0); at < p.pos; at++ {
		r := s.pg.wal[at]
		if r.end && r.ok && s.pg.tx[r.tx].phase == visible && !m.held(s, p, r.tx) {
			return true
		}
	}
	return false
}

// held reports whether the marks hold all of a transaction.
func (m *machine) held(s *state, p *proc, k int8) bool {
	w := m.plan.txs[k]
	for e := w.first; e < w.first+w.n; e++ {
		if !m.holds(s, p, e) {
			return false
		}
	}
	return true
}

// holds reports whether the mark of the part that an event was streamed for holds it.
func (m *machine) holds(s *state, p *proc, e int8) bool {
	xid, seq, _ := m.row(&s.pg, e)
	return p.marks[m.plan.events[e].part].s.holds(xid, seq)
}

// prove compares the rows that the mark would settle with what was published or parked.
func (m *machine) prove(s *state, i int) {
	p := &s.procs[i]
	n := *s
	for part := range m.parts {
		for _, e := range m.due(&s.pg, part, &p.marks[part], &p.marks[part].t) {
			if p.published.has(e) || m.without("a mark moves on evidence") {
				continue
			}
			n.needless = !s.pg.tx[m.plan.events[e].tx].silent && !s.pg.moved.has(e)
			m.again(&n, i, "misses an event")
			return
		}
	}
	n.procs[i].taking = 4
	m.emit(n, "relay %d finds nothing missing", i+1)
}

// move copies what was noted into the marks.
func (m *machine) move(s *state, i int) {
	n := *s
	p := &n.procs[i]
	if !m.owns(s, p) {
		m.again(s, i, "may not move the marks")
		return
	}
	for part := range m.parts {
		to := &n.pg.mark[part]
		if m.without("a snapshot is written before it is used") {
			to.t = p.marks[part].t
		}
		to.s, to.t, to.open, to.cursor = to.t, bound{}, false, 0
		p.marks[part] = *to
	}
	n.pg.n = max(n.pg.n, p.n)
	n.pg.sync()
	p.taking, p.b, p.lsn = 0, bound{}, 0
	m.settle(&n, i, streamLane)
	m.emit(n, "relay %d moves the marks", i+1)
}

// confirm emits that the slot moves behind the transactions that the marks hold.
func (m *machine) confirm(s *state, i int) {
	p := &s.procs[i]
	to := s.pg.slot
	for ; to < p.pos; to++ {
		r := s.pg.wal[to]
		if r.end && r.ok && !m.held(s, p, r.tx) && !m.without("only what is settled is confirmed") {
			break
		}
	}
	if to > s.pg.slot {
		n := *s
		n.pg.slot = to
		m.emit(n, "relay %d confirms %d", i+1, to)
	}
}
