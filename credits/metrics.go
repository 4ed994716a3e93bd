package credits

import (
	"errors"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
)

// codes are the values of the code label of credits_ops_total, for the errors of operations. An operation without an
// error has the code "replay", or its outcome in lower case.
var codes = []struct {
	err  error
	code string
}{
	{ErrUnknown, "outcome_unknown"},
	{ErrUnknownUser, "unknown_user"},
	{ErrReused, "mismatch"},
	{ErrFrozen, "frozen"},
	{ErrBackpressure, "backpressure"},
	{ErrRecovering, "epoch"},
	{errCorrupt, "corrupt"},
	{ErrExpired, "expired"},
	{nil, "unavailable"}, // the others
}

// count counts an operation.
func (m *bankMetrics) count(res *Result, err error) {
	code := strings.ToLower(string(res.Outcome))
	switch {
	case err != nil:
		for _, c := range codes {
			if code = c.code; errors.Is(err, c.err) {
				break
			}
		}
	case res.Replayed:
		code = codeReplay
	}
	m.ops.WithLabelValues(code).Inc()
}

const codeReplay = "replay"

type bankMetrics struct {
	ops   *prometheus.CounterVec
	loads prometheus.Counter
	lost  prometheus.Counter
}

func newBankMetrics(reg prometheus.Registerer) *bankMetrics {
	f := promauto.With(reg)
	m := &bankMetrics{
		ops: f.NewCounterVec(prometheus.CounterOpts{
			Name: "credits_ops_total",
			Help: "Credit operations by what became of them. A rise of epoch means Redis lost data, of backpressure " +
				"that the sync is behind.",
		}, []string{"code"}),
		loads: f.NewCounter(prometheus.CounterOpts{
			Name: "credits_ledger_reads_total",
			Help: "Accounts read from the ledger because Redis did not have them.",
		}),
		lost: newLost(reg),
	}
	for _, c := range codes {
		m.ops.WithLabelValues(c.code)
	}
	for _, o := range []Outcome{OK, Insufficient, Overflow, codeReplay} {
		m.ops.WithLabelValues(strings.ToLower(string(o)))
	}
	return m
}

// newLost returns a counter that all banks and syncs of a process share.
func newLost(reg prometheus.Registerer) prometheus.Counter {
	c := prometheus.NewCounter(prometheus.CounterOpts{
		Name: "credits_lost_operations_total",
		Help: "Acknowledged operations that Redis lost before they reached the ledger, as far as processes detected.",
	})
	if reg == nil {
		return c
	}
	err := reg.Register(c)
	if have, ok := errors.AsType[prometheus.AlreadyRegisteredError](err); ok {
		return have.ExistingCollector.(prometheus.Counter) //nolint:forcetypeassert // the name is ours
	}
	if err != nil {
		panic(err) // as MustRegister does
	}
	return c
}

// Reasons to freeze an account.
const (
	reasonGap       = "gap"
	reasonFork      = "fork"
	reasonDuplicate = "duplicate_operation"
	reasonBalance   = "balance"
	reasonMalformed = "malformed"
)

var reasons = []string{reasonGap, reasonFork, reasonDuplicate, reasonBalance, reasonMalformed}

type syncMetrics struct {
	lag     prometheus.Gauge
	frozen  *prometheus.CounterVec
	written *prometheus.CounterVec
	bumps   prometheus.Counter
	lost    prometheus.Counter
	drift   prometheus.Gauge
}

func newSyncMetrics(reg prometheus.Registerer) *syncMetrics {
	f := promauto.With(reg)
	m := &syncMetrics{
		lag: f.NewGauge(prometheus.GaugeOpts{
			Name: "credits_sync_lag_seconds",
			Help: "Age of the oldest operation that is not in the ledger yet. A rise means the sync or " +
				"Postgres is too slow, or gone, or the streams cannot be read. A node of a cluster that does not " +
				"answer is left out.",
		}),
		frozen: f.NewCounterVec(prometheus.CounterOpts{
			Name: "credits_frozen_total",
			Help: "Accounts frozen because their operations contradict the ledger. Any rise needs an operator.",
		}, []string{"reason"}),
		written: f.NewCounterVec(prometheus.CounterOpts{
			Name: "outbox_events_written_total", Help: "Events committed to the outbox by this process.",
		}, []string{"type"}),
		bumps: f.NewCounter(prometheus.CounterOpts{
			Name: "credits_epoch_bumps_total",
			Help: "Buckets rebuilt from the ledger because Redis had lost operations.",
		}),
		drift: f.NewGauge(prometheus.GaugeOpts{
			Name: "credits_reconcile_drift",
			Help: "Credits by which the ledger's accounts differ from their counter-accounts, looked at every 15 " +
				"minutes. Anything but 0 means the ledger was changed by hand.",
		}),
		lost: newLost(reg),
	}
	for _, t := range []string{eventAdded, eventDeducted} {
		m.written.WithLabelValues(t)
	}
	for _, r := range reasons {
		m.frozen.WithLabelValues(r)
	}
	return m
}
