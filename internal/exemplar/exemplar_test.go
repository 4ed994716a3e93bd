package exemplar

import (
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
)

func TestObserve(t *testing.T) {
	t.Parallel()
	const id = "4bf92f3577b34da6a3ce929d0e0e4736"
	for traceparent, want := range map[string]string{
		"00-" + id + "-00f067aa0ba902b7-01":         id,
		"00-" + id + "-00f067aa0ba902b7-03":         id,
		"cc-" + id + "-00f067aa0ba902b7-01-more":    id, // a later version may say more
		"00-" + id + "-00f067aa0ba902b7-00":         "", // not sampled: no backend has it
		"00-" + id + "-00f067aa0ba902b7-01more":     "",
		"ff-" + id + "-00f067aa0ba902b7-01":         "",
		"00-" + id[:31] + "G-00f067aa0ba902b7-01":   "",
		"00-00000000000000000000000000000000-aa-01": "",
		"00-" + zeros(32) + "-00f067aa0ba902b7-01":  "",
		"00-" + id[:30] + "é-00f067aa0ba902b7-01":   "",
		"": "",
		"nonsense that is as long as a trace context is, more": "",
	} {
		h := prometheus.NewHistogram(prometheus.HistogramOpts{Name: "h", Help: "A test's.", Buckets: []float64{0.5}})
		Observe(h, 0.25, traceparent)
		var m dto.Metric
		if err := h.Write(&m); err != nil {
			t.Fatal(err)
		}
		if n := m.GetHistogram().GetSampleCount(); n != 1 {
			t.Errorf("%q: %d observations, want 1", traceparent, n)
		}
		got := ""
		for _, l := range m.GetHistogram().GetBucket()[0].GetExemplar().GetLabel() {
			got += l.GetName() + "=" + l.GetValue()
		}
		if want != "" {
			want = "trace_id=" + want
		}
		if got != want {
			t.Errorf("%q: exemplar %q, want %q", traceparent, got, want)
		}
	}
}

func zeros(n int) string {
	b := make([]byte, n)
	for i := range b {
		b[i] = '0'
	}
	return string(b)
}

// BenchmarkObserve measures an exemplar, which is offered once per batch and once per request.
func BenchmarkObserve(b *testing.B) {
	h := prometheus.NewHistogram(prometheus.HistogramOpts{Name: "h", Help: "A test's.", Buckets: []float64{0.5}})
	for name, traceparent := range map[string]string{
		"without": "", "sampled": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
	} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				Observe(h, 0.25, traceparent)
			}
		})
	}
}
