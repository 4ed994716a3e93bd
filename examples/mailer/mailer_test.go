package mailer_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"
	"go.uber.org/goleak"

	"posthaste/consumer"
	"posthaste/examples/mailer"
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

// Every order is in the stream twice, and two mailers share the work: there is one mail per order. Other events are
// ignored, and events that cannot be decoded go to the dead stream.
func TestOneMailPerOrder(t *testing.T) {
	t.Parallel()
	r, d := testenv.Redis(t), testenv.Postgres(t)
	const n = 200
	_, err := r.Client.Pipelined(t.Context(), func(p redis.Pipeliner) error {
		for range n {
			id := uuid.Must(uuid.NewV7()).String()
			data := fmt.Sprintf(`{"id":%q,"user_id":%q,"amount":1250,"currency":"EUR"}`, uuid.NewString(),
				uuid.NewString())
			for range 2 {
				p.XAdd(t.Context(), &redis.XAddArgs{
					Stream: "outbox.order",
					Values: []any{"id", id, "type", "order.created", "subject", id, "data", data},
				})
			}
		}
		p.XAdd(t.Context(), &redis.XAddArgs{
			Stream: "outbox.order",
			Values: []any{"id", "x", "type", "order.shipped", "data", "{}"},
		})
		p.XAdd(t.Context(), &redis.XAddArgs{
			Stream: "outbox.order",
			Values: []any{"id", "y", "type", "order.created", "data", "nonsense"},
		})
		p.XAdd(t.Context(), &redis.XAddArgs{
			Stream: "outbox.order",
			Values: []any{"id", "z", "type", "order.created", "data", `{"id":"no uuid"}`},
		})
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 2)
	for range 2 {
		go func() {
			done <- mailer.Run(ctx, mailer.Config{Pool: d.Pool, Redis: r.Client, Logger: testenv.Logger(t)})
		}()
	}
	testenv.Eventually(t, 30*time.Second, func() error {
		st, err := consumer.Inspect(t.Context(), r.Client, "outbox.order", mailer.Group)
		if err == nil && (st.Lag != 0 || st.Pending != 0) {
			err = fmt.Errorf("%+v", st)
		}
		return err
	})
	cancel()
	if err := errors.Join(<-done, <-done); err != nil {
		t.Errorf("Run: %v", err)
	}
	if got := testenv.Value[int](t, d, "SELECT count(*) FROM confirmation_mail"); got != n {
		t.Errorf("%d mails for %d orders", got, n)
	}
	if got := testenv.Value[int](t, d, "SELECT count(DISTINCT order_id) FROM confirmation_mail"); got != n {
		t.Errorf("mails for %d different orders, want %d", got, n)
	}
	dead, err := consumer.Dead(t.Context(), r.Client, "outbox.")
	if err != nil || len(dead) != 2 {
		t.Errorf("dead: %v, %v; want the 2 that are no orders", dead, err)
	}
}
