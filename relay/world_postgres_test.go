package relay

import (
	"hash/fnv"
	"slices"
	"time"

	"github.com/google/uuid"

	"posthaste/outbox"
)

// postgres is the database of a world. Everything in it is guarded by world.mu.
type postgres struct {
	w   *world
	wal outbox.LSN // the end of what is written
	xid uint64     // the next transaction's
	seq int64
	// running are the transactions that have not ended for others: open ones, and commits that are held back.
	running map[uint64]*transaction
	// log are the commits in their order, parts the rows that are not deleted, whoever sees them.
	log   []*transaction
	parts [outbox.Partitions][]*tableRow

	state   outbox.State
	streams []string // every stream ever noted
	history map[uuid.UUID]bool
	dead    []outbox.Dead
	// suspected are the streams that an adoption noted as perhaps lossy, uncounted those that were not counted since.
	suspected map[string]bool
	uncounted []outbox.Loss
	// rolledBack are events that must never be published.
	rolledBack map[uuid.UUID]bool

	leader  *lockSession
	alone   *lockSession // who has the pipe for itself, and how often
	alones  int
	sharing map[*lockSession]int // who shares it, and how often
	claims  [outbox.Partitions]int64
	claimer [outbox.Partitions]*sweepConn

	slot *slot
	// unpublished: the table is not in the publication, so that nothing of it is streamed.
	unpublished bool
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
}

type tableRow struct {
	outbox.Event
	part int
	tx   *transaction
	// by is the sweep that has deleted it and not committed that.
	by *sweepConn
	// gone is set when it is deleted, unstreamed if it is not in the slot's stream.
	gone, unstreamed bool
}

func newPostgres(w *world) *postgres {
	pg := &postgres{
		w: w, wal: 1000, xid: 100, running: map[uint64]*transaction{}, history: map[uuid.UUID]bool{},
		suspected:  map[string]bool{},
		rolledBack: map[uuid.UUID]bool{}, sharing: map[*lockSession]int{},
	}
	pg.state = outbox.State{
		Name: "test", Desired: outbox.ModeAuto, Active: outbox.ModeStandby, Owner: outbox.Owner{Source: uuid.UUID{1}},
	}
	return pg
}

func partOf(aggregate string) int {
	h := fnv.New32a()
	_, _ = h.Write([]byte(aggregate))
	return int(h.Sum32() % outbox.Partitions)
}

// begin opens a writer's transaction.
func (w *world) begin() *transaction {
	w.mu.Lock()
	defer w.mu.Unlock()
	tx := &transaction{w: w, xid: w.pg.xid, begun: w.pg.wal}
	w.pg.xid++
	w.pg.running[tx.xid] = tx
	return tx
}

// insert adds an event, and returns its row.
func (tx *transaction) insert(aggregateType, aggregate, eventType string) *tableRow {
	tx.w.mu.Lock()
	defer tx.w.mu.Unlock()
	pg := tx.w.pg
	pg.seq++
	r := &tableRow{tx: tx, part: partOf(aggregate), unstreamed: pg.unpublished, Event: outbox.Event{
		ID: uuid.UUID{2, byte(pg.seq >> 8), byte(pg.seq)}, Seq: pg.seq, AggregateType: aggregateType,
		AggregateID: aggregate,
		Type:        eventType, Payload: []byte("{}"), Time: time.Now(),
	}}
	tx.rows = append(tx.rows, r)
	pg.parts[r.part] = append(pg.parts[r.part], r)
	tx.w.grow(100)
	return r
}

// write puts the commit into the WAL. Nobody sees it before show.
func (tx *transaction) write() {
	tx.w.mu.Lock()
	defer tx.w.mu.Unlock()
	tx.commit = tx.w.pg.wal
	tx.end = tx.commit + 10
	tx.w.pg.log = append(tx.w.pg.log, tx)
	tx.w.grow(10)
}

// show ends the transaction for everyone.
func (tx *transaction) show() {
	tx.w.mu.Lock()
	defer tx.w.mu.Unlock()
	tx.ended = true
	delete(tx.w.pg.running, tx.xid)
}

func (tx *transaction) commitNow() {
	tx.write()
	tx.show()
}

func (tx *transaction) rollback() {
	tx.w.mu.Lock()
	defer tx.w.mu.Unlock()
	tx.ended = true
	delete(tx.w.pg.running, tx.xid)
	for _, r := range tx.rows {
		tx.w.pg.rolledBack[r.ID] = true
		tx.w.pg.remove(r)
	}
}

// event commits one event.
func (w *world) event(aggregateType, aggregate string) *tableRow {
	tx := w.begin()
	defer tx.commitNow()
	return tx.insert(aggregateType, aggregate, "done")
}

// visible are the rows of a part that everyone sees, in their order.
func (pg *postgres) visible(part int) (rows []*tableRow) {
	for _, r := range pg.parts[part] {
		if r.tx.ended {
			rows = append(rows, r)
		}
	}
	return rows
}

func (pg *postgres) remove(r *tableRow) {
	r.gone = true
	pg.parts[r.part] = slices.DeleteFunc(pg.parts[r.part], func(o *tableRow) bool { return o == r })
}

// deliveredRow deletes a row whose event is in its stream, or was, and keeps history of it.
func (pg *postgres) deliver(r *tableRow, stream, entryID string) {
	if !pg.w.rd.has(stream, r.ID) && !pg.w.lost[r.ID] {
		pg.w.wrongly("row %d is deleted, and its event is not in %s", r.Seq, stream)
	}
	if !pg.w.confirmed[r.ID] {
		pg.w.wrongly("row %d is deleted before the sink has confirmed its event", r.Seq)
	}
	if entryID == "" {
		pg.w.wrongly("row %d is deleted without an entry", r.Seq)
	}
	pg.remove(r)
	pg.history[r.ID] = true
}

