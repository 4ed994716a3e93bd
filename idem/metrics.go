package idem

import (
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
)

// Outcomes of a guarded request, the values of the outcome label of idem_requests_total.
const (
	OutcomeAcquired    = "acquired"     // the first attempt
	OutcomeTakeover    = "takeover"     // after an attempt whose lease ended
	OutcomeReplayRedis = "replay_redis" // answered from the guard's record
	OutcomeReplayPG    = "replay_pg"    // answered from the database
	OutcomeBusy        = "busy"         // another attempt was still under way
	OutcomeWaited      = "waited"       // answered from the record after waiting for another attempt
	OutcomeMismatch    = "mismatch"     // the key was used for another command
	OutcomeDegraded    = "degraded"     // Redis was unusable; the database alone arbitrates
	OutcomeUnknown     = "unknown"      // it is not known whether the work was committed
	OutcomeRejected    = "rejected"     // refused for business reasons
)

var outcomes = []string{
	OutcomeAcquired, OutcomeTakeover, OutcomeReplayRedis, OutcomeReplayPG, OutcomeBusy, OutcomeWaited, OutcomeMismatch,
	OutcomeDegraded, OutcomeUnknown, OutcomeRejected,
}

type metrics struct {
	requests    *prometheus.CounterVec
	scripts     *prometheus.HistogramVec
	leaseLost   prometheus.Counter
	publishFail prometheus.Counter
}

func newMetrics(reg prometheus.Registerer, routes []string) *metrics {
	f := promauto.With(reg)
	m := &metrics{
		requests: f.NewCounterVec(prometheus.CounterOpts{
			Name: "idem_requests_total",
			Help: "Guarded requests by what the guard decided. A rise of degraded means Redis is unusable.",
		}, []string{"route", "outcome"}),
		scripts: f.NewHistogramVec(prometheus.HistogramOpts{
			Name:    "idem_script_seconds",
			Help:    "Duration of the guard's Redis scripts, failed ones included.",
			Buckets: []float64{0.00025, 0.0005, 0.0011, 0.0025, 0.005, 0.011, 0.025, 0.05, 0.11, 0.25, 0.5},
		}, []string{"script"}),
		leaseLost: f.NewCounter(prometheus.CounterOpts{
			Name: "idem_lease_lost_total",
			Help: "Attempts that lost their lease to another one while they worked.",
		}),
		publishFail: f.NewCounter(prometheus.CounterOpts{
			Name: "idem_publish_fail_total",
			Help: "Results that could not be written to Redis; their replays come from the database.",
		}),
	}
	for _, r := range routes {
		for _, o := range outcomes {
			m.requests.WithLabelValues(r, o)
		}
	}
	for _, s := range scriptNames {
		m.scripts.WithLabelValues(s)
	}
	return m
}
