package consumer

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"posthaste/internal/redisurl"
)

// Consumer is one member of a consumer group. It runs once.
type Consumer struct {
	opt     Options
	client  redis.UniversalClient
	log     *slog.Logger
	metrics *metrics
	handler Handler
	cluster bool
	// self tells this process's turns from those of another one with the same name.
	self string

	queues *queues
	// acks are the entries that are done, for the goroutine that acknowledges them.
	acks    chan *entry
	streams *streams
	leases  *leases
	suspect quarantine
	workers sync.WaitGroup
	outages outages
	dog     *watchdog
	// outageLogged is when an outage of the handlers was last logged, in Unix ns.
	outageLogged atomic.Int64
}

// New checks the options; it does no I/O.
func New(opt Options) (*Consumer, error) {
	if err := opt.validate(); err != nil {
		return nil, err
	}
	m, err := newMetrics(opt.Registerer, opt.Group)
	if err != nil {
		return nil, err
	}
	h := opt.Handler
	for i := len(opt.Middleware) - 1; i >= 0; i-- {
		h = opt.Middleware[i](h)
	}
	_, cluster := opt.Client.(*redis.ClusterClient)
	dog := newWatchdog()
	return &Consumer{
		opt: opt, client: opt.Client, log: opt.Logger, metrics: m, handler: h, cluster: cluster,
		self:    fmt.Sprintf("%016x", rand.Uint64()), //nolint:gosec // a name, not a secret
		queues:  newQueues(opt.Window, opt.ClaimIdle*3/4),
		acks:    make(chan *entry, maxHeld+2*opt.Window), // more than can be held: no worker waits here
		streams: newStreams(opt.Streams), leases: newLeases(), dog: dog,
		outages: outages{log: opt.Logger, metrics: m, dog: dog, runs: map[string]int{}},
	}, nil
}

// Name returns the consumer's name in its group.
func (c *Consumer) Name() string { return c.opt.Consumer }

// ErrDrain means that handlers were still running when the drain timeout had passed. Their events are not acknowledged
// and will be delivered again.
var ErrDrain = errors.New("the drain timeout has passed with handlers still running")

// Run reads until ctx ends, and then stops in order: nothing new begins, running handlers may finish within the drain
// timeout, what is done is acknowledged, and what waits is given back to the group. It returns nil, or ErrDrain; a
// Redis that is gone, at the start or later, only makes it wait.
func (c *Consumer) Run(ctx context.Context) error {
	c.log.Info("consumer started", "consumer", c.opt.Consumer)
	handlerCtx, cancelHandlers := context.WithCancel(context.WithoutCancel(ctx))
	defer cancelHandlers()
	upkeepCtx, stopUpkeep := context.WithCancel(context.WithoutCancel(ctx))
	defer stopUpkeep()

	var intake, upkeep, acking sync.WaitGroup
	intake.Go(func() { c.discover(ctx) })
	intake.Go(func() { c.readers(ctx) })
	intake.Go(func() { every(ctx, c.opt.ClaimIdle/3, c.removeAll) })
	intake.Go(func() { every(ctx, min(5*time.Second, c.opt.ClaimIdle), c.inspectAll) })
	intake.Go(func() { c.watch(ctx) })
	upkeep.Go(func() { c.holdAll(upkeepCtx) })
	last := make(chan struct{}) // closed after the last acknowledgement
	acking.Go(func() { c.acknowledge(upkeepCtx, last) })
	for range c.opt.Workers {
		c.workers.Go(func() { c.work(handlerCtx) })
	}

	<-ctx.Done()
	deadline := time.Now().Add(c.opt.DrainTimeout)
	c.queues.stop()
	c.log.Info("consumer stopping", "held", c.queues.counts().held)
	var err error
	if !waitUntil(&c.workers, deadline) {
		// Their contexts end now; a handler that heeds its context may still return, and one that does not is left
		// behind.
		cancelHandlers()
		if !waitUntil(&c.workers, time.Now().Add(time.Second)) {
			c.log.Error("handlers still running after the drain timeout")
		}
		err = fmt.Errorf("consumer group %q: %w", c.opt.Group, ErrDrain)
	}
	// A reader ends within its block time unless Redis hangs; what it read last is given back with the rest.
	quiet := waitUntil(&intake, later(deadline, time.Second))
	close(last)
	if !waitUntil(&acking, later(deadline, time.Second)) {
		c.log.Warn("acknowledgements lost: the events will be delivered again", "entries", c.queues.counts().unacked)
		quiet = false
	}
	stopUpkeep()
	acking.Wait()
	upkeep.Wait()
	if quiet && err == nil {
		c.giveBack()
	}
	c.log.Info("consumer stopped")
	return err
}

func later(t time.Time, least time.Duration) time.Time {
	if s := time.Now().Add(least); s.After(t) {
		return s
	}
	return t
}

// waitUntil waits for wg, at most until deadline.
func waitUntil(wg *sync.WaitGroup, deadline time.Time) bool {
	done := make(chan struct{})
	go func() { wg.Wait(); close(done) }()
	t := time.NewTimer(time.Until(deadline))
	defer t.Stop()
	select {
	case <-done:
		return true
	case <-t.C:
		return false
	}
}

// every calls f at once and then at every interval until ctx ends.
func every(ctx context.Context, interval time.Duration, f func(ctx context.Context)) {
	t := time.NewTicker(max(interval, time.Millisecond))
	defer t.Stop()
	for ctx.Err() == nil {
		f(ctx)
		select {
		case <-t.C:
		case <-ctx.Done():
		}
	}
}

// outages counts failed calls and logs the first and the end of a row of them, per operation and stream.
type outages struct {
	log     *slog.Logger
	metrics *metrics
	dog     *watchdog

	mu   sync.Mutex
	runs map[string]int
}

// note takes the result of an operation and returns how many times in a row it has failed now.
func (o *outages) note(op, stream string, err error) int {
	key := op + " " + stream
	o.mu.Lock()
	defer o.mu.Unlock()
	n := o.runs[key]
	if err != nil || n > 0 {
		o.dog.called(op, stream, err, time.Now())
	}
	if err == nil {
		if n > 0 {
			delete(o.runs, key)
			o.log.Info("redis answers again", "op", op, "stream", stream, "failures", n)
		}
		return 0
	}
	o.runs[key] = n + 1
	o.metrics.redisErrors.WithLabelValues(op).Inc()
	if n == 0 {
		o.log.Warn("redis call fails, retrying", "op", op, "stream", stream, "err", redisurl.WithAuthRemedy(err))
	}
	return n + 1
}

// reconnect is the wait after the n-th failure in a row of talking to Redis.
func reconnect(n int) time.Duration { return expBackoff(n, 50*time.Millisecond, 2*time.Second) }
