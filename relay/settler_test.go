package relay

import (
	"context"
	"errors"
	"maps"
	"math"
	"slices"
	"testing"
	"time"

	"posthaste/internal/pause"
	"posthaste/outbox"
	"posthaste/relay/stream"
)

// goSettle runs the settler on what the publisher hands on; the channel gets what ends it.
func (r *rig) goSettle() <-chan error {
	return background(func() error {
		err := r.s.settler.run(r.span)
		if err != nil {
			r.end(err)
		}
		return err
	})
}

// stream publishes and settles what is handed to it, from the mark as it is on.
func (r *rig) stream(rows ...outbox.Row) (publishing, settling <-chan error) {
	publishing, settling = r.runs(1)
	r.s.chunks <- chunk(rows...)
	return publishing, settling
}

// runs publishes and settles from the mark as it is, and with H, on.
func (r *rig) runs(handover outbox.LSN) (publishing, settling <-chan error) {
	r.from(handover)
	return r.goPublish(), r.goSettle()
}

// owedRows returns the number of unsettled rows.
func (w *world) owedRows() (n int) {
	w.do(func() { n = len(w.pg.rows(w.pg.owed)) })
	return n
}

// The sink confirms before the mark moves, and the gate and the slot are informed after that. This order makes a crash
// in between harmless.
func TestSettlingHasAnOrder(t *testing.T) {
	t.Parallel()
	inRig(t, Options{}, func(r *rig) {
		rows := r.commit("done", "done")
		pass(300 * time.Millisecond) // off the ticks: the gates are told between two looks
		r.stream(rows...)
		pass(3 * time.Second)
		got := compact(r.calls(0, "Store.Streams", "Store.NoteStream", "Sink.Look", "Sink.Adopt",
			"Store.Gated", "Sink.ForgetDoubt"))
		want := []string{
			"Sink.Publish", "Sink.Confirm", "Store.Marker", "Marker.Look", "Marker.Move", "Sink.Settled", "Marker.Look",
		}
		// The report to the gate runs concurrently with the next scan.
		if at := slices.Index(got, "Sink.Settled"); at > 0 && got[at-1] == "Marker.Look" {
			got = slices.Insert(slices.Delete(got, at, at+1), at-1, "Sink.Settled")
		}
		if got = slices.Compact(got); !slices.Equal(got, want) {
			t.Errorf("calls %v, want %v", got, want)
		}
		if r.i.settled != rows[1].End || r.owedRows() != 0 || value(t, r.i.relay.metrics.settled) != 2 {
			t.Errorf("the slot is told %v, want %v; %d rows are owed, %v were settled", r.i.settled, rows[1].End,
				r.owedRows(), value(t, r.i.relay.metrics.settled))
		}
		tr := r.s.settler.tracker
		if n, b := r.s.window.inflight(); n != 0 || b != 0 || len(tr.rows)+len(tr.portions) > 0 ||
			r.s.window.behind() != 0 {
			t.Errorf("%d events of %d bytes are held in the window, or the settler remembers something", n, b)
		}
	})
}

// A row that is published before it is visible stays unsettled until then, with no time limit. Later rows are settled,
// but neither the slot nor the gate passes it.
func TestSettlingWaitsUntilTheRowIsVisible(t *testing.T) {
	t.Parallel()
	inRig(t, Options{}, func(r *rig) {
		tx := r.writes("order a")
		held := tx.rows[0]
		next := r.commit("done")
		r.stream(tx.delivered()...)
		soon()
		r.s.chunks <- chunk(next...)
		pass(5 * time.Minute)
		if !r.pg.owed(held) || r.owedRows() != 1 || r.count("Marker.Move") != 1 || r.count("Marker.Look") < 100 {
			t.Errorf("%d rows are owed, %d moves, %d looks", r.owedRows(), r.count("Marker.Move"),
				r.count("Marker.Look"))
		}
		if n, _ := r.s.window.inflight(); n != 2 || r.i.settled != 0 || r.count("Sink.Settled") > 0 {
			t.Errorf("the slot is told %v, or the gate; the window holds %d", r.i.settled, n)
		}
		tx.show()
		pass(3 * time.Second)
		if r.i.settled != next[0].End || r.owedRows() != 0 || r.count("Sink.Settled") != 1 {
			t.Errorf("then the slot is told %v, want %v; %d rows are owed", r.i.settled, next[0].End, r.owedRows())
		}
	})
}

