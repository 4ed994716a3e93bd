package sink

import (
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
)

type metrics struct {
	seconds    prometheus.Histogram
	errors     *prometheus.CounterVec
	suppressed *prometheus.CounterVec
	pubsub     prometheus.Counter

	length, pending, lag, oldest, idle *prometheus.GaugeVec
	trimLost                           *prometheus.CounterVec
	memory, eviction                   prometheus.Gauge
}

// newMetrics makes the metrics and registers them. A nil registerer leaves them unregistered.
func newMetrics(reg prometheus.Registerer) *metrics {
	f := promauto.With(reg)
	counter := func(name, help string, labels ...string) *prometheus.CounterVec {
		return f.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, labels)
	}
	gauge := func(name, help string, labels ...string) *prometheus.GaugeVec {
		return f.NewGaugeVec(prometheus.GaugeOpts{Name: name, Help: help}, labels)
	}
	m := &metrics{
		seconds: f.NewHistogram(prometheus.HistogramOpts{
			Name: "outbox_publish_seconds",
			Help: "Duration of one publishing call to Redis, failed ones included. Rises when Redis or the " +
				"network is slow.",
			Buckets: []float64{0.0005, 0.0015, 0.005, 0.015, 0.05, 0.15, 0.5, 1.5, 5.5},
		}),
		errors: counter("outbox_publish_errors_total",
			"Failed calls to Redis by class. All but wrongtype and too_large are retried until they pass.", "class"),
		suppressed: counter("outbox_suppressed_total",
			"Events that were not published because an earlier owner had already done so. "+
				"Rises after a crash or a switch.", "reason"),
		pubsub: counter("outbox_pubsub_failed_total",
			"Events that are in their stream and were not published on their channel. Rises when Redis refuses "+
				"PUBLISH, and with types that begin with __, whose channels are Redis' own.").WithLabelValues(),
		length: gauge("outbox_stream_length",
			"Entries in the stream. Above the configured length a consumer group holds trimming.", "stream"),
		pending: gauge("outbox_group_pending", "Entries delivered to the group and not acknowledged.",
			"stream", "group"),
		lag: gauge("outbox_group_lag", "Entries not yet delivered to the group; -1 if Redis cannot tell.",
			"stream", "group"),
		oldest: gauge("outbox_group_oldest_pending_seconds",
			"Age of the oldest entry the group has not acknowledged. Rises when a consumer is stuck.",
			"stream", "group"),
		idle: gauge("outbox_group_idle_seconds",
			"How long entries have waited for the group while none of its consumers did anything; 0 if none "+
				"wait. Rises when no consumer reads for it: then it prevents trimming.", "stream", "group"),
		trimLost: counter("outbox_trim_lost_total", "Entries that left the stream before the group had read them.",
			"stream", "group"),
		memory: gauge("redis_memory_ratio",
			"Redis memory in use, relative to maxmemory; 0 without a limit. At 1 publishing stops.").WithLabelValues(),
		eviction: gauge("redis_eviction_unsafe",
			"1 if maxmemory-policy is not noeviction, so that Redis may delete streams and gates.").WithLabelValues(),
	}
	for _, c := range classes {
		m.errors.WithLabelValues(c)
	}
	m.suppressed.WithLabelValues("doubt")
	return m
}

// gaugesOfGroups returns the gauges with the labels stream and group.
func (m *metrics) gaugesOfGroups() []*prometheus.GaugeVec {
	return []*prometheus.GaugeVec{m.pending, m.lag, m.oldest, m.idle}
}
