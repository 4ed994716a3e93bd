package pubsub_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"testing"

	"github.com/redis/go-redis/v9"
	"go.uber.org/goleak"

	"posthaste/examples/pubsub"
	"posthaste/internal/lab/testenv"
)

func TestMain(m *testing.M) {
	code := testenv.Main(m)
	if err := goleak.Find(); err != nil && code == 0 {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

// Announcements are lost while the connection is down; the subscriber reports that some may be missing.
func TestBestEffort(t *testing.T) {
	t.Parallel()
	r := testenv.Redis(t)
	p := testenv.NewLink(t, r.Addr())
	client := redis.NewClient(&redis.Options{Addr: p.Addr()})
	defer client.Close()
	heard := make(chan string, 10)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		done <- pubsub.Run(ctx, pubsub.Config{
			Client: client, Patterns: []string{"order.*", "user.*"}, Logger: testenv.Logger(t),
			Announced: func(channel, payload string) { heard <- channel + " " + payload },
			Missed:    func() { heard <- "missed" },
		})
	}()
	announce := func(channel, payload string) {
		t.Helper()
		if err := r.Client.Publish(t.Context(), channel, payload).Err(); err != nil {
			t.Fatal(err)
		}
	}
	expect := func(want string) {
		t.Helper()
		if got := <-heard; got != want {
			t.Errorf("heard %q, want %q", got, want)
		}
	}
	expect("missed")
	announce("order.created", "1")
	announce("other", "2")
	announce("user.created", "3")
	expect("order.created 1")
	expect("user.created 3")
	p.Down()
	announce("order.created", "4")
	p.Up()
	expect("missed")
	announce("order.created", "5")
	expect("order.created 5")
	cancel()
	if err := <-done; err != nil {
		t.Errorf("Run: %v", err)
	}
	if err := pubsub.Run(t.Context(), pubsub.Config{}); err == nil || errors.Is(err, context.Canceled) {
		t.Errorf("an empty configuration: %v", err)
	}
}
