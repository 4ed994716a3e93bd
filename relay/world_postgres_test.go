package relay

import (
	"errors"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"

	"posthaste/outbox"
)

// postgres is the database of a world. Everything in it is guarded by world.mu.
type postgres struct {
	w   *world
	wal outbox.LSN // the end of what is written
	// xid is the next transaction's, first the first one that ever was, ended the one behind the last that has ended.
	// A crash gives ids out again from durable on.
	xid, first, ended, durable uint64
	// run is which process it is.
	run int
	// leaderSession is what the store tells of it, endedSessions are the sessions that were to end.
	leaderSession outbox.LeaderSession
	endedSessions []int
	seq           int64
	// running are the transactions that have not ended for others: open ones, and commits that are held back.
	running map[uint64]*transaction
	// log holds the commits in order, parts the rows of the table, visible or not.
	log   []*transaction
	parts [outbox.Partitions][]*tableRow
	marks []*mark
	// listed is the largest number of rows that a scan has listed.
	listed int

	state   outbox.State
	streams []outbox.Stream // every stream ever noted
	// layouts are those before the present one, oldest first.
	layouts []layout
	gated   map[string]bool
	// unawaited: no standby knows of the present one. impossibleLater: that impossibleShards is impossible is found out
	// when the layout changes, not before.
	unawaited, impossibleLater bool
	// delivered is set when an event was settled that is not parked.
	delivered bool
	dead      []outbox.Dead
	// suspected are the streams that an adoption noted as perhaps lossy, uncounted those that were not counted since.
	suspected map[string]bool
	uncounted []outbox.Report
	// repairs are those that are not done.
	repairs []outbox.Repair
	// groups are what was noted of streams.
	groups map[string][]string
	// rolledBack are events that must never be published.
	rolledBack map[uuid.UUID]bool

	leader  *lockSession
	alone   *lockSession // who has the pipe for itself, and how often
	alones  int
	sharing map[*lockSession]int // who shares it, and how often
	claims  int64
	claimer [outbox.Partitions]*sweepConn

	slot *slot
	// unpublished: the table is not in the publication, so that nothing of it is streamed.
	unpublished bool
	// publication counts how often it was put back.
	publication int
}

// layout is how streams were named, and what was published then.
type layout struct {
	outbox.Layout
	settled outbox.Settled
}

// stream is where a row's event is, or goes.
func (pg *postgres) stream(r *tableRow) string {
	for _, l := range pg.layouts {
		if holds(&l.settled, r) {
			return l.Stream(r.AggregateType, r.AggregateID)
		}
	}
	return pg.state.Stream(r.AggregateType, r.AggregateID)
}

// streamsOf are the only streams of types.
func streamsOf(names ...string) (list []outbox.Stream) {
	for _, n := range names {
		list = append(list, outbox.Stream{Name: n, Base: n})
	}
	return list
}

// mark is a row of outbox_mark.
type mark struct {
	part    int             // -1: every part
	settled *outbox.Settled // nil: the pass was written before it is used
	// pass is under way up to cursor; 0: it is not.
	pass   outbox.Settled
	cursor int64
	// entries are those that were noted with it.
	entries outbox.Entries
}

func holds(s *outbox.Settled, r *tableRow) bool { return r.Seq <= s.High && s.Snapshot.Sees(r.tx.xid) }

func (m *mark) holds(r *tableRow) bool {
	return holds(m.settled, r) || r.Seq <= m.cursor && holds(&m.pass, r)
}

// transaction is one writer's.
type transaction struct {
	w     *world
	xid   uint64
	begun outbox.LSN
	rows  []*tableRow
	// commit and end are where its commit is in the WAL; zero while it is open.
	commit, end outbox.LSN
	ended       bool // for everyone
	// crashed is set when the server has lost the transaction in a crash.
	crashed bool
}

type tableRow struct {
	outbox.Record
	part int
	tx   *transaction
	// deleted is set when its writer has deleted it, unstreamed if it is not in the slot's stream.
	deleted, unstreamed bool
}

// oneBeforeTheWrap makes the lower halves of transaction ids wrap around in the middle of a test.
const oneBeforeTheWrap = 7<<32 - 30

