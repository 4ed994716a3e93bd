package relay

import (
	"cmp"
	"hash/maphash"
	"maps"
	"slices"
	"sync"

	"posthaste/outbox"
)

// portion is the rows that one stream gets from a piece of the WAL, in their order.
type portion struct {
	stream string
	rows   []outbox.Row // nil when it is done
	ids    []rowID      // of rows; nil when it is confirmed
	// events and bytes are its room in the window.
	events, bytes int
	// end is the position up to which every transaction is complete with this portion and those before it.
	end outbox.LSN

	// done is set when every row was published or parked. number is then the last batch of the stream's lane that has
	// events of it, 0 if all rows were parked; last is the stream's last entry, published the number of its events.
	done      bool
	number    int64
	last      string
	published int
	// confirmed is set when the sink has confirmed the batch. xids are then the transactions of its rows that the mark
	// does not see.
	confirmed bool
	xids      []uint64
}

// rowID is a row as the WAL names it, with its aggregate.
type rowID struct {
	xid       uint32
	seq       int64
	aggregate aggregate
}

// aggregate is a hash of a stream and an aggregate id.
type aggregate uint64

var aggregateSeed = maphash.MakeSeed()

// tracker records which transactions are published as a whole, and decides from that how far the mark, the slot and the
// gates may be moved. It makes no calls. The router adds portions, the workers complete them, and the settler settles
// them; the fields after portions belong to the settler.
type tracker struct {
	mu     sync.Mutex
	routed outbox.LSN // everything up to here was given to the workers
	ended  outbox.LSN // an end that had no portion before it
	// portions are those that are not settled, in the order of the WAL.
	portions []*portion
	// abandoned is a transaction whose rest was not routed.
	abandoned *uint32

	mark outbox.Settled
	// snapshot is that of the last scan. It completes the ids of transactions.
	snapshot outbox.Snapshot
	// rows are the confirmed and parked rows that the mark does not see, by transaction. highest is the highest such
	// transaction there ever was.
	rows    map[uint64][]rowID
	highest uint64
	entries outbox.Entries
}

// begin sets the mark that the stream starts from. It is called before the first portion.
func (t *tracker) begin(at outbox.Pass) {
	t.mark, t.snapshot, t.highest = at.Settled, at.Snapshot, at.Snapshot.Max()
	t.rows, t.entries = map[uint64][]rowID{}, outbox.Entries{}
}

// route adds a piece: its portions, and its last end of a transaction.
func (t *tracker) route(portions []*portion, end outbox.LSN) {
	for _, p := range portions {
		p.ids = make([]rowID, len(p.rows))
		stream := maphash.String(aggregateSeed, p.stream)
		for i := range p.rows {
			id := maphash.String(aggregateSeed, p.rows[i].AggregateID)
			p.ids[i] = rowID{p.rows[i].XID, p.rows[i].Seq, aggregate(stream ^ id)}
		}
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.portions = append(t.portions, portions...)
	if n := len(t.portions); n > 0 {
		t.portions[n-1].end = max(t.portions[n-1].end, end)
		return
	}
	t.ended = max(t.ended, end)
}

// reached notes that everything up to a position was routed.
func (t *tracker) reached(position outbox.LSN) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.routed = max(t.routed, position)
}

// position is how far everything was routed.
func (t *tracker) position() outbox.LSN {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.routed
}

// publishedTo reports whether everything that was committed below position is published.
func (t *tracker) publishedTo(position outbox.LSN) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	first := slices.IndexFunc(t.portions, func(p *portion) bool { return !p.done })
	return t.routed >= position && (first < 0 || t.portions[first].rows[0].Commit >= position)
}

// complete notes that the rows of portions of one stream were published by batches up to number, after which last was
// the stream's last entry, or parked.
func (t *tracker) complete(portions []*portion, number int64, last string, parked map[*outbox.Record]bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, p := range portions {
		p.done, p.number, p.last = true, number, last
		for i := range p.rows {
			if !parked[&p.rows[i].Record] {
				p.published++
			}
		}
		p.rows = nil
	}
}

