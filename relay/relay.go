package relay

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"posthaste/internal/pause"
	"posthaste/outbox"
)

// Options are what a Relay needs. A field is required unless its comment gives a default or says that it may be nil.
type Options struct {
	// Name is the relay's name, for logs; the store knows it too.
	Name string
	// Holder names this process in relay_state, for people: host:pid.
	Holder string
	// Prefix is put before the aggregate type to name the stream.
	Prefix string
	// Window and WindowBytes bound what is published by the stream and not yet settled. Default 10,000 and 64 MiB.
	Window, WindowBytes int
	// WALBudget bounds the WAL that the slot may hold back, in bytes. Default 1 GiB.
	WALBudget int64
	// Poison is what happens behind a parked event. Default PoisonSkip.
	Poison Poison
	// DrainTimeout bounds an orderly stop. Default 10 s.
	DrainTimeout time.Duration

	Store   outbox.Store
	Locks   outbox.Locker
	Sink    outbox.Sink
	Source  outbox.Source
	Slots   outbox.Slots
	Sweeper outbox.Sweeper
	// SinkReady, if not nil, reports whether the sink can be written to and has the durability asked for.
	SinkReady func(ctx context.Context) error
	// Observe, if not nil, is called every few seconds by the leader with the known streams, to refresh gauges of the sink.
	Observe func(ctx context.Context, streams []string) error
	// Unobserve, if not nil, is called when this instance leads no more: those gauges are another's to show.
	Unobserve func()
	// OnPublished, if not nil, is told which events a publish brought into a stream, once that is known; in poll mode, after
	// their rows are gone. It is called on the way of the events, from several goroutines: it must not wait for anything.
	OnPublished func(mode outbox.Mode, stream string, events []*outbox.Event)

	// Registerer takes the metrics; nil for none.
	Registerer prometheus.Registerer
	// Logger gets changes of state and what needs a look; nil for none.
	Logger *slog.Logger
}

func (o *Options) defaults() {
	if o.Window <= 0 {
		o.Window = 10_000
	}
	if o.WindowBytes <= 0 {
		o.WindowBytes = 64 << 20
	}
	if o.WALBudget <= 0 {
		o.WALBudget = 1 << 30
	}
	if o.Poison == "" {
		o.Poison = PoisonSkip
	}
	if o.DrainTimeout <= 0 {
		o.DrainTimeout = 10 * time.Second
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
}

// Relay moves events from the table to the streams. It never gives up: whatever is missing or breaks, it names in its
// health, waits, and goes on when it is mended.
type Relay struct {
	*reporter
	o      Options
	window *window
	blocks *blocks // nil unless block-key

	mu    sync.Mutex
	phase phase
	owner outbox.Owner
	since time.Time

	// started is set when the relay has been registered once; from then on Run ends only with its context.
	started bool
	leading atomic.Bool

	keeper *slotKeeper
}

// New returns a relay; Run starts it.
func New(o Options) *Relay {
	o.defaults()
	w := newWindow(o.Window, o.WindowBytes)
	r := &Relay{
		reporter: &reporter{
			log: o.Logger.With("component", "relay"), health: newHealth(), onPublished: o.OnPublished,
			metrics: newMetrics(o.Registerer, func() float64 { n, _ := w.held(); return float64(n) }),
		},
		o: o, window: w, phase: phaseStandby, since: time.Now(),
	}
	if o.Poison == PoisonBlockKey {
		r.blocks = &blocks{}
	}
	r.keeper = &slotKeeper{reporter: r.reporter, store: o.Store, slots: o.Slots, budget: o.WALBudget, phase: r.current, epoch: r.epoch}
	r.health.fail(conditionPostgres, "not connected yet")
	return r
}

// permanent is what waiting cannot mend.
type permanent interface{ Permanent() bool }

// Run relays until ctx ends, then stops in order and returns nil. It returns an error only at the start and only for
// what waiting cannot mend: a second relay name on the table, a schema newer than the binary.
func (r *Relay) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	wctx, stop := context.WithCancel(ctx)
	defer stop()
	wg.Go(func() { r.watchSink(wctx) })
	for ctx.Err() == nil {
		err := r.session(ctx)
		if ctx.Err() != nil {
			break
		}
		var p permanent
		if !r.started && errors.As(err, &p) && p.Permanent() {
			return err
		}
		if err != nil {
			r.log.Warn("relay session ended", "err", err)
		}
		pause.About(ctx, 500*time.Millisecond)
	}
	r.enter(phaseStopped, outbox.ReasonStop)
	return nil
}

