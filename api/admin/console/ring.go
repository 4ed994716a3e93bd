package console

import (
	"math"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"posthaste/outbox"
)

const (
	// ringSize is the number of samples in 15 minutes.
	ringSize = 900
	// latencyWindow is the number of samples that the percentiles cover.
	latencyWindow = 5
)

// Sample is one second of the charts. A nil field is unknown to this process.
type Sample struct {
	// At is in Unix seconds.
	At int64 `json:"t"`
	// In and Out are the events written and published in that second.
	In  *float64 `json:"in"`
	Out *float64 `json:"out"`
	// P50 and P99 are percentiles of the seconds from commit to publish over the last 5 s, or nil without events.
	P50 *float64 `json:"p50"`
	P99 *float64 `json:"p99"`
	// Backlog is the number of rows in the outbox, Oldest the age of the oldest in seconds.
	Backlog *float64 `json:"backlog"`
	Oldest  *float64 `json:"oldest"`
}

// seen is recent data from Postgres and Redis. Its fields are nil while no page is open.
type seen struct {
	written, added  *counter
	backlog, oldest *float64
}

// counter is a reading of a rising number: the sum of parts numbers.
type counter struct {
	value float64
	at    time.Time
	parts int
}

// meter computes the rate of a counter that is read less often than samples are taken.
type meter struct {
	last *counter
	rate *float64
}

// read returns the rate per second between the last two different readings, or nil if there are not two.
func (m *meter) read(c *counter) *float64 {
	switch {
	case c == nil, m.last != nil && c.parts != m.last.parts: // another set of streams has another sum
		m.rate = nil
	case m.last != nil && c.at.After(m.last.at):
		v := max(c.value-m.last.value, 0) / c.at.Sub(m.last.at).Seconds()
		m.rate = &v
	}
	m.last = c
	return m.rate
}

type ring struct {
	metrics prometheus.Collector
	// names maps descriptors to the names that are read, and others to "".
	names map[*prometheus.Desc]string

	mu      sync.Mutex
	samples [ringSize]Sample
	n       int       // samples ever added
	gap     time.Time // when the relay last detected lost data in Redis

	// used by add only
	last    reading
	windows [latencyWindow][]uint64
	wn      int
	written meter
	added   meter
}

// reading is a snapshot of the process' own metrics.
type reading struct {
	// values has the sums of counters and gauges by name.
	values map[string]float64
	// bounds and counts are the histogram commitToPublish: cumulative for each bound, then the total. They are nil if
	// this process has no relay.
	bounds []float64
	counts []uint64
}

func newRing(c prometheus.Collector) *ring {
	return &ring{metrics: c, names: map[*prometheus.Desc]string{}}
}

// add takes a sample. leads reports whether the backlog gauges of this process are valid, shared whether other
// processes may publish concurrently.
func (r *ring) add(now time.Time, leads, shared bool, s seen) {
	m := r.read()
	out := Sample{At: now.Unix(), Backlog: s.backlog, Oldest: s.oldest}
	if leads && out.Backlog == nil {
		rows, oldest := m.values[backlogRows], m.values[backlogOldest]
		out.Backlog, out.Oldest = &rows, &oldest
	}
	first := r.n == 0
	out.In, out.Out = r.written.read(s.written), r.added.read(s.added)
	if leads && !first && (out.Out == nil || !shared) {
		out.Out = rise(r.last.values[published], m.values[published])
	}
	// A process without a relay takes orders; a relay writes few events itself.
	if orders, serves := m.values[eventsWritten]; out.In == nil && serves && m.counts == nil && !first {
		out.In = rise(r.last.values[eventsWritten], orders)
	}
	if m.counts != nil {
		old := r.windows[r.wn%latencyWindow]
		r.windows[r.wn%latencyWindow] = m.counts
		r.wn++
		if len(old) == len(m.counts) {
			out.P50, out.P99 = percentile(m.bounds, old, m.counts, 0.5), percentile(m.bounds, old, m.counts, 0.99)
		}
	}
	gap := !first && m.values[modeSwitches] > r.last.values[modeSwitches]
	r.last = m
	r.mu.Lock()
	defer r.mu.Unlock()
	if gap {
		r.gap = now
	}
	r.samples[r.n%ringSize] = out
	r.n++
}

