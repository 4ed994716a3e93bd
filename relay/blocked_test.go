package relay

import (
	"context"
	"errors"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"
	"weak"

	"github.com/google/uuid"

	"posthaste/outbox"
	"posthaste/relay/stream"
)

// freeze makes the servers of streams take calls, and answer none; thaw has them answer.
func (r *rig) freeze(streams ...string) (thaw func()) {
	done := make(chan struct{})
	r.do(func() {
		for _, s := range streams {
			r.rd.frozen[s] = done
		}
	})
	return func() { close(done) }
}

// both commits an event of each type in one transaction, of an aggregate that no other transaction has.
func (r *rig) both(types ...string) []outbox.Row {
	tx := r.begin()
	for _, typ := range types {
		tx.insert(typ, strconv.FormatUint(tx.xid, 10), "done")
	}
	tx.commitNow()
	return tx.delivered()
}

// remembered reports whether a gate knows an event as unsettled.
func (r *rig) remembered(stream string, id uuid.UUID) (there bool) {
	r.do(func() {
		for _, b := range r.rd.gates[stream].batches {
			there = there || slices.ContainsFunc(b.items, func(it batchItem) bool { return it.id == id })
		}
	})
	return there
}

// met makes the streams known, and settles what that takes.
func (r *rig) met(types ...string) (publishing, settling <-chan error) {
	publishing, settling = r.stream(r.both(types...)...)
	pass(3 * time.Second)
	return publishing, settling
}

// A stream whose server does not answer delays only its own events. Other published events are settled, the window
// holds the unsettled ones, and the slot is confirmed up to them. Later the stream catches up in order.
func TestOthersGoOnBesideAStreamThatStandsStill(t *testing.T) {
	t.Parallel()
	inRig(t, Options{}, func(r *rig) {
		r.met("order", "user")
		r.away(true, "outbox.order")
		before := r.i.settled
		for range 5 {
			for _, types := range [][]string{{"user"}, {"order"}, {"user", "order"}, {"user"}} {
				rows := r.both(types...)
				r.s.chunks <- chunk(rows...)
			}
			soon()
		}
		pass(3 * time.Second)
		for range 2 { // alone in a flight, so that it is settled before what came with something late
			r.s.chunks <- chunk(r.both("user")...)
			pass(3 * time.Second)
		}
		r.publishes("outbox.user", 1+17)
		// Events of a transaction that also has late events are unsettled as well.
		r.hasUnsettled(15)
		// And what is behind that in its stream stays in the gate; the first of all may be in one batch with it.
		if n, _ := r.s.window.inflight(); n != 15+11 && n != 15+12 {
			t.Errorf("the window holds %d events, want 15 that are owed, and 11 or 12 that are remembered", n)
		}
		if first := r.pg.rows(r.pg.owed)[0]; r.i.settled >= first.tx.end || r.i.settled < before {
			t.Errorf("the slot is told %v: behind what is owed at %v", r.i.settled, first.tx.end)
		}
		// The gate keeps events that are published and unsettled.
		for _, row := range r.pg.rows(r.pg.owed) {
			if row.AggregateType == "user" && !r.remembered("outbox.user", row.ID) {
				t.Errorf("the gate has forgotten row %d, which is owed", row.Seq)
			}
		}
		r.i.complains("streams: publishing to outbox.order is blocked")
		r.i.complains(errDown.Error())
		r.away(false, "outbox.order")
		pass(10 * time.Second)
		orders := r.published("outbox.order")
		if !slices.IsSorted(orders) || len(orders) != 1+10 {
			t.Errorf("published %v", orders)
		}
		if n, b := r.s.window.inflight(); n != 0 || b != 0 || r.owedRows() != 0 ||
			r.i.settled != r.s.router.tracker.position() {
			t.Errorf("%d events of %d bytes are held, %d rows are owed, the slot is told %v, want %v", n, b,
				r.owedRows(), r.i.settled, r.s.router.tracker.position())
		}
		if s := r.s.settler; len(s.tracker.rows)+len(s.tracker.portions)+len(s.stuck) > 0 {
			t.Errorf("the settler remembers %v, %v, %v", s.tracker.rows, s.tracker.portions, s.stuck)
		}
		r.i.says(t)
		rows := r.both("order", "user") // as before
		r.s.chunks <- chunk(rows...)
		pass(3 * time.Second)
		r.settlesTo(rows[1].End)
	})
}