// park moves a row to the dead ones.
func (pg *postgres) park(r *tableRow, class, reason string, attempts int) {
	if pg.w.rd.has(outbox.StreamName("outbox.", r.AggregateType), r.ID) {
		pg.w.wrongly("row %d is parked, and its event is in its stream", r.Seq)
	}
	pg.remove(r)
	pg.dead = append(pg.dead, outbox.Dead{
		ID: r.ID, Seq: r.Seq, AggregateType: r.AggregateType, AggregateID: r.AggregateID, Type: r.Type,
		Class: class, Error: reason,
		Attempts: attempts, DeadAt: time.Now(),
	})
}

// find returns the row by its number and id, if it is visible; in its own part, or in all.
func (pg *postgres) find(seq int64, id uuid.UUID, parts ...int) *tableRow {
	for _, p := range parts {
		for _, r := range pg.parts[p] {
			if r.Seq == seq && r.ID == id && r.tx.ended {
				return r
			}
		}
	}
	return nil
}

// rows counts the rows of the table, visible or not, of which are is true.
func (pg *postgres) rows(are func(r *tableRow) bool) (n int) {
	for _, part := range pg.parts {
		for _, r := range part {
			if are(r) {
				n++
			}
		}
	}
	return n
}

// snapshot is what a statement sees of other transactions now.
type snapshot struct {
	next    uint64
	running map[uint64]bool
}

func (s snapshot) Visible(xid uint32) bool { return uint64(xid) < s.next && !s.running[uint64(xid)] }

func (pg *postgres) snapshot() snapshot {
	s := snapshot{next: pg.xid, running: map[uint64]bool{}}
	for x := range pg.running {
		s.running[x] = true
	}
	return s
}

// oldest is the oldest transaction that has not ended for others.
func (pg *postgres) oldest() uint64 {
	x := pg.xid
	for r := range pg.running {
		x = min(x, r)
	}
	return x
}

// slot is the replication slot.
type slot struct {
	w                  *world
	confirmed, restart outbox.LSN
	lost               bool
	active             *walsender
}

// walsender is a server's end of a stream.
type walsender struct {
	of   *instance
	slot *slot
	gone chan struct{}
	// ghost: its client does not know that it exists.
	ghost bool
}

// end ends the walsender. The caller holds mu.
func (s *walsender) end() {
	if s.slot.active == s {
		s.slot.active = nil
		close(s.gone)
	}
}

// follow lets the WAL go that nobody needs: what is confirmed, but for open transactions.
func (s *slot) follow() {
	to := s.confirmed
	for _, tx := range s.w.pg.running {
		to = min(to, tx.begun)
	}
	s.restart = max(s.restart, to)
}

// moved looks at what the slot has passed without streaming it: a row that is not visible is lost to a sweep that ends
// now, so it has to be known what to wait for.
func (pg *postgres) passed(how string) {
	for _, tx := range pg.log {
		if tx.end > pg.slot.confirmed || tx.ended {
			continue
		}
		for _, r := range tx.rows {
			if !r.gone && pg.state.Barrier <= tx.xid {
				pg.w.wrongly("the slot is %s past row %d, which nobody sees; barrier %d", how, r.Seq, pg.state.Barrier)
			}
		}
	}
}

// streamed looks, when a stream begins, whether it begins behind rows that are still owed.
func (pg *postgres) streamed() {
	for _, tx := range pg.log {
		for _, r := range tx.rows {
			if tx.end <= pg.slot.confirmed && !r.gone && !r.unstreamed {
				pg.w.wrongly("the stream begins at %v, behind row %d, which is owed", pg.slot.confirmed, r.Seq)
			}
		}
	}
}

// confirm moves the slot for a stream that says that everything up to there is settled.
func (pg *postgres) confirm(to outbox.LSN) {
	for _, tx := range pg.log {
		for _, r := range tx.rows {
			if tx.end > pg.slot.confirmed && tx.end <= to && !r.gone && !r.unstreamed {
				pg.w.wrongly("%v is confirmed to the slot, and row %d is still in the table", to, r.Seq)
			}
		}
	}
	pg.slot.confirmed = max(pg.slot.confirmed, to)
}

// moveSlot is somebody else's doing: the slot is moved to the end of the WAL, unless it is streamed.
func (w *world) moveSlot() {
	if pg := w.pg; pg.slot != nil && pg.slot.active == nil {
		pg.slot.confirmed = pg.wal
	}
}

// dropSlot too.
func (w *world) dropSlot() {
	if s := w.pg.slot; s != nil {
		if s.active != nil {
			s.active.end()
		}
		w.pg.slot = nil
	}
}

// adopt writes a new owner.
func (pg *postgres) adopt(a outbox.Adoption) bool {
	if pg.state.Owner.Epoch != a.From {
		return false
	}
	if a.To.Epoch <= a.From {
		pg.w.wrongly("epoch %d follows %d", a.To.Epoch, a.From)
	}
	pg.state.Owner, pg.state.Holder, pg.state.Sink, pg.state.Degraded = a.To, a.Holder, a.Sink, ""
	pg.w.owners[a.To.Epoch], pg.w.adopter[a.To.Epoch] = a.To, a.Holder
	pg.w.known[a.To.Epoch] = slices.Clone(pg.streams)
	for _, s := range a.Suspects {
		pg.suspected[s.Stream] = true
		pg.uncounted = append(pg.uncounted, outbox.Loss{Stream: s.Stream})
	}
	if a.WentBack {
		pg.uncounted = append(pg.uncounted, outbox.Loss{Events: -1})
	}
	pg.w.grow(50)
	return true
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