func newPostgres(w *world) *postgres {
	pg := &postgres{
		w: w, wal: 1000, xid: oneBeforeTheWrap, first: oneBeforeTheWrap, ended: oneBeforeTheWrap,
		durable: oneBeforeTheWrap,
		running: map[uint64]*transaction{},
		marks:   []*mark{{part: -1, settled: &outbox.Settled{Snapshot: outbox.NewSnapshot(3, nil)}}},

		suspected:  map[string]bool{},
		gated:      map[string]bool{},
		groups:     map[string][]string{},
		rolledBack: map[uuid.UUID]bool{}, sharing: map[*lockSession]int{},
	}
	pg.state = outbox.State{
		Layout: outbox.Layout{Prefix: "outbox.", Shards: 1},
		Name:   "test", Desired: outbox.ModeAuto, Active: outbox.ModeStandby, Owner: outbox.Owner{Source: uuid.UUID{1}},
	}
	return pg
}

// begin opens a writer's transaction with events. Each is the type and the id of its aggregate, and its own type, which
// may be left out.
func (w *world) begin(events ...string) *transaction {
	tx := &transaction{w: w}
	w.do(func() {
		tx.xid, tx.begun = w.pg.xid, w.pg.wal
		w.pg.xid++
		w.pg.running[tx.xid] = tx
	})
	for _, e := range events {
		f := append(strings.Fields(e), "done")
		tx.insert(f[0], f[1], f[2])
	}
	return tx
}

// writes is a transaction whose commit is not visible yet.
func (w *world) writes(events ...string) *transaction {
	tx := w.begin(events...)
	tx.write()
	return tx
}

// commits is a transaction that has ended.
func (w *world) commits(events ...string) *transaction {
	tx := w.begin(events...)
	tx.commitNow()
	return tx
}

// insert adds an event, and returns its row.
func (tx *transaction) insert(aggregateType, aggregate, eventType string) *tableRow {
	tx.w.mu.Lock()
	defer tx.w.mu.Unlock()
	pg := tx.w.pg
	if tx.crashed {
		return nil
	}
	pg.seq++
	r := &tableRow{tx: tx, part: outbox.PartOf(aggregate), unstreamed: pg.unpublished, Record: outbox.Record{
		ID: uuid.UUID{2, byte(pg.seq >> 8), byte(pg.seq)}, Seq: pg.seq, AggregateType: aggregateType,
		AggregateID: aggregate,
		Type:        eventType, Payload: []byte("{}"), Time: time.Now(),
	}}
	tx.rows = append(tx.rows, r)
	pg.parts[r.part] = append(pg.parts[r.part], r)
	tx.w.grow(100)
	return r
}

// write puts the commit into the WAL. It is not visible before show.
func (tx *transaction) write() {
	tx.w.mu.Lock()
	defer tx.w.mu.Unlock()
	if tx.crashed {
		return
	}
	tx.commit = tx.w.pg.wal
	tx.end = tx.commit + 10
	tx.w.pg.log = append(tx.w.pg.log, tx)
	tx.w.pg.durable = max(tx.w.pg.durable, tx.xid+1)
	tx.w.grow(10)
}

// show ends the transaction for everyone.
func (tx *transaction) show() {
	tx.w.mu.Lock()
	defer tx.w.mu.Unlock()
	tx.over()
}

// over does so with mu held.
func (tx *transaction) over() {
	if pg := tx.w.pg; !tx.ended && !tx.crashed {
		tx.ended = true
		delete(pg.running, tx.xid)
		pg.ended = max(pg.ended, tx.xid+1)
	}
}

func (tx *transaction) commitNow() {
	tx.write()
	tx.show()
}

func (tx *transaction) rollback() {
	tx.w.mu.Lock()
	defer tx.w.mu.Unlock()
	tx.over()
	tx.undo()
}

func (tx *transaction) undo() {
	for _, r := range tx.rows {
		tx.w.pg.rolledBack[r.ID] = true
		tx.w.pg.remove(r)
	}
}

// crash restarts the server. Uncommitted work is lost, and its ids are assigned again.
func (pg *postgres) crash() {
	pg.w.trace = append(pg.w.trace, step{time.Since(pg.w.began), "postgres", "CRASHES", nil})
	pg.run++
	for _, tx := range pg.running {
		if tx.commit != 0 {
			tx.over()
			continue
		}
		tx.crashed = true
		tx.undo()
	}
	clear(pg.running)
	pg.xid, pg.ended = pg.durable, pg.durable
	for _, i := range pg.w.instances {
		s := i.session
		i.disconnect()
		pg.w.after(100*time.Millisecond, func() { s.notice() })
	}
}

