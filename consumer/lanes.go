package consumer

import (
	"slices"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
)

const (
	// windowBytes bounds the payloads in memory, beside Options.Window.
	windowBytes = 64 << 20
	// maxHeld bounds what is held with and without payload. Beyond it reading stops, so that a key that is hopelessly
	// behind costs a bounded amount of memory and of signs of life.
	maxHeld = 100_000
	// refill is how many parked entries of one key are read back in one round trip.
	refill = 32
)

// entry is a stream entry on its way through the process, from the read to the acknowledgement.
type entry struct {
	stream string
	id     string
	at     entryID
	// values are the entry's fields; nil while parked.
	values map[string]any
	size   int
	// attempt is the number of the next attempt to run, or of the running one.
	attempt int
	// suspect is set while the entry may be what kills the process; see suspect.go.
	suspect bool
	// acking is set when the entry has gone to the acknowledger.
	acking bool
	// waits counts the runs in a row that ended with Unavailable.
	waits int
	// seen is when the entry's idle time in Redis was last known to be near zero.
	seen time.Time
	lane *lane
	// stale is set when so much time has passed since then that another consumer may have taken the entry over.
	stale bool
	// moved is set when another consumer has taken the entry over.
	moved bool
}

func (e *entry) ref() entryRef { return entryRef{e.stream, e.at} }

func (e *entry) message() redis.XMessage { return redis.XMessage{ID: e.id, Values: e.values} }

type entryRef struct {
	stream string
	at     entryID
}

type laneKey struct{ stream, subject string }

// lane is the queue of one subject. It is ready (in lanes.ready), running, delayed or gone; never two of these.
type lane struct {
	key laneKey
	// queue is ascending by entry id. The running entry is not in it.
	queue   []*entry
	running *entry
	first   [1]*entry // where the queue of most lanes lives
	delayed bool
	ready   bool
	timer   *time.Timer
}

// lanes hands out entries so that those of one subject run one after the other and those of different subjects beside
// each other. It does no I/O.
type lanes struct {
	window int
	// fresh is how long an entry is certainly ours after a sign of life.
	fresh time.Duration

	mu    sync.Mutex
	work  *sync.Cond
	space bell // for who waits for room: the readers, and who takes over pending entries
	held  map[entryRef]*entry
	lanes map[laneKey]*lane
	free  []*lane
	ready []*lane // a queue: head is the first one in use
	head  int
	// idle counts the workers that wait.
	idle int
	// loaded counts entries with payload, bytes their size; unacked counts those done but not acknowledged.
	loaded, bytes, unacked int
	// delayed counts the lanes that wait for a retry.
	delayed int
	// moves counts what happens to entries, for the watchdog.
	moves   int64
	stopped bool
	// takes counts the readers of pending entries under way; forgotten is what was acknowledged meanwhile, which such a
	// reader may have seen as pending and must not bring back.
	takes     int
	forgotten map[entryRef]struct{}
}

func newLanes(window int, fresh time.Duration) *lanes {
	l := &lanes{
		window: window, fresh: fresh, held: make(map[entryRef]*entry, window),
		lanes: make(map[laneKey]*lane, window), forgotten: map[entryRef]struct{}{},
	}
	l.work = sync.NewCond(&l.mu)
	return l
}

// add takes over entries; those already held are only marked as seen. It returns how many were new.
func (l *lanes) add(es []*entry) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := 0
	for _, e := range es {
		ref := e.ref()
		if h, ok := l.held[ref]; ok {
			h.seen, h.moved = e.seen, false
			continue
		}
		if _, ok := l.forgotten[ref]; ok {
			continue
		}
		n++
		l.moves++
		l.held[ref] = e
		l.loaded++
		l.bytes += e.size
		l.enqueue(e)
	}
	return n
}

// enqueue puts e into its lane at its place. Entries mostly arrive in order, but one taken over from another consumer
// may be older than what waits.
func (l *lanes) enqueue(e *entry) {
	subject, _ := e.values["subject"].(string)
	if subject == "" {
		subject = "\x00" + e.id // no subject, no order: a lane of its own
	}
	key := laneKey{e.stream, subject}
	ln := l.lanes[key]
	if ln == nil {
		if n := len(l.free); n > 0 {
			ln, l.free = l.free[n-1], l.free[:n-1]
		} else {
			ln = &lane{}
		}
		ln.key, ln.queue = key, ln.first[:0]
		l.lanes[key] = ln
	}
	e.lane = ln
	ln.insert(e)
	l.activate(ln)
}

func (ln *lane) insert(e *entry) {
	if n := len(ln.queue); n == 0 || ln.queue[n-1].at.less(e.at) {
		ln.queue = append(ln.queue, e)
		return
	}
	i, _ := slices.BinarySearchFunc(ln.queue, e, func(a, b *entry) int {
		if a.at.less(b.at) {
			return -1
		}
		return 1
	})
	ln.queue = slices.Insert(ln.queue, i, e)
}

