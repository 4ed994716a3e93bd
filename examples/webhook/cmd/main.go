// Command webhook posts the events of one stream to WEBHOOK_URL, signed with WEBHOOK_SECRET. With WEBHOOK_LISTEN, it is
// the receiver instead: it receives, verifies and prints them.
package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/redis/go-redis/v9"

	"posthaste/consumer"
	"posthaste/examples/webhook"
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "webhook:", err)
		os.Exit(1)
	}
}

func run() error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	secret := []byte(os.Getenv("WEBHOOK_SECRET"))
	if addr := os.Getenv("WEBHOOK_LISTEN"); addr != "" {
		return receive(ctx, addr, secret)
	}
	opt, err := redis.ParseURL(env("POSTHASTE_REDIS_URL", "redis://localhost:6379/0"))
	if err != nil {
		return fmt.Errorf("the Redis URL cannot be parsed: %w", err)
	}
	client := redis.NewClient(opt)
	defer client.Close()
	handler, err := webhook.Handler(os.Getenv("WEBHOOK_URL"), secret, nil)
	if err != nil {
		return err
	}
	c, err := consumer.New(consumer.Options{
		Client: client, Group: webhook.Group, Streams: []string{env("WEBHOOK_STREAM", "outbox.order")},
		Handler: handler,
		Logger:  slog.New(slog.NewTextHandler(os.Stderr, nil)),
	})
	if err != nil {
		return err
	}
	return c.Run(ctx)
}

func receive(ctx context.Context, addr string, secret []byte) error {
	if len(secret) < 16 {
		return errors.New("WEBHOOK_SECRET is shorter than 16 bytes")
	}
	srv := &http.Server{
		Addr: addr, ReadHeaderTimeout: 5 * time.Second, ReadTimeout: 15 * time.Second,
		Handler: webhook.Receiver(secret, func(_ context.Context, d webhook.Delivery) error {
			_, err := fmt.Println(d.ID, d.Type, d.Subject)
			return err
		}),
	}
	failed := make(chan error, 1)
	go func() { failed <- srv.ListenAndServe() }()
	select {
	case err := <-failed:
		return err
	case <-ctx.Done():
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
	defer cancel()
	err := srv.Shutdown(ctx)
	_ = <-failed
	return err
}

func env(name, def string) string {
	if v := os.Getenv(name); v != "" {
		return v
	}
	return def
}
