package app

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"net"
	"time"

	"golang.org/x/sync/errgroup"

	"posthaste/api"
	"posthaste/credits"
	"posthaste/idem"
	"posthaste/internal/cli"
	"posthaste/internal/tlsfile"
	"posthaste/sql"
)

// Serve is what `posthaste serve` runs: the API, the credits, and the admin listener.
type Serve struct {
	process

	credits *credits.Bank
	api     *api.Server
	// keys is nil without authentication.
	keys   *api.Keys
	public net.Listener
}

// NewServe builds the API, which connects in Run. It has bound its listeners, so the caller must call Run or Close.
func NewServe(ctx context.Context, c Config, log *slog.Logger) (*Serve, error) {
	c.AdminAddr = cmp.Or(c.AdminAddr, defaultServeAdmin)
	p := &Serve{process: newProcess(c, log)}
	if err := p.build(ctx); err != nil {
		p.Close()
		return nil, err
	}
	return p, nil
}

func (p *Serve) build(ctx context.Context) error {
	c, reg := p.config, p.registry
	c.useTLS(p.log, reg, tlsfile.Collector{"http": c.HTTPTLS})
	poolConfig, err := sql.OrderPoolConfig(c.PostgresURL, c.Schema)
	if err != nil {
		return cli.Usage(err.Error())
	}
	p.traces = setupTracing(ctx, "posthaste-api", c.Version, p.log)
	poolConfig.ConnConfig.Tracer = p.traces.queries()
	if err := p.connect(ctx, poolConfig); err != nil {
		return err
	}
	client, err := c.GuardClient(ctx, c.RedisURL)
	if err != nil {
		return err
	}
	p.closes(client)
	var guard idem.Redis // nil if it has no Redis of its own
	if c.GuardRedisURL != "" {
		own, err := c.GuardClient(ctx, c.GuardRedisURL)
		if err != nil {
			return err
		}
		p.closes(own)
		guard = own
	}
	tokens, err := p.credentials()
	if err != nil {
		return cli.Usage(err.Error())
	}
	creditsClient, connections, err := c.CreditsClient(ctx)
	if err != nil {
		return err
	}
	p.closes(creditsClient)
	p.credits = credits.New(credits.Options{
		Redis: creditsClient, Connections: connections, Pool: p.pool, Durability: c.CreditDurability(),
		KeyMaxAge: c.KeyMaxAge, Logger: p.log, Registerer: reg,
	})
	p.api, err = api.New(api.Options{
		Pool: p.pool, Probe: p.adminPool, Redis: client, Guard: guard, Credits: p.credits, Keys: p.keys,
		RateLimit: c.RateLimit, KeyMaxAge: c.KeyMaxAge, Logger: p.log, Registerer: reg, Trace: p.traces.requests(),
		Tokens: tokens, AddressRateLimit: c.AddressRateLimit, TrustedProxies: c.TrustedProxies,
	})
	if err != nil {
		return err
	}
	if p.public, err = Listen(ctx, c.HTTPAddr); err != nil {
		return err
	}
	p.closes(p.public)
	p.public = boundPublic(p.public, c, p.refused)
	return p.listen(ctx, "serve", nil, p.api.Readyz())
}

// credentials loads the API keys or prepares the verification of tokens.
func (p *Serve) credentials() (tokens *api.Tokens, err error) {
	switch c := p.config; c.Auth {
	case "keys":
		p.keys, err = api.LoadKeys(c.AuthKeysFile)
	case "jwt":
		tokens, err = api.NewTokens(c.tokens())
	}
	return tokens, err
}

// Run serves until ctx ends, and closes everything.
func (p *Serve) Run(ctx context.Context) error {
	return p.inTime(ctx, p.work)
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
		p.notify(gctx, func(ctx context.Context) []string { return p.api.Ready(ctx).Reasons })
		return nil
	})
	g.Go(func() error {
		srv := withTLS(p.config.HTTPTLS, p.log, api.NewHTTPServer(p.api.Public()))
		return ServeHTTP(gctx, srv, p.public, p.config.DrainTimeout)
	})
	g.Go(func() error { return p.runConsole(gctx) })
	g.Go(func() error { return ServeHTTP(gctx, p.server, p.admin, p.config.DrainTimeout) })
	return g.Wait()
}

// checkSchema refuses a schema that is newer than the binary. Other faults may be fixed while the process runs.
func (p *Serve) checkSchema(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 3*time.Second)
	defer cancel()
	if err := sql.CheckSchema(ctx, p.pool); errors.Is(err, sql.ErrSchemaNewer) {
		return err
	}
	return nil
}

// ReloadKeys reads the file of API keys now. (A change is also noticed within two seconds.)
func (p *Serve) ReloadKeys() {
	if p.keys == nil {
		return
	}
	if err := p.keys.Reload(); err != nil {
		p.log.Error("the file of API keys was not taken; the keys remain as they were", "err", err)
		return
	}
	p.log.Info("API keys reloaded")
}

// PublicAddr returns the address of the public listener.
func (p *Serve) PublicAddr() net.Addr { return p.public.Addr() }