// A long transaction delays no other, no matter how low its id is, and its rows are unsettled when it ends.
func TestALongTransactionHoldsUpNobody(t *testing.T) {
	t.Parallel()
	inRig(t, Options{}, func(r *rig) {
		long, silent := r.begin("order b"), r.begin()
		late := long.rows[0]
		next := r.commit("done")
		r.stream(next...)
		pass(time.Minute)
		if r.i.settled != next[0].End || r.owedRows() != 1 || !r.pg.owed(late) {
			t.Errorf("the slot is told %v, want %v; %d rows are owed", r.i.settled, next[0].End, r.owedRows())
		}
		silent.rollback()
		long.commitNow()
		soon()
		r.s.chunks <- chunk(long.delivered()...)
		pass(3 * time.Second)
		r.settlesTo(long.end)
	})
}

// A transaction that is larger than the window is published as a whole, and settled when all of it is.
func TestAGiantTransaction(t *testing.T) {
	t.Parallel()
	inRig(t, Options{Window: 4}, func(r *rig) {
		rows := slices.Concat(r.transactions(3), r.commit(slices.Repeat([]string{"done"}, 30)...), r.transactions(3))
		giant := rows[3 : 3+30]
		r.stream(rows[:23]...)
		pass(time.Minute)
		if n := len(r.published("outbox.order")); n != 23 || r.owedRows() != 33 || r.i.settled != rows[1].End {
			t.Errorf("%d events are published, %d rows are owed; the slot is told %v", n, r.owedRows(), r.i.settled)
		}
		r.s.chunks <- chunk(rows[23:]...)
		pass(5 * time.Second)
		if r.owedRows() != 0 || r.i.settled != rows[35].End || r.i.settled <= giant[29].End {
			t.Errorf("%d rows are owed; the slot is told %v, want %v", r.owedRows(), r.i.settled, rows[35].End)
		}
	})
}

// A transaction of which too much would be in doubt after a crash ends the stream, behind what came before it.
func TestATransactionThatIsBetterSwept(t *testing.T) {
	t.Parallel()
	inRig(t, Options{Window: 4}, func(r *rig) {
		before := r.transactions(3)
		giant := r.commit(slices.Repeat([]string{"done"}, 200)...)
		publishing, _ := r.stream(slices.Concat(before, giant)...)
		pass(time.Minute)
		if err := <-publishing; slotReason(err) != outbox.ReasonGiant {
			t.Errorf("ended with %v", err)
		}
		if n := len(r.published("outbox.order")) - len(before); n < 80 || n > 84 {
			t.Errorf("%d events of it are published", n)
		}
		if n := r.owedRows(); n != len(giant) {
			t.Errorf("%d rows are owed, want %d", n, len(giant))
		}
	})
}

// A transaction whose row is not delivered is passed around, wherever its id is, until it is.
func TestAnUndoneTransactionIsPassedAround(t *testing.T) {
	t.Parallel()
	for undone := range 3 {
		inRig(t, Options{}, func(r *rig) {
			var rows []outbox.Row
			for _, aggregate := range []string{"a", "b", "c"} {
				row := r.commits("order " + aggregate).delivered()[0]
				row.End = 0 // the stream has not come to it
				rows = append(rows, row)
			}
			late := rows[undone]
			r.stream(slices.Delete(rows, undone, undone+1)...)
			pass(5 * time.Second)
			row := r.pg.rows(func(row *tableRow) bool { return row.Seq == late.Seq })[0]
			if !r.pg.owed(row) || r.owedRows() != 1 {
				t.Errorf("row %d: %d rows are owed, want it alone", undone, r.owedRows())
			}
			late.End = row.tx.end
			r.s.chunks <- chunk(late)
			pass(3 * time.Second)
			r.settlesTo(late.End)
		})
	}
}

