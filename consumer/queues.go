package consumer

import (
	"cmp"
	"slices"
	"sync"
	"time"
)

const (
	// windowBytes bounds the payloads in memory, in addition to Options.Window.
	windowBytes = 64 << 20
	// maxHeld bounds what is held with and without payload. Beyond it reading stops, so that a key that is hopelessly
	// behind costs a bounded amount of memory and of signs of life.
	maxHeld = 100_000
	// maxFailing is how many subjects may wait for a retry without payload. Beyond it they take up the window, because
	// in an outage of everything each further event would be one more to retry.
	maxFailing = 10_000
	// refill is how many parked entries of one key are read back in one round trip, and refillBytes about how many
	// bytes.
	refill      = 32
	refillBytes = 1 << 20
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
	// reloads counts the failures in a row to read the payload of the parked entry back.
	reloads int
	// waits counts the failed runs that were not counted as attempts.
	waits int
	// cause is set when the entry is to go to the dead stream, and that has failed.
	// tried is the number of its attempts.
	cause error
	tried int
	// failed is set when a run has failed; since is from which success on others count for it.
	failed bool
	since  int64
	// seen is when the entry's idle time in Redis was last known to be near zero.
	seen  time.Time
	queue *queue
	// stale is set when so much time has passed since then that another consumer may have taken the entry over.
	stale bool
	// moved is set when another consumer has taken the entry over.
	moved bool
}

func (e *entry) ref() entryRef { return entryRef{e.stream, e.at} }

type entryRef struct {
	stream string
	at     entryID
}

type queueKey struct{ stream, subject string }

// queue has the entries of one subject. It is ready (in queues.ready), running, delayed or gone; never two of these.
type queue struct {
	key queueKey
	// entries are ascending by id. The running one is not among them.
	entries []*entry
	running *entry
	ready   bool
	// timer runs while the queue is delayed.
	timer *time.Timer
}

// queues distributes entries so that those of one subject run one after the other and those of different subjects run
// concurrently. It does no I/O.
type queues struct {
	window int
	// fresh is how long an entry is certainly ours after a sign of life.
	fresh time.Duration

	mu        sync.Mutex
	work      *sync.Cond
	space     bell // for the readers, who wait for room
	held      map[entryRef]*entry
	bySubject map[queueKey]*queue
	ready     []*queue // in their order
	// idle counts the workers that wait.
	idle int
	// loaded counts entries with payload, bytes their size; unacked counts those done but not acknowledged.
	loaded, bytes, unacked int
	// failing counts the entries that have failed and are not done, at most one of a subject; succeeded those that are
	// done without an error.
	failing   int
	succeeded int64
	// row counts the entries that have failed for the first time since the last success. If there are many, an outage
	// has begun, and the successes before it no longer count.
	row    int
	before int64
	// moves counts what happens to entries, for the watchdog.
	moves   int64
	stopped bool
	// takes are the streams whose pending entries are being read, with their entries that were acknowledged or have
	// died since. The reader may have seen such an entry as pending and must not restore it. It may restore a dropped
	// one.
	takes map[string]map[entryRef]struct{}
}

func newQueues(window int, fresh time.Duration) *queues {
	qs := &queues{
		window: window, fresh: fresh, held: make(map[entryRef]*entry, window),
		bySubject: make(map[queueKey]*queue, window), takes: map[string]map[entryRef]struct{}{},
	}
	qs.work = sync.NewCond(&qs.mu)
	return qs
}

// add takes over entries; those already held are only marked as seen. It returns how many were new.
func (qs *queues) add(es []*entry) int {
	qs.mu.Lock()
	defer qs.mu.Unlock()
	n := 0
	for _, e := range es {
		ref := e.ref()
		if h, ok := qs.held[ref]; ok {
			h.seen, h.moved = e.seen, false
			continue
		}
		if _, ok := qs.takes[e.stream][ref]; ok {
			continue
		}
		n++
		qs.moves++
		qs.held[ref] = e
		qs.loaded++
		qs.bytes += e.size
		qs.enqueue(e)
	}
	return n
}

