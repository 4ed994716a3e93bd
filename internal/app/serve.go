package app

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"

	"posthaste/api"
	"posthaste/api/admin"
	"posthaste/api/admin/console"
	"posthaste/credits"
	"posthaste/idem"
	"posthaste/internal/cli"
	"posthaste/sink"
	"posthaste/sql"
)

// Serve is what `posthaste serve` runs: the API, the credits, and the admin listener.
type Serve struct {
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

// NewServe builds the API, which connects when it runs. It holds its listeners from here on, so the caller calls
// Run or Close.
func NewServe(ctx context.Context, c Config, log *slog.Logger) (*Serve, error) {
	if c.AdminAddr == "" {
		c.AdminAddr = DefaultServeAdmin
	}
	p := &Serve{config: c, log: log}
	if err := p.build(ctx); err != nil {
		p.Close()
		return nil, err
	}
	return p, nil
}

func (p *Serve) build(ctx context.Context) error {
	c, reg := p.config, newRegistry(p.config.Version)
	p.registry = reg
	poolConfig, err := sql.PoolConfig(c.PostgresURL, c.Schema, "api")
	if err != nil {
		return cli.Usage(err.Error())
	}
	p.traces = setupTracing(ctx, "posthaste-api", c.Version, p.log)
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
		Redis: creditsClient, Pool: p.pool, Durability: c.CreditDurability(), KeyMaxAge: c.KeyMaxAge, Logger: p.log,
		Registerer: reg,
	})
	p.api, err = api.New(api.Options{
		Pool: p.pool, Redis: client, Credits: p.credits, Keys: keys, RateLimit: c.RateLimit, KeyMaxAge: c.KeyMaxAge,
		Logger: p.log, Registerer: reg, Trace: p.traces.requests(),
	})
	if err != nil {
		return err
	}
	slots, err := c.Slots(p.pool, p.log)
	if err != nil {
		return err
	}
	if p.public, err = Listen(ctx, c.HTTPAddr); err != nil {
		return err
	}
	if p.admin, err = Listen(ctx, c.AdminAddr); err != nil {
		return err
	}
	if p.console, err = newConsole(ctx, c, console.Options{Kind: "serve", Gatherer: reg, Logger: p.log}); err != nil {
		return err
	}
	p.server = adminServer(admin.Handler(admin.Options{
		Pool: p.pool, RelayName: c.RelayName, Slots: slots, Ready: p.api.Readyz(), Token: c.AdminToken, Gatherer: reg,
		// The console's client: a question of an operator takes no connection of the API's.
		Console: p.console, Redis: sink.New(sink.Options{Client: p.console.client, Durability: c.Durability}).Ready,
		WALBudget: c.WALBudget,
		Addr:      c.AdminAddr, Bound: p.admin.Addr(), Logger: p.log,
	}))
	return nil
}

// Run serves until ctx ends, and closes everything.
func (p *Serve) Run(ctx context.Context) error {
	return p.config.inTime(ctx, p.log, p.work)
}

func (p *Serve) work(ctx context.Context) error {
	defer p.Close()
	if err := p.checkSchema(ctx); err != nil {
		return err
	}
	p.log.Info("serving", "version", p.config.Version, "http", p.public.Addr().String(), "admin",
		p.admin.Addr().String())
	g, gctx := errgroup.WithContext(ctx)
	g.Go(func() error { return p.api.Run(gctx) })
	g.Go(func() error { return p.credits.Run(gctx) })
	g.Go(func() error {
		return ServeHTTP(gctx, api.NewHTTPServer(p.api.Public()), p.public, p.config.DrainTimeout)
	})
	g.Go(func() error { return p.console.Run(gctx) })
	g.Go(func() error { return ServeHTTP(gctx, p.server, p.admin, p.config.DrainTimeout) })
	return g.Wait()
}

// checkSchema refuses a schema that is newer than the binary. Anything else may come right while it runs.
func (p *Serve) checkSchema(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 3*time.Second)
	defer cancel()
	if err := sql.CheckSchema(ctx, p.pool); errors.Is(err, sql.ErrSchemaNewer) {
		return err
	}
	return nil
}

// PublicAddr returns where the API is bound.
func (p *Serve) PublicAddr() net.Addr { return p.public.Addr() }

// Close frees what NewServe took. It may be called again.
func (p *Serve) Close() {
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