// unconfirmed lists the last batch of each stream that is published and not confirmed, except in streams to skip.
func (t *tracker) unconfirmed(lane outbox.Lane, skip func(stream string) bool) (marks []outbox.Mark) {
	t.mu.Lock()
	defer t.mu.Unlock()
	at := map[string]int{}
	for _, p := range t.portions {
		if !p.done || p.confirmed || p.number == 0 {
			continue
		}
		i, known := at[p.stream]
		if !known && skip(p.stream) {
			continue
		}
		if !known {
			i = len(marks)
			at[p.stream] = i
			marks = append(marks, outbox.Mark{Stream: p.stream, Lane: lane})
		}
		marks[i].Number = max(marks[i].Number, p.number)
	}
	return marks
}

// confirm counts the rows of batches that the sink has confirmed, and parked rows.
func (t *tracker) confirm(marks []outbox.Mark) {
	t.mu.Lock()
	defer t.mu.Unlock()
	upTo := make(map[string]int64, len(marks))
	for _, m := range marks {
		upTo[m.Stream] = m.Number
	}
	for _, p := range t.portions {
		if p.done && !p.confirmed && p.number <= upTo[p.stream] {
			t.count(p)
		}
	}
}

func (t *tracker) count(p *portion) {
	for _, r := range p.ids {
		xid := t.snapshot.Widen(r.xid)
		if t.mark.Snapshot.Sees(xid) {
			continue // it was deleted before it was published
		}
		t.rows[xid] = append(t.rows[xid], r)
		t.highest = max(t.highest, xid)
		if n := len(p.xids); n == 0 || p.xids[n-1] != xid {
			p.xids = append(p.xids, xid)
		}
	}
	t.entries.Raise(p.stream, p.last)
	p.confirmed, p.ids = true, nil
}

// whole reports whether every row that a scan has found of a transaction was published, and confirmed, or parked.
func (t *tracker) whole(o outbox.Owed) bool {
	rows := t.rows[o.XID]
	if len(rows) < len(o.Seqs) {
		return false
	}
	slices.SortFunc(rows, bySeq)
	for _, seq := range o.Seqs {
		_, there := slices.BinarySearchFunc(rows, seq, func(r rowID, seq int64) int { return cmp.Compare(r.seq, seq) })
		if !there {
			return false
		}
	}
	return true
}

// hide adds to hidden every transaction of rows with an event that follows, in its aggregate, one of a hidden
// transaction. If it were settled alone, and the sink then lost both events, it would be restored before the other one
// is published again.
func hide(hidden map[uint64]bool, rows map[uint64][]rowID) {
	var work []rowID // of hidden transactions
	for xid := range hidden {
		work = append(work, rows[xid]...)
	}
	if len(work) == 0 {
		return
	}
	slices.SortFunc(work, bySeq)
	type event struct {
		seq int64
		xid uint64
	}
	events := map[aggregate][]event{}
	for xid, list := range rows {
		for _, r := range list {
			events[r.aggregate] = append(events[r.aggregate], event{r.seq, xid})
		}
	}
	first := map[aggregate]int64{} // the first event of a hidden transaction
	for n := 0; n < len(work); n++ {
		r := work[n]
		if seq, known := first[r.aggregate]; known && seq <= r.seq {
			continue
		}
		first[r.aggregate] = r.seq
		for _, e := range events[r.aggregate] {
			if e.seq > r.seq && !hidden[e.xid] {
				hidden[e.xid] = true
				work = append(work, rows[e.xid]...)
			}
		}
	}
}

func bySeq(a, b rowID) int { return cmp.Compare(a.seq, b.seq) }

// missing returns a transaction of suspects that the stream has passed without all of its rows, 0 if there is none.
func (t *tracker) missing(suspects []outbox.Owed) uint64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	var underway map[uint64]bool
	for _, o := range suspects {
		if t.mark.Snapshot.Sees(o.XID) || t.whole(o) {
			continue
		}
		if underway == nil {
			underway = map[uint64]bool{}
			for _, p := range t.portions {
				for _, r := range p.ids { // nil when it is confirmed
					underway[t.snapshot.Widen(r.xid)] = true
				}
			}
		}
		if !underway[o.XID] {
			return o.XID
		}
	}
	return 0
}

// abandon notes the transaction in whose middle the router has ended.
func (t *tracker) abandon(xid uint32) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.abandoned = &xid
}

