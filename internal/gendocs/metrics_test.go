package gendocs

import (
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"posthaste/internal/lab/testenv"
	"posthaste/internal/lab/testenv/commandline"
)

// contractMetrics are the names that must not change.
const contractMetrics = `outbox_published_total{mode,stream} outbox_suppressed_total{reason} outbox_parked_total
	outbox_commit_to_publish_seconds{mode} outbox_publish_seconds outbox_publish_errors_total{class} outbox_backlog_rows
	outbox_backlog_oldest_seconds outbox_inflight_events outbox_relay_mode{mode} outbox_relay_leader outbox_relay_epoch
	outbox_mode_switches_total{from,to,reason} outbox_slot_active outbox_slot_retained_bytes ` +
	`outbox_slot_confirmed_lag_bytes
	outbox_slot_lost outbox_wire_idle_seconds outbox_stream_length{stream} outbox_group_pending{stream,group}
	outbox_group_lag{stream,group} outbox_group_oldest_pending_seconds{stream,group} ` +
	`outbox_trim_lost_total{stream,group}
	outbox_events_written_total{type} outbox_slot_max_keep_bytes outbox_scrape_errors_total{collector} ` +
	`redis_memory_ratio
	redis_eviction_unsafe idem_requests_total{route,outcome} idem_script_seconds{script} credits_ops_total{code}
	credits_sync_lag_seconds http_request_duration_seconds{route,method,status}`

// TestMetricsAreTheContracts: the names and labels of the contract exist, labels that are not open have all values
// from the start, and no bucket is a whole number: Prometheus writes those as 1 or as 1.0, and rules would miss half.
func TestMetricsAreTheContracts(t *testing.T) {
	t.Parallel()
	all, err := exportedMetrics(t.Context(), commandline.Config(t))
	if err != nil {
		t.Fatal(err)
	}
	for want := range strings.FieldsSeq(contractMetrics) {
		name, labels, _ := strings.Cut(strings.TrimSuffix(want, "}"), "{")
		x := all[name]
		if x == nil {
			t.Errorf("%s is not exported", name)
		} else if got := strings.Join(x.labels, ","); got != labels {
			t.Errorf("%s: labels %q, want %q", name, got, labels)
		}
	}
	for _, x := range all {
		for _, l := range x.labels {
			_, open := openLabels[l]
			named := slices.Contains(x.labels, "stream") // its series are created with the stream
			if !open && !named && len(x.values[l]) == 0 {
				t.Errorf("%s has no series at the start: make one for each value of %s (see zero in package relay), "+
					"or add the label to openLabels", x.name, l)
			}
		}
		if (x.kind == "histogram") != (len(x.bounds) > 0) {
			t.Errorf("%s is a %s with buckets %v", x.name, x.kind, x.bounds)
		}
		for _, b := range x.bounds {
			if b == math.Trunc(b) {
				t.Errorf("%s has the bucket %v", x.name, b)
			}
		}
	}
}

// TestMetricsPage: every metric has a note, every note has a metric, and the committed page is up to date.
func TestMetricsPage(t *testing.T) {
	t.Parallel()
	want, err := metricsReference(t.Context(), commandline.Config(t))
	if err != nil {
		t.Fatal(err)
	}
	have, err := os.ReadFile(filepath.Join(testenv.Root(t), "docs", "metrics.md"))
	if err != nil {
		t.Fatal(err)
	}
	if string(have) != want {
		t.Error("docs/metrics.md is out of date: run make docs")
	}
}