// A new type whose stream is on a server that is down is late from its first event. It has an H of its own, and its
// doubt is kept until that H is passed.
func TestOthersGoOnBesideANewStreamThatStandsStill(t *testing.T) {
	t.Parallel()
	for name, stop := range map[string]func(r *rig) (back func()){
		"down": func(r *rig) func() {
			r.away(true, "outbox.fresh")
			return func() { r.away(false, "outbox.fresh") }
		},
		"hangs": func(r *rig) func() { return r.freeze("outbox.fresh") },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			inRig(t, Options{}, func(r *rig) {
				r.gates.fresh = r.s.router.meet
				r.met("user")
				forgotten := r.count("Sink.ForgetDoubt")
				back := stop(r)
				for range 3 {
					for _, types := range [][]string{{"user"}, {"fresh"}, {"user", "fresh"}} {
						r.s.chunks <- chunk(r.both(types...)...)
					}
					soon()
				}
				pass(publishTimeout + 3*time.Second)
				r.publishes("outbox.user", 1+6)
				r.hasUnsettled(9)
				r.i.complains("streams: publishing to outbox.fresh is blocked")
				back()
				pass(10 * time.Second)
				fresh := r.published("outbox.fresh")
				if !slices.IsSorted(fresh) || len(fresh) != 6 || r.owedRows() != 0 {
					t.Errorf("published %v, and %d rows are owed", fresh, r.owedRows())
				}
				rows := r.both("user", "fresh")
				r.s.chunks <- chunk(rows...)
				pass(3 * time.Second)
				r.called("Sink.ForgetDoubt", forgotten+2) // once for each stream
				if n, _ := r.s.window.inflight(); r.owedRows() != 0 || n != 0 || r.i.settled != rows[1].End {
					t.Errorf("%d rows are owed, %d are held, afterwards", r.owedRows(), n)
				}
				r.i.says(t)
			})
		})
	}
}

// scanned waits for the settler's next scan.
func (r *rig) scanned() {
	for n := r.count("Marker.Look"); r.count("Marker.Look") == n; {
		pass(10 * time.Millisecond)
	}
}

// Events that were published but not confirmed when their server went down are not settled; the others are.
func TestOthersAreSettledBesideAStreamThatCannotBeConfirmed(t *testing.T) {
	t.Parallel()
	inRig(t, Options{}, func(r *rig) {
		r.met("order", "user")
		r.scanned()
		r.s.chunks <- chunk(r.both("order")...)
		pass(100 * time.Millisecond)
		r.s.chunks <- chunk(r.both("user")...)
		pass(100 * time.Millisecond) // published, and not yet confirmed
		r.away(true, "outbox.order")
		pass(8 * time.Second)
		for range 3 {
			r.s.chunks <- chunk(r.both("user")...)
			pass(4 * time.Second)
		}
		r.hasUnsettled(1)
		r.away(false, "outbox.order")
		pass(8 * time.Second)
		if n, _ := r.s.window.inflight(); r.owedRows() != 0 || n != 0 || len(r.s.settler.tracker.portions) > 0 {
			t.Errorf("%d rows are owed, %d held", r.owedRows(), n)
		}
	})
}