// enqueue puts e into its queue at its place. Entries mostly arrive in order, but one taken over from another consumer
// may be older than what waits.
func (qs *queues) enqueue(e *entry) {
	subject, _ := e.values["subject"].(string)
	if subject == "" {
		subject = "\x00" + e.id // no subject, no order: a queue of its own
	}
	key := queueKey{e.stream, subject}
	q := qs.bySubject[key]
	if q == nil {
		q = &queue{key: key}
		qs.bySubject[key] = q
	}
	e.queue = q
	q.insert(e)
	qs.activate(q)
}

func (q *queue) insert(e *entry) {
	i, _ := slices.BinarySearchFunc(q.entries, e.at, func(a *entry, at entryID) int {
		return cmp.Or(cmp.Compare(a.at.ms, at.ms), cmp.Compare(a.at.seq, at.seq))
	})
	q.entries = slices.Insert(q.entries, i, e)
}

// activate makes a queue ready if it has work and may run, and removes an empty one.
func (qs *queues) activate(q *queue) {
	if q.ready || q.timer != nil || q.running != nil {
		return
	}
	if len(q.entries) == 0 {
		delete(qs.bySubject, q.key)
		return
	}
	q.ready = true
	qs.ready = append(qs.ready, q)
	qs.work.Signal()
}

// next waits for an entry to run. False: stopped.
func (qs *queues) next() (*entry, bool) {
	qs.mu.Lock()
	defer qs.mu.Unlock()
	for {
		if qs.stopped {
			return nil, false
		}
		if len(qs.ready) > 0 {
			q := qs.ready[0]
			qs.ready[0] = nil
			qs.ready = qs.ready[1:]
			q.ready = false
			if len(q.entries) == 0 { // its entries went to another consumer
				qs.activate(q)
				continue
			}
			e := q.entries[0]
			q.entries[0] = nil
			q.entries = q.entries[1:]
			q.running = e
			e.stale = time.Since(e.seen) > qs.fresh
			if qs.idle > 0 && len(qs.ready) == 0 { // there may be something to park now
				qs.space.ring()
			}
			return e, true
		}
		qs.idle++
		qs.space.ring()
		qs.work.Wait()
		qs.idle--
	}
}

// unload takes e's payload out of the account.
func (qs *queues) unload(e *entry) {
	if e.values != nil {
		qs.loaded--
		qs.bytes -= e.size
		e.values = nil
	}
}

// done ends e's run and lets its queue go on. With ack the entry stays held until acked is called.
func (qs *queues) done(e *entry, ack bool) {
	qs.mu.Lock()
	defer qs.mu.Unlock()
	qs.moves++
	qs.unload(e)
	qs.settled(e)
	if ack {
		qs.unacked++
		qs.succeeded++
		qs.row = 0
	} else {
		qs.forget(e)
		qs.space.ring()
	}
	q := e.queue
	e.queue, q.running = nil, nil
	qs.activate(q)
}

// leave ends e's run because another consumer has it by now, or has finished it.
func (qs *queues) leave(e *entry) {
	qs.mu.Lock()
	defer qs.mu.Unlock()
	qs.moves++
	q := e.queue
	q.running = nil
	qs.letGo(e)
	qs.activate(q)
}

// retry ends e's run and runs it again after delay; its queue waits that long. An entry that belongs to another
// consumer by now is dropped instead.
func (qs *queues) retry(e *entry, delay time.Duration) {
	qs.mu.Lock()
	defer qs.mu.Unlock()
	q := e.queue
	q.running = nil
	if e.moved {
		qs.letGo(e)
		qs.activate(q)
		return
	}
	q.insert(e)
	if qs.stopped {
		return
	}
	var t *time.Timer
	t = time.AfterFunc(delay, func() {
		qs.mu.Lock()
		defer qs.mu.Unlock()
		if q.timer == t {
			q.timer = nil
			qs.activate(q)
		}
	})
	q.timer = t
	qs.space.ring()
}

func (qs *queues) forget(e *entry) {
	delete(qs.held, e.ref())
	if forgotten := qs.takes[e.stream]; forgotten != nil {
		forgotten[e.ref()] = struct{}{}
	}
}