// A row that its writer deletes before it is delivered is published like any other, and holds up nothing.
func TestARowThatItsWriterHasDeleted(t *testing.T) {
	t.Parallel()
	for name, when := range map[string]time.Duration{"before it is streamed": 0, "behind the mark": 5 * time.Second} {
		inRig(t, Options{}, func(r *rig) {
			rows := r.commit("done", "done")
			others := r.transactions(1)
			gone := r.pg.rows(func(row *tableRow) bool { return row.Seq == rows[1].Seq })[0]
			r.do(func() { r.pg.remove(gone) })
			r.runs(1)
			if when > 0 { // the mark passes what is there no more
				r.s.chunks <- chunk(rows[0])
				pass(when)
				rows = rows[1:]
			}
			r.s.chunks <- chunk(slices.Concat(rows, others)...)
			pass(3 * time.Second)
			if r.owedRows() != 0 || r.i.settled != others[0].End || value(t, r.i.relay.metrics.settled) != 3 {
				t.Errorf("%s: %d rows are owed; the slot is told %v, want %v; %v were settled", name, r.owedRows(),
					r.i.settled, others[0].End, value(t, r.i.relay.metrics.settled))
			}
			if n, _ := r.s.window.inflight(); n != 0 || len(r.s.settler.tracker.rows) > 0 || r.s.window.behind() != 0 {
				t.Errorf("%s: %d events are held in the window, or the settler remembers something", name, n)
			}
		})
	}
}

// The settler compares rows, not counts: a deleted row does not make up for an undelivered one.
func TestADeletedRowIsNoEvidence(t *testing.T) {
	t.Parallel()
	inRig(t, Options{}, func(r *rig) {
		rows := r.commit("done", "done", "done")
		table := r.pg.rows(func(*tableRow) bool { return true })
		r.do(func() { r.pg.remove(table[0]) })
		r.stream(rows[:2]...)
		pass(5 * time.Second)
		r.hasUnsettled(2)
		r.s.chunks <- chunk(rows[2])
		pass(3 * time.Second)
		r.settlesTo(rows[2].End)
	})
}

// An event that is published while the settler is busy does not count as missed.
func TestWhatIsOnItsWayIsNotMissed(t *testing.T) {
	t.Parallel()
	inRig(t, Options{}, func(r *rig) {
		s := &slowSink{r.s.settler.sink, 700 * time.Millisecond}
		r.s.settler.sink = s
		_, settling := r.runs(1)
		for range 50 {
			pass(3 * time.Second)
			r.s.chunks <- outbox.Chunk{Position: r.pg.wal} // so that a look sees all
			rows := r.transactions(3)
			pass(1500 * time.Millisecond)
			for n := range rows {
				c := chunk(rows[n])
				if n == 2 {
					r.do(func() { c.Position = r.pg.wal })
				}
				r.s.chunks <- c
				pass(600 * time.Millisecond)
			}
		}
		pass(10 * time.Second)
		r.goesOn(settling)
	})
}

// slowSink confirms slowly.
type slowSink struct {
	stream.Publisher
	by time.Duration
}

func (s *slowSink) Confirm(ctx context.Context, o outbox.Owner, marks []outbox.Mark) error {
	elapse(s.by)
	return s.Publisher.Confirm(ctx, o, marks)
}