// A server that takes calls and answers none holds up what others settle once, for as long as one waits for an answer.
func TestOthersAreSettledBesideAServerThatHangs(t *testing.T) {
	t.Parallel()
	inRig(t, Options{}, func(r *rig) {
		r.met("order", "user")
		r.scanned()
		r.s.chunks <- chunk(r.both("order")...)
		r.s.chunks <- chunk(r.both("user")...)
		pass(100 * time.Millisecond) // published, and not yet confirmed
		thaw := r.freeze("outbox.order")
		pass(publishTimeout + probeWait + 2*time.Second)
		r.hasUnsettled(1)
		asked := r.count("Sink.Confirm")
		for range 30 {
			r.s.chunks <- chunk(r.both("user")...)
			pass(2 * time.Second)
			r.hasUnsettled(1)
		}
		if n := r.count("Sink.Confirm") - asked; n < 30 || n > 70 {
			t.Errorf("confirmed %d times in a minute", n)
		}
		r.i.complains("settle: confirm: ")
		thaw()
		pass(8 * time.Second)
		n, _ := r.s.window.inflight()
		if s := r.s.settler; r.owedRows() != 0 || n != 0 || len(s.tracker.portions)+len(s.stuck) > 0 {
			t.Errorf("%d rows are owed, %d held", r.owedRows(), n)
		}
		r.i.says(t)
	})
}

// Calls that only inform a gate delay nothing: settled batches are reported, and doubt is cleared, in the background.
func TestAServerThatHangsHoldsUpNoQuietStreams(t *testing.T) {
	t.Parallel()
	inRig(t, Options{}, func(r *rig) {
		first := r.both("order", "user")
		after := r.both("user")
		r.runs(after[0].End)
		r.s.chunks <- chunk(first...)
		r.eventually("it is settled", 3*time.Second, func() bool { return len(r.pg.rows(r.pg.owed)) == 1 })
		thaw := r.freeze("outbox.order")
		r.s.chunks <- chunk(after...) // H is passed, and the gate was not told
		for n := range 20 {
			pass(500 * time.Millisecond)
			if got := len(r.published("outbox.user")); got != n+2 {
				t.Fatalf("%d events are published, want %d", got, n+2)
			}
			r.s.chunks <- chunk(r.both("user")...)
		}
		thaw()
		pass(10 * time.Second)
		r.s.chunks <- chunk(r.both("user")...)
		pass(3 * time.Second)
		r.do(func() {
			if n := len(r.rd.gates["outbox.order"].batches); n != 0 {
				t.Errorf("the gate was not told of %d batches", n)
			}
		})
		if outbox.LSN(r.s.settler.forgotten.Load()) != after[0].End {
			t.Errorf("doubt is forgotten up to %v, want %v", outbox.LSN(r.s.settler.forgotten.Load()), after[0].End)
		}
	})
}

// A gate keeps the events after a transaction that waits for another stream, and no more than the window holds.
func TestTheWindowBoundsWhatAGateRemembers(t *testing.T) {
	t.Parallel()
	inRig(t, Options{Window: 20}, func(r *rig) {
		r.met("order", "user", "bill")
		r.away(true, "outbox.order")
		r.s.chunks <- chunk(append(r.both("user", "order"), r.both("bill")...)...)
		soon()
		for range 30 { // they do not wait for the transaction
			r.s.chunks <- chunk(r.both("bill")...)
			soon()
		}
		r.publishes("outbox.bill", 32)
		go func() {
			for range 100 {
				r.s.chunks <- chunk(r.both("user")...)
			}
		}()
		pass(200 * time.Second)
		remembered := 0
		r.do(func() {
			for _, b := range r.rd.gates["outbox.user"].batches {
				remembered += len(b.items)
			}
		})
		if remembered < 5 || remembered > 20 {
			t.Errorf("%d events are remembered, want as many as the window holds", remembered)
		}
		r.away(false, "outbox.order")
		pass(60 * time.Second)
		r.publishes("outbox.user", 102)
		r.hasUnsettled(0)
	})
}

// The window bounds what is late: when it is full of that, all wait.
func TestTheWindowBoundsWhatIsLate(t *testing.T) {
	t.Parallel()
	inRig(t, Options{Window: 10}, func(r *rig) {
		r.met("order", "user")
		r.away(true, "outbox.order")
		go func() {
			for range 30 {
				r.s.chunks <- chunk(r.both("order")...)
				r.s.chunks <- chunk(r.both("user")...)
			}
		}()
		pass(20 * time.Second)
		if n, _ := r.s.window.inflight(); n > 10 || n <= 5 {
			t.Errorf("%d events are held, want as many as fit", n)
		}
		r.s.running.Store(true)
		if _, known := r.s.progress(); known { // or the auditor would find that the stream is stalled
			t.Error("it is not known why the stream stands still")
		}
		r.i.complains("the window is full of events for the blocked ones")
		r.away(false, "outbox.order")
		pass(60 * time.Second)
		if _, known := r.s.progress(); !known {
			t.Error("it is not known that the stream goes on")
		}
		if n := len(r.published("outbox.order")) + len(r.published("outbox.user")); n != 62 || r.owedRows() != 0 {
			t.Errorf("%d events are published, want 62; %d are owed", n, r.owedRows())
		}
	})
}

