package relay

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"posthaste/internal/pause"
	"posthaste/outbox"
	"posthaste/relay/stream"
	"posthaste/relay/sweep"
)

const (
	// publishTimeout bounds one attempt to publish a batch, or one other call of the sink.
	publishTimeout = 5 * time.Second
	// patience is how long something may fail before readiness reports it.
	patience = 5 * time.Second
	// withoutSink is the pause before an instance that does not reach the sink tries to lead: others may reach it.
	withoutSink = 2 * time.Second
)

// Options are the options of a Relay. A field is required unless its comment gives a default or allows nil.
type Options struct {
	// Name is the relay's name, for logs. The store is configured with the same name.
	Name string
	// Holder names this process in relay_state, for people: host:pid.
	Holder string
	// Prefix is put before the aggregate type to name the stream. If streams have another prefix so far, the leader
	// changes it when everything published is settled.
	Prefix string
	// Spread, if not nil, makes this a relay that only changes how many streams a type has: Run returns when that is
	// done.
	Spread *Spread
	// Window and WindowBytes bound the events that the stream has routed and not yet settled. Default 10,000 and
	// 64 MiB.
	Window, WindowBytes int
	// WALBudget bounds the WAL that the slot may hold back, in bytes. Default 1 GiB.
	WALBudget int64
	// Poison is the policy for events after a parked event of the same aggregate. Default PoisonSkip.
	Poison Poison
	// Restore bounds the age of the lost events that an adoption restores, counted back from the adoption. 0 restores
	// nothing, RestoreAll everything that history has.
	Restore time.Duration
	// DrainTimeout bounds an orderly stop. Default 10 s.
	DrainTimeout time.Duration

	// Migrate, if not nil, migrates the table before the relay uses it. It is repeated until it succeeds once.
	Migrate func(ctx context.Context) error

	Store   Store
	Locks   outbox.Locker
	Sink    stream.Sink
	Source  outbox.Source
	Slots   outbox.Slots
	Sweeper *sweep.Sweeper
	// SinkName is the name of the sink's condition in the health, redis or nats. Default redis.
	SinkName string
	// SinkReady, if not nil, reports whether the sink accepts writes and provides the configured durability.
	SinkReady func(ctx context.Context) error
	// Observe, if not nil, is called every few seconds by the leader with the known streams, to refresh gauges of the
	// sink.
	Observe func(ctx context.Context, streams []string) error
	// Unobserve, if not nil, is called when this instance no longer leads, because another instance then shows those
	// gauges.
	Unobserve func()
	// OnPublished, if not nil, is called with the events that a publish has added to a stream, once that is known; in
	// poll mode, after they are settled. It is called while events are published, from several goroutines, and must not
	// block.
	OnPublished func(mode outbox.Mode, stream string, events []*outbox.Record)

	// Registerer receives the metrics; nil for none.
	Registerer prometheus.Registerer
	// Logger receives changes of state and problems that need attention; nil for none.
	Logger *slog.Logger
}

func (o *Options) defaults() {
	o.Window = cmp.Or(o.Window, 10_000)
	o.WindowBytes = cmp.Or(o.WindowBytes, 64<<20)
	o.WALBudget = cmp.Or(o.WALBudget, 1<<30)
	o.Poison = cmp.Or(o.Poison, PoisonSkip)
	o.DrainTimeout = cmp.Or(o.DrainTimeout, 10*time.Second)
	o.SinkName = cmp.Or(o.SinkName, conditionRedis)
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
}

// Relay moves events from the table to the streams. It never gives up: it reports in its health what is missing or
// broken, waits, and continues when the problem is solved.
type Relay struct {
	*reporter
	o        Options
	window   *window
	activity *activity
	sweeps   *sweeps
	keeper   *slotKeeper
	// id identifies this process in its signs of life.
	id string
	// started is set when the relay has once been registered and had a lock session. Then Run ends only with its
	// context.
	started bool
}

// New returns a relay; Run starts it. Here the parts that live as long as the relay are joined.
func New(o Options) *Relay {
	o.defaults()
	w := newWindow(o.Window, o.WindowBytes)
	rep := &reporter{
		log: o.Logger.With("component", "relay"), health: newHealth(o.SinkName), onPublished: o.OnPublished,
		metrics: newMetrics(o.Registerer, func() float64 { n, _ := w.inflight(); return float64(n) }),
	}
	if o.Poison == PoisonBlockKey {
		rep.blocks = newBlocks()
	}
	rep.health.fail(conditionPostgres, "not connected yet")
	act := &activity{reporter: rep, store: o.Store, phase: phaseStandby, since: time.Now()}
	sw := &sweeps{reporter: rep, store: o.Store, sweeper: o.Sweeper}
	r := &Relay{reporter: rep, o: o, window: w, activity: act, sweeps: sw, id: newNonce().String()}
	r.keeper = &slotKeeper{Relay: r, mu: make(callLock, 1)}
	return r
}

