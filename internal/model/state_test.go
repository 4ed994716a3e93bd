package model

import (
	"fmt"
	"strings"
)

// The bounds of a scenario. Counts and numbers fit into an int8.
const (
	maxTx   = 4
	maxEv   = 4
	maxPart = 2
	// streamLane and restoreLane follow the lanes of the parts.
	streamLane  = maxPart
	restoreLane = maxPart + 1
	lanes       = maxPart + 2
)

// set is a set of numbers below 8: events, or transaction ids. It is a byte, as every field of a state is, because a
// state without padding is hashed at once, three times as fast.
type set uint8

func (s set) has(n int8) bool { return s>>n&1 == 1 }

func (s set) with(n int8) set {
	if n > 7 {
		panic("a set has numbers below 8")
	}
	return s | 1<<n
}

// phase is the progress of a transaction.
type phase int8

const (
	planned   phase = iota
	numbered        // it has its id
	written         // its rows are in the table and not visible
	committed       // its commit record is in the WAL
	visible
	aborted
	lost // by a server that crashed or went back
)

// tx is a transaction of a writer.
type tx struct {
	phase phase
	xid   int8
	// seq is the number of its first event.
	seq int8
	// silent: the table was not in the publication when it was written.
	silent bool
}

// snapshot is a pg_snapshot: the ids that had ended, and the first later id.
type snapshot struct {
	ended set
	xmax  int8
}

func (s snapshot) sees(xid int8) bool { return xid < s.xmax && s.ended.has(xid) }

// allBelow reports whether every transaction before xid had ended. Ids begin at 1; 0 is for rows that were settled
// when a database was restored on another server.
func (s snapshot) allBelow(xid int8) bool {
	below := set(1)<<xid - 2
	return s.xmax >= xid && s.ended&below == below
}

// bound is a snapshot with the last number that was assigned by then. No row that it sees has a higher number, unless
// the row is another server's, or has an id that was assigned twice.
type bound struct {
	snapshot
	hi int8
}

func (b bound) holds(xid, seq int8) bool { return b.sees(xid) && seq <= b.hi }

// mark defines the settled rows of a part: those that s holds and, if there is a t, those that t holds up to the
// cursor.
type mark struct {
	s, t   bound
	cursor int8
	open   bool // there is a t
}

func (m mark) settled(xid, seq int8) bool {
	return m.s.holds(xid, seq) || m.open && seq <= m.cursor && m.t.holds(xid, seq)
}

// record is an entry of the WAL: the rows of a transaction, or its end.
type record struct {
	tx  int8
	end bool
	ok  bool // committed
}

// postgres is the server's state that a crash or a failover can take back.
type postgres struct {
	tx   [maxTx]tx
	next int8 // the next id
	// ended are the ids that have ended; latest is the highest of them.
	ended  set
	latest int8
	seq    int8 // the last assigned number
	wal    [2 * maxTx]record
	len    int8
	synced int8 // how much of the WAL is on disk
	// seqSynced is a number that the sequence never goes back beyond.
	seqSynced int8
	// epoch and nonce are the owner's; adopted is the server's timeline at its adoption.
	epoch, nonce, adopted int8
	claim                 [maxPart]int8
	mark                  [maxPart]mark
	// pass is the snapshot that a hand-over writes before it uses it.
	pass bound
	// slot is the slot's start position in the WAL. barrier: older transactions must end first.
	slot, barrier int8
	// timeline is the server's when the stream was last found complete.
	timeline int8
	// n is how many entries the gate had let through when the last mark or cursor was written.
	n int8
	// raised is the highest epoch that a gate was raised to.
	raised  int8
	dropped set  // events whose rows retention has deleted
	moved   set  // events whose rows were moved to another part
	dead    set  // parked events
	foreign bool // restored on another server and not adopted there
}

// gate is the state that Redis keeps for a stream.
type gate struct {
	epoch int8
	// nonce distinguishes two owners of one epoch: each process of Postgres assigns an epoch once.
	nonce int8
	claim [lanes]int8
	last  [lanes]int8
	// unsettled are the events of each lane's batches that are not settled.
	unsettled [lanes]set
	// doubt are the events that an adoption found unsettled, inherited those that a later claim of a lane did.
	doubt, inherited set
	n                int8 // entries that it has let through
	// whole: the stream lacks no settled event. A recreated gate is not whole until an adoption has checked the
	// stream.
	whole bool
	// looked: the events that the owner found in an incomplete stream are in doubt.
	looked bool
}

