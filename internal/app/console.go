package app

import (
	"context"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"posthaste/api/admin/console"
	"posthaste/internal/cli"
	"posthaste/internal/ops"
	"posthaste/sql"
)

// consoleProcess is the console with connections of its own, so that its queries and the work do not delay each
// other.
type consoleProcess struct {
	*console.Console

	pool   *pgxpool.Pool
	client redis.UniversalClient
}

// newConsole fills in the missing fields of o. The console connects at its first request.
func newConsole(ctx context.Context, c Config, o console.Options) (*consoleProcess, error) {
	poolConfig, err := sql.PoolConfig(c.PostgresURL, c.Schema, "console")
	if err != nil {
		return nil, cli.Usage(err.Error())
	}
	poolConfig.MaxConns, poolConfig.MinConns = console.Conns, 0
	p := &consoleProcess{}
	if p.pool, err = pgxpool.NewWithConfig(ctx, poolConfig); err != nil {
		return nil, err
	}
	if p.client, err = c.RedisClient(ctx); err == nil {
		o.Slots, err = c.Slots(p.pool, nil)
	}
	if err == nil {
		o.Doctor, err = c.DoctorOptions(ctx)
	}
	if err != nil {
		p.close()
		return nil, err
	}
	o.Holder, o.Version, o.RelayName, o.StreamPrefix = holder(), c.Version, c.RelayName, c.StreamPrefix
	o.Pool, o.Redis = p.pool, p.client
	o.Doctor.WriterOnly = o.Relay == nil
	p.Console = console.New(o)
	return p, nil
}

// run runs the console, if there is one, until ctx ends.
func (p *consoleProcess) run(ctx context.Context) error {
	if p == nil {
		return nil
	}
	return p.Run(ctx)
}

func (p *consoleProcess) close() {
	if p == nil {
		return
	}
	if p.client != nil {
		_ = p.client.Close()
	}
	p.pool.Close()
}

// DoctorOptions returns the settings that the doctor measures against.
func (c Config) DoctorOptions(ctx context.Context) (ops.DoctorOptions, error) {
	var check func(ctx context.Context) error
	if c.SinkURL != "" {
		check = c.natsReady
	}
	client, err := c.redisOptions(ctx, c.RedisURL)
	if err != nil {
		return ops.DoctorOptions{}, err
	}
	var guard *redis.UniversalOptions
	if c.GuardRedisURL != "" {
		if guard, err = c.redisOptions(ctx, c.GuardRedisURL); err != nil {
			return ops.DoctorOptions{}, err
		}
	}
	return ops.DoctorOptions{
		PostgresURL: c.PostgresURL, Redis: client, NATS: check, Schema: c.Schema, RelayName: c.RelayName,
		Slot: c.Slot, Publication: c.Publication,
		WALBudget: c.WALBudget, StreamMaxlen: c.StreamMaxlen, History: c.History, Durability: c.Durability,
		SharedStreams: c.SharedStreams, Restore: c.Restore, Guard: guard,
	}, nil
}
