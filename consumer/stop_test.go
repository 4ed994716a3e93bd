package consumer_test

import (
	"context"
	"testing"
	"time"

	"github.com/google/uuid"

	"posthaste/consumer"
	"posthaste/internal/testenv"
)

// An orderly stop lets the running event end and acknowledges it; another consumer takes waiting events at once, not
// after the claim time.
func TestOrderlyStop(t *testing.T) {
	t.Parallel()
	r := testenv.Redis(t)
	ids := fill(t, r.Client, "outbox.order", 50, 1)
	var rec record
	begun, end := make(chan struct{}, 1), make(chan struct{})
	logs := &syncBuffer{}
	c := start(t, consumer.Options{
		Client: r.Client, Prefix: "outbox.", Logger: logTo(logs),
		Handler: func(ctx context.Context, ev consumer.Event) error {
			begun <- struct{}{}
			<-end
			return rec.handle(ctx, ev)
		},
	})
	<-begun
	c.cancel()
	logs.wait(t, "consumer stopping")
	close(end)
	must(t, c.stop())
	testenv.Equal(t, "events that ran", len(rec.list()), 1)
	if st, err := consumer.Inspect(t.Context(), r.Client, "outbox.order", "g"); err != nil || st.Pending+st.Lag != 49 ||
		st.Pending == 0 {
		t.Errorf("after the stop: %+v, %v; want 49 pending or unread", st, err)
	}
	start(t, consumer.Options{Client: r.Client, Prefix: "outbox.", ClaimIdle: time.Hour, Handler: rec.handle})
	settled(t, r.Client, 20*time.Second, "g", "outbox.order")
	allOnce(t, ids, rec.times())
	evs := rec.list()
	for i, ev := range evs {
		if number(t, ev) != i {
			t.Fatalf("event %d ran in place %d", number(t, ev), i)
		}
	}
}

// A handler that does not end in time is left behind, and its event is not acknowledged.
func TestDrainTimeout(t *testing.T) {
	t.Parallel()
	r := testenv.Redis(t)
	add(t, r.Client, "outbox.order", event{"a", "s", 1})
	begun := make(chan struct{})
	c := start(t, consumer.Options{
		Client: r.Client, Prefix: "outbox.", DrainTimeout: 50 * time.Millisecond,
		Handler: func(ctx context.Context, _ consumer.Event) error {
			close(begun)
			<-ctx.Done()
			return nil // wrongly: but it has ended, and says that it is done
		},
	})
	<-begun
	testenv.ErrorIs(t, "Run", c.stop(), consumer.ErrDrain)
}

// Acknowledgements are refused while events run that had waited without their payloads. None of the workers waits for
// that, so the consumer stops in order.
func TestAStopWithoutAcknowledgements(t *testing.T) {
	t.Parallel()
	r := testenv.Redis(t)
	const n = 500
	for i := range n {
		add(t, r.Client, "outbox.order", event{uuid.NewString(), "one", i})
	}
	fill(t, r.Client, "outbox.order", 300, 300)
	gate := make(chan struct{})
	var one, others record
	run := start(t, consumer.Options{
		Client: r.Client, Window: 64, Workers: 4, DrainTimeout: 3 * time.Second,
		Handler: func(ctx context.Context, ev consumer.Event) error {
			if ev.Subject != "one" {
				return others.handle(ctx, ev)
			}
			<-gate
			return one.handle(ctx, ev)
		},
	})
	eventuallyRan(t, &others, 20*time.Second, 300)
	must(t, r.Client.Do(t.Context(), "acl", "setuser", "default", "-xack").Err())
	close(gate)
	eventuallyRan(t, &one, 20*time.Second, n)
	must(t, run.stop())
}