// A stop abandons late events, those that share a transaction with one, and those that follow these in an aggregate:
// they stay unsettled, and the slot stays before them. It does not wait for events that will not be published. Other
// published events are settled.
func TestAStopLeavesWhatIsLate(t *testing.T) {
	t.Parallel()
	inRig(t, Options{}, func(r *rig) {
		publishing, settling := r.met("order", "user")
		r.away(true, "outbox.order")
		late := r.both("user", "order")
		r.s.chunks <- chunk(late...)
		tx := r.commits("user " + late[0].AggregateID)
		r.s.chunks <- chunk(append(tx.delivered(), r.both("user")...)...)
		pass(100 * time.Millisecond)
		r.end(errors.New("stop"))
		r.must(<-publishing)
		r.must(<-settling)
		if n := r.owedRows(); n != 3 || r.i.settled >= late[1].End {
			t.Errorf("%d rows are owed, want 3; the slot is told %v, behind %v", n, r.i.settled, late[1].End)
		}
		r.i.says(t)
	})
}

// Doubt is kept while an event that was committed below H is late.
func TestDoubtIsKeptWhileSomethingIsLate(t *testing.T) {
	t.Parallel()
	inRig(t, Options{}, func(r *rig) {
		first, late, after := r.both("order", "user"), r.both("order"), r.both("user")
		r.runs(after[0].End)
		r.s.chunks <- chunk(first...)
		soon()
		r.away(true, "outbox.order")
		r.s.chunks <- chunk(late...)
		r.s.chunks <- chunk(after...)
		soon()
		r.called("Sink.ForgetDoubt", 0)
		r.away(false, "outbox.order")
		pass(5 * time.Second)
		r.s.chunks <- outbox.Chunk{Position: r.pg.wal}
		soon()
		r.called("Sink.ForgetDoubt", 2)
	})
}

// The first success ends what a sweep before the stream has reported.
func TestTheFirstPublishEndsWhatASweepHasReported(t *testing.T) {
	t.Parallel()
	inRig(t, Options{}, func(r *rig) {
		r.i.relay.outcome(errDown)
		if bad, _ := r.i.reasons(); len(bad) != 1 {
			t.Fatalf("reasons %q", bad)
		}
		r.met("order")
		r.i.says(t)
	})
}

// A giant transaction ends the stream although another stream is blocked.
func TestAGiantTransactionBesideABlockedStream(t *testing.T) {
	t.Parallel()
	inRig(t, Options{Window: 8}, func(r *rig) {
		publishing, _ := r.met("order", "user")
		r.away(true, "outbox.order")
		r.s.chunks <- chunk(r.both("order")...)
		soon()
		r.s.chunks <- chunk(r.commits(slices.Repeat([]string{"user a"}, 300)...).delivered()...)
		pass(time.Minute)
		select {
		case err := <-publishing:
			if slotReason(err) != outbox.ReasonGiant {
				t.Errorf("ended with %v", err)
			}
		default:
			t.Error("the router has met a giant, and has not ended after a minute")
		}
		r.end(errors.New("over"))
	})
}

// Settling is retried with a backoff, even if the window is half full.
func TestSettlingIsRetriedWithABackoff(t *testing.T) {
	t.Parallel()
	inRig(t, Options{Window: 4}, func(r *rig) {
		s := &noMarkers{Marks: r.s.settler.store, w: r.world, broken: true}
		r.s.settler.store = s
		r.stream(r.transactions(20)...)
		pass(time.Minute)
		if s.tries > 120 {
			t.Errorf("%d sessions were tried in a minute", s.tries)
		}
		r.end(errors.New("over"))
	})
}