// activate makes a lane ready if it has work and may run, and forgets an empty one.
func (l *lanes) activate(ln *lane) {
	if ln.ready || ln.delayed || ln.running != nil {
		return
	}
	if len(ln.queue) == 0 {
		delete(l.lanes, ln.key)
		if len(l.free) < l.window {
			*ln = lane{}
			l.free = append(l.free, ln)
		}
		return
	}
	ln.ready = true
	if l.head > 256 && l.head*2 > len(l.ready) {
		l.ready = append(l.ready[:0], l.ready[l.head:]...)
		l.head = 0
	}
	l.ready = append(l.ready, ln)
	l.work.Signal()
}

// next waits for an entry to run. False: stopped.
func (l *lanes) next() (*entry, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for {
		if l.stopped {
			return nil, false
		}
		if l.head < len(l.ready) {
			ln := l.ready[l.head]
			l.ready[l.head] = nil
			l.head++
			ln.ready = false
			if len(ln.queue) == 0 { // its entries went to another consumer
				l.activate(ln)
				continue
			}
			e := ln.queue[0]
			ln.queue[0] = nil
			if ln.queue = ln.queue[1:]; len(ln.queue) == 0 {
				ln.queue = ln.first[:0]
			}
			ln.running = e
			e.stale = time.Since(e.seen) > l.fresh
			if l.idle > 0 && l.head == len(l.ready) { // there may be something to park now
				l.space.ring()
			}
			return e, true
		}
		l.idle++
		l.space.ring()
		l.work.Wait()
		l.idle--
	}
}

// unload takes e's payload out of the account.
func (l *lanes) unload(e *entry) {
	if e.values != nil {
		l.loaded--
		l.bytes -= e.size
		e.values = nil
	}
}

// done ends e's run and lets its lane go on. With ack the entry stays held until acked is called.
func (l *lanes) done(e *entry, ack bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.moves++
	l.unload(e)
	if ack {
		l.unacked++
	} else {
		l.forget(e)
		l.space.ring()
	}
	ln := e.lane
	e.lane, ln.running = nil, nil
	l.activate(ln)
}

// retry ends e's run and runs it again after delay; its lane waits that long. An entry that belongs to another
// consumer by now is dropped instead.
func (l *lanes) retry(e *entry, delay time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	ln := e.lane
	ln.running = nil
	if e.moved {
		l.unload(e)
		l.forget(e)
		l.activate(ln)
		return
	}
	ln.insert(e)
	if l.stopped {
		return
	}
	ln.delayed = true
	l.delayed++
	ln.timer = time.AfterFunc(delay, func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		if ln.delayed {
			ln.delayed, ln.timer = false, nil
			l.delayed--
			l.activate(ln)
		}
	})
	l.space.ring()
}

func (l *lanes) forget(e *entry) {
	delete(l.held, e.ref())
	if l.takes > 0 {
		l.forgotten[e.ref()] = struct{}{}
	}
}

// acked forgets entries whose acknowledgement has reached Redis.
func (l *lanes) acked(es []*entry) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, e := range es {
		l.forget(e)
	}
	l.unacked -= len(es)
	l.moves += int64(len(es))
	l.space.ring()
}

// beginTake and endTake surround reading pending entries.
func (l *lanes) beginTake() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.takes++
}

func (l *lanes) endTake() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.takes--; l.takes == 0 {
		clear(l.forgotten)
	}
}

// lose drops an entry that another consumer owns now, unless it runs already.
func (l *lanes) lose(ref entryRef) {
	l.mu.Lock()
	defer l.mu.Unlock()
	e := l.held[ref]
	if e == nil || e.lane == nil {
		return // gone, or done and about to be acknowledged
	}
	if e.lane.running == e {
		e.moved = true
		return
	}
	if i := slices.Index(e.lane.queue, e); i >= 0 {
		e.lane.queue = slices.Delete(e.lane.queue, i, i+1)
		l.unload(e)
		l.forget(e)
		l.space.ring()
	}
}

// stop lets no entry begin any more; running ones may end.
func (l *lanes) stop() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.stopped = true
	for _, ln := range l.lanes {
		if ln.timer != nil {
			ln.timer.Stop()
		}
	}
	l.work.Broadcast()
}

// heldSince returns, by stream, the entries that have given no sign of life since t, and takes them as having given one
// now.
func (l *lanes) heldSince(t, now time.Time) map[string][]*entry {
	l.mu.Lock()
	defer l.mu.Unlock()
	out := map[string][]*entry{}
	for _, e := range l.held {
		if e.seen.Before(t) {
			e.seen = now
			out[e.stream] = append(out[e.stream], e)
		}
	}
	return out
}

// laneCounts is a snapshot for the metrics and the watchdog.
type laneCounts struct {
	held, loaded, parked, delayed, unacked int
	// running are the handlers that run; behind the entries that wait for them, those that run included; resting those
	// that wait for a retry of their subject.
	running, behind, resting int
	// moves rises whenever an entry is taken over, is done with or is acknowledged; one more attempt is no move.
	moves int64
}

func (l *lanes) counts() laneCounts {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := laneCounts{
		held: len(l.held), loaded: l.loaded, parked: len(l.held) - l.loaded - l.unacked, delayed: l.delayed,
		unacked: l.unacked, moves: l.moves,
	}
	for _, ln := range l.lanes {
		switch {
		case ln.running != nil:
			n.running++
			n.behind += 1 + len(ln.queue)
		case ln.delayed:
			n.resting += len(ln.queue)
		}
	}
	return n
}
