// Command pubsub prints the messages on the channels given as arguments (patterns; default order.*).
package main

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"syscall"

	"github.com/redis/go-redis/v9"

	"posthaste/examples/pubsub"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "pubsub:", err)
		os.Exit(1)
	}
}

func run(patterns []string) error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if len(patterns) == 0 {
		patterns = []string{"order.*"}
	}
	url := os.Getenv("POSTHASTE_REDIS_URL")
	if url == "" {
		url = "redis://localhost:6379/0"
	}
	opt, err := redis.ParseURL(url)
	if err != nil {
		return fmt.Errorf("the Redis URL cannot be parsed: %w", err)
	}
	client := redis.NewClient(opt)
	defer client.Close()
	return pubsub.Run(ctx, pubsub.Config{
		Client: client, Patterns: patterns, Logger: slog.New(slog.NewTextHandler(os.Stderr, nil)),
		Announced: func(channel, payload string) { fmt.Println(channel, payload) },
		Missed:    func() { fmt.Println("# anything announced before this line may be missing") },
	})
}
