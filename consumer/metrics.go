package consumer

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

type metrics struct {
	dead          prometheus.Counter
	claimed       prometheus.Counter
	handleSeconds prometheus.Observer
	delaySeconds  prometheus.Observer
	held          prometheus.Gauge
	stalled       prometheus.Gauge
	redisErrors   *prometheus.CounterVec

	pending, lag, oldest *prometheus.GaugeVec
	trimLost             *prometheus.CounterVec

	group string
}

// register registers c, or returns the collector of another consumer in the same process.
func register[C prometheus.Collector](reg prometheus.Registerer, c C, errs *[]error) C {
	if reg == nil {
		return c
	}
	err := reg.Register(c)
	if dup, ok := errors.AsType[prometheus.AlreadyRegisteredError](err); ok {
		if same, ok := dup.ExistingCollector.(C); ok {
			return same
		}
	}
	*errs = append(*errs, err)
	return c
}

// redisOps are the values of the label op of outbox_consumer_redis_errors_total.
var redisOps = []string{
	"discover", "prepare", "read", "claim", "remove", "hold", "begin", "reload", "dead", "ack", "inspect", "lease",
}

func newMetrics(reg prometheus.Registerer, group string) (*metrics, error) {
	var errs []error
	counter := func(name, help string, labels ...string) *prometheus.CounterVec {
		return register(reg, prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, labels), &errs)
	}
	gauge := func(name, help string, labels ...string) *prometheus.GaugeVec {
		return register(reg, prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: name, Help: help}, labels), &errs)
	}
	histogram := func(name, help string, buckets ...float64) prometheus.Observer {
		opts := prometheus.HistogramOpts{Name: name, Help: help, Buckets: buckets}
		return register(reg, prometheus.NewHistogramVec(opts, []string{"group"}), &errs).WithLabelValues(group)
	}
	counts := func(name, help string) prometheus.Counter { return counter(name, help, "group").WithLabelValues(group) }
	shows := func(name, help string) prometheus.Gauge { return gauge(name, help, "group").WithLabelValues(group) }
	both := []string{"stream", "group"}
	m := &metrics{
		group: group,
		dead: counts("outbox_consumer_dead_total",
			"Events moved to a dead stream. A rise means that events were not processed."),
		claimed: counts("outbox_consumer_claimed_total",
			"Entries taken over from consumers that gave no sign of life. A rise means processes end without a stop."),
		handleSeconds: histogram("outbox_consumer_handle_seconds", "Time a handler takes for one event.",
			0.0005, 0.0025, 0.01, 0.025, 0.1, 0.25, 0.5, 2.5, 10.5, 60.5),
		delaySeconds: histogram("outbox_consumer_delay_seconds",
			"Time from an event's commit to the end of its handler.",
			0.0025, 0.01, 0.025, 0.1, 0.25, 0.5, 2.5, 10.5, 60.5, 600.5),
		held: shows("outbox_consumer_inflight_events", "Entries in this process that are not acknowledged."),
		stalled: shows("outbox_consumer_stalled",
			"1 while there is something to do and nothing has moved for a minute, whatever the cause."),
		redisErrors: counter("outbox_consumer_redis_errors_total", "Failed calls to Redis, each retried.", "op"),
		pending:     gauge("outbox_group_pending", "Entries delivered to the group and not acknowledged.", both...),
		lag: gauge("outbox_group_lag",
			"Entries not yet delivered to the group; NaN while it cannot be known. A rise means consumers are too "+
				"slow.", both...),
		oldest: gauge("outbox_group_oldest_pending_seconds",
			"Age of the oldest entry delivered and not acknowledged.", both...),
		trimLost: counter("outbox_trim_lost_total",
			"Entries trimmed before the group had read or acknowledged them. Any rise means lost events.", both...),
	}
	for _, op := range redisOps {
		m.redisErrors.WithLabelValues(op)
	}
	if err := errors.Join(errs...); err != nil {
		return nil, fmt.Errorf("consumer: register metrics: %w", err)
	}
	return m, nil
}

// stream makes the series of a stream exist.
func (m *metrics) stream(name string) {
	m.trimLost.WithLabelValues(name, m.group)
	m.pending.WithLabelValues(name, m.group)
	m.lag.WithLabelValues(name, m.group)
	m.oldest.WithLabelValues(name, m.group)
}

// inspectAll measures the group on every stream.
func (c *Consumer) inspectAll(ctx context.Context) {
	c.metrics.held.Set(float64(c.queues.counts().held))
	for _, stream := range c.streams.list() {
		if ctx.Err() != nil {
			return
		}
		s, err := inspect(ctx, c.client, stream, c.opt.Group, "settle")
		if ctx.Err() != nil || noGroup(err) || isMissing(err) {
			continue
		}
		c.dog.answered(stream, err, time.Now())
		if c.outages.note("inspect", stream, err) > 0 {
			continue
		}
		lag := s.Lag
		if c.leases.get(stream).other {
			lag = 0 // to be read by that one
		}
		c.dog.told(stream, lag, time.Now())
		c.metrics.observe(stream, s)
		if s.Lost > 0 {
			c.log.Error("entries were trimmed from the stream before the group read them: events lost",
				"stream", stream, "entries", s.Lost)
		}
	}
}

func (m *metrics) observe(stream string, s State) {
	lag := float64(s.Lag)
	if s.Lag < 0 {
		lag = math.NaN()
	}
	m.pending.WithLabelValues(stream, m.group).Set(float64(s.Pending))
	m.lag.WithLabelValues(stream, m.group).Set(lag)
	m.oldest.WithLabelValues(stream, m.group).Set(s.OldestPending.Seconds())
	m.trimLost.WithLabelValues(stream, m.group).Add(float64(s.Lost))
}