// A stream outlives the lower half of the ids, also where nothing is published for long.
func TestAStreamOfManyIds(t *testing.T) {
	t.Parallel()
	inRig(t, Options{}, func(r *rig) {
		r.commit("done")
		r.settleAll()
		r.stream(r.commit("done")...)
		for range 5 {
			pass(3 * time.Second)
			r.do(func() {
				r.pg.xid += 3 << 29
				r.pg.first, r.pg.ended, r.pg.durable = r.pg.xid, r.pg.xid, r.pg.xid
			})
			pass(3 * time.Second)
		}
		rows := r.commit("done")
		r.s.chunks <- chunk(rows...)
		pass(3 * time.Second)
		if r.owedRows() != 0 || r.i.settled != rows[0].End || len(r.published("outbox.order")) != 2 {
			t.Errorf("%d rows are owed; the slot is told %v, want %v", r.owedRows(), r.i.settled, rows[0].End)
		}
	})
}

// The publisher's knowledge of settled rows is also from before, and ids wrap around. The number of the mark does not
// help if numbers have restarted.
func TestWhatWasSettledLongAgo(t *testing.T) {
	t.Parallel()
	inRig(t, Options{}, func(r *rig) {
		at := r.here()
		r.s.settler.begin(at)
		at.High = math.MaxInt64
		r.s.router.begin(at.Settled, 1)
		r.goPublish()
		r.goSettle()
		r.s.chunks <- chunk(r.commit("done")...)
		soon()
		r.do(func() {
			r.pg.xid += 1<<31 + 100
			r.pg.first, r.pg.ended, r.pg.durable = r.pg.xid, r.pg.xid, r.pg.xid
		})
		pass(3 * time.Second)
		r.s.chunks <- chunk(r.commit("done")...)
		pass(3 * time.Second)
		r.publishes("outbox.order", 2)
		r.hasUnsettled(0)
	})
}

// Rows that a scan has read from a server that crashed later may not exist: the crash loses an asynchronous commit.
func TestACrashIsNoMissedRow(t *testing.T) {
	t.Parallel()
	inRig(t, Options{}, func(r *rig) {
		_, settling := r.stream(r.commit("done")...)
		pass(3 * time.Second)
		r.s.chunks <- outbox.Chunk{Position: r.pg.wal} // so that a look sees all
		tx := r.begin("order b")
		tx.show() // and its commit is not on disk
		pass(3 * time.Second)
		r.do(func() { tx.undo(); r.pg.crash() })
		pass(3 * time.Second)
		r.s.chunks <- outbox.Chunk{Position: r.pg.wal}
		pass(3 * time.Second)
		r.goesOn(settling)
	})
}

// A row that the stream has passed without delivering it is a finding, even if nothing else happens. A row that the
// stream has not reached is never a finding.
func TestTheSettlerFindsAMissedRow(t *testing.T) {
	t.Parallel()
	for _, passed := range []bool{true, false} {
		inRig(t, Options{}, func(r *rig) {
			_, settling := r.stream(r.commit("done")...)
			pass(3 * time.Second)
			missed := r.event("order", "a")
			if passed {
				r.s.chunks <- outbox.Chunk{Position: r.pg.wal}
			}
			pass(4 * time.Second)
			r.do(func() { r.grow(1000) })
			if passed {
				r.s.chunks <- outbox.Chunk{Position: r.pg.wal}
			}
			pass(10 * time.Second)
			n := value(t, r.i.relay.metrics.auditFailures.WithLabelValues(outbox.ReasonMissed))
			if found := len(settling) > 0; found != passed || (n == 1) != passed || !r.pg.owed(missed) {
				t.Errorf("passed %v: found %v, counted %v times", passed, found, n)
			}
			if passed {
				if err := <-settling; slotReason(err) != outbox.ReasonMissed {
					t.Errorf("ended with %v", err)
				}
			}
		})
	}
}

