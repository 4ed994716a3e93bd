package credits

import (
	"slices"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"posthaste/internal/testenv"
)

// All series exist with value zero at the start, so that their first increase is visible.
func TestMetricsBeginAtZero(t *testing.T) {
	t.Parallel()
	reg := prometheus.NewRegistry()
	New(Options{Registerer: reg})
	NewSync(SyncOptions{Registerer: reg})
	families, err := reg.Gather()
	must(t, err)
	series := map[string]int{}
	for _, f := range families {
		series[f.GetName()] = len(f.GetMetric())
		for _, m := range f.GetMetric() {
			if m.GetCounter().GetValue()+m.GetGauge().GetValue()+m.GetHistogram().GetSampleSum() != 0 {
				t.Errorf("%s begins at %v", f.GetName(), m)
			}
		}
	}
	for name, want := range map[string]int{
		"credits_ops_total": len(codes) + 4, "credits_ledger_reads_total": 1,
		"credits_sync_lag_seconds": 1,
		"credits_frozen_total":     len(reasons), "credits_epoch_bumps_total": 1, "credits_lost_operations_total": 1,
		"credits_reconcile_drift": 1, "outbox_events_written_total": 2,
	} {
		testenv.Equal(t, name, series[name], want)
	}
	if !slices.Contains(reasons, reasonFork) {
		t.Error("forks are not counted")
	}
}

// The drift metric shows changes that were made by hand in the ledger.
func TestDrift(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	a, b := w.funded(100), w.funded(50)
	w.settle()
	w.sync.compare(t.Context())
	testenv.Equal(t, "drift", reading(w.sync.metrics.drift), 0)
	w.db.Exec(t, "UPDATE credit_accounts SET balance = 93 WHERE user_id = $1", a)
	w.db.Exec(t, "DELETE FROM credit_accounts WHERE user_id = $1", b)
	w.sync.compare(t.Context())
	testenv.Equal(t, "drift", reading(w.sync.metrics.drift), 57)
}