// redis is the server's state that can go back. There is one stream.
type redis struct {
	stream [maxEv]int8 // events, from 1
	len    int8
	gate   gate
}

func (r *redis) ids() (ids set) {
	for _, e := range r.stream[:r.len] {
		ids = ids.with(e - 1)
	}
	return ids
}

type counter int8

const (
	idle counter = iota
	raising
	looking
	restoring
	sweeping
	streaming
)

// proc is an instance of the relay. Its memory may be out of date.
type proc struct {
	pc        counter
	assistant bool
	poll      bool // it sweeps under the shared lock
	epoch     int8
	nonce     int8 // see gate
	server    int8 // the process that its sessions are with
	adrift    bool // it has new sessions, and does not know that it has lost its lock
	last      [lanes]int8
	missing   set
	n         int8 // of the gate, according to the last reply
	swept     set  // the parts that it has swept since it adopted
	// doubtUntil: the doubt may be dropped when everything older has ended and is settled.
	doubtUntil int8
	// of a sweep
	part  int8 // from 1; 0: none is claimed
	claim int8
	mark  mark
	// of a hand-over: the pass that it has written; cleared: while polling, the pass is drained
	pass    bound
	cleared bool
	// of a stream
	pos       int8
	next      int8 // the next event of the transaction at pos
	begun     int8 // the end of the WAL when the stream began
	settled   bound
	published set // or parked, and not held by a mark
	look      look
	// flying is the event in flight to Redis, from 1, with its lane and number.
	flying  call
	refused bool // Redis refuses it
}

// look is the reading of a stream: a bound, the unsettled rows of the transactions before an id, and the end of the
// WAL after that, from 1.
type look struct {
	bound
	owed       set
	below, end int8
}

// statement is an abandoned write of a mark. It succeeds if the server and the owner are still the same.
type statement struct {
	to                         mark
	part, epoch, nonce, server int8 // part is from 1; a number after the last part means every part
}

type call struct {
	event, lane, epoch, claim, number, least, nonce int8
}

// state is the whole state of the machine. Equal states are the same.
type state struct {
	pg       postgres
	server   int8 // the process of Postgres
	timeline int8
	rd       redis
	leader   int8 // the instance that holds the lock, from 1
	procs    [2]proc
	late     call // a call of a process that has ended
	hung     statement
	// sent are the events that ever were in the stream, held those that a mark of this server ever held.
	sent, held set
	back       bool // a mark holds less than before
	// standby and dump are the states that a failover and a restore return to.
	standby       postgres
	dump          redis
	copied, saved bool
	cured         bool // Redis takes what it refused before, and answers
	needless      bool // a relay has adopted for an event that was not missing
	budget        budget
}

// budget is the number of remaining faults.
type budget struct {
	crash, lock, toggle, assist, pgCrash, pgBack, copy, rdBack int8
	flush, silent, slot, drop, update, cure, reply, hang, give int8
}

func parseBudget(s string) (b budget) {
	counts := map[string]*int8{
		"crash": &b.crash, "lock": &b.lock, "toggle": &b.toggle, "assist": &b.assist, "reply": &b.reply,
		"pgcrash": &b.pgCrash, "pgback": &b.pgBack, "copy": &b.copy, "rdback": &b.rdBack, "flush": &b.flush,
		"silent": &b.silent, "slot": &b.slot, "drop": &b.drop, "update": &b.update, "cure": &b.cure, "hang": &b.hang,
		"give": &b.give,
	}
	for _, f := range strings.Fields(s) {
		*counts[f]++ // an unknown fault is nil, and panics
	}
	return b
}

// plan is the writers' transactions, in an order that the locks of the aggregates enforce.
type plan struct {
	txs    []writer
	events []event
}