// letGo drops e, which may be read again.
func (qs *queues) letGo(e *entry) {
	qs.unload(e)
	qs.settled(e)
	delete(qs.held, e.ref())
	e.queue = nil
	qs.space.ring()
}

// acked removes entries whose acknowledgement has reached Redis.
func (qs *queues) acked(es []*entry) {
	qs.mu.Lock()
	defer qs.mu.Unlock()
	for _, e := range es {
		qs.forget(e)
	}
	qs.unacked -= len(es)
	qs.moves += int64(len(es))
	qs.space.ring()
}

// taking begins to read pending entries of stream, which its reader alone does; end ends it.
func (qs *queues) taking(stream string) (end func()) {
	qs.mu.Lock()
	defer qs.mu.Unlock()
	qs.takes[stream] = map[entryRef]struct{}{}
	return func() {
		qs.mu.Lock()
		defer qs.mu.Unlock()
		delete(qs.takes, stream)
	}
}

// holds reports whether an entry is in this process and was not taken over by another consumer.
func (qs *queues) holds(ref entryRef) bool {
	qs.mu.Lock()
	defer qs.mu.Unlock()
	e := qs.held[ref]
	return e != nil && !e.moved
}

// lose drops an entry that another consumer owns now, unless it runs already.
func (qs *queues) lose(ref entryRef) {
	qs.mu.Lock()
	defer qs.mu.Unlock()
	e := qs.held[ref]
	if e == nil || e.queue == nil {
		return // gone, or done and about to be acknowledged
	}
	if e.queue.running == e {
		e.moved = true
		return
	}
	if i := slices.Index(e.queue.entries, e); i >= 0 {
		e.queue.entries = slices.Delete(e.queue.entries, i, i+1)
		qs.letGo(e)
	}
}

// drop removes the entries of stream's queues. Running handlers may finish.
func (qs *queues) drop(stream string) {
	qs.mu.Lock()
	defer qs.mu.Unlock()
	for key, q := range qs.bySubject {
		if key.stream != stream {
			continue
		}
		for _, e := range q.entries {
			qs.letGo(e)
		}
		q.entries = nil
		if q.running != nil {
			q.running.moved = true
		}
		if q.timer != nil {
			q.timer.Stop()
			q.timer = nil
		}
		qs.activate(q)
	}
}

// stop lets no entry begin any more; running ones may end.
func (qs *queues) stop() {
	qs.mu.Lock()
	defer qs.mu.Unlock()
	qs.stopped = true
	for _, q := range qs.bySubject {
		if q.timer != nil {
			q.timer.Stop()
		}
	}
	qs.work.Broadcast()
}

// renewed notes that entries have given a sign of life at t.
func (qs *queues) renewed(es []*entry, t time.Time) {
	qs.mu.Lock()
	defer qs.mu.Unlock()
	for _, e := range es {
		e.seen = t
	}
}

// heldSince returns, by stream, the entries that have given no sign of life since t.
func (qs *queues) heldSince(t time.Time) map[string][]*entry {
	qs.mu.Lock()
	defer qs.mu.Unlock()
	out := map[string][]*entry{}
	for _, e := range qs.held {
		if e.seen.Before(t) {
			out[e.stream] = append(out[e.stream], e)
		}
	}
	return out
}

// queueCounts is a snapshot for the metrics and the watchdog.
type queueCounts struct {
	held, unacked int
	// running are the handlers that run; behind the entries that wait for them, those that run included; resting those
	// that wait for a retry of their subject.
	running, behind, resting int
	// moves rises whenever an entry is taken over, is done with or is acknowledged; one more attempt is no move.
	moves int64
}

func (qs *queues) counts() queueCounts {
	qs.mu.Lock()
	defer qs.mu.Unlock()
	n := queueCounts{held: len(qs.held), unacked: qs.unacked, moves: qs.moves}
	for _, q := range qs.bySubject {
		switch {
		case q.running != nil:
			n.running++
			n.behind += 1 + len(q.entries)
		case q.timer != nil:
			n.resting += len(q.entries)
		}
	}
	return n
}
