package relay

import (
	"cmp"
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"

	"posthaste/internal/pause"
	"posthaste/outbox"
	"posthaste/relay/stream"
)

// unrepairable is a sink that refuses one step of a repair of some streams while refusing is set. If slow, it answers
// as late as it may, as WAIT does without a replica.
type unrepairable struct {
	stream.Sink
	step     string
	names    map[string]bool
	slow     bool
	refusing *atomic.Bool
}

func (s unrepairable) refuses(ctx context.Context, step, name string) error {
	if s.step != step || !s.names[name] || !s.refusing.Load() {
		return nil
	}
	if s.slow {
		<-ctx.Done()
	}
	return &outbox.StreamError{Stream: name, Lost: true, Err: errDown}
}

// slow is a sink that takes its time to confirm.
type slow struct{ stream.Sink }

func (s slow) Confirm(ctx context.Context, o outbox.Owner, marks []outbox.Mark) error {
	if pause.For(ctx, 1500*time.Millisecond) != nil {
		return &outbox.StreamError{Stream: marks[0].Stream, Lost: true, Err: errDown}
	}
	return s.Sink.Confirm(ctx, o, marks)
}

func (s unrepairable) Regroup(ctx context.Context, name string, groups []string) error {
	return cmp.Or(s.refuses(ctx, "Regroup", name), s.Sink.Regroup(ctx, name, groups))
}

func (s unrepairable) Recall(ctx context.Context, o outbox.Owner, name string, ids []uuid.UUID, last string) error {
	return cmp.Or(s.refuses(ctx, "Recall", name), s.Sink.Recall(ctx, o, name, ids, last))
}

func (s unrepairable) Confirm(ctx context.Context, o outbox.Owner, marks []outbox.Mark) error {
	for _, m := range marks {
		if err := s.refuses(ctx, "Confirm", m.Stream); err != nil {
			return err
		}
	}
	return s.Sink.Confirm(ctx, o, marks)
}

// loses kills the leader, and lets the streams of types be lost, which may be left out.
func (w *world) loses(types ...string) (names map[string]bool) {
	names = map[string]bool{}
	w.do(func() {
		w.instances[0].die(true)
		for _, typ := range types {
			names["outbox."+typ] = true
			w.rd.away["outbox."+typ] = false
			w.rd.drop("outbox." + typ)
		}
	})
	return names
}

// deletes has a leader settle so many orders, and then deletes their stream.
func (w *world) deletes(orders int) {
	w.leads(outbox.ModePoll)
	for range orders {
		w.event("order", "a")
	}
	w.settles(outbox.ModePoll)
	w.loses("order")
}

// delay returns how long an event of the stream of users waits, at most ten minutes.
func (w *world) delay() time.Duration {
	row, began := w.event("user", "a"), time.Now()
	for there := false; !there && time.Since(began) < 10*time.Minute; {
		elapse(100 * time.Millisecond)
		w.do(func() { there = w.rd.has("outbox.user", row.ID) })
	}
	return time.Since(began)
}

// A stream whose gate can be raised, and that cannot be repaired, holds up no other, and does not have them adopted
// again and again. What it has lost is restored when it can be.
func TestAStreamThatCannotBeRepairedIsLeftOut(t *testing.T) {
	t.Parallel()
	for _, step := range []string{"Regroup", "Recall", "Confirm"} {
		inWorld(t, Options{}, func(w *world) {
			w.leads(outbox.ModeCDC)
			elapse(5 * time.Second) // the groups are recorded
			if step == "Recall" {
				w.do(func() { w.pg.state.Sink = "another" })
			}
			i, refusing := w.instance("two"), &atomic.Bool{}
			refusing.Store(true)
			i.relay.o.Sink = unrepairable{i.relay.o.Sink, step, w.loses("order"), false, refusing}
			w.launch(i)
			began := w.pg.state.Owner.Epoch
			for range 10 {
				if took := w.delay(); took > 15*time.Second {
					t.Errorf("%s: an event of the other stream waits %v", step, took)
				}
				elapse(time.Minute)
			}
			if n := w.pg.state.Owner.Epoch - began; n > 60 {
				t.Errorf("%s: %d adoptions in ten minutes", step, n)
			}
			refusing.Store(false)
			w.event("order", "a")
			w.ends(outbox.ModeCDC)
		})
	}
}

// Streams of a node without its replica have lost events, which are restored. While their durability is not reached,
// the others do not wait for it again and again.
func TestARepairWithoutDurabilityHoldsUpNobody(t *testing.T) {
	t.Parallel()
	for _, types := range [][]string{{"order"}, {"order", "b", "c", "d", "e", "f"}} {
		inWorld(t, Options{}, func(w *world) {
			w.leads(outbox.ModeCDC)
			for _, typ := range types {
				w.event(typ, "a")
			}
			w.settles(outbox.ModeCDC)
			i, refusing := w.instance("two"), &atomic.Bool{}
			refusing.Store(true)
			i.relay.o.Sink = unrepairable{i.relay.o.Sink, "Confirm", w.loses(types...), true, refusing}
			w.launch(i)
			if took := w.delay(); took > 30*time.Second {
				t.Errorf("%d streams: the first event of another one waits %v", len(types), took)
			}
			for range 100 {
				elapse(5 * time.Second)
				if took := w.delay(); took > time.Second {
					t.Errorf("%d streams: an event of another one waits %v", len(types), took)
				}
			}
			refusing.Store(false)
			w.ends(outbox.ModeCDC)
		})
	}
}

