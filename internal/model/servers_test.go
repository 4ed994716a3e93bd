package model

import (
	"cmp"
	"slices"
)

// This file has the steps of the writers and of the servers.

// write emits the next steps of the writers.
func (m *machine) write(s *state) {
	for k := range int8(len(m.plan.txs)) {
		t, p := &s.pg.tx[k], m.plan.txs[k]
		switch t.phase {
		case planned:
			if m.free(s, k) {
				n := *s
				n.pg.begin(k)
				m.emit(&n, "transaction %d has its id", k+1)
			}
		case numbered:
			n := *s
			n.pg.insert(k, p.n)
			if p.prepared {
				n.pg.sync()
			}
			m.emit(&n, "transaction %d writes its rows", k+1)
			if s.budget.silent > 0 {
				n.budget.silent--
				n.pg.tx[k].silent = true
				m.emit(&n, "transaction %d writes its rows, and is not published", k+1)
			}
		case written:
			n := *s
			n.pg.append(record{k, true, true})
			n.pg.tx[k].phase = committed
			if !p.async {
				n.pg.sync()
			}
			m.emit(&n, "transaction %d has its commit record", k+1)
			if p.mayAbort {
				n = *s
				n.pg.append(record{k, true, false})
				n.pg.tx[k].phase = aborted
				n.pg.end(t.xid)
				m.emit(&n, "transaction %d rolls back", k+1)
			}
		case committed:
			n := *s
			n.pg.tx[k].phase = visible
			n.pg.end(t.xid)
			m.emit(&n, "transaction %d is visible", k+1)
		}
	}
	if s.pg.synced < s.pg.len {
		n := *s
		n.pg.sync()
		m.emit(&n, "the WAL is on disk")
	}
}

// free reports whether the locks of the transaction's aggregates are free.
func (m *machine) free(s *state, k int8) bool {
	for i, e := range m.plan.events {
		if e.tx != k {
			continue
		}
		if int(e.of) != i && (s.pg.tx[m.plan.events[e.of].tx].phase != visible || !m.parked(&s.pg, e.of)) {
			return false
		}
		for _, o := range m.plan.events {
			if o.tx < k && o.aggregate == e.aggregate && s.pg.tx[o.tx].phase < visible {
				return false
			}
		}
	}
	return true
}

func (pg *postgres) begin(k int8) {
	pg.tx[k].phase, pg.tx[k].xid = numbered, pg.next
	pg.next++
}

func (pg *postgres) insert(k, n int8) {
	pg.tx[k].phase, pg.tx[k].seq = written, pg.seq+1
	pg.seq += n
	pg.append(record{tx: k})
}

func (pg *postgres) append(r record) {
	pg.wal[pg.len] = r
	pg.len++
}

func (pg *postgres) end(xid int8) {
	pg.ended = pg.ended.with(xid)
	pg.latest = max(pg.latest, xid)
}

// sync is the effect of a synchronous commit.
func (pg *postgres) sync() { pg.synced, pg.seqSynced = pg.len, pg.seq }

// snapshot has the ids up to the last one that has ended, which may be older than the last assigned one.
func (pg *postgres) snapshot() snapshot {
	return snapshot{pg.ended & (set(1)<<(pg.latest+1) - 1), pg.latest + 1}
}

// recover is a recovery after a crash: changes that were not on disk are lost, and so are the sessions. Ids and
// numbers of the lost part are assigned again.
func (m *machine) recover(pg *postgres) {
	pg.len = pg.synced
	clear(pg.wal[pg.len:])
	var has, ended set
	for _, r := range pg.wal[:pg.len] {
		has = has.with(r.tx)
		if r.end {
			ended = ended.with(r.tx)
			if r.ok {
				pg.tx[r.tx].phase = visible
			}
		}
	}
	pg.next, pg.seq = 1, pg.seqSynced
	var open set
	for k := range int8(len(m.plan.txs)) {
		t := &pg.tx[k]
		if t.phase == planned {
			continue
		}
		prepared := m.plan.txs[k].prepared && t.phase == written && has.has(k)
		if !prepared && !ended.has(k) {
			t.phase = lost
		}
		if has.has(k) {
			pg.next = max(pg.next, t.xid+1)
			pg.seq = max(pg.seq, t.seq+m.plan.txs[k].n-1)
		}
		if prepared {
			open = open.with(t.xid)
		}
	}
	pg.latest = pg.next - 1
	pg.ended = (set(1)<<pg.next - 1) &^ open
	pg.slot = min(pg.slot, pg.len)
}