type writer struct {
	first, n int8
	async    bool // it commits without waiting for the disk
	prepared bool // it survives a crash while it is open
	mayAbort bool
	poison   bool // Redis refuses its events
	stuck    bool // Redis does not answer for them
}

type event struct {
	aggregate byte
	part, tx  int8
	// of is the event that it retries, or itself: they have the same id.
	of int8
}

// parsePlan parses transactions such as "A0 A0+B1~ C1&": events by aggregate and part; ~ commits asynchronously, & is
// prepared, ? may roll back, ! is refused by Redis, # gets no answer from Redis. R1 is an operator's retry of the
// first event when that is parked.
func parsePlan(s string) (p plan) {
	for k, f := range strings.Fields(s) {
		t := writer{first: int8(len(p.events))}
		t.async, t.prepared, t.mayAbort = strings.Contains(f, "~"), strings.Contains(f, "&"), strings.Contains(f, "?")
		t.poison, t.stuck = strings.Contains(f, "!"), strings.Contains(f, "#")
		for e := range strings.SplitSeq(strings.Trim(f, "~&?!#"), "+") {
			n := event{e[0], int8(e[1] - '0'), int8(k), int8(len(p.events))}
			if n.aggregate == 'R' {
				n = p.events[n.part-1]
				n.tx = int8(k)
			}
			p.events = append(p.events, n)
			t.n++
		}
		p.txs = append(p.txs, t)
	}
	if len(p.txs) > maxTx || len(p.events) > maxEv {
		panic("too large a plan: " + s)
	}
	return p
}

// row is a row as a session sees it.
func (m *machine) row(pg *postgres, e int8) (xid, seq int8, seen bool) {
	t := pg.tx[m.plan.events[e].tx]
	seen = t.phase == visible && !pg.dropped.has(e) && !m.retried(pg, e)
	return t.xid, t.seq + e - m.plan.txs[m.plan.events[e].tx].first, seen
}

// stuck reports whether Redis does not answer for an event.
func (m *machine) stuck(s *state, e int8) bool {
	return m.plan.txs[m.plan.events[e].tx].stuck && !s.cured
}

// waits reports whether an event may wait for one that gets no answer: in its part, in the stream, or because the
// leader drains a pass in all parts before it continues.
func (m *machine) waits(s *state, e int8) bool {
	for o := range int8(len(m.plan.events)) {
		if _, _, seen := m.row(&s.pg, o); !seen || !m.stuck(s, o) || s.leader == 0 {
			continue
		}
		if l := &s.procs[s.leader-1]; l.pc == streaming || l.pass != (bound{}) || m.part(&s.pg, o) == m.part(&s.pg, e) {
			return true
		}
	}
	return false
}

// retried reports whether an operator has replaced a parked row.
func (m *machine) retried(pg *postgres, e int8) bool {
	for r, v := range m.plan.events {
		if v.of == e && int8(r) != e && pg.tx[v.tx].phase == visible {
			return true
		}
	}
	return false
}

// retrying reports whether a retry of an event is in the WAL, visible or not, or was before the server went back.
func (m *machine) retrying(s *state, e int8) bool {
	for r, v := range m.plan.events {
		t := s.pg.tx[v.tx].phase
		if v.of == e && int8(r) != e && (t == committed || t == visible || t == lost && s.timeline > 0) {
			return true
		}
	}
	return false
}

func (m *machine) parked(pg *postgres, e int8) bool { return pg.dead.has(e) && !m.retried(pg, e) }

// settled reports whether the mark of its part holds the row of an event.
func (m *machine) settled(pg *postgres, e int8) bool {
	xid, seq, _ := m.row(pg, e)
	return pg.mark[m.part(pg, e)].settled(xid, seq)
}

// part is the part of an event's row.
func (m *machine) part(pg *postgres, e int8) int8 {
	if pg.moved.has(e) {
		return 1 - m.plan.events[e].part
	}
	return m.plan.events[e].part
}

func (m *machine) names(s set) string {
	var b strings.Builder
	for e := range m.plan.events {
		if s.has(int8(e)) {
			fmt.Fprintf(&b, " %c%d", m.plan.events[e].aggregate, e+1)
		}
	}
	return "{" + strings.TrimSpace(b.String()) + "}"
}
