package credits

import (
	"errors"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
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
	waits prometheus.Histogram
	lost  prometheus.Counter
}

func newBankMetrics(reg prometheus.Registerer) *bankMetrics {
	m := &bankMetrics{
		ops: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "credits_ops_total",
			Help: "Credit operations by what became of them. A rise of epoch means Redis lost data, of backpressure " +
				"that the sync is behind.",
		}, []string{"code"}),
		loads: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "credits_ledger_reads_total",
			Help: "Accounts read from the ledger because Redis did not have them.",
		}),
		waits: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "credits_durability_wait_seconds",
			Help: "Time of pipelines that waited for replicas or disk. A rise means these are slow; at half a second " +
				"outcomes become unknown.",
			Buckets: []float64{0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.1},
		}),
	}
	for _, c := range codes {
		m.ops.WithLabelValues(c.code)
	}
	for _, o := range []Outcome{OK, Insufficient, Overflow, codeReplay} {
		m.ops.WithLabelValues(strings.ToLower(string(o)))
	}
	if reg != nil {
		reg.MustRegister(m.ops, m.loads, m.waits)
	}
	m.lost = newLost(reg)
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
	var have prometheus.AlreadyRegisteredError
	if err := reg.Register(c); errors.As(err, &have) {
		return have.ExistingCollector.(prometheus.Counter) //nolint:forcetypeassert // the name is ours
	} else if err != nil {
		panic(err) // as MustRegister does
	}
	return c
}

// Outcomes of stream entries, the values of the outcome label of credits_sync_entries_total.
const (
	entryApplied     = "applied"
	entryDuplicate   = "duplicate"
	entryQuarantined = "quarantined"
)

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
	pending prometheus.Gauge
	entries *prometheus.CounterVec
	frozen  *prometheus.CounterVec
	written *prometheus.CounterVec
	bumps   prometheus.Counter
	lost    prometheus.Counter
	drift   prometheus.Gauge
}

func newSyncMetrics(reg prometheus.Registerer) *syncMetrics {
	m := &syncMetrics{
		lag: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "credits_sync_lag_seconds",
			Help: "Age of the oldest operation that is not in the ledger yet. A rise means the sync or " +
				"Postgres is too slow, or gone. A node of a cluster that does not answer is left out.",
		}),
		pending: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "credits_stream_entries", Help: "Operations in the buckets' streams.",
		}),
		entries: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "credits_sync_entries_total",
			Help: "Stream entries by what became of them. Quarantined ones need an operator.",
		}, []string{"outcome"}),
		frozen: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "credits_frozen_total",
			Help: "Accounts frozen because their operations contradict the ledger. Any rise needs an operator.",
		}, []string{"reason"}),
		written: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "outbox_events_written_total", Help: "Events committed to the outbox by this process.",
		}, []string{"type"}),
		bumps: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "credits_epoch_bumps_total",
			Help: "Buckets rebuilt from the ledger because Redis had lost operations.",
		}),
		drift: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "credits_reconcile_drift",
			Help: "Credits by which the ledger's accounts differ from their counter-accounts, looked at every 15 " +
				"minutes. Anything but 0 means the ledger was changed by hand.",
		}),
		lost: newLost(reg),
	}
	for _, o := range []string{entryApplied, entryDuplicate, entryQuarantined} {
		m.entries.WithLabelValues(o)
	}
	for _, t := range []string{eventAdded, eventDeducted} {
		m.written.WithLabelValues(t)
	}
	for _, r := range reasons {
		m.frozen.WithLabelValues(r)
	}
	if reg != nil {
		reg.MustRegister(m.lag, m.pending, m.entries, m.frozen, m.written, m.bumps, m.drift)
	}
	return m
}
