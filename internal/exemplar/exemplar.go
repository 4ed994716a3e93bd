// Package exemplar notes, in a histogram's bucket, the trace of an event or request that fell into it. Prometheus keeps one
// such exemplar per bucket and scrape, so it is enough to offer a few.
package exemplar

import (
	"strings"

	"github.com/prometheus/client_golang/prometheus"
)

// Observe observes v, with the trace that traceparent (W3C trace context, or "") names as its exemplar if that trace is
// sampled: the others are in no backend.
func Observe(o prometheus.Observer, v float64, traceparent string) {
	if id := traceID(traceparent); id != "" {
		if e, ok := o.(prometheus.ExemplarObserver); ok {
			e.ObserveWithExemplar(v, prometheus.Labels{"trace_id": id})
			return
		}
	}
	o.Observe(v)
}

// traceID returns the id of a sampled trace, or "".
func traceID(s string) string {
	if len(s) < 55 || s[2] != '-' || s[35] != '-' || s[52] != '-' || s[:2] == "ff" || len(s) > 55 && s[55] != '-' {
		return ""
	}
	for i := range 55 {
		if i != 2 && i != 35 && i != 52 && !strings.ContainsRune("0123456789abcdef", rune(s[i])) {
			return ""
		}
	}
	sampled := strings.IndexByte("0123456789abcdef", s[54])&1 == 1
	if !sampled || strings.Trim(s[3:35], "0") == "" {
		return ""
	}
	return s[3:35]
}
