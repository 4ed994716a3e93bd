package console

import (
	"math"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"posthaste/relay"
	"posthaste/sink"
)

// relayMetrics registers the metrics of a relay and its sink.
func relayMetrics(tb testing.TB) *prometheus.Registry {
	tb.Helper()
	reg := prometheus.NewRegistry()
	relay.New(relay.Options{Registerer: reg})
	sink.New(sink.Options{Registerer: reg})
	return reg
}

func TestTheRingKeepsFifteenMinutes(t *testing.T) {
	t.Parallel()
	r := newRing(relayMetrics(t))
	start := time.Unix(1_700_000_000, 0)
	for i := range 1000 {
		r.add(start.Add(time.Duration(i)*time.Second), true, false, seen{})
	}
	list := r.list()
	if len(list) != 900 || list[0].At != start.Unix()+100 || list[899].At != start.Unix()+999 ||
		r.latest().At != start.Unix()+999 {
		t.Fatalf("%d samples from %d to %d", len(list), list[0].At, list[len(list)-1].At)
	}
	if s := list[899]; s.Backlog == nil || *s.Backlog != 0 || s.Out == nil || *s.Out != 0 || s.In != nil ||
		s.P50 != nil {
		t.Errorf("sample of a leader at rest: %+v", s)
	}
}

func TestSamplesAreOfWhoKnows(t *testing.T) {
	t.Parallel()
	r := newRing(prometheus.NewRegistry())
	number := func(v float64) *float64 { return &v }
	at := time.Unix(1_700_000_000, 0)
	r.add(at, false, false, seen{})
	if s := r.latest(); s.Backlog != nil || s.Out != nil || s.In != nil || s.P99 != nil {
		t.Errorf("nobody looks and nothing leads: %+v", s)
	}
	read := func(v float64, ms int) *counter {
		return &counter{value: v, at: at.Add(time.Duration(ms) * time.Millisecond)}
	}
	r.add(at, false, false, seen{written: read(100, 0), added: read(90, 0), backlog: number(10), oldest: number(2)})
	second := seen{written: read(130, 1000), added: read(115, 1000), backlog: number(15), oldest: number(2)}
	r.add(at, false, false, second)
	if s := r.latest(); *s.In != 30 || *s.Out != 25 || *s.Backlog != 15 {
		t.Errorf("in %v, out %v, backlog %v", *s.In, *s.Out, *s.Backlog)
	}
	// No new reading: the rate does not change.
	r.add(at, false, false, second)
	if s := r.latest(); *s.In != 30 || *s.Out != 25 {
		t.Errorf("without a new reading: in %v, out %v", *s.In, *s.Out)
	}
	// If a stream was deleted or the counter's process restarted, the rate is not negative.
	r.add(at, false, false, seen{written: read(131, 3000), added: read(1, 2000), backlog: number(0), oldest: number(0)})
	if s := r.latest(); *s.Out != 0 || *s.In != 0.5 {
		t.Errorf("after a loss: in %v, out %v", *s.In, *s.Out)
	}
	// One more stream is read; its entries are not new.
	r.add(at, false, false, seen{added: &counter{value: 60_000, at: at.Add(4 * time.Second), parts: 1}})
	if s := r.latest(); s.Out != nil {
		t.Errorf("with another stream: out %v", *s.Out)
	}
	r.add(at, false, false, seen{added: &counter{value: 60_020, at: at.Add(5 * time.Second), parts: 1}})
	if s := r.latest(); s.Out == nil || *s.Out != 20 {
		t.Errorf("a second later: out %v", s.Out)
	}
}

// While every relay sweeps, this relay's count is a part of the total.
func TestWhatSeveralPublishIsCountedInRedis(t *testing.T) {
	t.Parallel()
	r := newRing(relayMetrics(t))
	at := time.Unix(1_700_000_000, 0)
	added := func(v float64, s int) seen {
		return seen{added: &counter{value: v, at: at.Add(time.Duration(s) * time.Second)}}
	}
	r.add(at, true, true, added(100, 0))
	r.add(at, true, true, added(140, 1))
	if s := r.latest(); s.Out == nil || *s.Out != 40 {
		t.Errorf("several: %+v", s.Out)
	}
	r.add(at, true, false, added(180, 2))
	if s := r.latest(); s.Out == nil || *s.Out != 0 {
		t.Errorf("this one alone, which has published nothing: %+v", s.Out)
	}
	r.add(at, true, true, seen{})
	if s := r.latest(); s.Out == nil || *s.Out != 0 {
		t.Errorf("nobody looks: %+v", s.Out)
	}
}