// Rows that are far ahead in the WAL are not scanned before they are published: each scan lists about as many rows as
// the window holds.
func TestALookBesideABacklogIsSmall(t *testing.T) {
	t.Parallel()
	inRig(t, Options{Window: 20}, func(r *rig) {
		r.stream(r.commit("done")...)
		pass(3 * time.Second)
		rows := r.transactions(2) // the stream has passed the end of the last look
		r.s.chunks <- chunk(rows...)
		soon()
		backlog := r.transactions(500)
		r.s.chunks <- chunk(backlog[:10]...)
		pass(1200 * time.Millisecond) // one look may see it all: the stream was not behind before
		r.do(func() { r.pg.listed = 0 })
		for n := 10; n < 500; n += 10 {
			r.s.chunks <- chunk(backlog[n : n+10]...)
			pass(200 * time.Millisecond)
		}
		pass(3 * time.Second)
		if r.pg.listed > 40 || r.owedRows() != 0 || r.i.settled != backlog[499].End {
			t.Errorf("a look has listed %d rows; %d are owed; the slot is told %v", r.pg.listed, r.owedRows(),
				r.i.settled)
		}
	})
}

// Where nothing is published nothing is written, whatever else the server does.
func TestAnIdleStreamWritesNothing(t *testing.T) {
	t.Parallel()
	inRig(t, Options{}, func(r *rig) {
		r.runs(1)
		n := len(r.pg.marks)
		for range 20 {
			r.begin().rollback()
			soon()
		}
		if len(r.pg.marks) != n || r.count("Marker.Move") > 0 || r.count("Marker.Look") > 22 {
			t.Errorf("%d marks were written, %d looks", len(r.pg.marks)-n, r.count("Marker.Look"))
		}
	})
}

// If the window fills, or a goroutine waits for it, the mark moves before the next second.
func TestTheMarkMovesEarlierWhenTheWindowFills(t *testing.T) {
	t.Parallel()
	for name, o := range map[string]Options{
		"events": {Window: 4}, "bytes": {WindowBytes: 1200},
		"one that does not fit behind a small one": {WindowBytes: 1000},
	} {
		inRig(t, o, func(r *rig) {
			rows := r.transactions(40)
			for n := 1; n < len(rows) && o.WindowBytes == 1000; n += 2 {
				rows[n].Payload = make([]byte, 700)
			}
			began := time.Now()
			r.stream(rows...)
			r.eventually("all is published", time.Minute, func() bool {
				s := r.rd.streams["outbox.order"]
				return s != nil && len(s.entries) == 40
			})
			if took := time.Since(began); took > 4*time.Second {
				t.Errorf("%s: it took %v", name, took)
			}
		})
	}
}

// Looks that take long are rare, but not when the stream waits for the mark: then they hold it up for as long as they
// take, and no longer.
func TestLooksThatTakeLongAreRare(t *testing.T) {
	t.Parallel()
	inRig(t, Options{}, func(r *rig) {
		r.s.settler.store = &slowStore{r.s.settler.store, 2 * time.Second}
		r.stream()
		for range 100 {
			r.s.chunks <- chunk(r.commit("done")...)
			pass(time.Second)
		}
		if n := r.count("Marker.Look"); n < 15 || n > 25 {
			t.Errorf("%d looks in 100 s, each of which takes 2 s", n)
		}
	})
	inRig(t, Options{Window: 4}, func(r *rig) {
		r.s.settler.store = &slowStore{r.s.settler.store, 2 * time.Second}
		r.stream(r.transactions(40)...)
		pass(60 * time.Second)
		r.hasUnsettled(0)
	})
}

// slowStore has markers that look slowly.
type slowStore struct {
	Marks
	by time.Duration
}

type slowMarker struct {
	outbox.Marker
	by time.Duration
}

func (s *slowStore) Marker(ctx context.Context) (outbox.Marker, error) {
	m, err := s.Marks.Marker(ctx)
	return &slowMarker{m, s.by}, err
}

