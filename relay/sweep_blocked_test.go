package relay

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"posthaste/outbox"
	"posthaste/relay/stream"
)

// A leader that polls clears its doubt when all transactions from before its adoption have ended. A stream that cannot
// be published to then does not delay the others.
func TestOthersGoOnInASweepBesideABlockedStream(t *testing.T) {
	t.Parallel()
	inWorld(t, Options{}, func(w *world) {
		w.pg.state.Desired = outbox.ModePoll
		tx := w.begin()
		tx.insert("user", "late", "done")
		tx.write()
		w.start("one")
		w.event("order", "a")
		w.event("user", "a")
		elapse(5 * time.Second)
		w.do(func() { w.rd.away["outbox.order"] = true })
		w.event("order", "a")
		tx.show()
		elapse(10 * time.Second)
		var rows []*tableRow
		for n := range 2 * outbox.Partitions {
			rows = append(rows, w.event("user", fmt.Sprint("u-", n)))
		}
		elapse(20 * time.Second)
		w.do(func() {
			for _, row := range rows {
				if !w.rd.has("outbox.user", row.ID) {
					t.Errorf("event %d of part %d is not published", row.Seq, row.part)
				}
			}
			w.rd.away["outbox.order"] = false
		})
		w.settles(outbox.ModePoll)
		w.judge()
	})
}

// A toggle needs an adoption, which leaves out a stream that does not answer: the others go on, in the other mode, and
// it follows when it answers. The same where the next leader starts, in either mode.
func TestOthersGoOnBesideAStreamThatCannotBeAdopted(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		before, after, active outbox.Mode
		change                func(w *world)
	}{
		"to poll": {outbox.ModeCDC, outbox.ModePoll, outbox.ModePoll, nil},
		"to cdc":  {outbox.ModePoll, outbox.ModeAuto, outbox.ModeCDC, nil},
		"another leader polls": {outbox.ModePoll, outbox.ModePoll, outbox.ModePoll, func(w *world) {
			w.instances[0].die(true)
			w.replace()
		}},
		"another leader streams": {outbox.ModeCDC, outbox.ModeCDC, outbox.ModeCDC, func(w *world) {
			w.instances[0].die(true)
			w.replace()
		}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			inWorld(t, Options{}, func(w *world) {
				w.pg.state.Desired = c.before
				w.start("one")
				w.event("order", "a")
				w.event("user", "a")
				w.settles(c.before)
				epoch := w.pg.state.Owner.Epoch
				w.do(func() {
					w.rd.away["outbox.order"] = true
					w.pg.state.Desired = c.after
					if c.change != nil {
						c.change(w)
					}
				})
				elapse(10 * time.Second)
				row, fresh := w.event("user", "a"), w.event("item", "a")
				elapse(5 * time.Second)
				w.do(func() {
					if !w.rd.has("outbox.user", row.ID) || !w.rd.has("outbox.item", fresh.ID) {
						t.Error("the events of the other streams are not published")
					}
					if st := w.pg.state; st.Active != c.active || st.Owner.Epoch == epoch || st.Sink != "" {
						t.Errorf("state %+v, epoch %d before", st, epoch)
					}
				})
				leader := w.instances[len(w.instances)-1].relay
				if h := leader.Health(); !h.Ready || len(h.Degraded) != 1 ||
					!strings.HasPrefix(h.Degraded[0], "adopt: nothing is published to outbox.order until") {
					t.Errorf("health %+v", h)
				}
				late := w.event("order", "a")
				elapse(10 * time.Second)
				h := leader.Health()
				if h.Ready || !strings.HasPrefix(h.Reasons[0], "streams: publishing to outbox.order") {
					t.Errorf("health %+v", h)
				}
				w.do(func() {
					if w.rd.has("outbox.order", late.ID) {
						t.Error("a stream was published to that does not answer")
					}
					w.rd.away["outbox.order"] = false
				})
				w.settles(c.active)
				w.do(func() {
					if st := w.pg.state; st.Owner.Epoch != epoch+2 || st.Sink == "" {
						t.Errorf("state %+v, epoch %d before", st, epoch)
					}
				})
				w.judge()
			})
		})
	}
}