// session lives as long as one lock session. What ends it is said until there is another one: a relay that Postgres does
// not answer is no standby.
func (r *Relay) session(ctx context.Context) error {
	if err := r.o.Store.Register(ctx); err != nil {
		return r.unavailable(err)
	}
	r.started = true
	locks, err := r.o.Locks.Open(ctx)
	if err != nil {
		return r.unavailable(err)
	}
	defer locks.Close()
	r.health.clear(conditionPostgres)
	r.health.clear(conditionSchema)
	if err = r.work(ctx, locks); err != nil && ctx.Err() == nil && !errors.Is(err, outbox.ErrSuperseded) {
		return r.unavailable(err)
	}
	return err
}

// work waits for leadership, sweeping along in poll mode, and leads.
func (r *Relay) work(ctx context.Context, locks outbox.LockSession) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	go func() {
		select {
		case <-locks.Lost():
			cancel(errLockLost)
		case <-ctx.Done():
		}
	}()
	for ctx.Err() == nil {
		led, err := locks.TryLead(ctx)
		if err != nil {
			return err
		}
		if led {
			l := &leadership{Relay: r, locks: locks}
			return l.run(ctx)
		}
		if err := r.assist(ctx, locks); err != nil && ctx.Err() == nil {
			return err
		}
	}
	return context.Cause(ctx)
}

const (
	conditionPostgres = "postgres"
	conditionSchema   = "schema"
)

// unavailable notes why there is no session.
func (r *Relay) unavailable(err error) error {
	name, other := conditionPostgres, conditionSchema
	var named interface{ Condition() string }
	if errors.As(err, &named) {
		name, other = named.Condition(), conditionPostgres
	}
	r.health.clear(other)
	r.health.fail(name, err.Error())
	return err
}

var errLockLost = errors.New("the lock session is gone")

// state reads the relay's state, and shows which mode is desired.
func (r *Relay) state(ctx context.Context) (outbox.State, error) {
	st, err := r.o.Store.State(ctx)
	if err == nil {
		r.metrics.setDesired(st.Desired)
	}
	return st, err
}

// assist is one round of a standby: if poll mode is active it sweeps along until the state changes, otherwise it waits a
// little. Either way the caller then tries to lead.
func (r *Relay) assist(ctx context.Context, locks outbox.LockSession) error {
	st, err := r.state(ctx)
	if err != nil {
		return err
	}
	if st.Desired != outbox.ModePoll || st.Active != outbox.ModePoll {
		r.enter(phaseStandby, outbox.ReasonLeadership)
		pause.About(ctx, 500*time.Millisecond)
		return nil
	}
	ok, err := locks.TryPipe(ctx, false)
	if err != nil || !ok {
		pause.About(ctx, 200*time.Millisecond)
		return err
	}
	defer func() { _ = locks.DropPipe(context.WithoutCancel(ctx), false) }()
	// Only what is read after the lock was taken counts.
	if st, err = r.state(ctx); err != nil || st.Desired != outbox.ModePoll || st.Active != outbox.ModePoll {
		return err
	}
	return r.assistSweep(ctx, locks, st)
}

// assistSweep sweeps under the leader's owner until that changes or the leader is gone.
func (r *Relay) assistSweep(ctx context.Context, locks outbox.LockSession, st outbox.State) error {
	// What the leader has adopted under is published to, and nothing else: another server may lack something, which is the
	// leader's to find out.
	server, err := r.o.Sink.Bind(ctx)
	defer r.o.Sink.Release()
	if err != nil || server != st.Sink {
		pause.About(ctx, 200*time.Millisecond)
		return nil //nolint:nilerr // watchSink says it
	}
	r.own(st.Owner)
	r.enter(phasePoll, outbox.ReasonToggle)
	g := newGates(st.Owner, r.o.Sink, r.o.Store)
	err = r.sweepWhile(ctx, g, func(ctx context.Context) (bool, error) {
		now, err := r.state(ctx)
		if err != nil {
			return false, err
		}
		if now.Owner != st.Owner || now.Desired != outbox.ModePoll || now.Active != outbox.ModePoll {
			return false, nil
		}
		// A free leader lock is taken by the caller, after this sweep has ended.
		led, err := locks.TryLead(ctx)
		if err != nil {
			return false, err
		}
		return !led, nil // the caller asks again and gets it again: the lock is held by the session
	})
	r.health.clear("publish") // this instance does not publish now
	if err != nil && finished(err) {
		// The leader adopts anew; until then there is nothing to sweep under.
		r.log.Debug("sweeping along ended", "err", err)
		pause.About(ctx, 200*time.Millisecond)
		return nil
	}
	return err
}

// sweepWhile runs the sweeper until check says no or fails, or the sweeper ends by itself (ErrGap and its like are
// returned). check is asked a few times a second.
func (r *Relay) sweepWhile(ctx context.Context, g *gates, check func(ctx context.Context) (bool, error)) error {
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan error, 1)
	go func() { done <- r.o.Sweeper.Run(ctx, r.scope(g)) }()
	stop := func() error {
		cancel()
		return <-done
	}
	t := time.NewTicker(200 * time.Millisecond)
	defer t.Stop()
	for {
		select {
		case err := <-done:
			cancel()
			return err
		case <-t.C:
		}
		ok, err := check(ctx)
		if err != nil || !ok {
			if serr := stop(); err == nil {
				err = serr
			}
			return err
		}
	}
}

