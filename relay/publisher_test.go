package relay

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"posthaste/outbox"
)

func wantSeqs(t *testing.T, got []int64, want ...int64) {
	t.Helper()
	if !slices.Equal(got, want) {
		t.Errorf("published %v, want %v", got, want)
	}
}

// What was settled when the stream began is not published again, and nobody is asked about it. A row that the mark's
// snapshot sees and its number does not reach is another server's, and owed.
func TestPublisherPassesWhatIsSettled(t *testing.T) {
	t.Parallel()
	inRig(t, Options{}, func(r *rig) {
		tx := r.begin() // it runs when the mark is written
		running := tx.insert("order", "b", "done")
		settled := r.commit("done", "done")
		r.settleAll()
		tx.commitNow()
		after := r.commit("done")
		r.from(r.pg.wal)
		strange := slices.Clone(settled)
		strange[1].Seq = r.s.publisher.settled.High + 1
		r.goPublish()
		from := len(r.trace)
		r.s.chunks <- chunk(slices.Concat(settled, tx.delivered(), after, strange[1:])...)
		soon()
		wantSeqs(t, r.published("outbox.order"), running.Seq, after[0].Seq, strange[1].Seq)
		want := []string{
			"Store.Streams", "Store.NoteStream", "Sink.Look", "Sink.Adopt", "Store.Gated", "Sink.Publish",
			"Sink.ForgetDoubt",
		}
		if got := r.calls(from); !slices.Equal(got, want) {
			t.Errorf("calls %v, want %v", got, want)
		}
	})
}

// What nobody sees yet is published in the order of commits, and nobody waits for it.
func TestPublisherDoesNotWaitUntilARowIsVisible(t *testing.T) {
	t.Parallel()
	inRig(t, Options{}, func(r *rig) {
		tx := r.begin()
		tx.insert("order", "a", "done")
		tx.write()
		next := r.commit("done")
		r.from(next[0].End)
		r.goPublish()
		r.s.chunks <- chunk(slices.Concat(tx.delivered(), next)...)
		soon()
		wantSeqs(t, r.published("outbox.order"), tx.rows[0].Seq, next[0].Seq)
		tx.show()
	})
}

// A stream that the adoption did not know raises H: somebody may have published to it in between. What is in doubt is
// forgotten only when that is passed.
func TestAStreamMetLateHasItsOwnH(t *testing.T) {
	t.Parallel()
	inRig(t, Options{}, func(r *rig) {
		first := r.commit("done")
		r.from(first[0].End)
		r.gates.fresh = r.s.publisher.meet
		tx := r.begin()
		tx.insert("user", "b", "done")
		tx.commitNow()
		r.goPublish()
		r.s.chunks <- chunk(first...)
		soon()
		if n := r.count("Sink.ForgetDoubt"); n != 0 {
			r.t.Fatalf("forgotten %d times before a late H is passed", n)
		}
		r.do(func() { r.grow(100) })
		r.s.chunks <- chunk(tx.delivered()...)
		soon()
		wantSeqs(t, r.published("outbox.user"), tx.rows[0].Seq)
		if n := r.count("Sink.ForgetDoubt"); n != 0 {
			r.t.Errorf("forgotten %d times, and H is not passed", n)
		}
		r.s.chunks <- outbox.Chunk{Position: r.pg.wal}
		soon()
		if n := r.count("Sink.ForgetDoubt"); n != 2 {
			r.t.Errorf("forgotten %d times, want once for each stream", n)
		}
	})
}

// What an earlier owner published and did not settle stays in doubt until H is passed: it may be delivered until then.
func TestDoubtIsKeptUntilHIsPassed(t *testing.T) {
	t.Parallel()
	inRig(t, Options{}, func(r *rig) {
		tx := r.begin()
		tx.insert("order", "b", "done")
		tx.commitNow()
		before, doubtful := tx.delivered(), r.commit("done")
		done := r.goPublish()
		r.s.chunks <- chunk(doubtful...)
		soon()
		close(r.s.chunks)
		_ = <-done
		r.adopt()
		if err := r.gates.adopt(r.intake, streamsOf("outbox.order")[0], false, nil); err != nil {
			r.t.Fatal(err)
		}
		r.s = r.i.relay.newStream(r.gates, nil, nil)
		r.from(doubtful[0].End)
		r.goPublish()
		for n, c := range []outbox.Chunk{chunk(before...), chunk(doubtful...)} {
			r.s.chunks <- c
			soon()
			if forgotten := r.count("Sink.ForgetDoubt"); forgotten != n {
				r.t.Errorf("forgotten %d times after %d chunks; the second one passes H", forgotten, n+1)
			}
		}
		wantSeqs(t, r.published("outbox.order"), doubtful[0].Seq, before[0].Seq)
	})
}

