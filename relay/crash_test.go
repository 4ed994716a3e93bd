package relay

import (
	"cmp"
	"context"
	"hash/fnv"
	"maps"
	"os"
	"runtime/debug"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"

	"posthaste/internal/pause"
	"posthaste/outbox"
)

// scenario is a story that a world goes through while its writers write.
type scenario struct {
	o       Options
	desired outbox.Mode // auto if empty
	ends    outbox.Mode // cdc if empty
	standby bool        // there are two instances
	led     bool        // the leader stays: what happens while nobody leads is not part of the story
	// story runs concurrently with the writers.
	story func(w *world)
}

// scenarios are what an installation goes through in its life.
var scenarios = map[string]scenario{
	"stream": {desired: outbox.ModeCDC},
	"poll":   {desired: outbox.ModePoll, ends: outbox.ModePoll, standby: true},
	"toggles": {standby: true, story: func(w *world) {
		for _, m := range []outbox.Mode{outbox.ModePoll, outbox.ModeCDC, outbox.ModePoll, outbox.ModeAuto} {
			elapse(900 * time.Millisecond)
			w.wants(m)
		}
	}},
	"open transaction": {story: func(w *world) {
		tx := w.begin("order z")
		elapse(8 * time.Second)
		tx.commitNow()
	}},
	"budget": {o: Options{WALBudget: 20_000}, story: func(w *world) {
		tx := w.begin("user y")
		w.later(7*time.Second, func() { w.grow(18_000) })
		elapse(2 * time.Second)
		tx.write()
		w.do(func() { w.grow(18_000) })
		elapse(3 * time.Second)
		tx.show()
	}},
	"redis": {story: func(w *world) {
		w.later(1500*time.Millisecond, w.rd.restart)
		w.later(time.Second, w.rd.flush)
		w.later(time.Second, func() { w.rd.down = true })
		w.later(time.Second, func() { w.rd.down = false; w.rd.restart() })
	}},
	// Redis goes back in time as a whole, or a part of it does, under both ways.
	"redis goes back": {standby: true, story: func(w *world) {
		for _, m := range []outbox.Mode{outbox.ModeAuto, outbox.ModePoll} {
			w.wants(m)
			elapse(1300 * time.Millisecond)
			var old *redis
			w.do(func() { old = w.rd.copy() })
			w.later(700*time.Millisecond, func() { w.rd.back(old) })
			w.later(900*time.Millisecond, func() { w.rd.drop("outbox.order") })
			w.later(900*time.Millisecond, func() { delete(w.rd.gates, "outbox.order") })
			w.later(600*time.Millisecond, func() { old = w.rd.copy() })
			w.later(600*time.Millisecond, func() { w.rd.gates = old.gates }) // they alone
			w.later(400*time.Millisecond, func() { w.rd.flush(); w.rd.restart() })
			w.later(200*time.Millisecond, w.rd.flush)
		}
		w.wants(outbox.ModeAuto)
	}},
	// The server of one stream is down and the others are up. It returns as it was, or restarted, or all have lost
	// everything. An event follows one of a transaction that also has an event for the server that is down.
	"apart": {o: Options{}, story: func(w *world) {
		for round := range 4 {
			elapse(1300 * time.Millisecond)
			w.away(true, "outbox.order")
			elapse(700 * time.Millisecond)
			w.commits("user q", "order p", "user q")
			elapse(100 * time.Millisecond)
			w.commits("user q")
			w.later(700*time.Millisecond, func() {
				w.rd.away["outbox.order"] = false
				switch round {
				case 1:
					w.rd.restart()
				case 3:
					w.rd.flush()
				}
			})
		}
	}},
	// Leaders adopt while the server of one stream is down, and publish to the others. It returns as it was, or has
	// lost what came last, all but the gate, or everything; or the others have lost something in the meantime.
	"absent": {standby: true, story: func(w *world) {
		for round := range 5 {
			var old *redis
			w.do(func() { old = w.rd.copy() })
			w.event("order", "p")
			w.later(900*time.Millisecond, func() {
				w.rd.away["outbox.order"] = true
				w.pg.state.Desired = []outbox.Mode{outbox.ModePoll, outbox.ModeAuto}[round%2]
			})
			w.commits("user q", "order p")
			elapse(4 * time.Second)
			if round == 4 {
				w.do(func() { w.rd.flush(); w.rd.restart() })
			}
			w.event("user", "q")
			w.later(time.Second, func() {
				w.rd.away["outbox.order"] = false
				switch round {
				case 1:
					w.rd.revert("outbox.order", old)
				case 2:
					w.rd.drop("outbox.order")
				case 3:
					w.rd.revert("outbox.order", &redis{})
				}
			})
		}
		w.wants(outbox.ModeAuto)
	}},
	// Another database shares the streams, and is the first to publish after a loss, or not.
	"shared": {standby: true, story: func(w *world) {
		beside := func(times int) {
			for range times {
				w.later(170*time.Millisecond, func() { w.rd.neighbour("outbox.order"); w.rd.neighbour("outbox.user") })
			}
		}
		both := func(f func(name string)) { f("outbox.order"); f("outbox.user") }
		for _, m := range []outbox.Mode{outbox.ModeAuto, outbox.ModePoll} {
			w.wants(m)
			beside(6)
			w.do(func() { both(w.rd.drop); both(w.rd.neighbour) }) // it is first
			beside(3)
			w.do(func() { both(w.rd.drop) }) // we may be
			elapse(700 * time.Millisecond)
			beside(2)
			var old *redis
			w.do(func() { old = w.rd.copy() })
			beside(4)
			w.do(func() { w.rd.back(old); both(w.rd.neighbour) })
			beside(3)
			w.do(func() { w.rd.flush(); both(w.rd.neighbour) })
			beside(3)
			w.do(func() { delete(w.rd.gates, "outbox.order"); delete(w.rd.neighbours, "outbox.user") })
			beside(3)
		}
		w.wants(outbox.ModeAuto)
	}},
	"slot": {story: func(w *world) {
		w.later(1500*time.Millisecond, w.dropSlot)
		w.later(time.Second, func() {
			if w.pg.slot != nil {
				w.pg.slot.lost = true
				if ws := w.pg.slot.active; ws != nil {
					ws.end()
				}
			}
		})
		w.later(time.Second, func() { w.pg.unpublished = true })
	}},
	// A commit is streamed long before it is visible, and the mode changes twice until then.
	"held back": {standby: true, story: func(w *world) {
		elapse(1500 * time.Millisecond)
		tx := w.writes("order v")
		elapse(time.Second)
		w.wants(outbox.ModePoll)
		elapse(4 * time.Second)
		tx.show()
		again := w.writes("order v")
		w.wants(outbox.ModeAuto)
		elapse(3 * time.Second)
		again.show()
	}},
	// Another program moves the idle slot past a commit that is not visible yet.
	"moved": {led: true, story: func(w *world) {
		elapse(time.Second)
		w.wants(outbox.ModePoll)
		w.eventually("it is swept", time.Minute, func() bool {
			return w.pg.state.Active == outbox.ModePoll && (w.pg.slot == nil || w.pg.slot.active == nil)
		})
		elapse(6 * time.Second) // so that the leader has seen where it rests
		tx := w.writes("order x")
		w.do(w.moveSlot)
		elapse(time.Second)
		w.wants(outbox.ModeAuto)
		elapse(7 * time.Second)
		tx.show()
	}},
	// Postgres crashes during a stream and during a sweep, and assigns the same ids again.
	"crash": {standby: true, story: func(w *world) {
		for _, m := range []outbox.Mode{outbox.ModeAuto, outbox.ModePoll, outbox.ModePoll, outbox.ModeAuto} {
			elapse(1700 * time.Millisecond)
			w.wants(m)
			for range 3 {
				w.begin().rollback()
			}
			w.later(300*time.Millisecond, w.pg.crash)
		}
	}},
	// A transaction is larger than the window, and runs concurrently with others.
	"giant": {story: func(w *world) {
		tx := w.begin(slices.Repeat([]string{"order x", "order y", "order z"}, 14)...)
		elapse(2 * time.Second)
		tx.commitNow()
		elapse(time.Second)
		tx = w.writes(slices.Repeat([]string{"user x"}, 30)...)
		elapse(2 * time.Second)
		tx.show()
	}},
	// A type gets other numbers of streams, one after the other, in both modes, while a consumer group reads.
	"layout": {standby: true, story: func(w *world) {
		stop := w.consume()
		defer stop()
		for n, shards := range []int{4, 16, 1, 2} {
			elapse(700 * time.Millisecond)
			w.wants([]outbox.Mode{outbox.ModeAuto, outbox.ModePoll}[n%2])
			elapse(time.Second)
			// A commit that is streamed, and is not visible before the change has begun.
			tx := w.writes("order v")
			elapse(500 * time.Millisecond)
			finish := w.spread(shards)
			elapse(3 * time.Second)
			tx.show()
			finish()
		}
		w.wants(outbox.ModeAuto)
	}},
	// The same, and another database publishes to the same streams, to new ones first or not.
	"layout shared": {story: func(w *world) {
		stop := w.consume()
		defer stop()
		for _, shards := range []int{2, 1} {
			finish := w.spread(shards)
			for n := range 20 {
				w.later(170*time.Millisecond, func() {
					w.rd.neighbour("outbox.order")
					w.rd.neighbour(outbox.ShardName("outbox.order", n%2))
					if n == 15 {
						w.rd.drop(outbox.ShardName("outbox.order", 1))
					}
				})
			}
			finish()
		}
	}},
	// The same, and Redis loses streams of the present layout, and of those before.
	"layout lost": {story: func(w *world) {
		stop := w.consume()
		defer stop()
		for _, shards := range []int{2, 1, 4} {
			elapse(900 * time.Millisecond)
			w.spread(shards)()
			w.later(400*time.Millisecond, func() {
				for name := range w.rd.streams {
					if len(name)%2 == 0 {
						w.rd.drop(name)
					}
				}
			})
			w.later(400*time.Millisecond, func() { w.rd.flush(); w.rd.restart() })
		}
	}},
	// Instances with another prefix replace the others, under load, and Redis loses the streams of both.
	"prefix": {standby: true, story: func(w *world) {
		for _, prefix := range []string{"events.", "outbox."} {
			w.later(900*time.Millisecond, func() {
				w.prefix = prefix
				w.replace()
				w.replace()
			})
			for range 2 { // a fault may have begun to start another one with the old prefix
				var all []*instance
				w.do(func() { all = slices.Clone(w.instances) })
				for _, i := range all {
					if i.relay.o.Prefix != prefix {
						i.stop()
					}
				}
				elapse(100 * time.Millisecond)
			}
			w.eventually("the prefix is another one", 5*time.Minute, func() bool { return w.pg.state.Prefix == prefix })
			w.later(700*time.Millisecond, func() { w.rd.flush(); w.rd.restart() })
		}
	}},
	"skip":      {standby: true, story: poisonous},
	"block key": {o: Options{Poison: PoisonBlockKey}, story: poisonous},
}

