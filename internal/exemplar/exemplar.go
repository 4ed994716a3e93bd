// Package exemplar notes, in a histogram's bucket, the trace of an event or request that fell into it. Prometheus keeps
// one such exemplar per bucket and scrape, so it is enough to offer a few.
package exemplar

import (
	"github.com/prometheus/client_golang/prometheus"

	tp "posthaste/internal/traceparent"
)

// Observe observes v, with the trace that traceparent (W3C trace context, or "") names as its exemplar if that trace is
// sampled: the others are in no backend.
func Observe(o prometheus.Observer, v float64, traceparent string) {
	if id := tp.Sampled(traceparent); id != "" {
		if e, ok := o.(prometheus.ExemplarObserver); ok {
			e.ObserveWithExemplar(v, prometheus.Labels{"trace_id": id})
			return
		}
	}
	o.Observe(v)
}