// open reports whether something is published and not settled. A transaction with rows that were not published does not
// count, nor does one that follows it: when the workers have ended, no one publishes these rows.
func (t *tracker) open() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	unpublished, published := map[uint64]bool{}, maps.Clone(t.rows)
	if t.abandoned != nil {
		unpublished[t.snapshot.Widen(*t.abandoned)] = true
	}
	for _, p := range t.portions {
		for _, r := range p.ids {
			if xid := t.snapshot.Widen(r.xid); p.done {
				published[xid] = append(published[xid], r)
			} else {
				unpublished[xid] = true
			}
		}
	}
	hide(unpublished, published)
	for xid := range published {
		if !unpublished[xid] && !t.mark.Snapshot.Sees(xid) {
			return true
		}
	}
	return false
}

// reach returns how far the mark may be moved after a scan of what is below a transaction id, whether that settles
// something, and the transactions that the scan has found and that are not whole. The mark may see what it saw before,
// nothing that the scan does not see, and no transaction that is not whole or follows one that is not. least is what an
// earlier attempt reached.
func (t *tracker) reach(look outbox.Look, below, least uint64) (to outbox.Settled, news bool, undone []outbox.Owed) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.snapshot = look.Snapshot
	undone = slices.DeleteFunc(look.Owed, t.whole)
	unsettled := make(map[uint64]bool, len(undone))
	for _, o := range undone {
		unsettled[o.XID] = true
	}
	hide(unsettled, t.rows)
	hidden := slices.AppendSeq(slices.Clone(look.Snapshot.Running()), maps.Keys(unsettled))
	seen := outbox.NewSnapshot(min(look.Snapshot.Max(), below), hidden)
	top := least
	for xid := range t.rows {
		if seen.Sees(xid) {
			news, top = true, max(top, xid+1)
		}
	}
	if len(undone) == 0 {
		top = max(top, seen.Max())
	}
	return outbox.Settled{
		Snapshot: outbox.NewSnapshot(min(top, look.Snapshot.Max()), hidden), High: max(t.mark.High, look.High),
	}, news, undone
}

// moved notes that the mark was moved, and holds the entries now.
func (t *tracker) moved(to outbox.Settled) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.mark, t.entries = to, outbox.Entries{}
	for xid := range t.rows {
		if to.Snapshot.Sees(xid) {
			delete(t.rows, xid)
		}
	}
}

// released is what has become settled.
type released struct {
	// end is the position up to which every transaction is settled, 0 if it has not changed.
	end outbox.LSN
	// rows were published and are settled. events and bytes are room in the window.
	rows, events, bytes int
	// numbers are the last settled batches by stream.
	numbers map[string]int64
}

// release removes the portions that are settled. The slot may move up to the first portion that is not. A gate keeps
// the ids of every batch after one that is not settled, so such a portion keeps its room in the window, whose size
// bounds what a gate keeps.
func (t *tracker) release() released {
	t.mu.Lock()
	defer t.mu.Unlock()
	r := released{end: t.ended, numbers: map[string]int64{}}
	t.ended = 0
	held, before := map[string]bool{}, map[string]int64{}
	kept := t.portions[:0]
	for _, p := range t.portions {
		p.xids = slices.DeleteFunc(p.xids, t.mark.Snapshot.Sees)
		settled := p.confirmed && len(p.xids) == 0
		if settled {
			r.rows, p.published = r.rows+p.published, 0
		}
		if !settled || held[p.stream] {
			if !held[p.stream] && p.number > 0 && p.number == r.numbers[p.stream] {
				r.numbers[p.stream] = before[p.stream] // they share a batch
			}
			held[p.stream] = true
			kept = append(kept, p)
			continue
		}
		r.events, r.bytes = r.events+p.events, r.bytes+p.bytes
		if p.number > r.numbers[p.stream] {
			before[p.stream], r.numbers[p.stream] = r.numbers[p.stream], p.number
		}
		if n := len(kept); n > 0 {
			kept[n-1].end = max(kept[n-1].end, p.end)
		} else {
			r.end = max(r.end, p.end)
		}
	}
	clear(t.portions[len(kept):])
	t.portions = kept
	return r
}