// writes is a small transaction of the relay's, which is on disk when it ends.
func (pg *postgres) writes() {
	pg.xid++
	pg.ended, pg.durable = max(pg.ended, pg.xid), pg.xid
	pg.w.grow(50)
}

// event commits one event.
func (w *world) event(aggregateType, aggregate string) *tableRow {
	return w.commits(aggregateType + " " + aggregate).rows[0]
}

// remove deletes a row, as its writer may.
func (pg *postgres) remove(r *tableRow) {
	r.deleted = true
	pg.parts[r.part] = slices.DeleteFunc(pg.parts[r.part], func(o *tableRow) bool { return o == r })
}

// newest is the mark of a part.
func (pg *postgres) newest(part int) *mark {
	for _, m := range slices.Backward(pg.marks) {
		if m.settled != nil && (m.part == part || m.part == -1) {
			return m
		}
	}
	panic("there is always one")
}

// id is the number of a mark.
func (pg *postgres) id(m *mark) int64 { return int64(slices.Index(pg.marks, m)) }

// held tells whether the mark holds a row, settled whether it needs not be published: it is held, parked or deleted.
func (pg *postgres) held(r *tableRow) bool    { return pg.newest(r.part).holds(r) }
func (pg *postgres) settled(r *tableRow) bool { return r.deleted || pg.parked(r) || pg.held(r) }
func (pg *postgres) owed(r *tableRow) bool    { return !pg.settled(r) }

// waits tells whether a sweep would find the row.
func (pg *postgres) waits(r *tableRow) bool { return r.tx.ended && pg.owed(r) }

func (pg *postgres) parked(r *tableRow) bool {
	return slices.ContainsFunc(pg.dead, func(d outbox.Dead) bool { return d.ID == r.ID && d.Seq == r.Seq })
}

// now is what a statement sees of other transactions, and the last number that was given.
func (pg *postgres) now() outbox.Settled {
	return outbox.Settled{
		Snapshot: outbox.NewSnapshot(pg.ended, slices.Collect(maps.Keys(pg.running))), High: pg.seq,
	}
}

// mark writes a mark for o. It detects rows that must never be settled.
func (pg *postgres) mark(o outbox.Owner, m *mark) error {
	if pg.state.Owner != o {
		return outbox.ErrSuperseded
	}
	for part := range pg.parts {
		if m.settled != nil && (m.part == part || m.part == -1) {
			pg.compare(part, pg.newest(part), m)
		}
	}
	pg.marks = append(pg.marks, m)
	pg.writes()
	return nil
}

// sees tells whether a mark sees a transaction that the other one does not.
func (pg *postgres) sees(m, other *mark) bool {
	for x := pg.first; x < pg.xid; x++ {
		if m.settled.Snapshot.Sees(x) && !other.settled.Snapshot.Sees(x) {
			return true
		}
	}
	return false
}

// compare looks at the step from one mark of a part to the next.
func (pg *postgres) compare(part int, from, to *mark) {
	if pg.sees(from, to) {
		pg.w.wrongly("the mark of part %d goes back", part)
	}
	for x := range pg.running {
		if to.settled.Snapshot.Sees(x) {
			pg.w.wrongly("the mark of part %d sees transaction %d, which runs", part, x)
		}
	}
	if to.settled.Snapshot.Max() > pg.xid {
		pg.w.wrongly("the mark of part %d sees what is to come, from %d on", part, pg.xid)
	}
	for _, r := range pg.parts[part] {
		name := pg.stream(r)
		switch was, is := from.holds(r), to.holds(r); {
		case was && !is:
			pg.w.wrongly("the mark of part %d goes back: it does not hold row %d any more", part, r.Seq)
		case was == is, pg.parked(r):
		case !pg.w.rd.has(name, r.ID) && !pg.w.lost[r.ID]:
			pg.w.wrongly("row %d is settled, and its event is not in %s", r.Seq, name)
		case !pg.w.confirmed[r.ID]:
			pg.w.wrongly("row %d is settled before the sink has confirmed its event", r.Seq)
		default:
			pg.delivered = true
		}
	}
}

