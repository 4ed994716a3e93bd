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

// Below H the table is asked, and what is settled is not published again; above H nothing is asked.
func TestPublisherAsksUpToH(t *testing.T) {
	t.Parallel()
	inRig(t, Options{}, func(r *rig) {
		owed, settled, after := r.commit("done"), r.commit("done"), r.commit("done")
		r.do(func() { r.pg.remove(r.pg.find(settled[0].Seq, settled[0].ID, partOf("a"))) })
		r.s.publisher.begin(settled[0].Commit)
		r.goPublish()
		r.s.chunks <- chunk(slices.Concat(owed, settled, after)...)
		soon()
		wantSeqs(t, r.published("outbox.order"), owed[0].Seq, after[0].Seq)
		r.s.chunks <- chunk(r.commit("done")...)
		soon()
		if n := r.count("Store.Lookup"); n != 1 {
			r.t.Errorf("the table was asked %d times, want once", n)
		}
	})
}

// "Not there" means nothing before the transaction is visible: the publisher waits for that, and nobody overtakes.
func TestPublisherWaitsUntilARowIsVisible(t *testing.T) {
	t.Parallel()
	inRig(t, Options{}, func(r *rig) {
		tx := r.begin()
		tx.insert("order", "a", "done")
		tx.write()
		next := r.commit("done")
		r.s.publisher.begin(next[0].Commit)
		r.goPublish()
		r.s.chunks <- chunk(slices.Concat(tx.delivered(), next)...)
		pass(time.Minute)
		wantSeqs(t, r.published("outbox.order"))
		tx.show()
		soon()
		wantSeqs(t, r.published("outbox.order"), tx.rows[0].Seq, next[0].Seq)
	})
}

// A look-up that fails is repeated: nothing is taken for settled, or for owed, without an answer.
func TestPublisherRepeatsALookUp(t *testing.T) {
	t.Parallel()
	inRig(t, Options{}, func(r *rig) {
		rows := r.commit("done")
		r.plan = fault{"Store.Lookup", 0, refused}
		r.s.publisher.begin(rows[0].Commit)
		r.goPublish()
		r.s.chunks <- chunk(rows...)
		soon()
		wantSeqs(t, r.published("outbox.order"), rows[0].Seq)
	})
}

// A stream that the adoption did not know has an H of its own: somebody may have published to it, and settled, in
// between. What is in doubt is forgotten only when the last of these is passed.
func TestAStreamMetLateHasItsOwnH(t *testing.T) {
	t.Parallel()
	inRig(t, Options{}, func(r *rig) {
		first := r.commit("done")
		p := r.s.publisher
		p.begin(first[0].End)
		r.gates.fresh = p.meet
		tx := r.begin()
		tx.insert("user", "b", "done")
		tx.commitNow()
		r.do(func() { r.pg.remove(tx.rows[0]) }) // settled by whoever was there before
		r.goPublish()
		r.s.chunks <- chunk(first...)
		soon()
		if n := r.count("Sink.ForgetDoubt"); n != 0 {
			r.t.Fatalf("forgotten %d times before a late H is passed", n)
		}
		r.do(func() { r.grow(100) })
		r.s.chunks <- chunk(tx.delivered()...)
		soon()
		wantSeqs(t, r.published("outbox.user"))
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
		if err := r.gates.adopt(r.intake, "outbox.order", nil); err != nil {
			r.t.Fatal(err)
		}
		r.s = r.i.relay.newStream(r.gates, nil, nil)
		r.s.publisher.begin(doubtful[0].Commit)
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
		r.s.publisher.begin(5)
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
		r.s.publisher.begin(rows[0].Commit)
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
		rows := r.commit(slices.Repeat([]string{"done"}, 7)...)
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
		rows := r.commit(slices.Repeat([]string{"done"}, 7)...)
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

// An end of a transaction without rows of ours goes to the settler, in its turn: else the slot would never pass it.
func TestAMarkerIsHandedOn(t *testing.T) {
	t.Parallel()
	inRig(t, Options{}, func(r *rig) {
		r.goPublish()
		r.s.chunks <- outbox.Chunk{Rows: []outbox.Row{{End: 77}}, Position: 77}
		if f := <-r.s.flights; f.end != 77 || f.events != 0 || len(f.items) != 0 {
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
		r.do(func() {
			for _, part := range r.pg.parts {
				for _, row := range slices.Clone(part) {
					r.pg.remove(row)
				}
			}
		})
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
