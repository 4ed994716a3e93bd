package relay

import (
	"math/rand/v2"
	"sync"
	"time"

	"github.com/google/uuid"

	"posthaste/outbox"
)

// load has writers commit, roll back, hold back and leave open transactions, and returns when they are done. Each has
// aggregates of its own, and ends one transaction before it begins the next: what it writes has an order to keep.
func (w *world) load(seed uint64, writers, transactions int) {
	var wg sync.WaitGroup
	for n := range writers {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(seed, uint64(n)))
			spread := func(d time.Duration) { elapse(time.Duration(r.Int64N(int64(d)))) }
			for range transactions {
				tx := w.begin()
				for range 1 + r.IntN(4) {
					a := r.IntN(3)
					tx.insert([]string{"order", "user"}[a%2], string(rune('a'+3*n+a)), "done")
				}
				spread(200 * time.Millisecond)
				switch r.IntN(8) {
				case 0:
					tx.rollback()
				case 1, 2:
					tx.write()
					spread(600 * time.Millisecond)
					tx.show()
				default:
					tx.commitNow()
				}
				spread(150 * time.Millisecond)
			}
		})
	}
	wg.Wait()
}

// settles waits until everything that was committed is settled, and a leader is ready, in the mode that is
// wanted.
func (w *world) settles(mode outbox.Mode) {
	w.t.Helper()
	w.eventually("nothing is owed, and a leader is ready in mode "+string(mode), 5*time.Minute, func() bool {
		if len(w.pg.rows(w.pg.owed)) > 0 || w.pg.state.Active != mode || w.forgotten() {
			return false
		}
		for _, i := range w.instances {
			if w.pg.leader != nil && w.pg.leader.i == i && !i.isDead() && i.thaw == nil {
				w.calm = i.relay.Status().Leader && i.relay.Health().Ready
				return w.calm && (mode != outbox.ModeCDC || len(i.conns) == 0)
			}
		}
		return false
	})
}

// ends waits until all is settled, and judges that.
func (w *world) ends(mode outbox.Mode) {
	w.t.Helper()
	w.settles(mode)
	w.judge()
}

// forgotten reports whether Redis has lost a settled event; the relay notices that a moment later. The caller holds mu.
func (w *world) forgotten() bool {
	return len(w.pg.rows(func(r *tableRow) bool {
		return w.pg.held(r) && !w.pg.parked(r) && !w.rd.has(w.pg.stream(r), r.ID)
	})) > 0
}

// judge stops all instances in order and checks the final state.
func (w *world) judge() {
	w.t.Helper()
	elapse(2 * time.Second)
	all := w.stopAll()
	w.do(func() {
		for _, i := range all {
			if i.err != nil {
				w.wrongly("%s ended with %v", i.name, i.err)
			}
			if len(i.conns) > 0 && !i.isDead() {
				w.wrongly("%s has ended, and %d connections of its sweeps have not", i.name, len(i.conns))
			}
		}
		if s := w.pg.slot; s != nil && s.active != nil && !s.active.ghost && !s.active.of.isDead() {
			w.wrongly("everybody has stopped, and the slot is streamed")
		}
		w.weigh()
	})
	w.failed()
}

// weigh compares what was committed with what is in the streams, and parked. The caller holds mu.
func (w *world) weigh() {
	in, dead := map[uuid.UUID]int{}, map[uuid.UUID]int{}
	for _, s := range w.rd.streams {
		for _, e := range s.entries {
			if !e.foreign {
				in[e.ID]++
			}
		}
	}
	for _, d := range w.pg.dead {
		dead[d.ID]++
	}
	committed := 0
	for _, tx := range w.pg.log {
		for _, r := range tx.rows {
			committed++
			missing := in[r.ID]+dead[r.ID] == 0
			name := w.pg.stream(r)
			switch {
			case missing:
				w.wrongly("event %d was committed, and is neither in %s nor parked (the sink had lost it: %v)", r.Seq,
					name, w.lost[r.ID])
			case in[r.ID] == 1 && !w.rd.has(name, r.ID):
				w.wrongly("event %d is in another stream than %s", r.Seq, name)
			case in[r.ID]+dead[r.ID] > 1:
				w.wrongly("event %d is %d times in %s and %d times parked", r.Seq, in[r.ID], name, dead[r.ID])
			}
			delete(in, r.ID)
		}
	}
	for id := range in {
		w.wrongly("event %v was not committed, and is in a stream", id)
	}
	if committed == 0 {
		w.wrongly("nothing was committed: this world proves nothing")
	}
}
