package sink

import (
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"posthaste/sink/metrics"
)

// redisMetrics are the metrics of a sink, and those that only Redis has.
type redisMetrics struct {
	*metrics.Sink[loss]

	pubsub           prometheus.Counter
	memory, eviction prometheus.Gauge
}

// newMetrics makes the metrics and registers them. A nil registerer leaves them unregistered.
func newMetrics(reg prometheus.Registerer) *redisMetrics {
	f := promauto.With(reg)
	gauge := func(name, help string) prometheus.Gauge {
		return f.NewGauge(prometheus.GaugeOpts{Name: name, Help: help})
	}
	return &redisMetrics{
		Sink: metrics.New[loss](reg, classes),
		pubsub: f.NewCounter(prometheus.CounterOpts{
			Name: "outbox_pubsub_failed_total",
			Help: "Events that are in their stream and were not published on their channel. Rises when Redis refuses " +
				"PUBLISH, and with types that begin with __, whose channels are Redis' own.",
		}),
		memory: gauge("redis_memory_ratio",
			"Redis memory in use, relative to maxmemory; 0 without a limit. At 1 publishing stops."),
		eviction: gauge("redis_eviction_unsafe",
			"1 if maxmemory-policy is not noeviction, so that Redis may delete streams and gates."),
	}
}
