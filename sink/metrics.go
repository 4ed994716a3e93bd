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
	group := []string{"stream", "group"}
	m := &metrics{
		seconds: f.NewHistogram(prometheus.HistogramOpts{
			Name: "outbox_publish_seconds",
			Help: "Duration of one publishing call to Redis, failed ones included. Rises when Redis or the " +
				"network is slow.",
			Buckets: []float64{0.0005, 0.0015, 0.005, 0.015, 0.05, 0.15, 0.5, 1.5, 5.5},
		}),
		errors: f.NewCounterVec(prometheus.CounterOpts{
			Name: "outbox_publish_errors_total",
			Help: "Failed calls to Redis by class. All but wrongtype and too_large are retried until they pass.",
		}, []string{"class"}),
		suppressed: f.NewCounterVec(prometheus.CounterOpts{
			Name: "outbox_suppressed_total",
			Help: "Events that were not published because an earlier owner had already done so. " +
				"Rises after a crash or a switch.",
		}, []string{"reason"}),
		pubsub: f.NewCounter(prometheus.CounterOpts{
			Name: "outbox_pubsub_failed_total",
			Help: "Events that are in their stream and were not published on their channel. Rises when Redis refuses " +
				"PUBLISH, and with types that begin with __, whose channels are Redis' own.",
		}),
		length: f.NewGaugeVec(prometheus.GaugeOpts{
			Name: "outbox_stream_length",
			Help: "Entries in the stream. Above the configured length a consumer group holds trimming.",
		}, []string{"stream"}),
		pending: f.NewGaugeVec(prometheus.GaugeOpts{
			Name: "outbox_group_pending", Help: "Entries delivered to the group and not acknowledged.",
		}, group),
		lag: f.NewGaugeVec(prometheus.GaugeOpts{
			Name: "outbox_group_lag", Help: "Entries not yet delivered to the group; -1 if Redis cannot tell.",
		}, group),
		oldest: f.NewGaugeVec(prometheus.GaugeOpts{
			Name: "outbox_group_oldest_pending_seconds",
			Help: "Age of the oldest entry the group has not acknowledged. Rises when a consumer is stuck.",
		}, group),
		idle: f.NewGaugeVec(prometheus.GaugeOpts{
			Name: "outbox_group_idle_seconds",
			Help: "How long entries have waited for the group while none of its consumers did anything; 0 if none " +
				"wait. Rises when no consumer reads for it: then it prevents trimming.",
		}, group),
		trimLost: f.NewCounterVec(prometheus.CounterOpts{
			Name: "outbox_trim_lost_total", Help: "Entries that left the stream before the group had read them.",
		}, group),
		memory: f.NewGauge(prometheus.GaugeOpts{
			Name: "redis_memory_ratio",
			Help: "Redis memory in use, relative to maxmemory; 0 without a limit. At 1 publishing stops.",
		}),
		eviction: f.NewGauge(prometheus.GaugeOpts{
			Name: "redis_eviction_unsafe",
			Help: "1 if maxmemory-policy is not noeviction, so that Redis may delete streams and gates.",
		}),
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
