package prove

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"

	"posthaste/internal/app"
	"posthaste/internal/cli"
	"posthaste/internal/lab/oracle"
	"posthaste/internal/ops"
	"posthaste/internal/pause"
	"posthaste/outbox"
	"posthaste/sql"
)

// Options configure a campaign.
type Options struct {
	Seed     uint64        `help:"Repeats the plan of a campaign; 0 chooses one." default:"0"`
	Duration time.Duration `help:"How long faults are injected; start and verification come on top." default:"10m"`
	Faults   string        `default:"all"`
	Relays   int           `help:"How many relays run." default:"2"`
	Rate     int           `help:"Events per second." default:"300"`
	JSON     bool          `name:"json" help:"Print JSON instead of tables."`
	Report   string        `help:"Folder for the report as JSON and Markdown, its chart, and the processes' logs."`
	External bool          // see help.txt
	Yes      bool          `help:"Do not ask before playing on these servers."`
	Dir      string        // see help.txt
	PGBin    string        `name:"pg-bin" help:"Folder of the Postgres server's programs." env:"POSTHASTE_PG_BIN"`
	RedisBin string        `help:"The redis-server program." env:"POSTHASTE_REDIS_BIN"`
	Sink     string        `enum:"redis,nats" default:"redis"`
	NatsBin  string        `help:"The nats-server program." env:"POSTHASTE_NATS_BIN"`
}

const (
	// stuckAfter is how long after a fault no event may move; stuckAtLast is the limit until all events flow again,
	// which is longer because a flushed Redis must get many events again.
	stuckAfter  = 3 * time.Minute
	stuckAtLast = 20 * time.Minute
	// flowing is the greatest age of the oldest waiting event at which events count as flowing.
	flowing = 1500 * time.Millisecond
	// steadyFor is how long after a fault a recovery takes at least: before that, its effects may not show yet.
	steadyFor = 2 * time.Second
)

// errBroken ends a campaign early, after a broken promise.
var errBroken = errors.New("a promise is broken")

// campaign is one run.
type campaign struct {
	options Options
	config  app.Config
	log     *slog.Logger
	logs    string // folder of the processes' logs

	stage     *stage
	truth     *oracle.Truth
	pass      *oracle.Pass
	orders    *orders
	writers   *writers
	shop      *shop
	honesty   *honesty
	relays    []*process
	serves    []*process
	consumers []*process
	progress  *cli.Status
	report    *Report

	// ends is when the faults end; nil before they begin.
	ends atomic.Pointer[time.Time]
	// unread are the streams that have groupAway, the group that never reads.
	unread sync.Map
	// forgetting is the time until which Redis may lose data, in nanoseconds since 1970.
	forgetting atomic.Int64
	// troubled reports that a fault is active, or that the system is recovering from one.
	troubled atomic.Bool

	mu     sync.Mutex
	broken *oracle.Breach
	halt   context.CancelCauseFunc
	now    string // the active faults
}

// Run runs a campaign and reports the result. It fails if a promise was broken.
func (options Options) Run(ctx context.Context, config app.Config, o cli.IO) (err error) {
	faults, err := chooseFaults(options.Faults, options.External, options.Sink)
	switch {
	case err != nil:
		return err
	case options.Duration < time.Second || options.Relays < 1 || options.Relays > 8:
		return cli.Usage("--duration must be at least 1s, --relays 1 to 8")
	case options.Rate < 10 || options.Rate > 20_000:
		return cli.Usage("--rate must be 10 to 20000")
	}
	if options.Seed == 0 {
		options.Seed = uint64(time.Now().UnixNano()) % 1_000_000
	}
	c := &campaign{
		options: options, config: config, progress: cli.NewStatus(o.Stderr),
		log: slog.New(slog.NewTextHandler(o.Stderr, &slog.HandlerOptions{Level: max(config.LogLevel, slog.LevelWarn)})),
	}
	if options.External {
		if err := o.Confirm(ctx, options.Yes, c.warning(faults)); err != nil {
			return err
		}
	}
	defer func() {
		if cerr := c.close(ctx); err == nil {
			err = cerr
		}
	}()
	err = c.open(ctx)
	if err == nil {
		err = c.run(ctx, faults)
	}
	if err != nil {
		return err
	}
	return c.tell(o)
}

