package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"runtime/debug"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"golang.org/x/sync/errgroup"

	"posthaste/api"
	"posthaste/api/admin"
	"posthaste/api/admin/console"
	"posthaste/cdc"
	"posthaste/credits"
	"posthaste/idem"
	"posthaste/internal/cli"
	"posthaste/poll"
	"posthaste/relay"
	"posthaste/sink"
	"posthaste/sql"
)

const (
	defaultServeAdmin = "127.0.0.1:9090"
	defaultRelayAdmin = "127.0.0.1:9091"
	publication       = "posthaste"
)

// listen binds an address. It is the one thing at the start that waiting cannot mend.
func listen(ctx context.Context, addr string) (net.Listener, error) {
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", addr, err)
	}
	return l, nil
}

func newRegistry() *prometheus.Registry {
	reg := prometheus.NewRegistry()
	reg.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	info := prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "posthaste_build_info", Help: "Always 1; the version is the label."}, []string{"version"})
	info.WithLabelValues(version).Set(1)
	reg.MustRegister(info)
	return reg
}

// httpServer runs h on l until ctx ends, then lets what is in flight finish.
func httpServer(ctx context.Context, srv *http.Server, l net.Listener, drain time.Duration) error {
	done := make(chan error, 1)
	go func() { done <- srv.Serve(l) }()
	select {
	case err := <-done:
		return fmt.Errorf("serve on %s: %w", l.Addr(), err)
	case <-ctx.Done():
	}
	sctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), max(drain, time.Second))
	defer cancel()
	if err := srv.Shutdown(sctx); err != nil {
		_ = srv.Close()
	}
	_ = <-done // http.ErrServerClosed
	return nil
}

func adminServer(h http.Handler) *http.Server {
	return &http.Server{Handler: h, ReadHeaderTimeout: 5 * time.Second, ReadTimeout: 15 * time.Second, IdleTimeout: time.Minute}
}

// relayProcess is what `posthaste relay` runs. Tests build it on port 0.
type relayProcess struct {
	config Config
	log    *slog.Logger
	pool   *pgxpool.Pool
	sink   *sink.Sink
	client interface{ Close() error }
	// credits is the sync of balances, which has a client of its own.
	credits       *credits.Sync
	bank          *credits.Bank
	payments      *api.Payments
	creditsClient interface{ Close() error }
	relay         *relay.Relay
	console       *consoleProcess
	registry      *prometheus.Registry
	traces        *tracing
	admin         net.Listener
	server        *http.Server
}

// newRelay builds a relay; it connects when it runs.
func newRelay(ctx context.Context, c Config, log *slog.Logger) (*relayProcess, error) {
	if c.AdminAddr == "" {
		c.AdminAddr = defaultRelayAdmin
	}
	p := &relayProcess{config: c, log: log}
	if err := p.build(ctx); err != nil {
		p.close()
		return nil, err
	}
	return p, nil
}

func (p *relayProcess) build(ctx context.Context) error {
	c, reg := p.config, newRegistry()
	p.registry = reg
	poolConfig, err := sql.RelayPoolConfig(c.PostgresURL, c.Schema)
	if err != nil {
		return cli.Usage(err.Error())
	}
	if p.pool, err = pgxpool.NewWithConfig(ctx, poolConfig); err != nil {
		return err
	}
	reg.MustRegister(newPoolMetrics(p.pool))
	client, server, err := sink.NewBoundClient(c.RedisURL)
	if err != nil {
		return cli.Usage(err.Error())
	}
	p.client = client
	p.sink = sink.New(sink.Options{
		Client: client, Server: server, Source: "/posthaste/" + c.RelayName, PubSub: c.PubSub, Durability: c.Durability, MaxLen: c.StreamMaxlen,
		TrimForce: c.TrimForce, Registerer: reg, Logger: p.log,
	})
	creditsClient, err := credits.NewClient(c.RedisURL)
	if err != nil {
		return cli.Usage(err.Error())
	}
	p.creditsClient = creditsClient
	p.credits = credits.NewSync(credits.SyncOptions{Redis: creditsClient, Pool: p.pool, Logger: p.log, Registerer: reg})
	// Without an age for keys: what it repeats or takes back is old by nature.
	p.bank = credits.New(credits.Options{
		Redis: creditsClient, Pool: p.pool, Durability: creditDurability(c.Durability), Logger: p.log, Registerer: reg,
	})
	p.payments = api.NewPayments(api.PaymentsOptions{Pool: p.pool, Credits: p.bank, Logger: p.log, Registerer: reg})
	slots, err := cdc.NewSlots(cdc.SlotsOptions{Pool: p.pool, Schema: c.Schema, Slot: c.Slot, Publication: publication, Logger: p.log})
	if err != nil {
		return err
	}
	reader, err := cdc.NewReader(cdc.ReaderOptions{
		URL: c.PostgresURL, Schema: c.Schema, Slot: c.Slot, Publication: publication, Registerer: reg, Logger: p.log,
	})
	if err != nil {
		return err
	}
	sweeper := poll.New(poll.Options{
		URL: c.PostgresURL, Schema: c.Schema, Prefix: c.StreamPrefix, Workers: c.SweepWorkers, History: c.History > 0, Sink: p.sink,
		Registerer: reg, Logger: p.log,
	})
	p.traces = setupTracing(ctx, "posthaste-relay", p.log)
	p.relay = relay.New(relay.Options{
		Name: c.RelayName, Holder: holder(), Prefix: c.StreamPrefix, Window: c.Window, WindowBytes: c.WindowBytes, WALBudget: c.WALBudget,
		Poison: c.Poison, DrainTimeout: c.DrainTimeout, Store: sql.NewStore(p.pool, c.RelayName, c.History),
		Locks: sql.NewLocks(c.PostgresURL, c.Schema, p.log), Sink: p.sink, Source: reader, Slots: slots, Sweeper: sweeper,
		SinkReady: p.sink.Ready, Observe: p.sink.Observe, Unobserve: p.sink.Unobserve, OnPublished: p.traces.onPublished(), Registerer: reg, Logger: p.log,
	})
	if p.admin, err = listen(ctx, c.AdminAddr); err != nil {
		return err
	}
	if p.console, err = newConsole(ctx, c, console.Options{Kind: "relay", Relay: p.relay, Gatherer: reg, Logger: p.log}); err != nil {
		return err
	}
	p.server = adminServer(admin.Handler(admin.Options{
		Pool: p.pool, RelayName: c.RelayName, Slots: slots, Relay: p.relay, Ready: admin.RelayReady(p.relay), Token: c.AdminToken,
		Gatherer: reg, Console: p.console, WALBudget: c.WALBudget, Addr: c.AdminAddr, Bound: p.admin.Addr(), Logger: p.log,
	}))
	return nil
}

