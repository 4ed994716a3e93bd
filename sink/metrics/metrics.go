// Package metrics has what the sinks of all servers report.
package metrics

import (
	"context"
	"crypto/tls"
	"errors"
	"net"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"posthaste/outbox"
)

// MaxGroups bounds the groups of a stream that have series of their own.
const MaxGroups = 50

// Sink has the metrics of a sink. T is what the sink keeps of each group from one observation to the next.
type Sink[T any] struct {
	Seconds    prometheus.Histogram
	Errors     *prometheus.CounterVec
	Suppressed prometheus.Counter

	length   *prometheus.GaugeVec
	groups   []*prometheus.GaugeVec // pending, lag, oldest and idle
	trimLost *prometheus.CounterVec

	mu   sync.Mutex
	seen map[string]map[string]T // by stream and group
}

// New makes the metrics and registers them. A nil registerer leaves them unregistered. classes are all values of the
// label of Errors.
func New[T any](reg prometheus.Registerer, classes []string) *Sink[T] {
	f := promauto.With(reg)
	counter := func(name, help string, labels ...string) *prometheus.CounterVec {
		return f.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, labels)
	}
	gauge := func(name, help string, labels ...string) *prometheus.GaugeVec {
		return f.NewGaugeVec(prometheus.GaugeOpts{Name: name, Help: help}, labels)
	}
	m := &Sink[T]{
		Seconds: f.NewHistogram(prometheus.HistogramOpts{
			Name: "outbox_publish_seconds",
			Help: "Duration of one publishing call to Redis or NATS, failed ones included. Rises when the server or " +
				"the network is slow.",
			Buckets: []float64{0.0005, 0.0015, 0.005, 0.015, 0.05, 0.15, 0.5, 1.5, 5.5},
		}),
		Errors: counter("outbox_publish_errors_total",
			"Failed calls to Redis or NATS by class. All but wrongtype and too_large are retried until they pass.",
			"class"),
		Suppressed: counter("outbox_suppressed_total",
			"Events that were not published because an earlier owner had already done so. "+
				"Rises after a crash or a switch.", "reason").WithLabelValues("doubt"),
		length: gauge("outbox_stream_length",
			"Entries in the stream; on NATS the gate's messages count. Above the configured length a consumer group "+
				"holds trimming.", "stream"),
		groups: []*prometheus.GaugeVec{
			gauge("outbox_group_pending", "Entries delivered to the group and not acknowledged.", "stream", "group"),
			gauge("outbox_group_lag", "Entries not yet delivered to the group; -1 if the server does not know.",
				"stream", "group"),
			gauge("outbox_group_oldest_pending_seconds",
				"Age of the oldest entry the group has not acknowledged. Rises when a consumer is stuck.",
				"stream", "group"),
			gauge("outbox_group_idle_seconds",
				"How long entries have waited for the group while none of its consumers did anything; 0 if none "+
					"wait. Rises when no consumer reads for it: then it prevents trimming.", "stream", "group"),
		},
		trimLost: counter("outbox_trim_lost_total", "Entries that left the stream before the group had read them.",
			"stream", "group"),
	}
	for _, c := range classes {
		m.Errors.WithLabelValues(c)
	}
	return m
}

// Group is the state of a consumer group.
type Group struct {
	Name         string
	Pending, Lag int64
	Oldest, Idle time.Duration
}

// Group exports the state of a group.
func (m *Sink[T]) Group(stream string, g Group) {
	for i, v := range []float64{float64(g.Pending), float64(g.Lag), g.Oldest.Seconds(), g.Idle.Seconds()} {
		m.groups[i].WithLabelValues(stream, g.Name).Set(v)
	}
	m.Lost(stream, g.Name, 0)
}

// Lost counts entries that left a stream before a group had read them.
func (m *Sink[T]) Lost(stream, group string, n int64) {
	m.trimLost.WithLabelValues(stream, group).Add(float64(n))
}

// Observe exports the state of streams, and deletes the series of groups and streams that no longer exist. read exports
// the groups of streams[i] and returns its length and what to keep of the groups; nil if the stream does not exist. The
// series of a stream with an error stay. Observe returns the first error.
func (m *Sink[T]) Observe(
	streams []string, read func(i int, before map[string]T) (length int64, groups map[string]T, err error),
) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	var first error
	before := m.seen
	m.seen = make(map[string]map[string]T, len(streams))
	for i, stream := range streams {
		length, groups, err := read(i, before[stream])
		switch {
		case err != nil:
			if first == nil {
				first = err
			}
			if was, ok := before[stream]; ok {
				m.seen[stream] = was
			}
		case groups != nil:
			m.length.WithLabelValues(stream).Set(float64(length))
			m.seen[stream] = groups
		}
	}
	for stream, groups := range before {
		now, ok := m.seen[stream]
		if !ok {
			m.length.DeleteLabelValues(stream)
		}
		for group := range groups {
			if _, ok := now[group]; !ok {
				m.forget(stream, group)
				m.trimLost.DeleteLabelValues(stream, group)
			}
		}
	}
	return first
}

func (m *Sink[T]) forget(stream, group string) {
	for _, v := range m.groups {
		v.DeleteLabelValues(stream, group)
	}
}

// Unobserve deletes the series of Observe, because another instance exports them from now on. The counters of missed
// entries stay.
func (m *Sink[T]) Unobserve() {
	m.mu.Lock()
	defer m.mu.Unlock()
	for stream, groups := range m.seen {
		m.length.DeleteLabelValues(stream)
		for group := range groups {
			m.forget(stream, group)
		}
	}
}

// Other is the class of errors that have no other one.
const Other = "other"

// Class returns the class of an error for which the server does not matter; "" for nil.
func Class(err error) string {
	var poison *outbox.PoisonError
	var certificate *tls.CertificateVerificationError
	var op *net.OpError
	var network net.Error
	switch {
	case err == nil:
		return ""
	case errors.As(err, &poison):
		return poison.Class
	case errors.Is(err, outbox.ErrMoved):
		return "restarted"
	case errors.Is(err, outbox.ErrGap):
		return "gap"
	case errors.As(err, new(*outbox.FencedError)):
		return "fenced"
	case errors.As(err, new(*outbox.ForeignError)):
		return "foreign"
	case errors.Is(err, context.Canceled):
		return "canceled"
	case errors.Is(err, context.DeadlineExceeded):
		return "timeout"
	case errors.As(err, &certificate), errors.As(err, new(tls.RecordHeaderError)),
		errors.As(err, &op) && op.Op == "remote error": // one side refused the certificate, or only one uses TLS
		return "tls"
	case errors.As(err, &network) && network.Timeout():
		return "timeout"
	case errors.As(err, &network):
		return "connection"
	}
	return Other
}

// Permanent reports whether a lane cannot be used any more.
func Permanent(err error) bool {
	var p interface{ Permanent() bool }
	return errors.Is(err, outbox.ErrGap) || errors.As(err, &p) && p.Permanent()
}