func (m *slowMarker) Look(ctx context.Context, since outbox.Settled, below uint64) (outbox.Look, error) {
	if err := pause.For(ctx, m.by); err != nil {
		return outbox.Look{}, err
	}
	return m.Marker.Look(ctx, since, below)
}

// Each mark notes the highest entries of what was confirmed since the one before, by stream.
func TestMarksNoteEntries(t *testing.T) {
	t.Parallel()
	inRig(t, Options{}, func(r *rig) {
		rows := r.commits("user b", "order a", "order a").delivered()
		r.stream(rows[0])
		soon()
		r.s.chunks <- chunk(rows[1:]...)
		pass(3 * time.Second)
		r.s.chunks <- chunk(r.commit("done")...)
		pass(3 * time.Second)
		var got []outbox.Entries
		for _, m := range r.pg.marks {
			if m.entries != nil {
				got = append(got, m.entries)
			}
		}
		want := []outbox.Entries{{"outbox.order": "3-0", "outbox.user": "1-0"}, {"outbox.order": "4-0"}}
		if !slices.EqualFunc(got, want, maps.Equal[outbox.Entries]) {
			t.Errorf("entries %v, want %v", got, want)
		}
	})
}

// Whatever fails is repeated while the intake lasts, step by step; nothing is settled twice, and what arrives late does
// no harm.
func TestSettlingIsRepeated(t *testing.T) {
	t.Parallel()
	for _, step := range []string{"Sink.Confirm", "Store.Marker", "Marker.Look", "Marker.Move"} {
		for n := range 2 {
			for k := refused; k <= late; k++ {
				inRig(t, Options{}, func(r *rig) {
					r.plan = fault{step, n, k}
					rows := r.commit("done", "done")
					r.stream(rows...)
					pass(2 * time.Second)
					if n > 0 && step == "Store.Marker" { // there is no second one without a reason
						r.do(func() { r.pg.crash() })
					}
					rows = r.commit("done")
					r.s.chunks <- chunk(rows...)
					pass(20 * time.Second)
					if r.i.settled != rows[0].End || r.owedRows() != 0 || !r.struck ||
						value(t, r.i.relay.metrics.settled) != 3 {
						t.Errorf("%s: the slot is told %v, want %v; %d rows are owed, struck %v", r.plan, r.i.settled,
							rows[0].End, r.owedRows(), r.struck)
					}
					if len(r.s.settler.tracker.entries)+len(r.s.settler.tracker.rows) > 0 {
						t.Errorf("%s: the settler remembers something", r.plan)
					}
				})
			}
		}
	}
}

// A server that crashes ends its sessions and assigns the same ids again. Scan results from before the crash are
// invalid.
func TestSettlingAcrossACrash(t *testing.T) {
	t.Parallel()
	inRig(t, Options{}, func(r *rig) {
		r.stream(r.commit("done")...)
		pass(3 * time.Second)
		aborted := r.begin()
		aborted.rollback()
		rows := r.commit("done")
		r.begin().rollback()
		r.s.chunks <- chunk(rows...)
		pass(1500 * time.Millisecond)
		r.begin().rollback()
		pass(3 * time.Second) // a look sees an id that is nowhere written
		r.do(r.pg.crash)
		again := r.begin("order b")
		late := again.rows[0]
		pass(5 * time.Second)
		again.commitNow()
		pass(3 * time.Second)
		if !r.pg.owed(late) || r.owedRows() != 1 {
			t.Errorf("%d rows are owed, want the one that is not delivered", r.owedRows())
		}
		r.s.chunks <- chunk(again.delivered()...)
		pass(3 * time.Second)
		r.settlesTo(again.end)
	})
}

