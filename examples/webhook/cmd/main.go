// Command webhook receives the events of posthaste deliver on WEBHOOK_LISTEN and prints them. WEBHOOK_SECRETS has the
// secret, or two while it is replaced, separated by a space.
package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

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
	secrets := strings.Fields(os.Getenv("WEBHOOK_SECRETS"))
	if len(secrets) == 0 {
		return errors.New("WEBHOOK_SECRETS is empty")
	}
	receiver, err := webhook.New(secrets, func(_ context.Context, ev webhook.Event) error {
		_, err := fmt.Println(ev.ID, ev.Type, ev.Subject)
		return err
	})
	if err != nil {
		return err
	}
	srv := &http.Server{
		Addr: os.Getenv("WEBHOOK_LISTEN"), Handler: receiver,
		ReadHeaderTimeout: 5 * time.Second, ReadTimeout: 15 * time.Second,
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
	err = srv.Shutdown(ctx)
	_ = <-failed
	return err
}
