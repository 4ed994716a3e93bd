package relay

import (
	"errors"
	"fmt"
	"slices"
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

// Events that were settled when the stream began are not published again, and no call is made for them. A row that the
// mark's snapshot sees but its number does not reach was written on another server and is unsettled.
func TestPublisherPassesWhatIsSettled(t *testing.T) {
	t.Parallel()
	inRig(t, Options{}, func(r *rig) {
		tx := r.begin("order b") // it runs when the mark is written
		running := tx.rows[0]
		settled := r.commit("done", "done")
		r.settleAll()
		tx.commitNow()
		after := r.commit("done")
		r.from(r.pg.wal)
		strange := slices.Clone(settled)
		strange[1].Seq = r.s.router.settled.High + 1
		r.goPublish()
		from := len(r.trace)
		r.s.chunks <- chunk(slices.Concat(settled, tx.delivered(), after, strange[1:])...)
		soon()
		wantSeqs(t, r.published("outbox.order"), running.Seq, after[0].Seq, strange[1].Seq)
		want := []string{
			"Store.Streams", "Store.NoteStream", "Sink.Look", "Sink.Adopt", "Store.Gated", "Sink.Publish",
		}
		if got := r.calls(from); !slices.Equal(got, want) {
			t.Errorf("calls %v, want %v", got, want)
		}
	})
}

// A stream that the adoption did not know raises H, because another instance may have published to it since. Its doubt
// is cleared only after H is passed. Without an answer to the question for H, the question is repeated.
func TestAStreamMetLateHasItsOwnH(t *testing.T) {
	t.Parallel()
	inRig(t, Options{}, func(r *rig) {
		first := r.commit("done")
		r.from(first[0].End)
		r.gates.fresh = r.s.router.meet
		r.plan = fault{"Store.InsertLSN", 0, refused}
		tx := r.commits("user b")
		r.goPublish()
		r.s.chunks <- chunk(first...)
		r.forgetDoubt()
		r.called("Sink.ForgetDoubt", 0)
		r.do(func() { r.grow(100) })
		r.s.chunks <- chunk(tx.delivered()...)
		r.forgetDoubt()
		wantSeqs(t, r.published("outbox.user"), tx.rows[0].Seq)
		r.called("Sink.ForgetDoubt", 0)
		r.s.chunks <- outbox.Chunk{Position: r.pg.wal}
		r.forgetDoubt()
		r.called("Sink.ForgetDoubt", 2)
	})
}

// A worker takes what waits, and no more than its bounds for one delivery.
func TestADeliveryIsBounded(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		rows, bytes int // of each of four portions
		want        int // portions in the first delivery
	}{
		"all that waits":   {1, 100, 4},
		"many rows":        {deliveryRows / 2, 100, 2},
		"many bytes":       {1, deliveryBytes/2 + 1, 2},
		"one is too large": {deliveryRows + 1, deliveryBytes + 1, 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := &worker{signal: make(chan struct{}, 1)}
			for range 4 {
				w.add(&portion{events: c.rows, bytes: c.bytes})
			}
			if got, _ := w.next(t.Context()); len(got) != c.want {
				t.Errorf("%d portions, want %d", len(got), c.want)
			}
		})
	}
}

// A batch is at most half the window, so that one is settled while the next is published. A larger event is published
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
			f := r.landed()
			sizes = append(sizes, f.events)
			r.s.window.release(f.events, f.bytes)
		}
		if !slices.Equal(sizes, []int{3, 3, 1}) {
			r.t.Errorf("pieces of %v, want 3, 3 and the large one", sizes)
		}
	})
}

// The number of published and unsettled events is bounded: a full window stops the publisher until there is room.
func TestPublisherWaitsForTheWindow(t *testing.T) {
	t.Parallel()
	inRig(t, Options{Window: 4}, func(r *rig) {
		rows := r.transactions(7)
		done := r.goPublish()
		r.s.chunks <- chunk(rows...)
		soon()
		r.publishes("outbox.order", 4)
		if passed, _ := r.s.progress(); passed != 0 {
			r.t.Errorf("%v counts as passed, and is not published", passed)
		}
		f := r.landed()
		r.s.window.release(f.events, f.bytes)
		soon()
		r.publishes("outbox.order", 6)
		r.end(errors.New("toggled"))
		r.must(<-done)
	})
}

// An end of a transaction without rows of ours goes to the settler, in its turn: else the slot would never pass it.
func TestAMarkerIsHandedOn(t *testing.T) {
	t.Parallel()
	inRig(t, Options{}, func(r *rig) {
		r.goPublish()
		r.s.chunks <- outbox.Chunk{Rows: []outbox.Row{{End: 77}}, Position: 77}
		soon()
		if got := r.s.router.tracker.release(); got.end != 77 || got.events != 0 {
			r.t.Errorf("got %+v", got)
		}
		if passed, known := r.s.progress(); passed != 77 || known {
			r.t.Errorf("passed %v, known %v; nobody has said yet that the stream runs", passed, known)
		}
	})
}

// Failures of the sink are retried until the intake ends; they are reported, and the report is cleared. Nothing is
// parked for them. Until then the auditor knows that the stream is blocked for a known reason.
func TestPublisherRepeatsTrouble(t *testing.T) {
	t.Parallel()
	inRig(t, Options{}, func(r *rig) {
		r.s.running.Store(true)
		r.goPublish()
		r.do(func() { r.rd.down = true })
		r.s.chunks <- chunk(r.commit("done")...)
		pass(time.Minute)
		r.i.says(r.t, "publish: ")
		r.do(func() { r.rd.down = false })
		r.landed()
		if bad, _ := r.i.reasons(); len(bad) > 0 || len(r.pg.dead) > 0 {
			r.t.Errorf("afterwards: %v, %d parked", bad, len(r.pg.dead))
		}
	})
}

// A publisher that is fenced, or finds that the sink has lost data, ends at once: a retry cannot help.
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
			r.landed()
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

// A stop or a toggle does not wait for a sink that does not answer. Events that may have been published become doubt.
func TestPublisherStopsRepeatingWhenTheIntakeEnds(t *testing.T) {
	t.Parallel()
	for _, down := range []string{"publishing", "raising a gate"} {
		inRig(t, Options{}, func(r *rig) {
			done := r.goPublish()
			if down == "publishing" {
				r.s.chunks <- chunk(r.commit("done")...)
				r.landed()
			}
			r.do(func() { r.rd.down = true })
			r.s.chunks <- chunk(r.commit("done")...)
			soon()
			why := fmt.Errorf("toggled while %s", down)
			r.end(why)
			ended := time.Now()
			if err := <-done; err != nil || time.Since(ended) > publishTimeout {
				t.Errorf("ended with %v after %v", err, time.Since(ended))
			}
		})
	}
}
