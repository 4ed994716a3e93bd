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
	// ringSize is 15 minutes of a sample a second.
	ringSize = 900
	// latencyWindow is over how many samples the percentiles are taken.
	latencyWindow = 5
)

// Sample is one second of the charts. A nil field is not known to this process.
type Sample struct {
	// At is in Unix seconds.
	At int64 `json:"t"`
	// In and Out are events written and published in that second.
	In  *float64 `json:"in"`
	Out *float64 `json:"out"`
	// P50 and P99 are percentiles of the seconds from commit to publish, over the last 5 s; nil without an event.
	P50 *float64 `json:"p50"`
	P99 *float64 `json:"p99"`
	// Backlog is the rows in the outbox, Oldest the age of the oldest of them in seconds.
	Backlog *float64 `json:"backlog"`
	Oldest  *float64 `json:"oldest"`
}

// seen is what Postgres and Redis told a moment ago, if anybody looks.
type seen struct {
	written, added  *counter
	backlog, oldest *float64
}

// counter is a number that rises, when it was read, and of how many parts it is the sum.
type counter struct {
	value float64
	at    time.Time
	parts int
}

// meter makes a rate of a counter that is read less regularly than samples are taken.
type meter struct {
	last *counter
	rate *float64
}

// read returns the rate per second between the last two different readings; nil if there are none.
func (m *meter) read(c *counter) *float64 {
	switch {
	case c == nil, m.last != nil && c.parts != m.last.parts: // a stream that was not looked at before did not begin now
		m.rate = nil
	case m.last != nil && c.at.After(m.last.at):
		v := max(c.value-m.last.value, 0) / c.at.Sub(m.last.at).Seconds()
		m.rate = &v
	}
	m.last = c
	return m.rate
}

// ring keeps the last samples.
type ring struct {
	metrics prometheus.Collector
	// names are those of the metrics that are read, "" for all others.
	names map[*prometheus.Desc]string

	mu      sync.Mutex
	samples [ringSize]Sample
	n       int       // samples ever added
	gap     time.Time // when the relay last found that Redis has lost its place

	// owned by add
	last    reading
	windows [latencyWindow][]uint64
	wn      int
	written meter
	added   meter
}

// reading is what the process' own metrics say at one moment.
type reading struct {
	published, backlog, oldest, orders, gaps float64
	relays                                   bool // this process has a relay
	serves                                   bool // this process takes orders
	bounds                                   []float64
	counts                                   []uint64 // cumulative, by bounds, then everything
}

func newRing(c prometheus.Collector) *ring {
	return &ring{metrics: c, names: map[*prometheus.Desc]string{}}
}

// add takes a sample. leads tells whether the gauges of this process are those of the leader, shared whether other
// processes may be publishing beside it.
func (r *ring) add(now time.Time, leads, shared bool, s seen) {
	m := r.read()
	out := Sample{At: now.Unix(), Backlog: s.backlog, Oldest: s.oldest}
	if leads && out.Backlog == nil {
		out.Backlog, out.Oldest = &m.backlog, &m.oldest
	}
	first := r.n == 0
	out.In, out.Out = r.written.read(s.written), r.added.read(s.added)
	if leads && !first && (out.Out == nil || !shared) {
		out.Out = rise(r.last.published, m.published)
	}
	if out.In == nil && m.serves && !m.relays && !first { // a relay writes few events itself
		out.In = rise(r.last.orders, m.orders)
	}
	if m.relays {
		old := r.windows[r.wn%latencyWindow]
		r.windows[r.wn%latencyWindow] = m.counts
		r.wn++
		if len(old) == len(m.counts) {
			out.P50, out.P99 = percentile(m.bounds, old, m.counts, 0.5), percentile(m.bounds, old, m.counts, 0.99)
		}
	}
	gap := !first && m.gaps > r.last.gaps
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

// lastGap returns when this process' relay last found that Redis has lost its place; zero if it never did.
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

// read sums up the metrics of this process. It looks at six of hundreds, and not in the way in which a scrape is
// answered: most of what a relay does while nothing happens would be this. What cannot be read counts as nothing.
func (r *ring) read() reading {
	var m reading
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
		switch value := v.GetCounter().GetValue() + v.GetGauge().GetValue(); name {
		case published:
			m.published += value
		case backlogRows:
			m.backlog += value
		case backlogOldest:
			m.oldest += value
		case modeSwitches:
			gap := func(l *dto.LabelPair) bool { return l.GetValue() == outbox.ReasonGap }
			if slices.ContainsFunc(v.GetLabel(), gap) {
				m.gaps += value
			}
		case eventsWritten:
			m.serves = true
			m.orders += value
		case commitToPublish:
			m.relays = true
			m.add(v.GetHistogram())
		}
	}
	return m
}

// What is read of the metrics of this process.
const (
	published       = "outbox_published_total"
	backlogRows     = "outbox_backlog_rows"
	backlogOldest   = "outbox_backlog_oldest_seconds"
	modeSwitches    = "outbox_mode_switches_total"
	eventsWritten   = "outbox_events_written_total"
	commitToPublish = "outbox_commit_to_publish_seconds"
)

// descsMost bounds names: a collector may make its descriptions anew each time.
const descsMost = 10_000

// name returns the name of what is read, "" for all others. Only a description's text tells its name.
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

// add adds a histogram; all have the same bounds.
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

// percentile reads a percentile of what came between two readings of a histogram, in the middle of its bucket's range
// as far as the rank goes; nil if nothing came. Beyond the last bound it answers that bound.
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