// park notes a row among the dead ones.
func (pg *postgres) park(r *tableRow, class, reason string, attempts int) {
	switch {
	case pg.parked(r):
		return
	case pg.w.rd.has(pg.stream(r), r.ID):
		pg.w.wrongly("row %d is parked, and its event is in its stream", r.Seq)
	case pg.held(r):
		pg.w.wrongly("row %d is parked, and is settled", r.Seq)
	}
	pg.dead = append(pg.dead, outbox.Dead{
		ID: r.ID, Seq: r.Seq, AggregateType: r.AggregateType, AggregateID: r.AggregateID, Type: r.Type,
		Class: class, Error: reason,
		Attempts: attempts, DeadAt: time.Now(),
	})
	pg.writes()
}

// rows are the rows of the table, visible or not, of which are is true.
func (pg *postgres) rows(are func(r *tableRow) bool) (rows []*tableRow) {
	for _, part := range pg.parts {
		for _, r := range part {
			if are(r) {
				rows = append(rows, r)
			}
		}
	}
	return rows
}

// oldest is the oldest transaction that has not ended for others.
func (pg *postgres) oldest() uint64 {
	x := pg.xid
	for r := range pg.running {
		x = min(x, r)
	}
	return x
}

// changeLayout is layout_change.sql.
func (pg *postgres) changeLayout(o outbox.Owner, to outbox.Layout) error {
	if pg.state.Owner != o {
		return outbox.ErrSuperseded
	}
	m := pg.newest(0)
	for part := range pg.parts {
		if n := pg.newest(part); n != m || n.part != -1 || n.cursor > 0 {
			return errUnlike
		}
	}
	for name, s := range pg.w.rd.streams {
		for _, e := range s.entries {
			if pg.w.owed(e.ID) {
				pg.w.wrongly("the layout changes, and event %d, which is in %s, is not settled", e.Seq, name)
			}
		}
	}
	pg.layouts = append(pg.layouts, layout{pg.state.Layout, *m.settled})
	pg.state.Layout = to
	pg.writes()
	return nil
}

var errUnlike = errors.New("the parts are not settled alike")

// adopt writes a new owner.
func (pg *postgres) adopt(a outbox.Adoption) bool {
	if pg.state.Owner.Epoch != a.From {
		return false
	}
	if a.To.Epoch <= a.From {
		pg.w.wrongly("epoch %d follows %d", a.To.Epoch, a.From)
	}
	pg.state.Owner, pg.state.Holder, pg.state.Sink, pg.state.Degraded = a.To, a.Holder, a.Sink, ""
	pg.state.Active = outbox.ModeStandby
	pg.w.owners[a.To.Epoch], pg.w.adopter[a.To.Epoch] = a.To, a.Holder
	pg.w.known[a.To.Epoch] = slices.DeleteFunc(outbox.StreamNames(pg.streams), func(s string) bool {
		_, away := pg.w.rd.away[s]
		_, unnamed := pg.w.rd.away[outbox.BaseName(s, pg.state.Shards)+"#sharded"]
		return a.Sink == incomplete && (away || unnamed) // it may be left out
	})
	for _, s := range a.Suspects {
		pg.suspected[s.Stream] = true
		pg.uncounted = append(pg.uncounted, outbox.Report{Stream: s.Stream})
		pg.repair(outbox.Repair{Stream: s.Stream, To: 1, Recall: !s.Intact() || s.Missing > 0})
	}
	if a.WentBack {
		pg.uncounted = append(pg.uncounted, outbox.Report{Missing: -1})
		for _, s := range pg.streams {
			pg.repair(outbox.Repair{Stream: s.Name, To: 1, Recall: true, Back: true})
		}
	}
	pg.writes()
	return true
}

// repair records a pending repair, once for each stream.
func (pg *postgres) repair(r outbox.Repair) {
	r.IDs = []int64{1}
	for i := range pg.repairs {
		if p := &pg.repairs[i]; p.Stream == r.Stream {
			p.Recall, p.Back = p.Recall || r.Recall, p.Back || r.Back
			return
		}
	}
	pg.repairs = append(pg.repairs, r)
}

// reads looks, when rows are read for o, whether it was in the table before, and all its gates were raised. An instance
// that sweeps along may come before that: it raises the gate of a stream before it publishes there.
func (i *instance) reads(o outbox.Owner) {
	w := i.w
	if w.owners[o.Epoch] != o {
		w.wrongly("rows are read for epoch %d, which is not in the table", o.Epoch)
	}
	if w.adopter[o.Epoch] != i.name {
		return
	}
	for _, s := range w.known[o.Epoch] {
		if !w.raised[o.Epoch][s] {
			w.wrongly("rows are read for epoch %d before the gate of %s was raised to it", o.Epoch, s)
		}
	}
}