// spread stops every instance, and starts one that gives a type so many streams. finish waits until that is done, and
// starts others.
func (w *world) spread(shards int) (finish func()) {
	stop := func() {
		for range 2 { // a fault may have started another one in between
			elapse(100 * time.Millisecond)
			var old []*instance
			w.do(func() { old = slices.Clone(w.instances) })
			for _, i := range old {
				i.stop()
			}
		}
	}
	w.do(func() { w.spreading = shards })
	stop()
	w.do(w.replace)
	return func() {
		w.eventually("the layout is another one", 5*time.Minute, func() bool { return w.pg.state.Shards == shards })
		w.do(func() { w.spreading = 0 })
		stop()
		w.do(func() {
			w.replace()
			w.replace()
		})
	}
}

// consume has a consumer group read, slowly, one stream after the other, and returns what ends that.
func (w *world) consume() (stop func()) {
	w.do(func() {
		w.rd.readers, w.rd.handled, w.rd.seen = map[string]int64{}, map[string]int64{}, map[uuid.UUID]bool{}
	})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		for ctx.Err() == nil {
			pause.For(ctx, 300*time.Millisecond)
			w.do(func() {
				// Those with the longer names first: the wrong ones, where order depends on it.
				names := slices.SortedFunc(maps.Keys(w.rd.streams), func(a, b string) int {
					return cmp.Or(len(b)-len(a), strings.Compare(a, b))
				})
				for _, name := range names {
					if w.rd.unread(name) > 0 {
						w.rd.read(name)
						break
					}
				}
			})
		}
	}()
	return func() { cancel(); <-done }
}