// What a stream has lost while it was left out is restored when it answers, although no event waits for it.
func TestAStreamIsAdoptedWhenItAnswersAgain(t *testing.T) {
	t.Parallel()
	for _, mode := range []outbox.Mode{outbox.ModePoll, outbox.ModeCDC} {
		inWorld(t, Options{}, func(w *world) {
			w.pg.state.Desired = mode
			w.start("one")
			w.event("order", "a")
			w.event("user", "a")
			w.settles(mode)
			var old *redis
			w.do(func() { old = w.rd.copy() })
			w.event("order", "a")
			w.settles(mode)
			w.do(func() {
				w.rd.away["outbox.order"] = true
				w.instances[0].die(true)
				w.replace()
			})
			elapse(20 * time.Second)
			w.do(func() {
				if w.pg.state.Sink != "" || w.pg.state.Active != mode {
					t.Errorf("state %+v", w.pg.state)
				}
				w.rd.revert("outbox.order", old)
				w.rd.away["outbox.order"] = false
			})
			w.settles(mode)
			w.judge()
		})
	}
}

// tailless is a sink that cannot list one stream.
type tailless struct{ stream.Sink }

func (s tailless) Tail(ctx context.Context, name, after string) ([]outbox.Entry, error) {
	if name == "outbox.order" {
		return nil, &outbox.StreamError{Stream: name, Err: errDown}
	}
	return s.Sink.Tail(ctx, name, after)
}

// A stream whose gate can be raised, and that cannot be repaired, does not have the others adopted again and again.
func TestAStreamThatCannotBeRepairedIsLeftOut(t *testing.T) {
	t.Parallel()
	inWorld(t, Options{}, func(w *world) {
		w.start("one")
		w.event("order", "a")
		w.event("user", "a")
		w.settles(outbox.ModeCDC)
		w.do(func() {
			w.instances[0].die(true)
			w.rd.drop("outbox.order")
		})
		i := w.instance("two")
		i.relay.o.Sink = tailless{i.relay.o.Sink}
		w.launch(i)
		began := w.pg.state.Owner.Epoch
		for range 10 {
			row := w.event("user", "a")
			elapse(time.Minute)
			w.do(func() {
				if !w.rd.has("outbox.user", row.ID) {
					t.Error("the event of the other stream is not published")
				}
			})
		}
		if n := w.pg.state.Owner.Epoch - began; n < 10 || n > 60 {
			t.Errorf("%d adoptions in ten minutes", n)
		}
	})
}

// A stream that does not answer for a moment is not left out.
func TestAnAdoptionWaitsAMoment(t *testing.T) {
	t.Parallel()
	inWorld(t, Options{}, func(w *world) {
		w.pg.streams = streamsOf("outbox.order", "outbox.user")
		w.rd.away["outbox.order"] = true
		w.start("one")
		elapse(blockedWait / 2)
		w.do(func() { w.rd.away["outbox.order"] = false })
		w.event("order", "a")
		w.settles(outbox.ModeCDC)
		if st := w.pg.state; st.Owner.Epoch != 1 || st.Sink == "" {
			t.Errorf("state %+v", st)
		}
	})
}

// An adoption waits when no stream answers, and a change of the layout when one does not.
func TestAnAdoptionLeavesOutNoStreamThatItNeeds(t *testing.T) {
	t.Parallel()
	inWorld(t, Options{}, func(w *world) {
		w.pg.streams = streamsOf("outbox.order", "outbox.user")
		w.rd.away["outbox.order"], w.rd.away["outbox.user"] = true, true
		i := w.start("one")
		elapse(time.Minute)
		if h := i.relay.Health(); h.Ready || w.pg.state.Owner.Epoch != 0 {
			t.Errorf("epoch %d, health %+v", w.pg.state.Owner.Epoch, h)
		}
		w.do(func() { w.rd.away["outbox.order"], w.rd.away["outbox.user"] = false, false })
		w.event("order", "a")
		w.settles(outbox.ModeCDC)
	})
	inWorld(t, Options{Spread: &Spread{Shards: 4, Waiting: func(string) {}}}, func(w *world) {
		w.pg.streams = streamsOf("outbox.order", "outbox.user")
		w.rd.away["outbox.order"] = true
		w.start("one")
		w.event("user", "a")
		elapse(time.Minute)
		if w.pg.state.Owner.Epoch != 0 {
			t.Errorf("epoch %d", w.pg.state.Owner.Epoch)
		}
	})
}
