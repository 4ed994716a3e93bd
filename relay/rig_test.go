package relay

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"posthaste/outbox"
)

// rig has the parts of one stream on a world, without the relay that drives them.
type rig struct {
	*world
	i      *instance
	gates  *gates
	s      *streaming
	intake context.Context
	// end ends the intake, stopWork the work.
	end, stopWork context.CancelCauseFunc
	span          span
	// seen is how many portions landed has returned.
	seen int
}

// inRig runs do with the parts of a stream under a fresh owner.
func inRig(t *testing.T, o Options, do func(r *rig)) {
	t.Helper()
	inWorld(t, o, func(w *world) {
		r := &rig{world: w, i: w.instance("one")}
		r.i.relay.health.clear(conditionPostgres)
		// As after a hand-over of an empty table: a stream begins with ids of the time.
		w.pg.marks = append(w.pg.marks, &mark{part: -1, settled: &outbox.Settled{
			Snapshot: outbox.NewSnapshot(w.pg.first, nil),
		}})
		r.adopt()
		r.s = r.i.relay.newStream(r.gates, nil, nil)
		intake, end := context.WithCancelCause(context.Background())
		work, stopWork := context.WithCancelCause(context.Background())
		r.intake, r.end, r.stopWork, r.span = intake, end, stopWork, span{intake, work}
		defer end(nil)
		defer stopWork(nil)
		defer bound(end, stopWork)()
		do(r)
	})
}

// errOverdue is the cause of what did not end by itself.
var errOverdue = errors.New("it does not end")

// bound cancels, in order, the contexts of whatever still runs after ten minutes, so that an endless loop fails its
// test. stop cancels that timer.
func bound(ends ...context.CancelCauseFunc) (stop func()) {
	t := time.AfterFunc(10*time.Minute, func() {
		for _, end := range ends {
			end(errOverdue)
		}
	})
	return func() { t.Stop() }
}

// adopt makes a new owner of the table, and of no gate.
func (r *rig) adopt() {
	o := outbox.Owner{Source: r.pg.state.Owner.Source, Epoch: r.pg.state.Owner.Epoch + 1, Nonce: newNonce()}
	r.do(func() { r.pg.adopt(outbox.Adoption{From: o.Epoch - 1, To: o, Holder: "one"}) })
	r.gates = newGates(o, r.pg.state.Layout, memSink{r.i}, memStore{r.i})
}

// from has the parts begin with the mark as it is, and with H.
func (r *rig) from(handover outbox.LSN) {
	at := r.here()
	at.End = handover
	r.s.router.begin(at.Settled, at.End)
	r.s.settler.begin(at)
}

// here is what a hand-over ends with: the mark, and the end of the WAL.
func (r *rig) here() (at outbox.Pass) {
	r.do(func() { at = outbox.Pass{Settled: *r.pg.newest(0).settled, End: r.pg.wal} })
	return at
}

// settleAll makes what is visible now the mark, as if it had been published before.
func (r *rig) settleAll() {
	r.do(func() {
		for _, row := range r.pg.rows(func(row *tableRow) bool { return row.tx.ended }) {
			r.lost[row.ID] = true
			r.confirmed[row.ID] = true
		}
		now := r.pg.now()
		if err := r.pg.mark(r.pg.state.Owner, &mark{part: -1, settled: &now}); err != nil {
			r.t.Error(err)
		}
	})
}

// commit commits events of one transaction, and returns them as the slot delivers them.
func (r *rig) commit(types ...string) []outbox.Row {
	var events []string
	for _, t := range types {
		events = append(events, "order a "+t)
	}
	return r.commits(events...).delivered()
}

// transactions commits events of one transaction each.
func (r *rig) transactions(n int) (rows []outbox.Row) {
	for range n {
		rows = append(rows, r.commit("done")...)
	}
	return rows
}

func (tx *transaction) delivered() (rows []outbox.Row) {
	for _, r := range tx.rows {
		rows = append(rows, outbox.Row{Record: r.Record, Commit: tx.commit, XID: uint32(tx.xid)})
	}
	rows[len(rows)-1].End = tx.end
	return rows
}

// chunk is what the source makes of rows.
func chunk(rows ...outbox.Row) outbox.Chunk {
	c := outbox.Chunk{Rows: rows}
	for _, row := range rows {
		c.Bytes += row.Size()
		c.Position = max(c.Position, row.End)
	}
	return c
}

// goPublish runs the publisher; the channel gets what ends it.
func (r *rig) goPublish() <-chan error {
	return background(func() error {
		defer close(r.s.settler.ended)
		return r.s.router.run(r.span, func(err error) { r.end(err) })
	})
}

// forgetDoubt waits a second and then makes the settler clear the doubt, if allowed.
func (r *rig) forgetDoubt() {
	soon()
	r.s.settler.forgetDoubt(r.span.work)
	soon()
}