// open starts the servers and prepares the processes.
func (c *campaign) open(ctx context.Context) (err error) {
	if c.stage, err = openStage(ctx, &c.config, c.options, c.log); err != nil {
		return err
	}
	c.logs = filepath.Join(cmp.Or(c.options.Report, c.stage.dir), "logs")
	if err := os.MkdirAll(c.logs, 0o700); err != nil {
		return fmt.Errorf("make the folder of the report: %w", err)
	}
	began := time.Now()
	c.report = newReport(c, began)
	c.truth = oracle.New(c.options.Seed, began)
	c.pass = oracle.NewPass(c.truth)
	if err := c.processes(ctx); err != nil {
		return err
	}
	l, err := c.stage.link(ctx, "writers", serverPostgres)
	if err != nil {
		return err
	}
	if c.writers, err = newWriters(ctx, c.truth, c.stage.postgresURL(l), c.options.Rate); err != nil {
		return err
	}
	c.orders = newOrders()
	c.shop = newShop(c.orders, c.serves, c.broke)
	c.honesty = &honesty{c: c}
	return c.report.machine(ctx, c)
}

// processes prepares the children.
func (c *campaign) processes(ctx context.Context) error {
	of := func(list *[]*process, n int, name string, args ...string) error {
		for i := range n {
			who := fmt.Sprintf("%s-%d", name, i)
			env, err := c.stage.config(ctx, who, c.config)
			if err != nil {
				return err
			}
			p, err := newProcess(who, c.logs, env, args...)
			if err != nil {
				return err
			}
			*list = append(*list, p)
		}
		return nil
	}
	if _, err := c.stage.pool.Exec(ctx, createEffects); err != nil {
		return err
	}
	return errors.Join(
		of(&c.relays, c.options.Relays, "relay", "relay", "--restore="+oracle.RestoreSpan.String(), "--stream-maxlen=0",
			"--drain-timeout=5s", "--redis-durability="+c.config.RedisDurability.String(), "--wal-budget=256MiB"),
		of(&c.serves, 2, "serve", "serve", "--drain-timeout=5s", "--log-level=error"),
		of(&c.consumers, 2, "consumer", "prove-consumer", "--log-level=error", "--drain-timeout=5s"),
	)
}

// broke notes a broken promise. The first one ends the campaign.
func (c *campaign) broke(b *oracle.Breach) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.broken == nil {
		b.At = time.Now()
		c.broken = b
		if c.halt != nil {
			c.halt(errBroken)
		}
	}
}

// breach returns the first broken promise, or nil.
func (c *campaign) breach() *oracle.Breach {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.broken
}

func (c *campaign) desire(ctx context.Context, mode outbox.Mode) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	if err := sql.Register(ctx, c.stage.pool, c.config.RelayName); err != nil {
		return err
	}
	return sql.SetDesired(ctx, c.stage.pool, c.config.RelayName, mode)
}

// run runs the phases of the campaign: start, rounds, verification.
func (c *campaign) run(ctx context.Context, faults []*fault) error {
	running, halt := context.WithCancelCause(ctx)
	c.halt = halt
	// Reading continues until the end. Writing ends before the verification.
	reading, stopReading := context.WithCancel(context.WithoutCancel(ctx))
	writing, stopWriting := context.WithCancel(running)
	var readers, actors sync.WaitGroup
	defer func() {
		halt(nil)
		stopWriting()
		actors.Wait()
		stopReading()
		readers.Wait()
	}()
	for _, p := range c.all() {
		if err := p.start(); err != nil {
			return err
		}
	}
	readers.Go(func() { c.reader("order", c.orders, c.forgot).run(reading) })
	for _, typ := range types {
		readers.Go(func() { c.reader(typ, typed{c.pass, typ}, c.forgot).run(reading) })
	}
	readers.Go(func() { c.honesty.run(reading) })
	readers.Go(func() { c.report.sample(reading, c) })
	actors.Go(func() { c.writers.run(writing, c.options.Seed) })
	actors.Go(func() { c.shop.run(writing, c.options.Seed) })
	_, err := c.recover(running, time.Now(), outbox.ModeAuto)
	if err == nil {
		c.honesty.begin()
		err = c.rounds(running, faults)
	}
	if running.Err() != nil || c.breach() != nil { // the end of the campaign has caused the error
		err = nil
	}
	stopWriting()
	actors.Wait()
	// An interrupted campaign is verified as well. After a broken promise, the state is reported as it is.
	if err == nil && c.breach() == nil {
		err = c.verify(context.WithoutCancel(ctx))
	}
	c.report.finish(c, ctx.Err() != nil)
	if b := c.breach(); b != nil {
		c.report.Story = c.story(context.WithoutCancel(ctx), b)
	}
	return err
}

