package relay

import (
	"context"
	"errors"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"
	"weak"

	"posthaste/outbox"
	"posthaste/relay/stream"
)

// A giant transaction ends the stream although another stream is blocked.
func TestAGiantTransactionBesideABlockedStream(t *testing.T) {
	t.Parallel()
	inRig(t, Options{Window: 8}, func(r *rig) {
		publishing, _ := r.met("order", "user")
		r.away(true, "outbox.order")
		r.s.chunks <- chunk(r.both("order")...)
		soon()
		tx := r.begin()
		for range 300 {
			tx.insert("user", "a", "done")
		}
		tx.commitNow()
		r.s.chunks <- chunk(tx.delivered()...)
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

// The settler may release before the worker of a routed portion has started.
func TestAReleaseBeforeTheWorkerHasStarted(t *testing.T) {
	t.Parallel()
	inRig(t, Options{}, func(r *rig) {
		r.from(1)
		rows := r.commit("done")
		r.s.router.tracker.route([]*portion{{stream: "outbox.order", rows: rows[:1], events: 1}}, rows[0].End)
		r.s.settler.release()
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
		tx := r.begin()
		tx.insert("fresh", "a", "done")
		tx.commitNow()
		r.s.chunks <- chunk(tx.delivered()...)
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
		tx := r.begin()
		waits := tx.insert("order", "p", "done")
		retried := tx.insert("order", "p", "done")
		retried.ID = dead.ID
		later := tx.insert("order", "p", "done")
		tx.commitNow()
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
		if err := <-publishing; err != nil {
			t.Errorf("ended with %v", err)
		}
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
		tx := r.begin()
		tx.insert("order", "a", "poison")
		tx.commitNow()
		r.s.chunks <- chunk(tx.delivered()...)
		pass(10 * time.Second)
		green := 0
		for range 20 {
			tx := r.begin()
			tx.insert("user", "a", "poison")
			tx.commitNow()
			r.s.chunks <- chunk(tx.delivered()...)
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