// fail emits the faults of the servers.
func (m *machine) fail(s *state) {
	b := s.budget
	if b.pgCrash > 0 {
		n := *s
		n.budget.pgCrash--
		n.server++
		n.leader = 0
		m.recover(&n.pg)
		m.emit(&n, "Postgres crashes")
	}
	if b.pgBack > 0 && !s.copied && s.pg.synced == s.pg.len {
		n := *s
		n.copied, n.standby = true, s.pg
		m.emit(&n, "the standby has this")
	}
	if b.pgBack > 0 && s.copied {
		n := *s
		n.budget.pgBack--
		n.server++
		n.timeline++
		n.leader = 0
		n.pg, n.standby = s.standby, postgres{}
		for k := range m.plan.txs {
			if s.pg.tx[k].phase > planned && n.pg.tx[k].phase == planned {
				n.pg.tx[k] = s.pg.tx[k]
				n.pg.tx[k].phase = lost
			}
		}
		m.recover(&n.pg)
		n.held = 0
		m.emit(&n, "the standby is promoted")
	}
	if b.copy > 0 {
		n := *s
		n.budget.copy--
		n.server++
		n.leader = 0
		n.pg.foreign = true
		m.recover(&n.pg)
		n.pg.next, n.pg.ended, n.pg.latest = 1, 1, 0
		for k := range n.pg.tx {
			if n.pg.tx[k].phase == written {
				n.pg.tx[k].phase = lost // a dump has no prepared transactions
			}
		}
		n.pg.wal, n.pg.len, n.pg.synced, n.pg.slot = [2 * maxTx]record{}, 0, 0, -1
		m.emit(&n, "the database is restored on another server")
	}
	if s.pg.foreign && !m.writing(s) {
		m.naturalize(s)
	}
	if b.cure > 0 {
		n := *s
		n.budget.cure--
		n.cured = true
		m.emit(&n, "Redis takes what it refused")
	}
	if b.update > 0 && m.without("rows stay in their part") {
		for e := range int8(len(m.plan.events)) {
			if _, _, seen := m.row(&s.pg, e); seen {
				n := *s
				n.budget.update--
				n.pg.moved = n.pg.moved.with(e)
				m.emit(&n, "event %d gets another aggregate id", e+1)
			}
		}
	}
	if b.rdBack > 0 && !s.saved {
		n := *s
		n.saved, n.dump = true, s.rd
		m.emit(&n, "Redis is saved")
	}
	if b.rdBack > 0 && s.saved {
		n := *s
		n.budget.rdBack--
		n.rd, n.dump = s.dump, redis{}
		m.emit(&n, "Redis goes back to %s", m.stream(&n.rd))
	}
	if b.flush > 0 && s.rd.gate.epoch > 0 {
		n := *s
		n.budget.flush--
		n.rd = redis{}
		m.emit(&n, "Redis is emptied")
	}
	if b.slot > 0 && s.pg.slot >= 0 {
		n := *s
		n.budget.slot--
		n.pg.slot = -1
		m.emit(&n, "the slot is dropped")
	}
	if b.drop > 0 {
		for e := range int8(len(m.plan.events)) {
			xid, seq, seen := m.row(&s.pg, e)
			mk := &s.pg.mark[m.part(&s.pg, e)]
			old := mk.settled(xid, seq)
			if m.without("retention checks the mark") {
				old = seq <= mk.s.hi
			}
			if seen && old {
				n := *s
				n.budget.drop--
				n.pg.dropped = n.pg.dropped.with(e)
				m.emit(&n, "the row of event %d is dropped by age", e+1)
			}
		}
	}
}

// writing reports whether a transaction has the table locked.
func (m *machine) writing(s *state) bool {
	for _, t := range s.pg.tx {
		if t.phase == written || t.phase == committed {
			return true
		}
	}
	return false
}

// naturalize emits an operator's handling of a copy: settled rows get the id of no transaction; unsettled rows are
// written again, with an id of this server and new numbers. Rows written here earlier count as unsettled. The mark
// sees the first, and no id of this server, because transactions with such an id may still write.
func (m *machine) naturalize(s *state) {
	n := *s
	pg := &n.pg
	pg.foreign = false
	var owed []int8 // in plans with a copy, a transaction has one event
	for e := range int8(len(m.plan.events)) {
		if _, _, seen := m.row(&s.pg, e); seen && !m.settled(&s.pg, e) && !m.parked(&s.pg, e) {
			owed = append(owed, e)
		} else if seen && !m.without("a copy's rows get ids of the server") {
			pg.tx[m.plan.events[e].tx].xid = 0
		}
	}
	slices.SortFunc(owed, func(a, b int8) int { return cmp.Compare(m.seqOf(&s.pg, a), m.seqOf(&s.pg, b)) })
	for _, e := range owed {
		pg.seq++
		t := &pg.tx[m.plan.events[e].tx]
		t.seq, t.xid = pg.seq, pg.next
	}
	sees := snapshot{1, 1}
	if m.without("the mark of a copy sees nothing of the server") {
		sees = snapshot{set(1)<<pg.next - 1, pg.next}
	}
	pg.end(pg.next)
	pg.next++
	if !m.without("a copy's rows get ids of the server") {
		for part := range pg.mark {
			pg.mark[part] = mark{s: bound{sees, pg.seq}}
		}
	}
	pg.sync()
	n.held, pg.nonce = 0, -1 // the owner belongs to another server
	m.emit(&n, "the operator adopts the copy")
}