// poisonous commits events that Redis refuses, swept and streamed, and has a stream's key be of another type for a
// while.
func poisonous(w *world) {
	for range 3 {
		w.commits("order p", "order p poison", "order p", "user q")
		elapse(800 * time.Millisecond)
	}
	w.do(func() { w.rd.wrongType["outbox.item"] = true })
	w.event("item", "r")
	w.later(2*time.Second, func() { w.rd.wrongType["outbox.item"] = false })
	w.event("item", "s")
}

// result is what came of a scenario: how often each call was made, whether all faults struck, and whether every promise
// was kept.
type result struct {
	counts     map[string]int
	struck, ok bool
}

// run lets the scenario happen with faults, one after the other.
func (s scenario) run(t *testing.T, plan ...fault) (r result) {
	s.o.Window = 12
	inWorld(t, s.o, func(w *world) {
		if len(plan) > 0 {
			w.plan, w.then = plan[0], plan[1:]
		}
		if s.desired != "" {
			w.pg.state.Desired = s.desired
		}
		w.start("one")
		if s.standby {
			w.start("two")
		}
		told := make(chan struct{})
		go func() {
			defer close(told)
			if s.story != nil {
				s.story(w)
			}
		}()
		w.load(7, 3, 8)
		<-told
		mode := outbox.ModeCDC
		if s.ends != "" {
			mode = s.ends
		}
		w.ends(mode)
		r = result{w.counts, w.struck && len(w.then) == 0, len(w.wrong) == 0}
	})
	return r
}