// scope is what a sweep under g works with.
func (r *Relay) scope(g *gates) outbox.Scope {
	return outbox.Scope{
		Owner: g.owner, Ensure: g.ensure, Claimed: r.refreshBlocks, BlockKey: r.blocks != nil, Blocked: r.blocks.blocker,
		Published: func(stream string, events []*outbox.Event, suppressed int) {
			r.published(outbox.ModePoll, stream, events)
		},
		Parked: func(e *outbox.Event, err error) {
			r.blocks.add(e)
			r.parked(e, err)
		},
		Outcome: r.outcome,
	}
}

// refreshBlocks reads which events are parked, for block-key.
func (r *Relay) refreshBlocks(ctx context.Context) error {
	if r.blocks == nil {
		return nil
	}
	return r.blocks.refresh(func() ([]outbox.Dead, error) { return r.o.Store.Parked(ctx) })
}

// own records under which owner this instance acts.
func (r *Relay) own(o outbox.Owner) {
	r.mu.Lock()
	r.owner = o
	r.mu.Unlock()
	r.metrics.epoch.Set(float64(o.Epoch))
}

// epoch is the one this instance acts under.
func (r *Relay) epoch() int64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.owner.Epoch
}

// enter records a phase and logs and counts a change of mode once.
func (r *Relay) enter(p phase, reason string) {
	r.mu.Lock()
	from := r.phase
	r.phase = p
	if from != p {
		r.since = time.Now()
	}
	r.mu.Unlock()
	if from == p {
		return
	}
	r.log.Debug("phase", "from", from, "to", p, "reason", reason)
	// Adopting is a moment between two modes, not a mode.
	if p == phaseAdopt {
		return
	}
	r.metrics.setMode(p.mode())
}

func (r *Relay) current() phase {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.phase
}

// watchSink keeps the sink's part of the health, on leaders and standbys alike.
func (r *Relay) watchSink(ctx context.Context) {
	if r.o.SinkReady == nil {
		return
	}
	for ctx.Err() == nil {
		actx, cancel := context.WithTimeout(ctx, 3*time.Second)
		err := r.o.SinkReady(actx)
		cancel()
		if err != nil && ctx.Err() == nil {
			r.health.fail("redis", err.Error())
		} else {
			r.health.clear("redis")
		}
		pause.For(ctx, time.Second)
	}
}

// Health tells whether events can flow.
func (r *Relay) Health() Health {
	bad, degraded := r.health.lists()
	h := Health{Role: "standby", Ready: len(bad) == 0, Reasons: bad, Degraded: degraded}
	if r.leading.Load() {
		h.Role = "leader"
	} else if h.Ready {
		h.Degraded = nil
	}
	return h
}

// Status is a view of this instance.
type Status struct {
	Mode     outbox.Mode
	Phase    string
	Leader   bool
	Epoch    int64
	Inflight int
	Since    time.Time
}

// Status tells what this instance does now.
func (r *Relay) Status() Status {
	n, _ := r.window.held()
	r.mu.Lock()
	defer r.mu.Unlock()
	return Status{
		Mode: r.phase.mode(), Phase: string(r.phase), Leader: r.leading.Load(), Epoch: r.owner.Epoch, Inflight: n, Since: r.since,
	}
}

func newNonce() outbox.Nonce {
	var n outbox.Nonce
	_, _ = rand.Read(n[:]) // never fails: crypto/rand ends the program instead
	return n
}

// backoff doubles from first to most, with jitter. The zero value starts at first.
type backoff struct {
	first, most, next time.Duration
}

func (b *backoff) wait(ctx context.Context) {
	b.next = min(max(b.next*2, b.first), b.most)
	pause.About(ctx, b.next)
}

func (b *backoff) reset() { b.next = 0 }

// slotReason names the condition behind an error that ended or prevented the stream.
func slotReason(err error) string {
	var se *outbox.SlotError
	var fenced *outbox.FencedError
	switch {
	case err == nil:
		return outbox.ReasonStop
	case errors.As(err, &se):
		return se.Reason
	case errors.Is(err, outbox.ErrMoved):
		return outbox.ReasonRestarted
	case errors.Is(err, outbox.ErrGap):
		return outbox.ReasonGap
	case errors.As(err, &fenced), errors.Is(err, outbox.ErrSuperseded):
		return outbox.ReasonFenced
	default:
		return outbox.ReasonConnection
	}
}

func wrap(step string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s: %w", step, err)
}
