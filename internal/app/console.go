package app

import (
	"context"

	"github.com/redis/go-redis/v9"

	"posthaste/api/admin/console"
	"posthaste/internal/cli"
	"posthaste/sql"
)

// newConsole makes the console, with o and what o lacks, and returns its client of Redis. The console has connections
// of its own, so that its queries and the work do not delay each other. It connects at its first request.
func (p *process) newConsole(ctx context.Context, o console.Options) (redis.UniversalClient, error) {
	c := p.config
	poolConfig, err := sql.PoolConfig(c.PostgresURL, c.Schema, "console")
	if err != nil {
		return nil, cli.Usage(err.Error())
	}
	poolConfig.MaxConns, poolConfig.MinConns = console.Conns, 0
	if o.Pool, err = p.pooled(ctx, poolConfig); err != nil {
		return nil, err
	}
	client, err := c.RedisClient(ctx)
	if err != nil {
		return nil, err
	}
	p.closes(client)
	if o.Slots, err = c.Slots(o.Pool, nil); err != nil {
		return nil, err
	}
	if o.Doctor, err = c.doctorOptions(ctx); err != nil {
		return nil, err
	}
	o.Doctor.WriterOnly = o.Relay == nil
	o.Redis, o.Holder, o.Version, o.RelayName, o.StreamPrefix = client, holder(), c.Version, c.RelayName, c.StreamPrefix
	p.console = console.New(o)
	return client, nil
}
