package main

import (
	"context"
	"log/slog"

	"github.com/alecthomas/kong"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"posthaste/internal/app"
	"posthaste/internal/audit"
	"posthaste/internal/cli"
)

// env is what a command runs with.
type env struct {
	cli.IO

	config app.Config
	// settings is the text that config was parsed from, and model the parser's.
	settings app.Settings
	model    *kong.Application
}

// open runs do with Postgres and Redis, within the time limit of a short command.
func (e *env) open(
	ctx context.Context, do func(ctx context.Context, pool *pgxpool.Pool, client redis.UniversalClient) error,
) error {
	return e.config.WithPool(ctx, func(ctx context.Context, pool *pgxpool.Pool) error {
		client, err := e.config.RedisClient(ctx)
		if err != nil {
			return err
		}
		defer client.Close()
		return do(ctx, pool, client)
	})
}

// audited makes a change and writes its audit entries. Without a pool, it only logs them. On a terminal, whose user
// sees the command's own output, it logs no entry that is in the table.
func (e *env) audited(
	ctx context.Context, pool *pgxpool.Pool, action string, args audit.Detail,
	change func(ctx context.Context) (audit.Detail, error),
) error {
	config := e.config
	if pool != nil && cli.IsTerminal(e.Stderr) {
		config.LogLevel = slog.LevelError
	}
	return audit.New(pool, config.LoggerTo(e.Stderr)).Do(ctx, audit.Terminal(), action, args, change)
}

// confirmed is audited after the user's confirmation, and within the time limit of a short command from then on. ctx is
// the command's: the answer may take longer than the limit.
func (e *env) confirmed(
	ctx context.Context, yes bool, question string, pool *pgxpool.Pool, action string, args audit.Detail,
	change func(ctx context.Context) (audit.Detail, error),
) error {
	if err := e.Confirm(ctx, yes, question); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, app.OneShotTimeout)
	defer cancel()
	return e.audited(ctx, pool, action, args, change)
}
