package consumer_test

import (
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/go-redis/v9"

	"posthaste/consumer"
)

func TestMetricsAtStart(t *testing.T) {
	t.Parallel()
	reg := prometheus.NewRegistry()
	client := redis.NewClient(&redis.Options{})
	defer client.Close()
	for _, group := range []string{"a", "b"} { // two in one process share the collectors
		_, err := consumer.New(consumer.Options{
			Client: client, Group: group, Streams: []string{"s"},
			Handler: (&record{}).handle, Registerer: reg,
		})
		must(t, err)
	}
	for _, name := range []string{
		"outbox_consumer_dead_total", "outbox_consumer_claimed_total",
		"outbox_consumer_inflight_events", "outbox_consumer_redis_errors_total", "outbox_consumer_handle_seconds",
	} {
		if v := sample(t, reg, name); v != 0 {
			t.Errorf("%s = %v at the start", name, v)
		}
	}
}