// holder names this process for people.
func holder() string {
	host, err := os.Hostname()
	if err != nil {
		host = "unknown"
	}
	return fmt.Sprintf("%s:%d", host, os.Getpid())
}

// inTime runs work until ctx ends, and then no longer than the drain timeout: a server that does not answer would hold up the
// end by one timeout after the other. What is left to the end of the process is what a crash would leave.
func (c Config) inTime(ctx context.Context, log *slog.Logger, work func(ctx context.Context) error) error {
	done := make(chan error, 1)
	go func() { done <- work(ctx) }()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
	}
	select {
	case err := <-done:
		return err
	case <-time.After(max(c.DrainTimeout, time.Second)):
		log.Warn("not everything has stopped within the drain timeout; ending all the same")
		return nil
	}
}

// run relays until ctx ends.
func (p *relayProcess) run(ctx context.Context) error {
	return p.config.inTime(ctx, p.log, p.work)
}

func (p *relayProcess) work(ctx context.Context) error {
	defer p.close()
	// The relay's memory is bounded by its window; without a limit the collector lets the heap grow to twice that.
	if os.Getenv("GOMEMLIMIT") == "" {
		debug.SetMemoryLimit(int64(p.config.WindowBytes) + 96<<20)
	}
	p.log.Info("relay starting", "version", version, "relay", p.config.RelayName, "slot", p.config.Slot, "admin", p.admin.Addr().String())
	g, gctx := errgroup.WithContext(ctx)
	actx, stopAdmin := context.WithCancel(context.WithoutCancel(ctx))
	defer stopAdmin()
	g.Go(func() error {
		defer stopAdmin() // last: readiness stays visible while the relay drains
		return p.relay.Run(gctx)
	})
	g.Go(func() error { return p.credits.Run(gctx) })
	g.Go(func() error { return p.bank.Run(gctx) })
	g.Go(func() error { return p.payments.Run(gctx) })
	g.Go(func() error { return p.console.Run(actx) })
	g.Go(func() error { return httpServer(actx, p.server, p.admin, time.Second) })
	return g.Wait()
}

func (p *relayProcess) close() {
	defer p.traces.shutdown() // last, because it may wait for a collector
	if p.admin != nil {
		_ = p.admin.Close()
	}
	if p.client != nil {
		_ = p.client.Close()
	}
	if p.creditsClient != nil {
		_ = p.creditsClient.Close()
	}
	p.console.close()
	if p.pool != nil {
		p.pool.Close()
	}
}

// serveProcess is what `posthaste serve` runs. Tests build it on port 0.
type serveProcess struct {
	config Config
	log    *slog.Logger
	pool   *pgxpool.Pool
	client interface{ Close() error }
	// credits has a client of its own: it waits longer, and nothing may be resent.
	credits       *credits.Bank
	creditsClient interface{ Close() error }
	api           *api.Server
	console       *consoleProcess
	registry      *prometheus.Registry
	traces        *tracing
	public        net.Listener
	admin         net.Listener
	server        *http.Server
}

// newServe builds the API; it connects when it runs.
func newServe(ctx context.Context, c Config, log *slog.Logger) (*serveProcess, error) {
	if c.AdminAddr == "" {
		c.AdminAddr = defaultServeAdmin
	}
	p := &serveProcess{config: c, log: log}
	if err := p.build(ctx); err != nil {
		p.close()
		return nil, err
	}
	return p, nil
}

