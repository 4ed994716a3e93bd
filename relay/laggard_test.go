package relay

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	"posthaste/outbox"
)

// away makes the servers of streams stop answering, or answer again.
func (r *rig) away(gone bool, streams ...string) {
	r.do(func() {
		for _, s := range streams {
			r.rd.away[s] = gone
		}
	})
}

// both commits an event of each of two types in one transaction, and alone one of the second type in another.
func (r *rig) both(types ...string) []outbox.Row {
	tx := r.begin()
	for _, typ := range types {
		tx.insert(typ, "a", "done")
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

// A stream whose server does not answer holds up its own events only. What is published beside it is settled, the
// window holds what is not, and the slot is confirmed up to there. Then it catches up, in its order.
func TestOthersGoOnBesideAStreamThatStandsStill(t *testing.T) {
	t.Parallel()
	inRig(t, Options{Apart: true}, func(r *rig) {
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
		if n := len(r.published("outbox.user")); n != 1+17 {
			t.Errorf("%d events of the other stream are published, want 18", n)
		}
		// What came in one transaction with what is late is owed with it; the first of the others may have come to the
		// slot.
		if n := r.owedRows(); n != 15 {
			t.Errorf("%d rows are owed, want 15", n)
		}
		if n, _ := r.s.window.held(); n != 15 {
			t.Errorf("the window holds %d events, want those that are owed", n)
		}
		if first := r.pg.rows(r.pg.owed)[0]; r.i.settled >= first.tx.end || r.i.settled < before {
			t.Errorf("the slot is told %v: behind what is owed at %v", r.i.settled, first.tx.end)
		}
		// What is published and owed is not forgotten by its gate.
		for _, row := range r.pg.rows(r.pg.owed) {
			if row.AggregateType == "user" && !r.remembered("outbox.user", row.ID) {
				t.Errorf("the gate has forgotten row %d, which is owed", row.Seq)
			}
		}
		bad, _ := r.i.reasons()
		if text := strings.Join(bad, " "); !strings.Contains(text, "streams: outbox.order stand still") ||
			!strings.Contains(text, errDown.Error()) {
			t.Errorf("reasons %q", text)
		}
		r.away(false, "outbox.order")
		pass(10 * time.Second)
		orders := r.published("outbox.order")
		if !slices.IsSorted(orders) || len(orders) != 1+10 {
			t.Errorf("published %v", orders)
		}
		if n, b := r.s.window.held(); n != 0 || b != 0 || r.owedRows() != 0 || r.i.settled != r.s.publisher.position() {
			t.Errorf("%d events of %d bytes are held, %d rows are owed, the slot is told %v, want %v", n, b,
				r.owedRows(), r.i.settled, r.s.publisher.position())
		}
		if s := r.s.settler; len(s.rows)+len(s.pending)+len(s.late)+len(s.stuck) > 0 {
			t.Errorf("the settler remembers %v, %v, %v, %v", s.rows, s.pending, s.late, s.stuck)
		}
		if bad, _ := r.i.reasons(); len(bad) > 0 {
			t.Errorf("reasons %q", bad)
		}
		rows := r.both("order", "user") // as before
		r.s.chunks <- chunk(rows...)
		pass(3 * time.Second)
		if r.owedRows() != 0 || r.i.settled != rows[1].End {
			t.Errorf("%d rows are owed afterwards", r.owedRows())
		}
	})
}

// What was published and not confirmed when its server went down is not settled; the others are.
func TestOthersAreSettledBesideAStreamThatCannotBeConfirmed(t *testing.T) {
	t.Parallel()
	inRig(t, Options{Apart: true}, func(r *rig) {
		r.met("order", "user")
		for looks := r.count("Marker.Look"); r.count("Marker.Look") == looks; {
			pass(10 * time.Millisecond)
		}
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
		if n := r.owedRows(); n != 1 {
			t.Errorf("%d rows are owed, want 1", n)
		}
		r.away(false, "outbox.order")
		pass(8 * time.Second)
		if n, _ := r.s.window.held(); r.owedRows() != 0 || n != 0 || len(r.s.settler.pending) > 0 {
			t.Errorf("%d rows are owed, %d held", r.owedRows(), n)
		}
	})
}

// The window bounds what is late: when it is full of that, all wait.
func TestTheWindowBoundsWhatIsLate(t *testing.T) {
	t.Parallel()
	inRig(t, Options{Apart: true, Window: 10}, func(r *rig) {
		r.met("order", "user")
		r.away(true, "outbox.order")
		go func() {
			for range 30 {
				r.s.chunks <- chunk(r.both("order")...)
				r.s.chunks <- chunk(r.both("user")...)
			}
		}()
		pass(20 * time.Second)
		if n, _ := r.s.window.held(); n > 10 || n <= 5 {
			t.Errorf("%d events are held, want as many as fit", n)
		}
		r.away(false, "outbox.order")
		pass(60 * time.Second)
		if n := len(r.published("outbox.order")) + len(r.published("outbox.user")); n != 62 || r.owedRows() != 0 {
			t.Errorf("%d events are published, want 62; %d are owed", n, r.owedRows())
		}
	})
}

// A stop ends what is late: it stays owed, and the slot stays before it. What else was published is settled.
func TestAStopLeavesWhatIsLate(t *testing.T) {
	t.Parallel()
	inRig(t, Options{Apart: true}, func(r *rig) {
		publishing, settling := r.met("order", "user")
		r.away(true, "outbox.order")
		late := r.both("order")
		r.s.chunks <- chunk(late...)
		r.s.chunks <- chunk(r.both("user")...)
		pass(100 * time.Millisecond)
		r.end(errors.New("stop"))
		if err := <-publishing; err != nil {
			t.Errorf("the publisher ended with %v", err)
		}
		if err := <-settling; err != nil {
			t.Errorf("the settler ended with %v", err)
		}
		if n := r.owedRows(); n != 1 || r.i.settled >= late[0].End {
			t.Errorf("%d rows are owed, want 1; the slot is told %v, behind %v", n, r.i.settled, late[0].End)
		}
		if bad, _ := r.i.reasons(); len(bad) > 0 {
			t.Errorf("reasons %q", bad)
		}
	})
}

// What is in doubt stays so while something is late that was committed below H.
func TestDoubtIsKeptWhileSomethingIsLate(t *testing.T) {
	t.Parallel()
	inRig(t, Options{Apart: true}, func(r *rig) {
		first, late, after := r.both("order", "user"), r.both("order"), r.both("user")
		r.from(after[0].End)
		r.goPublish()
		r.goSettle()
		r.s.chunks <- chunk(first...)
		soon()
		r.away(true, "outbox.order")
		r.s.chunks <- chunk(late...)
		r.s.chunks <- chunk(after...)
		soon()
		if n := r.count("Sink.ForgetDoubt"); n != 0 {
			t.Errorf("forgotten %d times while something is late", n)
		}
		r.away(false, "outbox.order")
		pass(5 * time.Second)
		r.s.chunks <- outbox.Chunk{Position: r.pg.wal}
		soon()
		if n := r.count("Sink.ForgetDoubt"); n != 2 {
			t.Errorf("forgotten %d times, want once for each stream", n)
		}
	})
}

// A stream that has lost its place when its server is back ends the stream.
func TestALaggardThatFindsAGapEndsTheStream(t *testing.T) {
	t.Parallel()
	inRig(t, Options{Apart: true}, func(r *rig) {
		publishing, _ := r.met("order", "user")
		r.away(true, "outbox.order")
		r.s.chunks <- chunk(r.both("order")...)
		soon()
		r.do(r.rd.flush)
		r.away(false, "outbox.order")
		if err := <-publishing; !errors.Is(err, outbox.ErrGap) {
			t.Errorf("ended with %v", err)
		}
	})
}

// An event of a stream that is late is parked, and with block-key those behind it, also when they came before that.
func TestALaggardParks(t *testing.T) {
	t.Parallel()
	inRig(t, Options{Apart: true, Poison: PoisonBlockKey}, func(r *rig) {
		r.met("order", "user")
		r.away(true, "outbox.order")
		for _, typ := range []string{"done", "poison", "done"} {
			tx := r.begin()
			tx.insert("order", "p", typ)
			tx.commitNow()
			r.s.chunks <- chunk(tx.delivered()...)
			soon()
		}
		r.away(false, "outbox.order")
		pass(15 * time.Second)
		if n := len(r.published("outbox.order")); n != 2 {
			t.Errorf("%d events are published, want 2", n)
		}
		if n := value(t, r.i.relay.metrics.parked); n != 2 || r.owedRows() != 0 {
			t.Errorf("%v events are parked, want 2; %d rows are owed", n, r.owedRows())
		}
	})
}