func rise(from, to float64) *float64 {
	v := max(to-from, 0)
	return &v
}

// list returns the samples, oldest first.
func (r *ring) list() []Sample {
	r.mu.Lock()
	defer r.mu.Unlock()
	n := min(r.n, ringSize)
	out := make([]Sample, 0, n)
	for i := r.n - n; i < r.n; i++ {
		out = append(out, r.samples[i%ringSize])
	}
	return out
}

// lastGap returns when this process' relay last detected lost data in Redis, or the zero time.
func (r *ring) lastGap() time.Time {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.gap
}

// latest returns the last sample, or nil.
func (r *ring) latest() *Sample {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.n == 0 {
		return nil
	}
	s := r.samples[(r.n-1)%ringSize]
	return &s
}

// read reads six of the hundreds of metrics of this process. It avoids a full gathering, which would be most of the
// work of an idle relay. A metric that cannot be read is zero.
func (r *ring) read() reading {
	m := reading{values: map[string]float64{}}
	all := make(chan prometheus.Metric, 64)
	go func() {
		defer close(all)
		r.metrics.Collect(all)
	}()
	for metric := range all {
		name := r.name(metric.Desc())
		if name == "" {
			continue
		}
		var v dto.Metric
		if metric.Write(&v) != nil {
			continue
		}
		gap := func(l *dto.LabelPair) bool { return l.GetValue() == outbox.ReasonGap }
		switch {
		case name == commitToPublish:
			m.add(v.GetHistogram())
		case name != modeSwitches || slices.ContainsFunc(v.GetLabel(), gap):
			m.values[name] += v.GetCounter().GetValue() + v.GetGauge().GetValue()
		}
	}
	return m
}

// The metrics that are read; of modeSwitches only those because of a gap.
const (
	published       = "outbox_published_total"
	backlogRows     = "outbox_backlog_rows"
	backlogOldest   = "outbox_backlog_oldest_seconds"
	modeSwitches    = "outbox_mode_switches_total"
	eventsWritten   = "outbox_events_written_total"
	commitToPublish = "outbox_commit_to_publish_seconds"
)

// descsMost bounds names: a collector may create new descriptors at each collection.
const descsMost = 10_000

// name returns the name of a metric that is read, or "" for others. Only the text of a descriptor has its name.
func (r *ring) name(d *prometheus.Desc) string {
	name, known := r.names[d]
	if known {
		return name
	}
	text := d.String()
	for _, n := range []string{published, backlogRows, backlogOldest, modeSwitches, eventsWritten, commitToPublish} {
		if strings.Contains(text, `fqName: "`+n+`"`) {
			name = n
		}
	}
	if len(r.names) >= descsMost {
		clear(r.names)
	}
	r.names[d] = name
	return name
}

// add adds a histogram. All of them have the same bounds.
func (m *reading) add(h *dto.Histogram) {
	if m.counts == nil {
		m.counts = make([]uint64, len(h.GetBucket())+1)
		for _, b := range h.GetBucket() {
			m.bounds = append(m.bounds, b.GetUpperBound())
		}
	}
	if len(h.GetBucket())+1 != len(m.counts) {
		return
	}
	for i, b := range h.GetBucket() {
		m.counts[i] += b.GetCumulativeCount()
	}
	m.counts[len(m.counts)-1] += h.GetSampleCount()
}

// percentile returns a percentile of the observations between two readings of a histogram, interpolated in its bucket;
// nil without observations. In the bucket +Inf it returns the largest finite bound.
func percentile(bounds []float64, from, to []uint64, q float64) *float64 {
	total := to[len(to)-1] - from[len(from)-1]
	if total == 0 || to[len(to)-1] < from[len(from)-1] {
		return nil
	}
	rank := math.Ceil(q * float64(total))
	low, below := 0.0, 0.0
	for i, bound := range bounds {
		n := float64(to[i] - from[i])
		if n >= rank {
			v := low + (bound-low)*(rank-below)/max(n-below, 1)
			return &v
		}
		low, below = bound, n
	}
	return &low
}