// After the intake has ended, the first failure ends settling. Unsettled events become doubt, and nothing waits for
// them.
func TestSettlingEndsWithTheFirstFailureAfterTheIntake(t *testing.T) {
	t.Parallel()
	for _, step := range []string{"Sink.Confirm", "Store.Marker", "Marker.Look", "Marker.Move"} {
		inRig(t, Options{}, func(r *rig) {
			r.plan = fault{step, 0, late}
			_, settling := r.stream(r.commit("done")...)
			pass(1500 * time.Millisecond)
			r.end(errors.New("stopping"))
			pass(callLimit)
			if n := r.count(step); n != 1 || len(settling) != 1 {
				t.Errorf("%s: %d attempts, want the one that was under way", step, n)
			}
		})
	}
}

// A leader that was succeeded moves no mark, and its stream ends.
func TestASupersededSettlerEnds(t *testing.T) {
	t.Parallel()
	inRig(t, Options{}, func(r *rig) {
		r.do(func() { r.pg.state.Owner.Nonce[0]++ })
		_, settling := r.stream(r.commit("done")...)
		if err := <-settling; !errors.Is(err, outbox.ErrSuperseded) || r.owedRows() != 1 {
			t.Errorf("ended with %v; %d rows are owed", err, r.owedRows())
		}
		if !hopeless(context.Cause(r.intake)) || r.i.settled != 0 || r.count("Sink.Settled") > 0 {
			t.Errorf("the intake ended with %v; the slot is told %v, or the gate", context.Cause(r.intake), r.i.settled)
		}
	})
}

// In an orderly stop the mark continues to move until everything is settled, without waiting for the next second.
func TestTheLastFlightsAreSettled(t *testing.T) {
	t.Parallel()
	inRig(t, Options{}, func(r *rig) {
		_, settling := r.stream(r.commit("done")...)
		pass(3 * time.Second)
		tx := r.writes("order b")
		r.s.chunks <- chunk(tx.delivered()...)
		pass(10 * time.Millisecond)
		r.end(errors.New("stopping"))
		pass(5 * time.Second)
		if len(settling) > 0 {
			t.Fatal("it ended, and something is not settled")
		}
		tx.show()
		pass(100 * time.Millisecond)
		if len(settling) != 1 || r.owedRows() != 0 || r.i.settled != tx.end {
			t.Errorf("%d rows are owed; the slot is told %v, want %v", r.owedRows(), r.i.settled, tx.end)
		}
	})
}

// noMarkers is a Store that opens no markers while it is broken.
type noMarkers struct {
	Marks
	w      *world
	broken bool // guarded by world.mu, and tries
	tries  int
}

func (n *noMarkers) Marker(ctx context.Context) (outbox.Marker, error) {
	var broken bool
	n.w.do(func() { broken, n.tries = n.broken, n.tries+1 })
	if broken {
		return nil, errRefused
	}
	return n.Marks.Marker(ctx)
}

// A failure to settle is reported after a while, and the report is cleared when settling works again.
func TestWhatCannotBeSettledIsSaid(t *testing.T) {
	t.Parallel()
	for step, broken := range map[string]func(r *rig) *bool{
		"confirm": func(r *rig) *bool { return &r.rd.down },
		"open": func(r *rig) *bool {
			n := &noMarkers{Marks: r.s.settler.store, w: r.world}
			r.s.settler.store = n
			return &n.broken
		},
	} {
		inRig(t, Options{}, func(r *rig) {
			down := broken(r)
			r.from(1)
			publishing := r.goPublish()
			r.s.chunks <- chunk(r.commit("done")...)
			soon()
			r.do(func() { *down = true })
			settling := r.goSettle()
			pass(patience - time.Second)
			r.i.says(t)
			pass(4 * time.Second)
			r.i.says(t, "settle: "+step+": ")
			r.do(func() { *down = false })
			pass(3 * time.Second)
			if bad, _ := r.i.reasons(); len(bad) > 0 || len(publishing)+len(settling) > 0 || r.owedRows() > 0 {
				t.Errorf("%s: afterwards %v, or a part has ended", step, bad)
			}
		})
	}
}
