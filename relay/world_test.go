package relay

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"posthaste/internal/pause"
	"posthaste/outbox"
)

// world is everything outside of the relay, in memory and in a synctest bubble: one Postgres, one Redis, and the
// instances that work on them. It keeps the promises of package outbox and none beyond: a commit is in the WAL before
// it is visible, a slot does not depend on visibility, a reply may be lost, a call may take effect long after its
// caller gave up.
//
// Most violations are detected where they happen (wrongly) and are reported with the calls that led to them; the rest
// are detected at the end (oracle_test.go).
type world struct {
	t testing.TB
	o Options // of every instance

	mu        sync.Mutex
	began     time.Time
	pg        *postgres
	rd        *redis
	grown     chan struct{} // closed, and made anew, when the WAL has grown
	instances []*instance
	plan      fault
	then      []fault // follow when plan has struck, each counted from then on
	struck    bool    // the last one has
	calm      bool    // Redis forgets nothing any more: who stops needs not notice it
	counts    map[string]int
	trace     []step
	wrong     []string
	told      bool // what is wrong
	// raised has, by epoch, the streams whose gates were raised to it; known, the streams its adoption found noted.
	raised  map[int64]map[string]bool
	known   map[int64][]string
	owners  map[int64]outbox.Owner
	adopter map[int64]string
	// confirmed are the events that the sink has confirmed, lost those that it has lost since.
	confirmed, lost map[[16]byte]bool
	// closing is set when every instance is being stopped.
	closing bool
	// prefix is what instances that start are configured with; spreading: they only give a type so many streams.
	prefix    string
	spreading int
}

// step is one call, for the report of a test that fails.
type step struct {
	at        time.Duration
	who, what string
	err       error
}

func newWorld(t testing.TB, o Options) *world {
	w := &world{
		t: t, o: o, began: time.Now(), grown: make(chan struct{}), counts: map[string]int{},
		raised: map[int64]map[string]bool{},
		known:  map[int64][]string{}, owners: map[int64]outbox.Owner{}, adopter: map[int64]string{},
		confirmed: map[[16]byte]bool{},
		lost:      map[[16]byte]bool{}, prefix: "outbox.",
	}
	w.pg, w.rd = newPostgres(w), newRedis(w)
	return w
}

// inWorld runs do in a bubble with a world of its own, and reports what was wrong in it.
func inWorld(t *testing.T, o Options, do func(w *world)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, o)
		defer w.failed()
		defer w.stopAll()
		do(w)
	})
}

// wrongly notes that something has happened that never may. The caller holds mu.
func (w *world) wrongly(format string, args ...any) {
	if len(w.wrong) < 5 {
		w.wrong = append(w.wrong, fmt.Sprintf("after %v: ", time.Since(w.began))+fmt.Sprintf(format, args...))
	}
	w.trace = append(w.trace, step{time.Since(w.began), "WRONG", fmt.Sprintf(format, args...), nil})
}

// do runs f on the world from outside: an operator, an application, a disaster.
func (w *world) do(f func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	f()
}

// grow adds to the WAL and wakes its readers. The caller holds mu.
func (w *world) grow(bytes int) {
	w.pg.wal += outbox.LSN(bytes)
	close(w.grown)
	w.grown = make(chan struct{})
}

// elapse lets time pass on the bubble's clock, without a real wait. Several goroutines may call it at once, unlike
// [pass].
func elapse(d time.Duration) { _ = pause.For(context.Background(), d) }

// later lets time pass, and then runs f on the world from outside.
func (w *world) later(d time.Duration, f func()) {
	elapse(d)
	w.do(f)
}

// eventually waits until cond holds, which is asked with mu held.
func (w *world) eventually(what string, within time.Duration, cond func() bool) {
	w.t.Helper()
	for end := time.Now().Add(within); ; elapse(100 * time.Millisecond) {
		w.mu.Lock()
		ok := cond() || len(w.wrong) > 0
		w.mu.Unlock()
		if ok {
			return
		}
		if time.Now().After(end) {
			w.mu.Lock()
			w.wrongly("not in %v: %s; %s", within, what, w.describe())
			w.mu.Unlock()
			return
		}
	}
}

// describe says how things stand. The caller holds mu.
func (w *world) describe() string {
	st := w.pg.state
	rows := len(w.pg.rows(w.pg.owed))
	text := fmt.Sprintf("%d rows are owed, wanted %s, active %s, epoch %d", rows, st.Desired, st.Active, st.Owner.Epoch)
	for _, i := range w.instances {
		phase, health := i.relay.Status().Phase, i.relay.Health()
		text += fmt.Sprintf("; %s is in %s, dead: %v, %+v", i.name, phase, i.isDead(), health)
	}
	return text
}