// landed waits until one more portion is published, and returns it. No settler runs meanwhile.
func (r *rig) landed() (p *portion) {
	r.t.Helper()
	t := r.s.router.tracker
	for began := time.Now(); p == nil; pass(time.Millisecond) {
		t.mu.Lock()
		if r.seen < len(t.portions) && t.portions[r.seen].done {
			p = t.portions[r.seen]
		}
		t.mu.Unlock()
		if time.Since(began) > 5*time.Minute {
			r.t.Fatal("nothing is published")
		}
	}
	r.seen++
	return p
}

// published are the seqs in a stream, in their order.
func (w *world) published(stream string) (seqs []int64) {
	w.do(func() {
		if s := w.rd.streams[stream]; s != nil {
			for _, e := range s.entries {
				seqs = append(seqs, e.Seq)
			}
		}
	})
	return seqs
}

// away makes the servers of streams stop answering, or answer again.
func (w *world) away(gone bool, streams ...string) {
	w.do(func() {
		for _, s := range streams {
			w.rd.away[s] = gone
		}
	})
}

// wants sets the mode that is wanted.
func (w *world) wants(mode outbox.Mode) { w.do(func() { w.pg.state.Desired = mode }) }

// arrives checks that an event is in its stream, or not.
func (w *world) arrives(row *tableRow, want bool) {
	w.t.Helper()
	w.do(func() {
		if name := w.pg.stream(row); w.rd.has(name, row.ID) != want {
			w.t.Errorf("event %d is in %s: %v; %s", row.Seq, name, !want, w.describe())
		}
	})
}

// calls lists the calls made, in order, except those named in but.
func (w *world) calls(from int, but ...string) (names []string) {
	skip := map[string]bool{}
	for _, name := range but {
		skip[name] = true
	}
	w.do(func() {
		for _, s := range w.trace[from:] {
			if !skip[s.what] {
				names = append(names, s.what)
			}
		}
	})
	return names
}

// count is how often a call was made.
func (w *world) count(name string) (n int) {
	w.do(func() { n = w.counts[name] })
	return n
}

// called checks how often a call was made.
func (w *world) called(name string, want int) {
	w.t.Helper()
	if n := w.count(name); n != want {
		w.t.Errorf("%s was called %d times, want %d", name, n, want)
	}
}

// publishes checks how many events are in a stream.
func (w *world) publishes(stream string, want int) {
	w.t.Helper()
	if got := w.published(stream); len(got) != want {
		w.t.Errorf("%d events are published to %s, want %d: %v", len(got), stream, want, got)
	}
}

// hasUnsettled checks the number of unsettled rows.
func (w *world) hasUnsettled(want int) {
	w.t.Helper()
	if n := w.owedRows(); n != want {
		w.t.Errorf("%d rows are owed, want %d", n, want)
	}
}

// settlesTo checks that everything is settled, and that the slot has that position.
func (r *rig) settlesTo(end outbox.LSN) {
	r.t.Helper()
	if r.hasUnsettled(0); r.i.settled != end {
		r.t.Errorf("the slot is told %v, want %v", r.i.settled, end)
	}
}

// goesOn checks that a part has not ended.
func (r *rig) goesOn(done <-chan error) {
	r.t.Helper()
	if len(done) > 0 {
		r.t.Errorf("ended with %v", <-done)
	}
}

func (w *world) must(err error) {
	w.t.Helper()
	if err != nil {
		w.t.Fatal(err)
	}
}

// background runs f; the channel gets what it returns.
func background(f func() error) <-chan error {
	done := make(chan error, 1)
	go func() { done <- f() }()
	return done
}

// pass lets time pass, and everything happen that does so meanwhile: what it has written may be read then.
func pass(d time.Duration) {
	elapse(d)
	synctest.Wait()
}

// soon lets a second pass.
func soon() { pass(time.Second) }

// value is what a counter or a gauge stands at.
func value(t *testing.T, m prometheus.Metric) float64 {
	t.Helper()
	var d dto.Metric
	if err := m.Write(&d); err != nil {
		t.Fatal(err)
	}
	return d.GetCounter().GetValue() + d.GetGauge().GetValue() // one of them
}

// reasons are why the instance is not ready, and what is wrong although it is.
func (i *instance) reasons() (bad, degraded []string) { return i.relay.health.lists() }

// complains checks that the instance is not ready for a reason with the text.
func (i *instance) complains(text string) {
	i.w.t.Helper()
	if bad, _ := i.reasons(); !strings.Contains(strings.Join(bad, "; "), text) {
		i.w.t.Errorf("reasons %q, want %q", bad, text)
	}
}

// says checks what is wrong with the instance, by the beginning of each reason.
func (i *instance) says(t testing.TB, want ...string) {
	t.Helper()
	i.relay.health.says(t, want...)
}

func (h *health) says(t testing.TB, want ...string) {
	t.Helper()
	got, degraded := h.lists()
	for _, d := range degraded {
		got = append(got, "degraded: "+d)
	}
	if !slices.EqualFunc(got, want, strings.HasPrefix) {
		t.Errorf("wrong is %q, want %q", got, want)
	}
}
