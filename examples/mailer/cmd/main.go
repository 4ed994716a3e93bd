// Command mailer runs the example mailer on its own.
package main

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"syscall"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"posthaste/examples/mailer"
	"posthaste/sql"
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "mailer:", err)
		os.Exit(1)
	}
}

func run() error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	cfg, err := sql.PoolConfig(env("POSTHASTE_POSTGRES_URL", "postgres://localhost:5432/postgres"),
		env("POSTHASTE_SCHEMA", "public"), "mailer")
	if err != nil {
		return err
	}
	pool, err := pgxpool.NewWithConfig(ctx, cfg)
	if err != nil {
		return fmt.Errorf("prepare the connections: %w", err)
	}
	defer pool.Close()
	opt, err := redis.ParseURL(env("POSTHASTE_REDIS_URL", "redis://localhost:6379/0"))
	if err != nil {
		return fmt.Errorf("the Redis URL cannot be parsed: %w", err)
	}
	client := redis.NewClient(opt)
	defer client.Close()
	return mailer.Run(ctx, mailer.Config{
		Pool: pool, Redis: client, Stream: env("POSTHASTE_STREAM_PREFIX", "outbox.") + "order",
		Logger: slog.New(slog.NewTextHandler(os.Stderr, nil)),
	})
}

func env(name, def string) string {
	if v := os.Getenv(name); v != "" {
		return v
	}
	return def
}