// A relay counts the few events that it writes itself, not those of the other processes.
func TestARelayDoesNotKnowWhatOthersWrote(t *testing.T) {
	t.Parallel()
	for relays, reg := range map[bool]*prometheus.Registry{
		true:  relayMetrics(t),
		false: prometheus.NewRegistry(),
	} {
		written := prometheus.NewCounter(prometheus.CounterOpts{Name: "outbox_events_written_total", Help: "x"})
		reg.MustRegister(written)
		r := newRing(reg)
		r.add(time.Unix(1, 0), relays, false, seen{})
		written.Add(3)
		r.add(time.Unix(2, 0), relays, false, seen{})
		if in := r.latest().In; relays && in != nil || !relays && (in == nil || *in != 3) {
			t.Errorf("a relay: %v, written: %v", relays, in)
		}
	}
}

// The relay detects lost data in Redis also while no page is open.
func TestALostPlaceIsRemembered(t *testing.T) {
	t.Parallel()
	reg := prometheus.NewRegistry()
	switches := prometheus.NewCounterVec(prometheus.CounterOpts{Name: "outbox_mode_switches_total", Help: "x"},
		[]string{"from", "to", "reason"})
	reg.MustRegister(switches)
	r := newRing(reg)
	switches.WithLabelValues("cdc", "poll", "gap").Inc() // before the first sample
	for s := range 3 {
		r.add(time.Unix(int64(s), 0), true, false, seen{})
		switches.WithLabelValues("cdc", "poll", "toggle").Inc()
	}
	if at := r.lastGap(); !at.IsZero() {
		t.Errorf("a gap at %v", at)
	}
	switches.WithLabelValues("cdc", "poll", "gap").Inc()
	r.add(time.Unix(9, 0), true, false, seen{})
	r.add(time.Unix(10, 0), true, false, seen{})
	if at := r.lastGap(); !at.Equal(time.Unix(9, 0)) {
		t.Errorf("a gap at %v, want that of second 9", at)
	}
}

func TestPercentiles(t *testing.T) {
	t.Parallel()
	bounds := []float64{0.001, 0.01, 0.1}
	zero := []uint64{0, 0, 0, 0}
	for _, c := range []struct {
		counts []uint64
		q      float64
		want   float64
	}{
		{[]uint64{100, 100, 100, 100}, 0.5, 0.0005}, // all in the first bucket
		{[]uint64{0, 100, 100, 100}, 0.5, 0.0055},   // all in the second
		{[]uint64{90, 98, 100, 100}, 0.99, 0.055},   // the rank is the first of two in the third
		{[]uint64{0, 0, 0, 10}, 0.5, 0.1},           // beyond the last bound
		{[]uint64{1, 1, 1, 1}, 0.99, 0.001},         // a single event
	} {
		got := percentile(bounds, zero, c.counts, c.q)
		if got == nil || math.Abs(*got-c.want) > 1e-9 {
			t.Errorf("%v at %v: got %v, want %v", c.counts, c.q, got, c.want)
		}
	}
	if got := percentile(bounds, []uint64{5, 5, 5, 5}, []uint64{5, 5, 5, 5}, 0.5); got != nil {
		t.Errorf("without events: %v", *got)
	}
	if got := percentile(bounds, []uint64{5, 5, 5, 5}, zero, 0.5); got != nil {
		t.Errorf("after a restart: %v", *got)
	}
}

// BenchmarkSample measures the cost of the sample that a process takes every second.
func BenchmarkSample(b *testing.B) {
	r := newRing(relayMetrics(b))
	for b.Loop() {
		r.add(time.Unix(1, 0), true, false, seen{})
	}
}