// failed reports what went wrong, once.
func (w *world) failed() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.wrong) == 0 || w.told {
		return
	}
	w.told = true
	var b strings.Builder
	for _, s := range w.trace[max(0, len(w.trace)-150):] {
		fmt.Fprintf(&b, "%9.3f %s %s", s.at.Seconds(), s.who, s.what)
		if s.err != nil {
			fmt.Fprintf(&b, ": %v", s.err)
		}
		b.WriteByte('\n')
	}
	w.t.Logf("the last calls:\n%s", b.String())
	w.t.Errorf("fault %v (struck: %v): %s", w.plan, w.struck, strings.Join(w.wrong, "\n"))
}

// instance is one process that runs a relay.
type instance struct {
	w      *world
	name   string
	relay  *Relay
	cancel context.CancelFunc
	done   chan struct{}
	err    error
	// dead is closed when the process dies.
	dead chan struct{}

	// Guarded by world.mu.
	thaw      chan struct{} // not nil: stopped, until it is closed
	session   *lockSession
	conns     map[*sweepConn]bool
	opened    int    // connections of sweeps
	bound     string // the Redis it is bound to
	anyone    bool   // it takes whoever answers
	let       map[string]int64
	trimmed   []string
	cancelled int
	settled   outbox.LSN // what the source was told
}

// start starts an instance.
func (w *world) start(name string) *instance {
	i := w.instance(name)
	w.launch(i)
	return i
}

func (w *world) launch(i *instance) {
	ctx, cancel := context.WithCancel(context.Background())
	w.do(func() {
		i.cancel, i.done = cancel, make(chan struct{})
		if w.instances = append(w.instances, i); w.closing {
			cancel()
		}
	})
	go func() {
		defer close(i.done)
		i.err = i.relay.Run(ctx)
	}()
}

// instance makes an instance that is not run: its parts are the test's to use.
func (w *world) instance(name string) *instance {
	i := &instance{
		w: w, name: name, cancel: func() {}, dead: make(chan struct{}), conns: map[*sweepConn]bool{}, anyone: true,
		let: map[string]int64{},
	}
	o := w.o
	o.Name, o.Holder, o.Restore = "test", name, RestoreAll
	w.do(func() {
		if o.Prefix = w.prefix; w.spreading > 0 {
			o.Spread = &Spread{Shards: w.spreading, Waiting: func(string) {}}
		}
	})
	o.Store, o.Locks, o.Sink, o.Source, o.Slots = memStore{i}, memLocks{i}, memSink{i}, memSource{i}, memSlots{i}
	o.Sweeper = i.sweeper(memSink{i})
	i.relay = New(o)
	return i
}

// stop stops the instance in order.
func (i *instance) stop() {
	i.cancel()
	<-i.done
}

// stopAll stops every instance in order and returns them. Instances that are started after that stop by themselves.
func (w *world) stopAll() (all []*instance) {
	w.do(func() { w.closing, all = true, w.instances })
	for _, i := range all {
		i.stop()
	}
	return all
}

// lease is how long a server keeps the session of a client that is gone.
const lease = 10 * time.Second

// die kills the process. What it holds on the servers ends at once, or only when they miss it. The caller holds mu.
func (i *instance) die(missedAtOnce bool) {
	if i.isDead() {
		return
	}
	i.w.trace = append(i.w.trace, step{time.Since(i.w.began), i.name, "DIES", nil})
	close(i.dead)
	i.cancel()
	if missedAtOnce {
		i.disconnect()
		return
	}
	i.w.after(lease, i.disconnect)
}

func (i *instance) isDead() bool {
	select {
	case <-i.dead:
		return true
	default:
		return false
	}
}

// disconnect ends on the servers what the instance holds there. The caller holds mu.
func (i *instance) disconnect() {
	if i.session != nil {
		i.session.end()
	}
	for c := range i.conns {
		c.end()
	}
	if s := i.w.pg.slot; s != nil && s.active != nil && s.active.of == i {
		s.active.end()
	}
}

// freeze stops the process for longer than the servers wait for it. When it resumes, it continues where it stopped, and
// learns only a moment later that it lost its locks. The caller holds mu.
func (i *instance) freeze() {
	i.w.trace = append(i.w.trace, step{time.Since(i.w.began), i.name, "FREEZES", nil})
	i.thaw = make(chan struct{})
	i.w.after(lease, i.disconnect)
	s := i.session
	i.w.after(lease+5*time.Second, func() {
		close(i.thaw)
		i.thaw = nil
		i.w.after(time.Second, func() { s.notice() })
	})
}

// after runs f in d, with mu held.
func (w *world) after(d time.Duration, f func()) {
	time.AfterFunc(d, func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		f()
	})
}

var (
	errDead    = errors.New("this process is dead")
	errRefused = errors.New("the call was refused")
	errUnheard = errors.New("the reply was lost")
	errGone    = errors.New("the connection is gone")
)