// A durability that takes its time is waited for.
func TestARepairWithASlowDurability(t *testing.T) {
	t.Parallel()
	inWorld(t, Options{}, func(w *world) {
		w.leads(outbox.ModeCDC)
		i, refusing := w.instance("two"), &atomic.Bool{}
		refusing.Store(true)
		i.relay.o.Sink = unrepairable{slow{i.relay.o.Sink}, "Confirm", w.loses("order"), true, refusing}
		w.launch(i)
		elapse(time.Minute)
		refusing.Store(false)
		w.event("order", "a")
		w.ends(outbox.ModeCDC)
	})
}

// hiccup is a store that fails once, behind the first page of a log.
type hiccup struct {
	Store
	done *atomic.Bool
}

func (s hiccup) Log(ctx context.Context, r outbox.Repair, visit func(page []outbox.Logged) error) error {
	return s.Store.Log(ctx, r, func(page []outbox.Logged) error {
		err := visit(page)
		if err == nil && s.done.CompareAndSwap(false, true) {
			err = errRefused
		}
		return err
	})
}

// A repair begins again under the same owner. At its end, nothing is left in the gate of what both have published.
func TestARepairThatBeginsAgainLeavesNothingInTheGate(t *testing.T) {
	t.Parallel()
	inWorld(t, Options{}, func(w *world) {
		w.deletes(600)
		i := w.instance("two")
		i.relay.o.Store = hiccup{i.relay.o.Store, &atomic.Bool{}}
		w.launch(i)
		w.settles(outbox.ModePoll)
		epoch := w.pg.state.Owner.Epoch
		elapse(time.Minute)
		w.do(func() {
			g := w.rd.gates["outbox.order"]
			if n := len(g.doubt) + len(g.batches); n > 0 || w.pg.state.Owner.Epoch != epoch {
				t.Errorf("%d batches and events are left, epoch %d, was %d", n, w.pg.state.Owner.Epoch, epoch)
			}
		})
		w.judge()
	})
}

// The server of a stream goes down again while the stream is repaired.
func TestAServerGoesDownInARepair(t *testing.T) {
	t.Parallel()
	inWorld(t, Options{}, func(w *world) {
		w.leads(outbox.ModePoll)
		var old *redis
		w.do(func() { old = w.rd.copy() })
		for range 30 {
			w.event("order", "a")
		}
		w.settles(outbox.ModePoll)
		w.do(func() {
			w.rd.goesAt = "outbox.order"
			w.rd.revert("outbox.order", old)
			w.rd.restart()
		})
		elapse(10 * time.Second)
		if took := w.delay(); took > 20*time.Second {
			t.Errorf("an event of the other stream waits %v; health %+v", took, w.instances[0].relay.Health())
		}
		w.do(func() {
			w.rd.goesAt = ""
			w.rd.away["outbox.order"] = false
		})
		w.ends(outbox.ModePoll)
	})
}

// creeping is a sink that takes one batch of a repair of outbox.order, and then none for some seconds, until until is
// negative.
type creeping struct {
	stream.Sink
	until *atomic.Int64
}

type creepingLane struct {
	outbox.LanePublisher
	s creeping
}

type creepingDelivery struct {
	outbox.Delivery
	s creeping
}

func (s creeping) Lane(name string, o outbox.Owner, l outbox.Lane) outbox.LanePublisher {
	p := s.Sink.Lane(name, o, l)
	if name != "outbox.order" || l.Part != outbox.RestoreLane {
		return p
	}
	return creepingLane{p, s}
}

func (l creepingLane) Deliver(events []*outbox.Record) outbox.Delivery {
	return creepingDelivery{l.LanePublisher.Deliver(events), l.s}
}

func (d creepingDelivery) Publish(ctx context.Context) (outbox.Receipt, error) {
	now, until := time.Now().UnixNano(), d.s.until.Load()
	if until > 0 && now < until {
		return outbox.Receipt{}, &outbox.StreamError{Stream: "outbox.order", Err: errDown}
	}
	r, err := d.Delivery.Publish(ctx)
	if until >= 0 {
		d.s.until.Store(now + int64(3*time.Second))
	}
	return r, err
}

// A repair that begins again behind what it has published holds up no other stream, and all that it has restored is
// counted.
func TestARepairThatCreeps(t *testing.T) {
	t.Parallel()
	inWorld(t, Options{}, func(w *world) {
		w.deletes(600)
		i, until, restored := w.instance("two"), &atomic.Int64{}, &atomic.Int64{}
		i.relay.o.Sink = creeping{i.relay.o.Sink, until}
		i.relay.o.Store = counted{i.relay.o.Store, restored}
		w.launch(i)
		if took := w.delay(); took > 20*time.Second {
			t.Errorf("an event of the other stream waits %v", took)
		}
		until.Store(-1)
		w.settles(outbox.ModePoll)
		if n := restored.Load(); n != 601 {
			t.Errorf("%d restored events are counted", n)
		}
		w.judge()
	})
}

// counted is a store that keeps how many events the last repair has restored.
type counted struct {
	Store
	restored *atomic.Int64
}

func (s counted) Repaired(ctx context.Context, o outbox.Owner, r outbox.Repair, done outbox.Repaired) error {
	s.restored.Store(done.Restored)
	return s.Store.Repaired(ctx, o, r, done)
}