// A new stream whose gate could not be raised at first, and whose rows are then all parked, is not blocked.
func TestABlockedStreamWhoseRowsAreParkedIsNotBlocked(t *testing.T) {
	t.Parallel()
	inRig(t, Options{Poison: PoisonBlockKey}, func(r *rig) {
		publishing, _ := r.met("user")
		r.s.router.blocks.add(&outbox.Record{ID: [16]byte{1}, AggregateType: "fresh", AggregateID: "a"})
		r.away(true, "outbox.fresh")
		r.s.chunks <- chunk(r.commits("fresh a").delivered()...)
		pass(3 * time.Second)
		r.away(false, "outbox.fresh")
		pass(10 * time.Second)
		r.s.chunks <- chunk(r.both("user")...)
		pass(5 * time.Minute)
		bad, _ := r.i.reasons()
		if len(publishing) > 0 {
			t.Errorf("ended: %v", <-publishing)
		}
		if len(bad) > 0 || len(r.pg.dead) != 1 || r.owedRows() != 0 || r.s.window.behind() != 0 {
			t.Errorf("reasons %q, %d parked, owed %d, %d behind the mark", bad, len(r.pg.dead), r.owedRows(),
				r.s.window.behind())
		}
		r.s.running.Store(true)
		if _, known := r.s.progress(); !known {
			t.Error("the stream is not audited any more")
		}
	})
}

// A dead event is retried behind an event that waits for it, and before another. With block-key, the other waits, too:
// it must not pass the first.
func TestARetriedEventIsNotPassed(t *testing.T) {
	t.Parallel()
	inRig(t, Options{Poison: PoisonBlockKey}, func(r *rig) {
		r.met("order")
		dead := &outbox.Record{ID: [16]byte{1}, AggregateType: "order", AggregateID: "p"}
		r.s.router.blocks.add(dead)
		tx := r.commits("order p", "order p", "order p")
		waits, retried, later := tx.rows[0], tx.rows[1], tx.rows[2]
		retried.ID = dead.ID
		r.s.chunks <- chunk(tx.delivered()...)
		pass(10 * time.Second)
		var parked []int64
		for _, d := range r.pg.dead {
			parked = append(parked, d.Seq)
		}
		if got := r.published("outbox.order"); !slices.Contains(got, retried.Seq) || slices.Contains(got, later.Seq) ||
			!slices.Equal(parked, []int64{waits.Seq, later.Seq}) {
			t.Errorf("published %v, dead %v; want %d published, %d and %d dead", got, parked, retried.Seq, waits.Seq,
				later.Seq)
		}
	})
}

// The auditor notices a slot that is silent while a stream is blocked.
func TestASilentSlotBesideABlockedStreamIsNoticed(t *testing.T) {
	t.Parallel()
	inRig(t, Options{}, func(r *rig) {
		r.met("order", "user")
		r.s.running.Store(true)
		r.away(true, "outbox.order")
		r.s.chunks <- chunk(r.both("order")...)
		soon()
		for range 3 {
			r.s.chunks <- chunk(r.both("user")...) // they go on
			soon()
		}
		var found error
		for range 20 { // and then nothing is delivered any more, though the WAL grows
			r.event("user", "a")
			pass(auditInterval)
			if err := r.s.auditor.once(r.intake); err != nil {
				found = err
			}
		}
		if slotReason(found) != outbox.ReasonStalled || found == nil {
			t.Errorf("found %v; %d rows are owed after 100 s", found, r.owedRows())
		}
	})
}

// When the intake ends in the middle of a transaction, the settler does not wait for its rest.
func TestAStopInTheMiddleOfATransaction(t *testing.T) {
	t.Parallel()
	inRig(t, Options{Window: 6}, func(r *rig) {
		publishing, settling := r.met("order", "user")
		r.away(true, "outbox.order")
		for range 4 {
			r.s.chunks <- chunk(r.both("order")...)
			soon()
		}
		rows := r.both("user", "user", "user", "user")
		r.s.chunks <- chunk(rows[:1]...)
		r.s.chunks <- chunk(rows[1:]...)
		pass(5 * time.Second)
		r.end(errors.New("toggled"))
		r.must(<-publishing)
		began := time.Now()
		pass(10 * time.Second)
		if len(settling) == 0 {
			t.Errorf("after %v the settler still waits for rows that are not published any more", time.Since(began))
		}
	})
}