func (c *campaign) all() []*process { return slices.Concat(c.relays, c.serves, c.consumers) }

// reader returns a reader of the stream of a type; forgot is that of reader.
func (c *campaign) reader(typ string, b book, forgot func() bool) *reader {
	return &reader{
		stream: c.config.StreamPrefix + typ, book: b, streams: c.stage.streams, broken: c.broke, forgot: forgot,
	}
}

// forgot counts a loss of data by the sink, and reports whether a fault may have caused it.
func (c *campaign) forgot() bool {
	if time.Now().UnixNano() >= c.forgetting.Load() {
		return false
	}
	c.report.mu.Lock()
	defer c.report.mu.Unlock()
	c.report.Counts.Forgot++
	return true
}

// rounds injects faults until the duration has elapsed, ctx ends, or a promise is broken.
func (c *campaign) rounds(ctx context.Context, faults []*fault) error {
	p := newPlan(c.options.Seed, faults)
	end := time.Now().Add(c.options.Duration)
	c.ends.Store(&end)
	mode := outbox.ModeAuto
	for time.Now().Before(end) && ctx.Err() == nil {
		r := p.next()
		if r.Mode != mode {
			if err := c.toMode(ctx, r.Mode); err != nil {
				return err
			}
			mode = r.Mode
		}
		if err := c.play(ctx, r); err != nil {
			return err
		}
		pause.For(ctx, r.rest)
	}
	return nil
}

// toMode switches the mode and waits until it is active.
func (c *campaign) toMode(ctx context.Context, mode outbox.Mode) error {
	began := time.Now()
	c.note("mode " + string(mode))
	for {
		err := c.desire(ctx, mode)
		if err == nil {
			break
		}
		if ctx.Err() != nil || time.Since(began) > stuckAfter {
			return fmt.Errorf("switch to %s: %w", mode, err)
		}
		pause.For(ctx, 200*time.Millisecond)
	}
	_, err := c.recover(ctx, began, mode)
	return err
}

// note records the active faults.
func (c *campaign) note(what string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now = what
}

// play plays a round and waits until all events flow again.
func (c *campaign) play(ctx context.Context, r *round) error {
	c.note(r.names())
	c.troubled.Store(true)
	if r.forgets() {
		c.forgetting.Store(time.Now().Add(time.Hour).UnixNano())
	}
	r.At = time.Now()
	var shots sync.WaitGroup
	errs := make([]error, len(r.Faults))
	for i, s := range r.Faults {
		shots.Go(func() {
			pause.For(ctx, time.Duration(i)*r.gap)
			errs[i] = c.shoot(ctx, s)
		})
	}
	shots.Wait()
	r.Healed = time.Now()
	if err := errors.Join(errs...); err != nil {
		return err
	}
	if slices.ContainsFunc(r.Faults, func(s *shot) bool { return s.fault.touches == touchesMode }) {
		if err := c.toMode(ctx, r.Mode); err != nil {
			return err
		}
	}
	var err error
	r.Recovered, err = c.recover(ctx, r.Healed, r.Mode)
	if err == nil && c.breach() == nil {
		if r.forgets() { // losses are detected by now, except in a stream without new events
			c.forgetting.Store(time.Now().Add(10 * time.Second).UnixNano())
		}
		c.troubled.Store(false)
		c.note("")
	}
	c.report.played(r)
	c.progress.Say("%4d %-9s %-44s recovered in %6.1f s; %s", r.Number, r.Mode, r.names(),
		r.Recovered.Sub(r.Healed).Seconds(), c.left())
	return err
}

