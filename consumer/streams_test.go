package consumer_test

import (
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	"posthaste/consumer"
	"posthaste/internal/testenv"
)

// A consumer that names a type's only stream reads those that the type is spread over, once a relay has marked it, but
// not the stream of another type whose name only looks like one of them.
func TestShardsOfANamedStream(t *testing.T) {
	t.Parallel()
	r := testenv.Redis(t)
	var f failing
	add(t, r.Client, "outbox.user.1", event{"another type", "s", 1})
	add(t, r.Client, "outbox.order", event{"before", "s", 1})
	start(t, consumer.Options{Client: r.Client, Streams: []string{"outbox.order", "outbox.user"}, Handler: f.run})
	settled(t, r.Client, 20*time.Second, "g", "outbox.order")
	streams := []string{"outbox.order"}
	for _, n := range []int{0, 3, 15} {
		name := fmt.Sprintf("outbox.order.%d", n)
		streams = append(streams, name)
		add(t, r.Client, name, event{name, "s", 2 + n})
	}
	must(t, r.Client.Set(t.Context(), "outbox.order#sharded", 1, 0).Err())
	testenv.Eventually(t, 30*time.Second, func() error {
		n := len(f.times())
		return testenv.FailIf(n < len(streams), "%d events, want %d", n, len(streams))
	})
	settled(t, r.Client, 20*time.Second, "g", streams...)
	testenv.Equal(t, "events of another type", f.times()["another type"], 0)
	found, err := consumer.Streams(t.Context(), r.Client, "outbox.")
	if err != nil || !slices.Contains(found, "outbox.order.3") || slices.Contains(found, "outbox.order#sharded") {
		t.Errorf("streams %q, %v", found, err)
	}
	bases, err := consumer.Bases(t.Context(), r.Client,
		append(streams, "outbox.user.1", "outbox.order.16", "outbox.order.03"))
	if want := map[string]string{
		"outbox.order.0": "outbox.order", "outbox.order.3": "outbox.order", "outbox.order.15": "outbox.order",
	}; err != nil || !maps.Equal(bases, want) {
		t.Errorf("bases %v, %v", bases, err)
	}
	if n := r.Client.Exists(t.Context(), "outbox.order.1", "outbox.user").Val(); n > 1 {
		t.Error("a stream was made that nobody publishes to")
	}
}
