package relay

import (
	"cmp"
	"maps"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"posthaste/outbox"
)

// tracked is a tracker and a list of everything that has happened.
type tracked struct {
	*rapid.T
	tracker
	wal      outbox.LSN
	xid      uint64
	least    uint64
	portions []*portion // all there ever were
	rows     []*row
	number   map[string]int64 // the last batch of each stream
}

type row struct {
	outbox.Row
	xid       uint64
	stream    string
	number    int64
	confirmed bool
}

var trackedStreams = []string{"a", "b", "c"}

// TestTracker holds the tracker against what may be reported: nothing of a transaction that is not published and
// confirmed as a whole.
func TestTracker(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(rt *rapid.T) {
		w := &tracked{T: rt, xid: 100, number: map[string]int64{}}
		w.begin(outbox.Pass{Settled: outbox.Settled{Snapshot: outbox.NewSnapshot(w.xid, nil)}})
		held := load{}
		for range rapid.IntRange(1, 40).Draw(rt, "steps") {
			switch rapid.IntRange(0, 3).Draw(rt, "step") {
			case 0:
				events, bytes := w.piece()
				held.add(events, bytes)
			case 1:
				w.publish()
			case 2:
				w.confirmSome()
			case 3:
				w.settle()
			}
			r := w.release()
			held.add(-r.events, -r.bytes)
			w.check(r)
		}
		for range 20 { // in the end everything is settled
			w.publish()
			w.confirmSome()
		}
		for _, p := range w.portions {
			if !p.done {
				w.published([]*portion{p})
			}
		}
		w.confirm(w.unconfirmed(outbox.Lane{}, func(string) bool { return false }))
		for _, r := range w.rows {
			r.confirmed = true
		}
		w.settle()
		r := w.release()
		w.check(r)
		held.add(-r.events, -r.bytes)
		if held != (load{}) || w.open() || len(w.tracker.rows) > 0 || len(w.tracker.portions) > 0 {
			rt.Fatalf("%v is held in the end, %d portions, rows %v", held, len(w.tracker.portions), w.tracker.rows)
		}
	})
}

// piece routes a few transactions, whose rows go to several streams.
func (w *tracked) piece() (events, bytes int) {
	byStream := map[string]*portion{}
	var portions []*portion
	var end outbox.LSN
	for range rapid.IntRange(1, 3).Draw(w.T, "transactions") {
		w.wal++
		commit := w.wal
		n := rapid.IntRange(1, 3).Draw(w.T, "rows")
		for i := range n {
			stream := rapid.SampledFrom(trackedStreams).Draw(w.T, "stream")
			r := &row{xid: w.xid, stream: stream}
			r.XID, r.Seq, r.Commit = uint32(w.xid), int64(len(w.rows)+1), commit
			r.AggregateID = rapid.SampledFrom([]string{"x", "y"}).Draw(w.T, "aggregate")
			if i == n-1 {
				w.wal++
				r.End, end = w.wal, w.wal
			}
			w.rows = append(w.rows, r)
			p := byStream[stream]
			if p == nil {
				p = &portion{stream: stream}
				byStream[stream] = p
				portions = append(portions, p)
			}
			p.rows = append(p.rows, r.Row)
			p.events, p.bytes = p.events+1, p.bytes+10
			events, bytes = events+1, bytes+10
		}
		w.xid++
	}
	w.route(portions, end)
	w.portions = append(w.portions, portions...)
	w.reached(end)
	return events, bytes
}

// publish publishes the next portions of a stream with one delivery.
func (w *tracked) publish() {
	stream := rapid.SampledFrom(trackedStreams).Draw(w.T, "published")
	var next []*portion
	for _, p := range w.portions {
		if p.stream == stream && !p.done {
			next = append(next, p)
		}
	}
	if len(next) > 0 {
		w.published(next[:rapid.IntRange(1, len(next)).Draw(w.T, "portions")])
	}
}

func (w *tracked) published(portions []*portion) {
	stream := portions[0].stream
	w.number[stream]++
	for _, p := range portions {
		for i := range p.rows {
			w.rows[p.rows[i].Seq-1].number = w.number[stream]
		}
	}
	w.complete(portions, w.number[stream], "1-1", nil)
}

// confirmSome confirms what is published in all streams but one.
func (w *tracked) confirmSome() {
	stuck := rapid.SampledFrom(append([]string{""}, trackedStreams...)).Draw(w.T, "stuck")
	marks := w.unconfirmed(outbox.Lane{}, func(stream string) bool { return stream == stuck })
	w.confirm(marks)
	for _, m := range marks {
		for _, r := range w.rows {
			if r.stream == m.Stream && r.number > 0 && r.number <= m.Number {
				r.confirmed = true
			}
		}
	}
}

// settle scans, and moves the mark as far as it may be.
func (w *tracked) settle() {
	owed := map[uint64]*outbox.Owed{}
	for _, r := range w.rows {
		if !w.mark.Snapshot.Sees(r.xid) {
			o := owed[r.xid]
			if o == nil {
				o = &outbox.Owed{XID: r.xid}
				owed[r.xid] = o
			}
			o.Seqs = append(o.Seqs, r.Seq)
		}
	}
	var look outbox.Look
	look.Snapshot, look.High = outbox.NewSnapshot(w.xid, nil), int64(len(w.rows))
	for _, xid := range slices.Sorted(maps.Keys(owed)) {
		look.Owed = append(look.Owed, *owed[xid])
	}
	if xid := w.missing(look.Owed); xid != 0 {
		w.Fatalf("transaction %d counts as missed", xid)
	}
	if to, news, _ := w.reach(look, look.Snapshot.Max(), w.least); news {
		w.moved(to)
		w.least = max(w.least, to.Snapshot.Max())
	}
	unsettled := map[string]int64{} // by stream and aggregate: the first row that is not settled
	for _, r := range w.rows {
		name := r.stream + " " + r.AggregateID
		switch before := unsettled[name]; {
		case !w.mark.Snapshot.Sees(r.xid):
			unsettled[name] = cmp.Or(before, r.Seq)
		case !r.confirmed:
			w.Fatalf("the mark sees transaction %d, whose row %d is not confirmed", r.xid, r.Seq)
		case before != 0:
			w.Fatalf("the mark sees transaction %d with row %d, and not row %d of the same aggregate", r.xid, r.Seq,
				before)
		}
	}
}

// check holds what was released against the mark.
func (w *tracked) check(r released) {
	for _, row := range w.rows {
		settled := w.mark.Snapshot.Sees(row.xid)
		if !settled && r.end > row.Commit {
			w.Fatalf("the slot moves to %v, beyond row %d of commit %v, not settled", r.end, row.Seq, row.Commit)
		}
		if !settled && row.number > 0 && r.numbers[row.stream] >= row.number {
			w.Fatalf("the gate of %s is told batch %d, and row %d of batch %d is not settled", row.stream,
				r.numbers[row.stream], row.Seq, row.number)
		}
	}
	if w.publishedTo(w.wal) && slices.ContainsFunc(w.rows, func(r *row) bool { return r.number == 0 }) {
		w.Fatal("everything counts as published")
	}
}