func (p *serveProcess) build(ctx context.Context) error {
	c, reg := p.config, newRegistry()
	p.registry = reg
	poolConfig, err := sql.PoolConfig(c.PostgresURL, c.Schema, "api")
	if err != nil {
		return cli.Usage(err.Error())
	}
	p.traces = setupTracing(ctx, "posthaste-api", p.log)
	poolConfig.ConnConfig.Tracer = p.traces.queries()
	if p.pool, err = pgxpool.NewWithConfig(ctx, poolConfig); err != nil {
		return err
	}
	reg.MustRegister(newPoolMetrics(p.pool))
	client, err := idem.NewClient(c.RedisURL)
	if err != nil {
		return cli.Usage(err.Error())
	}
	p.client = client
	var keys *api.Keys
	if c.AuthKeys {
		if keys, err = api.LoadKeys(c.AuthKeysFile); err != nil {
			return cli.Usage(err.Error())
		}
	}
	creditsClient, err := credits.NewClient(c.RedisURL)
	if err != nil {
		return cli.Usage(err.Error())
	}
	p.creditsClient = creditsClient
	p.credits = credits.New(credits.Options{
		Redis: creditsClient, Pool: p.pool, Durability: creditDurability(c.Durability), KeyMaxAge: c.KeyMaxAge, Logger: p.log, Registerer: reg,
	})
	p.api, err = api.New(api.Options{
		Pool: p.pool, Redis: client, Credits: p.credits, Keys: keys, RateLimit: c.RateLimit, KeyMaxAge: c.KeyMaxAge, Logger: p.log, Registerer: reg,
		Trace: p.traces.requests(),
	})
	if err != nil {
		return err
	}
	slots, err := cdc.NewSlots(cdc.SlotsOptions{Pool: p.pool, Schema: c.Schema, Slot: c.Slot, Publication: publication, Logger: p.log})
	if err != nil {
		return err
	}
	if p.public, err = listen(ctx, c.HTTPAddr); err != nil {
		return err
	}
	if p.admin, err = listen(ctx, c.AdminAddr); err != nil {
		return err
	}
	if p.console, err = newConsole(ctx, c, console.Options{Kind: "serve", Gatherer: reg, Logger: p.log}); err != nil {
		return err
	}
	p.server = adminServer(admin.Handler(admin.Options{
		Pool: p.pool, RelayName: c.RelayName, Slots: slots, Ready: p.api.Readyz(), Token: c.AdminToken, Gatherer: reg, Console: p.console,
		Redis: sink.New(sink.Options{Client: client}).Ready, WALBudget: c.WALBudget,
		Addr: c.AdminAddr, Bound: p.admin.Addr(), Logger: p.log,
	}))
	return nil
}

// run serves until ctx ends.
func (p *serveProcess) run(ctx context.Context) error {
	return p.config.inTime(ctx, p.log, p.work)
}

func (p *serveProcess) work(ctx context.Context) error {
	defer p.close()
	if err := p.checkSchema(ctx); err != nil {
		return err
	}
	p.log.Info("serving", "version", version, "http", p.public.Addr().String(), "admin", p.admin.Addr().String())
	g, gctx := errgroup.WithContext(ctx)
	g.Go(func() error { return p.api.Run(gctx) })
	g.Go(func() error { return p.credits.Run(gctx) })
	g.Go(func() error {
		return httpServer(gctx, api.NewHTTPServer(p.api.Public()), p.public, p.config.DrainTimeout)
	})
	g.Go(func() error { return p.console.Run(gctx) })
	g.Go(func() error { return httpServer(gctx, p.server, p.admin, p.config.DrainTimeout) })
	return g.Wait()
}

// checkSchema refuses a schema that is newer than the binary. Anything else may mend itself.
func (p *serveProcess) checkSchema(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 3*time.Second)
	defer cancel()
	if err := sql.CheckSchema(ctx, p.pool); errors.Is(err, sql.ErrSchemaNewer) {
		return err
	}
	return nil
}

func (p *serveProcess) close() {
	defer p.traces.shutdown() // last, because it may wait for a collector
	for _, l := range []net.Listener{p.public, p.admin} {
		if l != nil {
			_ = l.Close()
		}
	}
	if p.client != nil {
		_ = p.client.Close()
	}
	if p.creditsClient != nil {
		_ = p.creditsClient.Close()
	}
	p.console.close()
	if p.pool != nil {
		p.pool.Close()
	}
}

type serveCmd struct{}

// Run serves until a signal.
func (serveCmd) Run(ctx context.Context, e *env) error {
	p, err := newServe(ctx, e.config, e.config.logger())
	if err != nil {
		return err
	}
	return p.run(ctx)
}

type relayCmd struct{}

// Run relays until a signal.
func (relayCmd) Run(ctx context.Context, e *env) error {
	p, err := newRelay(ctx, e.config, e.config.logger())
	if err != nil {
		return err
	}
	err = p.run(ctx)
	if errors.Is(err, context.Canceled) {
		return nil
	}
	return err
}