func (c *campaign) left() string {
	switch end := c.ends.Load(); {
	case end == nil:
		return c.options.Duration.String() + " to come"
	case time.Until(*end) > 0:
		return time.Until(*end).Round(time.Second).String() + " left"
	}
	return "ending"
}

// shoot injects one fault and heals it. A failed injection is only recorded. A failed healing is an error: the results
// of later rounds would mean nothing.
func (c *campaign) shoot(ctx context.Context, s *shot) error {
	s.At = time.Now()
	inject, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	what, heal, err := s.fault.inject(inject, c, oracle.Random(s.seed, 1))
	s.What = what
	if err != nil {
		s.Failed = ops.OneLine(err)
	}
	if heal == nil {
		return nil
	}
	if err == nil {
		pause.For(ctx, s.hold)
	}
	s.Healed = time.Now()
	// A fault is healed even after the campaign was canceled.
	healing, cancelHealing := context.WithTimeout(context.WithoutCancel(ctx), stuckAfter)
	defer cancelHealing()
	if err := heal(healing); err != nil {
		return fmt.Errorf("heal %s: %w", s.Fault, err)
	}
	return nil
}

// recover waits until all events flow in the desired mode, and returns the time since which they do. If they do not
// flow in time, a promise is broken.
func (c *campaign) recover(ctx context.Context, since time.Time, mode outbox.Mode) (recovered time.Time, err error) {
	for _, p := range c.all() {
		if ended, code := p.ended(); ended {
			c.breaks("exit", uuid.Nil, "", "%s has ended by itself, with exit code %d", p.name, code)
			return time.Now(), errBroken
		}
	}
	moved, seen := since, 0
	for {
		flows, why := c.flows(ctx, since, mode)
		now := time.Now()
		if _, n, _ := c.pass.Counts(); n > seen {
			moved, seen = now, n
		}
		switch {
		case !flows:
			recovered = time.Time{}
		case recovered.IsZero():
			recovered = now
		}
		// The effects of a fault may show only after a moment.
		if flows && now.Sub(since) > steadyFor {
			return recovered, nil
		}
		if !flows && (now.Sub(moved) > stuckAfter || now.Sub(since) > stuckAtLast) {
			c.breaks("stuck", uuid.Nil, "", "%v after the end of the faults %s", now.Sub(since).Round(time.Second), why)
			return now, errBroken
		}
		if err := pause.For(ctx, 50*time.Millisecond); err != nil {
			return now, err
		}
	}
}

// flows reports whether everything committed before since is in the streams, new events arrive there quickly, and the
// desired mode is active. If not, it also returns the reason.
func (c *campaign) flows(ctx context.Context, since time.Time, mode outbox.Mode) (bool, string) {
	oldest, waiting := c.pass.Behind()
	_, _, gone := c.pass.Counts()
	switch {
	case gone > 0 || !oldest.IsZero() && (oldest.Before(since) || time.Since(oldest) > flowing):
		return false, fmt.Sprintf("%d events wait, the oldest for %v", waiting, time.Since(oldest).Round(time.Second))
	case !c.active(ctx, mode):
		return false, fmt.Sprintf("the mode is not %s yet", mode)
	}
	return true, ""
}

func (c *campaign) active(ctx context.Context, mode outbox.Mode) bool {
	want := outbox.ModePoll
	if mode != outbox.ModePoll {
		want = outbox.ModeCDC
	}
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	st, err := sql.ReadState(ctx, c.stage.pool, c.config.RelayName)
	return err == nil && st.Active == want
}

// close stops everything that the campaign started.
func (c *campaign) close(ctx context.Context) error {
	c.progress.End()
	for _, p := range c.all() {
		p.close()
	}
	if c.writers != nil {
		c.writers.pool.Close()
	}
	if c.stage == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
	defer cancel()
	return c.stage.close(ctx)
}