// suffer runs the scenario once with each fault, until one breaks a promise.
func (s scenario) suffer(t *testing.T, faults []fault) {
	for _, f := range faults {
		if s.led && f.kind >= killed && f.kind <= unlocked {
			continue
		}
		if !s.run(t, f).ok {
			return
		}
	}
}

// TestMain collects garbage less often than a service does: each run is a world that is dropped as a whole.
func TestMain(m *testing.M) {
	debug.SetGCPercent(800)
	os.Exit(m.Run())
}

// Whatever call of whatever port fails, in whatever way, in whatever situation: every committed event is in its stream
// once, in order, and the table is empty. See oracle_test.go for all that is looked at.
func TestCrashPoints(t *testing.T) {
	t.Parallel()
	for name, s := range scenarios {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := s.run(t)
			if !r.ok {
				return
			}
			for faults := range slices.Chunk(faultsOf(name, r.counts), 500) { // a scenario has thousands of them
				t.Run(faults[0].String(), func(t *testing.T) {
					t.Parallel()
					s.suffer(t, faults)
				})
			}
		})
	}
}

// Two kills, each before a call takes effect or when it has: every pair of calls and moments, in their order, in as
// many situations as it takes until both have struck. POSTHASTE_TEST_PAIRS=all is for all pairs, not a sample.
func TestPairsOfCrashPoints(t *testing.T) {
	t.Parallel()
	made := map[string]map[string]int{} // by scenario: the calls
	calls := map[string]bool{}
	for name, s := range scenarios {
		if s.led {
			continue
		}
		r := s.run(t)
		if !r.ok {
			return
		}
		made[name] = r.counts
		for call := range r.counts {
			calls[call] = true
		}
	}
	share := 200 * worlds
	if os.Getenv("POSTHASTE_TEST_FULL") == "1" {
		share = 20
	}
	if os.Getenv("POSTHASTE_TEST_PAIRS") == "all" {
		share = 1
	}
	var apart atomic.Int64
	t.Run("each", func(t *testing.T) {
		for _, first := range slices.Sorted(maps.Keys(calls)) {
			t.Run(first, func(t *testing.T) {
				t.Parallel()
				for _, second := range slices.Sorted(maps.Keys(calls)) {
					for moments := range 4 {
						a, b := fault{first, 0, killed + kind(moments/2)}, fault{second, 0, killed + kind(moments%2)}
						h := fnv.New32a()
						_, _ = h.Write([]byte(a.String() + b.String()))
						if h.Sum32()%share != 0 {
							continue
						}
						switch crossed, ok := pair(t, made, a, b, h.Sum32()/share); {
						case !ok:
							return
						case !crossed:
							apart.Add(1)
							t.Logf("never one after the other: %v, %v", a, b)
						}
					}
				}
			})
		}
	})
	t.Logf("%d calls; %d pairs never came one after the other", len(calls), apart.Load())
}

// pair looks for a scenario in which both faults strike, one after the other. The seed chooses the scenario to try
// first and the call at which the first fault strikes. A late first fault leaves little time for the second one, so the
// last attempts use the first call of its kind.
func pair(t *testing.T, made map[string]map[string]int, a, b fault, seed uint32) (crossed, ok bool) {
	names := slices.Sorted(maps.Keys(made))
	for _, anywhere := range []bool{true, false} {
		for n := range names {
			name := names[(n+int(seed%uint32(len(names))))%len(names)]
			counts := made[name]
			if counts[a.call] == 0 || counts[b.call] == 0 {
				continue
			}
			a.n = 0
			if at := places(counts[a.call]); anywhere {
				a.n = at[int(seed/64)%len(at)]
			}
			if r := scenarios[name].run(t, a, b); !r.ok || r.struck {
				return r.struck, r.ok
			}
		}
	}
	return false, true
}

// faultsOf are the faults that a scenario is repeated with: of all that there are, or, but with POSTHASTE_TEST_FULL, a
// sample that is always the same.
func faultsOf(scenario string, counts map[string]int) (faults []fault) {
	full := os.Getenv("POSTHASTE_TEST_FULL") == "1"
	for _, call := range slices.Sorted(maps.Keys(counts)) {
		for _, n := range places(counts[call]) {
			for k := refused; k <= dropped; k++ {
				f := fault{call, n, k}
				h := fnv.New32a()
				_, _ = h.Write([]byte(scenario + f.String()))
				if full || h.Sum32()%(sample*worlds) == 0 {
					faults = append(faults, f)
				}
			}
		}
	}
	return faults
}

// sample is how many of the faults one stands for. Of those, one in so many worlds is run.
const sample = 40

var worlds uint32 = 1

// places are the calls of one kind that fail: the first few, and then fewer and fewer.
func places(calls int) (at []int) {
	for n := 0; n < calls; n += max(1, n/3) {
		at = append(at, n)
	}
	return at
}
