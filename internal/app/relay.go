package app

import (
	"cmp"
	"context"
	"log/slog"
	"os"
	"runtime/debug"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"

	"posthaste/api"
	"posthaste/api/admin"
	"posthaste/cdc"
	"posthaste/credits"
	"posthaste/internal/cli"
	"posthaste/internal/pause"
	"posthaste/internal/tlsfile"
	"posthaste/relay"
	"posthaste/relay/sweep"
	"posthaste/sink"
	"posthaste/sql"
)

// Relay is what `posthaste relay` runs: the relay, the admin listener, and, in a database that has the tables of the
// shop, the sync of credits and payments.
type Relay struct {
	process

	credits  *credits.Sync
	bank     *credits.Bank
	payments *api.Payments
	relay    *relay.Relay
	// spread is relay.Options.Spread.
	spread *relay.Spread
}

// NewRelay builds a relay, which connects in Run. It has bound its listener, so the caller must call Run or Close.
func NewRelay(ctx context.Context, c Config, log *slog.Logger) (*Relay, error) {
	c.AdminAddr = cmp.Or(c.AdminAddr, defaultRelayAdmin)
	p := &Relay{process: newProcess(c, log)}
	err := p.build(ctx)
	if err == nil {
		err = p.listen(ctx, "relay", p.relay, admin.RelayReady(p.relay))
	}
	if err != nil {
		p.Close()
		return nil, err
	}
	return p, nil
}

// Spread changes how many streams a type has. It runs a relay that does only that, and returns when it has finished
// or ctx ends. It calls waiting with the reason of each wait.
func Spread(ctx context.Context, c Config, log *slog.Logger, shards int, waiting func(why string)) error {
	p := &Relay{process: newProcess(c, log), spread: &relay.Spread{Shards: shards, Waiting: waiting}}
	defer p.Close()
	if err := p.build(ctx); err != nil {
		return err
	}
	if err := p.relay.Run(ctx); err != nil {
		return err
	}
	return context.Cause(ctx)
}

func (p *Relay) build(ctx context.Context) error {
	c, reg := p.config, p.registry
	c.useTLS(p.log, reg, tlsfile.Collector{})
	poolConfig, err := sql.RelayPoolConfig(c.PostgresURL, c.Schema)
	if err != nil {
		return cli.Usage(err.Error())
	}
	if err := p.connect(ctx, poolConfig); err != nil {
		return err
	}
	events, err := p.publishTo(ctx)
	if err != nil {
		return err
	}
	p.names()
	slots, err := c.Slots(p.pool, p.log)
	if err != nil {
		return err
	}
	reader, err := cdc.NewReader(cdc.Options{
		URL: c.PostgresURL, Pool: p.pool, Schema: c.Schema, Slot: c.Slot, Publication: c.Publication, Registerer: reg,
		Logger: p.log,
	})
	if err != nil {
		return err
	}
	sweeper := sweep.New(sweep.Options{
		Open: func(ctx context.Context) (sweep.Conn, error) {
			return sql.OpenSweep(ctx, c.PostgresURL, c.Schema, c.RelayName)
		},
		Workers: c.SweepWorkers, Sink: events, Logger: p.log,
	})
	p.traces = setupTracing(ctx, "posthaste-relay", c.Version, p.log)
	p.relay = relay.New(relay.Options{
		Name: c.RelayName, Holder: holder(), Prefix: c.StreamPrefix, Spread: p.spread,
		Window: c.Window, WindowBytes: c.WindowBytes, WALBudget: c.WALBudget, Poison: c.Poison, Restore: c.Restore,
		DrainTimeout: c.DrainTimeout,
		Store:        sql.NewStore(p.pool, c.RelayName, c.History), Locks: sql.NewLocks(c.PostgresURL, c.Schema, p.log),
		Sink: events, Source: reader, Slots: slots, Sweeper: sweeper, SinkName: c.sinkName(), SinkReady: events.ready,
		Observe: events.observe, Unobserve: events.unobserve, OnPublished: p.traces.onPublished(c.sinkName()),
		Registerer: reg, Logger: p.log, Migrate: p.migrate(),
	})
	return nil
}

func (p *Relay) publishTo(ctx context.Context) (events sinks, err error) {
	c := p.config
	if c.SinkURL != "" {
		if events, err = c.natsSink(p.registry); err == nil {
			p.closers = append(p.closers, events.close)
		}
		return events, err
	}
	options, err := c.redisOptions(ctx, c.RedisURL)
	if err != nil {
		return events, err
	}
	client, server := sink.NewBoundClient(options)
	p.closes(client)
	commands(client)
	redis := sink.New(sink.Options{
		Client: client, Server: server, Source: c.EntrySource(), Shared: c.SharedStreams.On(), PubSub: c.Pubsub.On(),
		ChannelPrefix: c.ChannelPrefix, Durability: c.RedisDurability, MaxLen: c.StreamMaxlen,
		TrimForce: c.Trim == "force", Registerer: p.registry, Logger: p.log,
	})
	return sinks{Sink: redis, ready: redis.Ready, observe: redis.Observe, unobserve: redis.Unobserve}, nil
}