// meet has nothing to do before H is known: the sweep goes on, and H will cover the stream.
func TestMeetBeforeHIsKnown(t *testing.T) {
	t.Parallel()
	inRig(t, Options{}, func(r *rig) {
		if err := r.s.publisher.meet(r.intake, "outbox.order"); err != nil || r.count("Store.InsertLSN") != 0 {
			r.t.Errorf("%v, and a position was asked for", err)
		}
		r.from(5)
		r.plan = fault{"Store.InsertLSN", 0, refused}
		if err := r.s.publisher.meet(r.intake, "outbox.order"); !errors.Is(err, errRefused) {
			r.t.Errorf("without an answer: %v", err)
		}
	})
}

// A doubt that cannot be forgotten is tried again with the next chunk, and not forgotten twice.
func TestDoubtIsForgottenOnce(t *testing.T) {
	t.Parallel()
	inRig(t, Options{}, func(r *rig) {
		rows := r.commit("done")
		r.plan = fault{"Sink.ForgetDoubt", 0, refused}
		r.from(rows[0].End)
		r.goPublish()
		r.s.chunks <- chunk(rows...)
		soon()
		for range 3 {
			r.s.chunks <- outbox.Chunk{Position: r.pg.wal}
			soon()
		}
		if n := r.count("Sink.ForgetDoubt"); n != 2 {
			r.t.Errorf("%d calls, want one that fails and one that does not", n)
		}
	})
}

// A gulp takes what waits, and no more than its bounds: memory is bounded by what is taken at once.
func TestGulp(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		rows, bytes int // of each of four chunks
		want        int // chunks in the first gulp
	}{
		"all that waits": {1, 100, 4},
		"many rows":      {gulpRows / 2, 100, 2},
		"many bytes":     {1, gulpBytes/2 + 1, 2},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			chunks := make(chan outbox.Chunk, 4)
			for n := range 4 {
				chunks <- outbox.Chunk{Rows: make([]outbox.Row, c.rows), Bytes: c.bytes, Position: outbox.LSN(n + 1)}
			}
			p := &publisher{chunks: chunks}
			rows, position := p.gulp(<-chunks)
			if len(rows) != c.want*c.rows || position != outbox.LSN(c.want) {
				t.Errorf("%d rows up to %d, want %d up to %d", len(rows), position, c.want*c.rows, c.want)
			}
		})
	}
	chunks := make(chan outbox.Chunk)
	close(chunks)
	if rows, _ := (&publisher{chunks: chunks}).gulp(outbox.Chunk{Rows: make([]outbox.Row, 2)}); len(rows) != 2 {
		t.Errorf("the last gulp has %d rows, want 2", len(rows))
	}
}

// One piece is half the window, so that one is settled while the next is published; what is larger than that goes
// alone.
func TestPiecesAreHalfTheWindow(t *testing.T) {
	t.Parallel()
	inRig(t, Options{Window: 6, WindowBytes: 4000}, func(r *rig) {
		rows := r.transactions(7)
		rows[6].Payload = make([]byte, 9000)
		r.goPublish()
		r.s.chunks <- chunk(rows...)
		var sizes []int
		for range 3 {
			f := <-r.s.flights
			sizes = append(sizes, f.events)
			r.s.window.release(f.events, f.bytes)
		}
		if !slices.Equal(sizes, []int{3, 3, 1}) {
			r.t.Errorf("pieces of %v, want 3, 3 and the large one", sizes)
		}
	})
}

// What is published and not settled is bounded: a full window stops the publisher, and room lets it go on.
func TestPublisherWaitsForTheWindow(t *testing.T) {
	t.Parallel()
	inRig(t, Options{Window: 4}, func(r *rig) {
		rows := r.transactions(7)
		done := r.goPublish()
		r.s.chunks <- chunk(rows...)
		soon()
		if n := len(r.published("outbox.order")); n != 4 {
			r.t.Fatalf("%d events are published and not settled, want 4", n)
		}
		if passed, _ := r.s.progress(); passed != 0 {
			r.t.Errorf("%v counts as passed, and is not published", passed)
		}
		f := <-r.s.flights
		r.s.window.release(f.events, f.bytes)
		soon()
		if n := len(r.published("outbox.order")); n != 6 {
			r.t.Errorf("%d events are published, want two more", n)
		}
		stop := errors.New("toggled")
		r.end(stop)
		if err := <-done; !errors.Is(err, stop) {
			r.t.Errorf("ended with %v, want the intake's cause", err)
		}
	})
}

// Nobody waits in the middle of a transaction: nothing of it is settled before the rest is published. Its rest is a
// piece of its own, so that what is behind it waits.
func TestNobodyWaitsInTheMiddleOfATransaction(t *testing.T) {
	t.Parallel()
	inRig(t, Options{Window: 4}, func(r *rig) {
		rows := slices.Concat(r.transactions(1), r.commit(slices.Repeat([]string{"done"}, 8)...), r.transactions(3))
		r.goPublish()
		r.s.chunks <- chunk(rows[:4]...)
		r.s.chunks <- chunk(rows[4:]...)
		pass(time.Minute)
		if n := len(r.published("outbox.order")); n != 9 {
			r.t.Errorf("%d events are published, want all of the transaction, and none behind it", n)
		}
		var sizes []int
		for held := 9; held > 0; {
			f := <-r.s.flights
			sizes = append(sizes, f.events)
			held -= f.events
		}
		r.s.window.release(9, 9*rows[0].Size())
		soon()
		if n := len(r.published("outbox.order")); n != 12 || !slices.Equal(sizes, []int{2, 2, 2, 2, 1}) {
			r.t.Errorf("%d events are published, the first in pieces of %v", n, sizes)
		}
	})
}

