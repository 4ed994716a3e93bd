package deliver

import "github.com/prometheus/client_golang/prometheus"

// Outcomes of a request: the closed set of the label outcome.
const (
	accepted    = "accepted"
	busy        = "busy"
	gone        = "gone"
	refused     = "refused"
	unreachable = "unreachable"
)

// newSeconds returns the histogram of the requests with every series of the group.
func newSeconds(group string) *prometheus.HistogramVec {
	h := prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name: "outbox_deliver_seconds",
		Help: "Duration of a request to the receiver of webhooks, by its outcome. busy: 408, 429 and 5xx. refused: " +
			"other 3xx and 4xx. gone: 410.",
		Buckets: []float64{0.0025, 0.01, 0.025, 0.1, 0.25, 0.5, 2.5, 10.5, 60.5},
	}, []string{"group", "outcome"})
	for _, o := range []string{accepted, busy, gone, refused, unreachable} {
		h.WithLabelValues(group, o)
	}
	return h
}
