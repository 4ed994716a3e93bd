package relay

import (
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"posthaste/outbox"
)

// TestSlowestEventIsTheExemplar: every event is counted, and the slowest that has a trace is the bucket's exemplar.
func TestSlowestEventIsTheExemplar(t *testing.T) {
	t.Parallel()
	const slow, fast = "4bf92f3577b34da6a3ce929d0e0e4736", "00000000000000000000000000000001"
	now := time.Now()
	event := func(age time.Duration, trace string) *outbox.Record {
		e := &outbox.Record{Time: now.Add(-age)}
		if trace != "" {
			e.Headers = []byte(`{"traceparent": "00-` + trace + `-00f067aa0ba902b7-01"}`)
		}
		return e
	}
	reg := prometheus.NewRegistry()
	m := newMetrics(reg, func() float64 { return 0 })
	m.observe(outbox.ModeCDC, []*outbox.Record{
		event(0, fast), event(400*time.Millisecond, slow), event(time.Second, ""),
		event(-time.Hour, ""),
	}, now)
	m.observe(outbox.ModeCDC, nil, now)
	got := histogramOf(t, reg, "outbox_commit_to_publish_seconds", "cdc")
	if got.GetSampleCount() != 4 || got.GetSampleSum() < 1.399 || got.GetSampleSum() > 1.401 {
		t.Errorf("%d observations, %v s together; want 4 and 1.4, a clock that is ahead counting as 0",
			got.GetSampleCount(), got.GetSampleSum())
	}
	var traces []string
	for _, b := range got.GetBucket() {
		for _, l := range b.GetExemplar().GetLabel() {
			traces = append(traces, l.GetName()+" "+l.GetValue())
		}
	}
	if len(traces) != 1 || traces[0] != "trace_id "+slow {
		t.Errorf("exemplars %v, want the slowest event's trace", traces)
	}
}

func histogramOf(t *testing.T, reg *prometheus.Registry, name, label string) *dto.Histogram {
	t.Helper()
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			if f.GetName() == name && m.GetLabel()[0].GetValue() == label {
				return m.GetHistogram()
			}
		}
	}
	t.Fatalf("no %s of %s", name, label)
	return nil
}
