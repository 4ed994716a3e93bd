package relay

import (
	"context"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"posthaste/outbox"
	"posthaste/relay/stream"
)

// leads starts a relay, and waits until it has settled an event of each of two streams.
func (w *world) leads(mode outbox.Mode) {
	w.pg.state.Desired = mode
	w.start("one")
	w.event("order", "a")
	w.event("user", "a")
	w.settles(mode)
}

// follows kills the first relay and starts another one, while the server of a key is down.
func (w *world) follows(away string) {
	w.do(func() {
		w.rd.away[away] = true
		w.instances[0].die(true)
		w.replace()
	})
}

// A toggle needs an adoption, which leaves out a stream that does not answer: the others go on, in the other mode, and
// it follows when it answers. The same where the next leader starts, in either mode.
func TestOthersGoOnBesideAStreamThatCannotBeAdopted(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		before, after, active outbox.Mode
		another               bool
	}{
		"to poll":                {outbox.ModeCDC, outbox.ModePoll, outbox.ModePoll, false},
		"to cdc":                 {outbox.ModePoll, outbox.ModeAuto, outbox.ModeCDC, false},
		"another leader polls":   {outbox.ModePoll, outbox.ModePoll, outbox.ModePoll, true},
		"another leader streams": {outbox.ModeCDC, outbox.ModeCDC, outbox.ModeCDC, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			inWorld(t, Options{}, func(w *world) {
				w.leads(c.before)
				epoch := w.pg.state.Owner.Epoch
				w.do(func() {
					w.rd.away["outbox.order"] = true
					w.pg.state.Desired = c.after
					if c.another {
						w.instances[0].die(true)
						w.replace()
					}
				})
				elapse(10 * time.Second)
				row, fresh := w.event("user", "a"), w.event("item", "a")
				elapse(5 * time.Second)
				w.arrives(row, true)
				w.arrives(fresh, true)
				w.do(func() {
					if st := w.pg.state; st.Active != c.active || st.Owner.Epoch == epoch || st.Sink != incomplete {
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
				w.arrives(late, false)
				w.away(false, "outbox.order")
				w.settles(c.active)
				w.do(func() {
					if st := w.pg.state; st.Owner.Epoch != epoch+2 || st.Sink == incomplete {
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
	for n, mode := range []outbox.Mode{outbox.ModePoll, outbox.ModeCDC, outbox.ModeCDC} {
		inWorld(t, Options{}, func(w *world) {
			w.rd.anonymous = n > 1 // the server may have no name
			w.leads(mode)
			var old *redis
			w.do(func() { old = w.rd.copy() })
			w.event("order", "a")
			w.settles(mode)
			w.follows("outbox.order")
			w.later(20*time.Second, func() {
				if w.pg.state.Sink != incomplete || w.pg.state.Active != mode {
					t.Errorf("state %+v", w.pg.state)
				}
				w.rd.revert("outbox.order", old)
				w.rd.away["outbox.order"] = false
			})
			w.ends(mode)
		})
	}
}

// wedge is a sink in which one call of a stream fails while failing is set.
type wedge struct {
	stream.Sink
	failing *atomic.Bool
	name    string
}

func (s wedge) Check(ctx context.Context, o outbox.Owner, streams []string) error {
	if !s.failing.Load() || s.name != "outbox.item" {
		return s.Sink.Check(ctx, o, streams)
	}
	<-ctx.Done()
	return &outbox.StreamError{Stream: s.name, Lost: true, Err: ctx.Err()}
}

func (s wedge) Adopt(ctx context.Context, name string, o outbox.Owner, intact bool) error {
	if s.failing.Load() && name == s.name {
		return &outbox.StreamError{Stream: name, Err: errDown}
	}
	return s.Sink.Adopt(ctx, name, o, intact)
}

// A stream that answers is adopted although another one has ceased to answer.
func TestAStreamIsAdoptedBesideAnotherThatHangs(t *testing.T) {
	t.Parallel()
	inWorld(t, Options{}, func(w *world) {
		w.pg.state.Desired = outbox.ModePoll
		w.pg.streams = streamsOf("outbox.order", "outbox.user", "outbox.item")
		w.rd.away["outbox.order"] = true
		i, failing := w.instance("one"), &atomic.Bool{}
		i.relay.o.Sink = wedge{i.relay.o.Sink, failing, "outbox.item"}
		w.launch(i)
		elapse(20 * time.Second)
		failing.Store(true)
		w.later(time.Second, func() {
			if w.pg.state.Sink != incomplete {
				t.Errorf("state %+v", w.pg.state)
			}
			w.rd.away["outbox.order"] = false
		})
		before := w.count("Store.Adopt")
		elapse(time.Minute)
		if n := w.count("Store.Adopt"); n == before {
			t.Error("no adoption follows")
		}
	})
}

// A stream that refuses to be adopted, or whose node is down, is tried again by each adoption: by those that follow
// when it can be read, and by that of a toggle. The others do not wait for it each time.
func TestOthersDoNotWaitAgainForAStreamThatWasLeftOut(t *testing.T) {
	t.Parallel()
	for n, mode := range []outbox.Mode{outbox.ModePoll, outbox.ModeCDC, outbox.ModePoll, outbox.ModeCDC} {
		inWorld(t, Options{}, func(w *world) {
			down := n > 1
			w.pg.state.Desired = mode
			w.pg.streams = streamsOf("outbox.order", "outbox.user")
			w.rd.away["outbox.order"] = down
			i, failing := w.instance("one"), &atomic.Bool{}
			failing.Store(!down)
			i.relay.o.Sink = wedge{i.relay.o.Sink, failing, "outbox.order"}
			w.launch(i)
			elapse(10 * time.Second)
			before := w.count("Store.Adopt")
			for n := range 600 {
				if n == 300 {
					w.wants(outbox.ModeCDC)
				}
				if took := w.delay(); took >= time.Second {
					t.Errorf("%s, down %v: event %d arrives after %v", mode, down, n, took)
				}
			}
			if n := w.count("Store.Adopt") - before; !down && n < 2 {
				t.Errorf("%s: %d adoptions", mode, n)
			}
			failing.Store(false)
			w.away(false, "outbox.order")
			w.event("order", "a")
			w.ends(outbox.ModeCDC)
		})
	}
}

// If every stream fails, each in another step, adoptions follow ever more slowly.
func TestEveryStreamFailsInAStepOfItsOwn(t *testing.T) {
	t.Parallel()
	inWorld(t, Options{}, func(w *world) {
		w.pg.streams = streamsOf("outbox.order", "outbox.user")
		w.rd.away["outbox.order"] = true
		i, failing := w.instance("one"), &atomic.Bool{}
		failing.Store(true)
		i.relay.o.Sink = wedge{i.relay.o.Sink, failing, "outbox.user"}
		w.launch(i)
		elapse(10 * time.Minute)
		if h, n := i.relay.Health(), w.count("Store.Adopt"); h.Ready || n > 60 {
			t.Errorf("%d adoptions, health %+v", n, h)
		}
		failing.Store(false)
		w.away(false, "outbox.order")
		w.event("order", "a")
		w.ends(outbox.ModeCDC)
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
		w.away(false, "outbox.order")
		w.event("order", "a")
		w.settles(outbox.ModeCDC)
		if st := w.pg.state; st.Owner.Epoch != 1 || st.Sink == incomplete {
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

// The server that knows that a type has several streams is down; those of the streams are not.
func TestTheKeyOfAShardedTypeIsAway(t *testing.T) {
	t.Parallel()
	inWorld(t, Options{}, func(w *world) {
		w.pg.state.Shards = 4
		w.leads(outbox.ModePoll)
		w.follows("outbox.order#sharded")
		elapse(10 * time.Second)
		row := w.event("user", "a")
		elapse(2 * time.Minute)
		w.arrives(row, true)
		w.away(false, "outbox.order#sharded")
		w.ends(outbox.ModePoll)
	})
}

// Servers may have no name. A follower publishes nothing if the adoption has left out a stream.
func TestAFollowerOfAnAnonymousServer(t *testing.T) {
	t.Parallel()
	for range 10 { // it depends on which of them is first
		inWorld(t, Options{}, func(w *world) {
			w.rd.anonymous = true
			w.leads(outbox.ModePoll)
			var old *redis
			w.do(func() { old = w.rd.copy() })
			lost := w.event("order", "a")
			w.settles(outbox.ModePoll)
			w.do(func() {
				w.rd.noted = map[string]string{"outbox.order": entryID(w.rd.entry("outbox.order", lost.ID))}
				w.rd.away["outbox.order"] = true
				w.instances[0].die(true)
				w.replace()
			})
			elapse(8 * time.Second)
			w.replace()
			w.later(5*time.Second, func() { w.rd.revert("outbox.order", old) })
			w.event("order", "a")
			elapse(3 * time.Second)
			w.away(false, "outbox.order")
			w.settles(outbox.ModePoll)
			elapse(10 * time.Second)
			if seqs := w.published("outbox.order"); len(seqs) != 3 || !slices.IsSorted(seqs) {
				t.Errorf("published %v", seqs)
			}
		})
	}
}

// If Postgres has gone back, an adoption waits for a stream that does not answer.
func TestAnAdoptionWaitsIfPostgresHasGoneBack(t *testing.T) {
	t.Parallel()
	inWorld(t, Options{}, func(w *world) {
		w.leads(outbox.ModePoll)
		w.do(func() {
			w.rd.away["outbox.order"] = true
			w.instances[0].die(true)
			w.pg.repair(outbox.Repair{Stream: "outbox.order", To: 1, Recall: true, Back: true})
			w.replace()
		})
		elapse(time.Minute)
		row := w.event("user", "a")
		elapse(time.Minute)
		w.arrives(row, false) // before the stream is compared
		w.away(false, "outbox.order")
		h := w.instances[1].relay.Health()
		if h.Ready || !strings.HasPrefix(h.Reasons[0], "restore: postgres has gone") {
			t.Errorf("health %+v", h)
		}
		w.ends(outbox.ModePoll)
	})
}

// While an adoption leaves out one stream, the other one fails, and the first one answers again.
func TestAStreamThatWasLeftOutAnswersFirst(t *testing.T) {
	t.Parallel()
	inWorld(t, Options{}, func(w *world) {
		w.leads(outbox.ModePoll)
		w.follows("outbox.order")
		for n, left := 0, false; n < 20000 && !left; n++ {
			w.later(500*time.Microsecond, func() {
				if left = w.pg.state.Sink == incomplete; left {
					w.rd.away["outbox.user"] = true
				}
			})
		}
		elapse(5 * time.Second)
		w.away(false, "outbox.order")
		elapse(10 * time.Second)
		row := w.event("order", "a")
		elapse(2 * time.Minute)
		w.arrives(row, true)
		w.away(false, "outbox.user")
		w.ends(outbox.ModePoll)
	})
}