// migrate returns a function that applies the migrations of the outbox; nil if the settings do not want that.
func (p *Relay) migrate() func(ctx context.Context) error {
	c := p.config
	if !c.MigrateFirst {
		return nil
	}
	return func(ctx context.Context) error {
		applied, err := sql.MigrateFor(ctx, c.PostgresURL, c.Schema, c.RelayName, p.log, sql.OutboxLines()...)
		for _, a := range applied {
			p.log.Info("migration applied", "line", a.Line, "version", a.Version)
		}
		return err
	}
}

// names exports the names of the database: one Prometheus may scrape the relays of several.
func (p *Relay) names() {
	info := prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "outbox_relay_info",
		Help: "Always 1; the labels are the source field of the database's entries, and whether it shares its streams.",
	}, []string{"source", "shared"})
	info.WithLabelValues(p.config.EntrySource(), strconv.FormatBool(p.config.SharedStreams.On())).Set(1)
	p.registry.MustRegister(info)
}

// buildCredits builds the parts of the relay for the shop, and registers their metrics.
func (p *Relay) buildCredits(ctx context.Context) error {
	client, connections, err := p.config.CreditsClient(ctx)
	if err != nil {
		return err
	}
	p.closes(client)
	p.credits = credits.NewSync(credits.SyncOptions{
		Redis: client, Pool: p.pool, Logger: p.log, Registerer: p.registry,
	})
	// No maximum age of keys: the operations that it repeats or reverts are old.
	p.bank = credits.New(credits.Options{
		Redis: client, Connections: connections, Pool: p.pool, Durability: p.config.CreditDurability(), Logger: p.log,
		Registerer: p.registry,
	})
	p.payments = api.NewPayments(api.PaymentsOptions{
		Pool: p.pool, Credits: p.bank, Logger: p.log, Registerer: p.registry,
	})
	return nil
}

// Run relays until ctx ends, and closes everything.
func (p *Relay) Run(ctx context.Context) error {
	return p.inTime(ctx, p.work)
}

func (p *Relay) work(ctx context.Context) error {
	defer p.Close()
	// The relay's memory is bounded by its window; without a limit the garbage collector lets the heap grow to twice
	// that.
	if os.Getenv("GOMEMLIMIT") == "" {
		debug.SetMemoryLimit(int64(p.config.WindowBytes) + 96<<20)
	}
	p.log.Info("relay starting", "version", p.config.Version, "relay", p.config.RelayName, "slot", p.config.Slot,
		"admin", p.admin.Addr().String())
	g, gctx := errgroup.WithContext(ctx)
	actx, stopAdmin := context.WithCancel(context.WithoutCancel(ctx))
	defer stopAdmin()
	g.Go(func() error {
		defer stopAdmin() // last: readiness stays visible while the relay drains
		return p.relay.Run(gctx)
	})
	g.Go(func() error { return p.shop(gctx) })
	g.Go(func() error {
		p.notify(gctx, func(context.Context) []string {
			if h := p.relay.Health(); !h.Ready {
				return append(h.Reasons, "starting")
			}
			return nil
		})
		return nil
	})
	g.Go(func() error { return p.runConsole(actx) })
	g.Go(func() error { return ServeHTTP(actx, p.server, p.admin, time.Second) })
	return g.Wait()
}

// shopInterval is how often a relay checks whether its database has the tables of the shop.
const shopInterval = 5 * time.Second

// shop waits until the database has the tables of the shop. Then it runs the sync of credits, and payments.
func (p *Relay) shop(ctx context.Context) error {
	for {
		if there, err := sql.HasLine(ctx, p.pool, sql.LineShop); err == nil && there {
			break
		}
		if err := pause.For(ctx, shopInterval); err != nil {
			return nil //nolint:nilerr // stopping
		}
	}
	if err := p.buildCredits(ctx); err != nil {
		return err
	}
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return p.credits.Run(ctx) })
	g.Go(func() error { return p.bank.Run(ctx) })
	g.Go(func() error { return p.payments.Run(ctx) })
	return g.Wait()
}

// RunWithoutCredits relays until ctx ends, without the sync of credits: on a shared Redis the sync would book the
// operations of other databases into this one. The caller calls Close.
func (p *Relay) RunWithoutCredits(ctx context.Context) error {
	g, gctx := errgroup.WithContext(ctx)
	g.Go(func() error { return p.relay.Run(gctx) })
	g.Go(func() error { return ServeHTTP(gctx, p.server, p.admin, time.Second) })
	return g.Wait()
}

func (p *Relay) Status() relay.Status { return p.relay.Status() }

// Health returns why the relay is not ready, or degraded.
func (p *Relay) Health() relay.Health { return p.relay.Health() }
