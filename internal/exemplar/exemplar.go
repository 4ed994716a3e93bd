// Package exemplar attaches the trace of an event or request to its bucket of a histogram. Prometheus keeps one such
// exemplar per bucket and scrape, so offering a few is enough.
package exemplar

import (
	"github.com/prometheus/client_golang/prometheus"

	tp "posthaste/internal/traceparent"
)

// Observe observes v. Its exemplar is the trace that traceparent (W3C trace context, or "") names, if it is sampled:
// other traces are in no backend.
func Observe(o prometheus.Observer, v float64, traceparent string) {
	if id := tp.Sampled(traceparent); id != "" {
		if e, ok := o.(prometheus.ExemplarObserver); ok {
			e.ObserveWithExemplar(v, prometheus.Labels{"trace_id": id})
			return
		}
	}
	o.Observe(v)
}
