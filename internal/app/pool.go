package app

import (
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
)

// poolMetrics exports the statistics of a connection pool. It never waits for a connection.
type poolMetrics struct {
	pool                             *pgxpool.Pool
	connections, limit, taken, waits *prometheus.Desc
}

func newPoolMetrics(pool *pgxpool.Pool) *poolMetrics {
	return &poolMetrics{
		pool: pool,
		connections: prometheus.NewDesc("pg_pool_connections",
			"Connections to Postgres: in use, idle, or being opened.", []string{"state"}, nil),
		limit: prometheus.NewDesc("pg_pool_max_connections", "Connections the pool may open.", nil, nil),
		taken: prometheus.NewDesc("pg_pool_acquires_total", "Times a connection was taken from the pool.", nil, nil),
		waits: prometheus.NewDesc("pg_pool_wait_seconds_total",
			"Time spent waiting because no connection was idle.", nil, nil),
	}
}

func (m *poolMetrics) Describe(ch chan<- *prometheus.Desc) {
	prometheus.DescribeByCollect(m, ch)
}

func (m *poolMetrics) Collect(ch chan<- prometheus.Metric) {
	s := m.pool.Stat()
	gauge := func(d *prometheus.Desc, v int32, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, float64(v), labels...)
	}
	gauge(m.connections, s.AcquiredConns(), "used")
	gauge(m.connections, s.IdleConns(), "idle")
	gauge(m.connections, s.ConstructingConns(), "opening")
	gauge(m.limit, s.MaxConns())
	ch <- prometheus.MustNewConstMetric(m.taken, prometheus.CounterValue, float64(s.AcquireCount()))
	ch <- prometheus.MustNewConstMetric(m.waits, prometheus.CounterValue, s.EmptyAcquireWaitTime().Seconds())
}