// newLeadership joins the parts that live as long as one holding of the leader lock.
func (r *Relay) newLeadership(locks outbox.LockSession) *leadership {
	return &leadership{
		Relay: r, locks: locks, reconciler: &reconciler{Relay: r},
		housekeeper: &housekeeper{Relay: r, backlog: time.Now().Add(backlogInterval)},
		partial:     pause.Backoff{First: time.Second, Most: 30 * time.Second},
	}
}

// newStream joins the parts that live as long as one run of the slot reader, under the owner of g.
func (r *Relay) newStream(g *gates, begin func(context.Context) (outbox.Pass, error),
	guard func(context.Context, bool) error,
) *streaming {
	chunks := make(chan outbox.Chunk, 4)
	tr := &tracker{}
	ro := &router{
		reporter: r.reporter, horizons: r.o.Store, dead: r.o.Store, sink: r.o.Sink, gates: g, window: r.window,
		tracker: tr, chunks: chunks, workers: map[string]*worker{},
	}
	s := &streaming{
		Relay: r, begin: begin, guard: guard, chunks: chunks, router: ro, owner: make(callLock, 1),
		settler: &settler{
			reporter: r.reporter, store: r.o.Store, sink: r.o.Sink, source: r.o.Source, gates: g, window: r.window,
			router: ro, tracker: tr, begun: make(chan struct{}), ended: make(chan struct{}), stuck: map[string]error{},
			probes: make(chan struct{}, probesAtOnce),
		},
	}
	s.auditor = &auditor{reporter: r.reporter, store: r.o.Store, progress: s.progress}
	return s
}

// Run relays until ctx ends, then stops in order and returns nil. It returns an error only at the start and only for a
// problem that waiting cannot solve: a second relay name on the table, a schema newer than the binary, or a pooler that
// gives no session. With Options.Spread it also returns an error if a type cannot have so many streams.
func (r *Relay) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	wctx, stop := context.WithCancel(ctx)
	defer stop()
	wg.Go(func() { r.watchSink(wctx) })
	dog := &watchdog{reporter: r.reporter, store: r.o.Store, activity: r.activity, leads: r.o.Spread == nil}
	wg.Go(func() { dog.run(wctx) })
	if r.o.Spread != nil {
		wg.Go(func() { r.troubles(wctx) })
	}
	for ctx.Err() == nil {
		err := r.session(ctx)
		if ctx.Err() != nil {
			break
		}
		if r.o.Spread != nil && r.o.Spread.done {
			return r.o.Spread.err
		}
		var p interface{ Permanent() bool } // waiting does not mend it
		if !r.started && errors.As(err, &p) && p.Permanent() {
			return err
		}
		if err != nil {
			r.sessionEnded(err)
		}
		pause.About(ctx, 500*time.Millisecond)
	}
	r.activity.enter(phaseStopped, outbox.ReasonStop)
	return nil
}

// session lasts as long as one lock session. Health keeps the reason for its end until the next session begins, because
// a relay that cannot reach Postgres is not a standby.
func (r *Relay) session(ctx context.Context) error {
	if r.o.Migrate != nil && !r.started {
		if err := r.o.Migrate(ctx); err != nil {
			return r.unavailable(err)
		}
	}
	if err := r.o.Store.Register(ctx); err != nil {
		return r.unavailable(err)
	}
	locks, err := r.o.Locks.Open(ctx)
	if err != nil {
		return r.unavailable(err)
	}
	r.started = true
	defer locks.Close()
	r.health.clear(conditionPostgres)
	r.health.clear(conditionSchema)
	if err = r.work(ctx, locks); err != nil && ctx.Err() == nil && !superseded(err) {
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
		if r.health.failing(r.health.sink) {
			if pause.About(ctx, withoutSink) != nil {
				break
			}
		}
		led, err := locks.TryLead(ctx)
		if err != nil {
			return err
		}
		if led {
			return r.newLeadership(locks).run(ctx)
		}
		if err := r.assist(ctx, locks); err != nil && ctx.Err() == nil {
			return err
		}
	}
	return context.Cause(ctx)
}

// unavailable reports why there is no session.
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
			r.health.fail(r.health.sink, err.Error())
		} else {
			r.health.clear(r.health.sink)
		}
		pause.Tick(ctx, time.Second)
	}
}

// Health reports whether events can flow.
func (r *Relay) Health() Health {
	bad, degraded := r.health.lists()
	h := Health{Role: "standby", Ready: len(bad) == 0, Reasons: bad, Degraded: degraded}
	if r.activity.leading.Load() {
		h.Role = "leader"
	} else if h.Ready {
		h.Degraded = nil
	}
	return h
}

// Status reports the current mode, phase and role of this instance.
func (r *Relay) Status() Status {
	st := r.activity.status()
	st.Inflight, _ = r.window.inflight()
	return st
}