const (
	// callTime is how long a call is on its way, callLimit how long it may take.
	callTime, callLimit = time.Millisecond, 5 * time.Second
)

// call makes one call of a port: effect is what it does on the server, with mu held. Faults strike here, and nowhere
// else.
func call[T any](ctx context.Context, i *instance, name string, effect func() (T, error)) (v T, err error) {
	w := i.w
	var none T
	kind := i.enter(name)
	defer func() { i.leave(name, err) }()
	if kind == refused {
		return none, errRefused
	}
	on := time.NewTimer(callTime)
	defer on.Stop()
	select {
	case <-i.dead:
		<-on.C // or the clock would stand still while something is repeated that never should be
		return none, errDead
	case <-ctx.Done():
		return none, i.abandon(ctx, func() { _, _ = effect() })
	case <-on.C:
	}
	if kind == late {
		pause.For(ctx, callLimit)
		w.after(2*time.Second, func() { _, _ = effect() })
		return none, context.DeadlineExceeded
	}
	i.awake()
	w.mu.Lock()
	defer w.mu.Unlock()
	if i.isDead() {
		return none, errDead
	}
	v, err = effect()
	switch kind {
	case unheard:
		return none, errUnheard
	case ended:
		i.die(w.counts[name]%2 == 0)
		return none, errDead
	}
	return v, err
}

// command is a call that returns nothing.
func command(ctx context.Context, i *instance, name string, effect func() error) error {
	_, err := call(ctx, i, name, func() (struct{}, error) { return struct{}{}, effect() })
	return err
}

// abandon ends a call whose caller gave up. The server may have received it: every second one takes effect.
func (i *instance) abandon(ctx context.Context, effect func()) error {
	i.w.mu.Lock()
	defer i.w.mu.Unlock()
	if i.cancelled++; i.cancelled%2 == 0 && !i.isDead() {
		effect()
	}
	return ctx.Err()
}

// awake waits while the process is stopped.
func (i *instance) awake() {
	for {
		i.w.mu.Lock()
		thaw := i.thaw
		i.w.mu.Unlock()
		if thaw == nil {
			return
		}
		<-thaw
	}
}

// enter counts a call, and lets the planned fault strike.
func (i *instance) enter(name string) kind {
	i.awake()
	w := i.w
	w.mu.Lock()
	defer w.mu.Unlock()
	n := w.counts[name]
	w.counts[name]++
	if w.plan.kind == none || w.plan.call != name || w.plan.n != n || w.struck || w.calm && w.plan.kind >= flushed {
		return none
	}
	w.struck = true
	w.trace = append(w.trace, step{time.Since(w.began), i.name, "FAULT " + w.plan.String(), nil})
	switch w.plan.kind {
	case killed:
		i.die(n%2 == 0)
		w.after(time.Second, w.replace)
	case ended:
		w.after(time.Second, w.replace)
	case frozen:
		i.freeze()
		w.after(0, w.replace)
	case unlocked:
		if s := i.session; s != nil {
			s.end()
			w.after(2*time.Second, s.notice)
		}
		w.after(0, w.replace)
	case flushed:
		w.rd.flush()
	case dropped:
		for name := range w.rd.streams {
			w.rd.drop(name)
		}
	}
	struck := w.plan.kind
	if len(w.then) > 0 {
		w.plan, w.then, w.struck = w.then[0], w.then[1:], false
		w.plan.n += w.counts[w.plan.call]
	}
	return struck
}

func (i *instance) leave(name string, err error) {
	i.w.mu.Lock()
	defer i.w.mu.Unlock()
	i.w.trace = append(i.w.trace, step{time.Since(i.w.began), i.name, name, err})
}

// replace starts another instance, as an operator does when one is in trouble.
func (w *world) replace() {
	name := fmt.Sprintf("other%d", len(w.instances))
	go func() { w.start(name) }()
}

// kind is how a call goes wrong.
type kind int

const (
	none     kind = iota
	refused       // it fails and does nothing
	unheard       // it does what it should, and the reply is lost
	late          // it is not answered in time, and does what it should when nobody waits any more
	killed        // its process dies
	ended         // it does what it should, and its process dies
	frozen        // its process is stopped until it has lost its locks, and goes on
	unlocked      // the lock session ends, and its process learns of that two seconds later
	flushed       // it goes well, but Redis has just forgotten everything
	dropped       // the same of its streams, not of their gates
)

func (k kind) String() string {
	return [...]string{
		"none", "refused", "unheard", "late", "killed", "ended", "frozen", "unlocked", "flushed", "dropped",
	}[k]
}

// fault is one call that goes wrong: the nth, from 0, of its name.
type fault struct {
	call string
	n    int
	kind kind
}

func (f fault) String() string { return fmt.Sprintf("%s:%d:%s", f.call, f.n, f.kind) }
