package api

import (
	"net/http"
	"strconv"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
)

type metrics struct {
	requests *prometheus.HistogramVec
	written  *prometheus.CounterVec
	eviction prometheus.Gauge
}

// eventOrderCreated is the only event type that this API writes.
const eventOrderCreated = "order.created"

func newMetrics(reg prometheus.Registerer) *metrics {
	f := promauto.With(reg)
	m := &metrics{
		requests: f.NewHistogramVec(prometheus.HistogramOpts{
			Name:    "http_request_duration_seconds",
			Help:    "Time from a request's header to its reply. A rise of status 503 means Postgres is unusable.",
			Buckets: []float64{0.0011, 0.0025, 0.005, 0.011, 0.025, 0.05, 0.11, 0.25, 0.5, 1.1, 2.5, 5.5, 11.5},
		}, []string{"route", "method", "status"}),
		written: f.NewCounterVec(prometheus.CounterOpts{
			Name: "outbox_events_written_total",
			Help: "Events committed to the outbox by this process.",
		}, []string{"type"}),
		eviction: f.NewGauge(prometheus.GaugeOpts{
			Name: "redis_eviction_unsafe",
			Help: "1 while Redis may throw keys away when its memory is full (maxmemory-policy is not noeviction).",
		}),
	}
	m.written.WithLabelValues(eventOrderCreated)
	for _, r := range documented {
		for _, status := range r.statuses {
			m.requests.WithLabelValues(r.route, r.method, strconv.Itoa(status))
		}
	}
	return m
}

// documented are the routes and their statuses in the contract.
var documented = []struct {
	route, method string
	statuses      []int
}{
	{routeOrders, http.MethodPost, []int{201, 400, 401, 402, 403, 404, 408, 409, 413, 415, 422, 423, 429, 500, 503}},
	{routeOrders, http.MethodGet, []int{200, 400, 401, 403, 429, 500, 503}},
	{routeOrder, http.MethodGet, []int{200, 304, 401, 404, 429, 500, 503}},
	{routeByKey, http.MethodGet, []int{200, 304, 400, 401, 403, 404, 429, 500, 503}},
	{routeAdd, http.MethodPost, []int{200, 400, 401, 403, 404, 408, 413, 415, 422, 423, 429, 500, 503}},
	{routeDeduct, http.MethodPost, []int{200, 400, 401, 402, 403, 404, 408, 413, 415, 422, 423, 429, 500, 503}},
	{routeBalance, http.MethodGet, []int{200, 400, 401, 403, 404, 429, 500, 503}},
	{routeWellKnown, http.MethodGet, []int{200, 429}},
	{routeOpenAPI, http.MethodGet, []int{200, 429}},
}