// A blocked stream keeps its rows in memory, and not the chunks that they came in.
func TestABlockedStreamKeepsNoChunk(t *testing.T) {
	t.Parallel()
	inRig(t, Options{}, func(r *rig) {
		r.met("order", "user")
		r.away(true, "outbox.order")
		var kept []weak.Pointer[outbox.Row]
		func() {
			for range 20 {
				c := chunk(slices.Concat(r.both("order"), r.both("user"), r.both("user"))...)
				kept = append(kept, weak.Make(&c.Rows[0]))
				r.s.chunks <- c
				pass(2 * time.Second)
			}
		}()
		runtime.GC()
		runtime.GC()
		n := 0
		for _, p := range kept {
			if p.Value() != nil {
				n++
			}
		}
		held, _ := r.s.window.inflight()
		if n > 2 {
			t.Errorf("%d of 20 chunks are kept as a whole; the window holds %d events", n, held)
		}
	})
}

// A successful park of one worker does not clear the condition of another.
func TestAParkThatSucceedsClearsNoOthersCondition(t *testing.T) {
	t.Parallel()
	inRig(t, Options{}, func(r *rig) {
		r.met("order", "user")
		h := &hanging{DeadEvents: r.s.router.dead, typ: "order"}
		h.broken.Store(true)
		r.s.router.dead = h
		tx := r.commits("order a poison")
		r.s.chunks <- chunk(tx.delivered()...)
		pass(10 * time.Second)
		green := 0
		for range 20 {
			r.s.chunks <- chunk(r.commits("user a poison").delivered()...)
			for range 20 {
				pass(100 * time.Millisecond)
				if bad, _ := r.i.reasons(); !strings.Contains(strings.Join(bad, " "), "park") {
					green++
				}
			}
		}
		if green > 0 {
			t.Errorf("park is not said in %d of 400 looks", green)
		}
	})
}

// undurable is a Sink whose replicas are gone.
type undurable struct {
	stream.Publisher
	now, most atomic.Int64
}

func (s *undurable) Confirm(ctx context.Context, _ outbox.Owner, _ []outbox.Mark) error {
	n := s.now.Add(1)
	defer s.now.Add(-1)
	for old := s.most.Load(); n > old && !s.most.CompareAndSwap(old, n); old = s.most.Load() {
	}
	<-ctx.Done()
	return errors.New("durability is not reached")
}

// The settler bounds how many streams it confirms alone at a time.
func TestProbesAreBounded(t *testing.T) {
	t.Parallel()
	inRig(t, Options{}, func(r *rig) {
		s := &undurable{Publisher: r.s.settler.sink}
		r.s.settler.sink = s
		var types []string
		for i := range 100 {
			types = append(types, "t"+string(rune('a'+i/26))+string(rune('a'+i%26)))
		}
		r.stream(r.both(types...)...)
		pass(time.Minute)
		if n := s.most.Load(); n > 32 {
			t.Errorf("%d confirmations wait at once", n)
		}
		r.end(errors.New("over"))
	})
}

// A fenced worker ends the intake at once, although another worker waits for an answer.
func TestAFencedStreamBesideOneThatHangs(t *testing.T) {
	t.Parallel()
	inRig(t, Options{}, func(r *rig) {
		r.met("order", "user")
		r.freeze("outbox.user")
		r.s.chunks <- chunk(r.both("user")...)
		pass(100 * time.Millisecond)
		r.do(func() { r.rd.gates["outbox.order"].owner.Epoch++ })
		began := time.Now()
		r.s.chunks <- chunk(r.both("order")...)
		<-r.intake.Done()
		if cause := context.Cause(r.intake); !hopeless(cause) || time.Since(began) > time.Second {
			t.Errorf("the intake ended with %v after %v", cause, time.Since(began))
		}
	})
}