// An end of a transaction without rows of ours goes to the settler, in its turn: else the slot would never pass it.
func TestAMarkerIsHandedOn(t *testing.T) {
	t.Parallel()
	inRig(t, Options{}, func(r *rig) {
		r.goPublish()
		r.s.chunks <- outbox.Chunk{Rows: []outbox.Row{{End: 77}}, Position: 77}
		if f := <-r.s.flights; f.end != 77 || f.events != 0 || len(f.rows) != 0 {
			r.t.Errorf("got %+v", f)
		}
		soon()
		if passed, known := r.s.progress(); passed != 77 || known {
			r.t.Errorf("passed %v, known %v; nobody has said yet that the stream runs", passed, known)
		}
	})
}

// Trouble with the sink is repeated for as long as the intake lasts, said, and taken back; nothing is parked for it.
// Meanwhile the audit is told that the stream stands still for a known reason.
func TestPublisherRepeatsTrouble(t *testing.T) {
	t.Parallel()
	inRig(t, Options{}, func(r *rig) {
		r.s.running.Store(true)
		r.goPublish()
		r.do(func() { r.rd.down = true })
		r.s.chunks <- chunk(r.commit("done")...)
		pass(time.Minute)
		if bad, _ := r.i.reasons(); len(bad) != 1 || !strings.HasPrefix(bad[0], "publish: ") {
			r.t.Errorf("reasons %v", bad)
		}
		if _, known := r.s.progress(); known {
			r.t.Error("the audit would take the sink's trouble for the stream's")
		}
		r.do(func() { r.rd.down = false })
		<-r.s.flights
		if bad, _ := r.i.reasons(); len(bad) > 0 || len(r.pg.dead) > 0 {
			r.t.Errorf("afterwards: %v, %d parked", bad, len(r.pg.dead))
		}
		if _, known := r.s.progress(); !known {
			r.t.Error("the stream goes on, and is not audited")
		}
	})
}

// Whoever is fenced, or meets a sink that has forgotten something, ends at once: repeating cannot help.
func TestPublisherEndsWhenItIsFinished(t *testing.T) {
	t.Parallel()
	for want, disturb := range map[string]func(r *rig){
		"fenced": func(r *rig) { r.rd.gates["outbox.order"].owner.Epoch++ },
		"gate":   func(r *rig) { r.rd.flush() },
		"moved": func(r *rig) {
			r.i.anyone, r.i.bound = false, "another"
		},
		"another database": func(r *rig) { r.rd.gates["outbox.order"].owner.Source[0] = 9 },
	} {
		inRig(t, Options{}, func(r *rig) {
			done := r.goPublish()
			r.s.chunks <- chunk(r.commit("done")...)
			<-r.s.flights
			r.do(func() { disturb(r) })
			began := time.Now()
			r.s.chunks <- chunk(r.commit("done")...)
			err := <-done
			if !finished(err) || time.Since(began) > time.Second {
				t.Errorf("%s: ended with %v after %v", want, err, time.Since(began))
			}
			if want == "moved" && !errors.Is(err, outbox.ErrMoved) {
				t.Errorf("moved: %v", err)
			}
		})
	}
}

// A stop, or a toggle, does not wait for a sink that does not answer: what may have been published becomes doubt.
func TestPublisherStopsRepeatingWhenTheIntakeEnds(t *testing.T) {
	t.Parallel()
	for _, down := range []string{"publishing", "raising a gate"} {
		inRig(t, Options{}, func(r *rig) {
			done := r.goPublish()
			if down == "publishing" {
				r.s.chunks <- chunk(r.commit("done")...)
				<-r.s.flights
			}
			r.do(func() { r.rd.down = true })
			r.s.chunks <- chunk(r.commit("done")...)
			soon()
			why := fmt.Errorf("toggled while %s", down)
			r.end(why)
			if err := <-done; !errors.Is(err, why) {
				t.Errorf("ended with %v, want %v", err, why)
			}
		})
	}
}

// What is settled while nothing is published is told to the gates within about a second, and told once.
func TestPublisherTellsTheGatesWhatIsSettled(t *testing.T) {
	t.Parallel()
	inRig(t, Options{}, func(r *rig) {
		r.goPublish()
		r.s.chunks <- chunk(r.commit("done", "done")...)
		f := <-r.s.flights
		r.settleAll()
		r.s.publisher.lanes.settled(f.marks)
		pass(10 * time.Second)
		if n := r.count("Sink.Settled"); n != 1 {
			r.t.Errorf("told %d times, want once", n)
		}
		if g := r.rd.gates["outbox.order"]; len(g.batches) != 0 {
			r.t.Errorf("the gate remembers %v", g.batches)
		}
	})
}
