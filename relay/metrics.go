package relay

import (
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"posthaste/internal/exemplar"
	"posthaste/outbox"
)

// latencyBuckets are hand-picked and not whole numbers, so that text and OpenMetrics name them alike.
var latencyBuckets = []float64{
	0.0005, 0.0015, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.5, 2.5, 5.5, 15.5,
	60.5, 300.5,
}

// switchReasons are the values of the reason label of outbox_mode_switches_total.
var switchReasons = []string{
	outbox.ReasonWALLevel, outbox.ReasonNoRight, outbox.ReasonPooler, outbox.ReasonSlotsFull, outbox.ReasonSendersFull,
	outbox.ReasonPublication, outbox.ReasonSlotMissing, outbox.ReasonSlotLost,
	outbox.ReasonSlotActive, outbox.ReasonSlotForeign, outbox.ReasonDecode, outbox.ReasonSilent,
	outbox.ReasonConnection, outbox.ReasonTransactionHeld, outbox.ReasonMissed,
	outbox.ReasonStalled, outbox.ReasonGiant, outbox.ReasonBudget, outbox.ReasonToggle, outbox.ReasonFenced,
	outbox.ReasonGap,
	outbox.ReasonRestarted, outbox.ReasonLayout, outbox.ReasonStop, outbox.ReasonLeadership, reasonOther,
}

// reasonOther stands for every reason outside the closed set.
const reasonOther = "other"

// maxStreamLabels bounds the streams that get a series of their own; the rest share one.
const maxStreamLabels = 200

type metrics struct {
	published, switches, slotCreated, scrapeErrors, auditFailures   *prometheus.CounterVec
	mode, desired, streamInfo                                       *prometheus.GaugeVec
	commitToPublish                                                 *prometheus.HistogramVec
	parked, settled, lostEvents, restored, failovers                prometheus.Counter
	leader, epoch, backlogRows, backlogOldest, dead, lost, phantoms prometheus.Gauge
	slotActive, slotRetained, slotConfirmed, slotLost, slotMaxKeep  prometheus.Gauge
	stalled                                                         prometheus.Gauge

	leaders []prometheus.Gauge // those that only a leader feeds
	streams map[string]bool    // label values given out; owned by streamLabel's callers, under reporter.labels
}

// registry makes metrics and registers them.
type registry struct {
	promauto.Factory
	leaders []prometheus.Gauge
}

func (r *registry) gauge(name, help string) prometheus.Gauge {
	return r.NewGauge(prometheus.GaugeOpts{Name: name, Help: help})
}

func (r *registry) counter(name, help string) prometheus.Counter {
	return r.NewCounter(prometheus.CounterOpts{Name: name, Help: help})
}

// ofLeader is a gauge that only a leader feeds; idle resets it.
func (r *registry) ofLeader(name, help string) prometheus.Gauge {
	g := r.gauge(name, help)
	r.leaders = append(r.leaders, g)
	return g
}

func newMetrics(reg prometheus.Registerer, inflight func() float64) *metrics {
	r := &registry{Factory: promauto.With(reg)}
	m := &metrics{streams: map[string]bool{}}
	m.addEvents(r)
	m.addState(r)
	m.addSlot(r)
	r.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "outbox_inflight_events", Help: "Events routed and not yet settled, bounded by the window.",
	}, inflight)
	m.leaders = r.leaders
	m.setMode(outbox.ModeStandby)
	m.setDesired("")
	if reg != nil { // otherwise nothing reads the series
		m.zero()
	}
	return m
}

// addEvents adds the metrics of events.
func (m *metrics) addEvents(r *registry) {
	m.published = r.NewCounterVec(prometheus.CounterOpts{
		Name: "outbox_published_total",
		Help: "Events published and known to be in their stream, by the mode they travelled in.",
	}, []string{"mode", "stream"})
	m.parked = r.counter("outbox_parked_total",
		"Events moved to outbox_dead. Any rise needs attention: posthaste dead list.")
	m.commitToPublish = r.NewHistogramVec(prometheus.HistogramOpts{
		Name: "outbox_commit_to_publish_seconds", Buckets: latencyBuckets,
		Help: "Age of an event when its publish returned: from its commit when streamed, from its insert when " +
			"polled.",
	}, []string{"mode"})
	m.settled = r.counter("outbox_settled_total", "Events settled after they were published by the stream.")
	m.backlogRows = r.ofLeader("outbox_backlog_rows",
		"Events in the outbox that are neither settled nor published. Rises when they come faster than they leave.")
	m.backlogOldest = r.ofLeader("outbox_backlog_oldest_seconds",
		"Age of the oldest event in the outbox that is not settled.")
	m.dead = r.ofLeader("outbox_dead_rows", "Dead events of the relay, in outbox_dead.")
	m.lost = r.ofLeader("outbox_lost_events",
		"Events that the sink lost after they were settled, and that were not published again yet.")
	m.lostEvents = r.counter("outbox_lost_events_total",
		"Events that the sink was found to have lost after they were settled. Any rise needs attention: posthaste "+
			"status names the command that restores them.")
	m.restored = r.counter("outbox_restored_events_total",
		"Events that the sink had lost after they were settled, and that an adoption has published again.")
	m.phantoms = r.ofLeader("outbox_phantom_events",
		"Events in a stream whose commit Postgres has lost, by a failover or a restore, and that were not "+
			"acknowledged: posthaste phantoms names them, and phantoms --ack acknowledges them.")
	m.failovers = r.counter("outbox_postgres_failovers_total",
		"Times Postgres was found to have gone back in time, by a failover or a restore, so that it may have "+
			"lost marks or commits.")
	m.streamInfo = r.NewGaugeVec(prometheus.GaugeOpts{
		Name: "outbox_stream_info",
		Help: "1 for each stream, with what the names of the streams of its type have in common: of several, it is " +
			"the name without the number.",
	}, []string{"stream", "base"})
	m.scrapeErrors = r.NewCounterVec(prometheus.CounterOpts{
		Name: "outbox_scrape_errors_total",
		Help: "Failed reads behind gauges, which keep their last value meanwhile; and housekeeping that failed.",
	}, []string{"collector"})
}

// addState adds the metrics of this instance.
func (m *metrics) addState(r *registry) {
	m.mode = r.NewGaugeVec(prometheus.GaugeOpts{
		Name: "outbox_relay_mode", Help: "1 for the mode this instance is in: cdc, poll or standby.",
	}, []string{"mode"})
	m.desired = r.NewGaugeVec(prometheus.GaugeOpts{
		Name: "outbox_relay_desired_mode",
		Help: "1 for the mode that is wanted: auto, cdc or poll. All 0 until this instance has read it. Polling " +
			"while poll is not wanted is a fallback.",
	}, []string{"mode"})
	m.leader = r.gauge("outbox_relay_leader", "1 if this instance leads.")
	m.epoch = r.gauge("outbox_relay_epoch", "The fencing epoch this instance acts under. It rises at every adoption.")
	m.switches = r.NewCounterVec(prometheus.CounterOpts{
		Name: "outbox_mode_switches_total",
		Help: "Changes of the leader between cdc, poll and standby, with the reason. A steady rise is flapping.",
	}, []string{"from", "to", "reason"})
	m.auditFailures = r.NewCounterVec(prometheus.CounterOpts{
		Name: "outbox_audit_failures_total",
		Help: "Times the stream was found to be silent about rows: missed or stalled.",
	}, []string{"reason"})
	m.stalled = r.ofLeader("outbox_relay_stalled",
		"1 while rows wait and nothing moves, or one part of the table is stalled, whatever the cause.")
}

// addSlot adds the metrics of the slot.
func (m *metrics) addSlot(r *registry) {
	m.slotActive = r.ofLeader("outbox_slot_active", "1 if a walsender streams the slot.")
	m.slotRetained = r.ofLeader("outbox_slot_retained_bytes",
		"WAL that the slot holds back from removal. Bounded by the WAL budget.")
	m.slotConfirmed = r.ofLeader("outbox_slot_confirmed_lag_bytes",
		"WAL between the slot's confirmed position and the server's.")
	m.slotLost = r.ofLeader("outbox_slot_lost", "1 if the slot was invalidated by the server.")
	m.slotMaxKeep = r.ofLeader("outbox_slot_max_keep_bytes",
		"max_slot_wal_keep_size in bytes, -1 for unlimited: the limit while no relay runs.")
	m.slotCreated = r.NewCounterVec(prometheus.CounterOpts{
		Name: "outbox_slot_created_total",
		Help: "Slots made by this instance: new, or because the one before was missing or lost, or its " +
			"publication was not whole. A rise of missing means that another program drops it.",
	}, []string{"reason"})
}

// zero makes every series of a closed label set exist from the start.
func (m *metrics) zero() {
	modes := []outbox.Mode{outbox.ModeCDC, outbox.ModePoll, outbox.ModeStandby}
	for _, a := range modes {
		if a != outbox.ModeStandby {
			m.commitToPublish.WithLabelValues(string(a))
		}
		for _, b := range modes {
			if a == b {
				continue
			}
			for _, r := range switchReasons {
				m.switches.WithLabelValues(string(a), string(b), r)
			}
		}
	}
	for _, c := range []string{
		"backlog", "slot", "dead", "losses", "streams", conditionTable, conditionHistory,
		conditionTrim,
	} {
		m.scrapeErrors.WithLabelValues(c)
	}
	for _, r := range []string{madeNew, madeMissing, madeLost, madePublication} {
		m.slotCreated.WithLabelValues(r)
	}
	m.auditFailures.WithLabelValues(outbox.ReasonMissed)
	m.auditFailures.WithLabelValues(outbox.ReasonStalled)
}

// idle resets the gauges that only a leader feeds: another instance shows them now. Of which type a stream is never
// changes, and stays.
func (m *metrics) idle() {
	for _, g := range m.leaders {
		g.Set(0)
	}
}

func (m *metrics) setMode(mode outbox.Mode) {
	only(m.mode, mode, outbox.ModeCDC, outbox.ModePoll, outbox.ModeStandby)
}

func (m *metrics) setDesired(mode outbox.Mode) {
	only(m.desired, mode, outbox.ModeAuto, outbox.ModeCDC, outbox.ModePoll)
}

// only sets the series of one of the modes to 1, and the others to 0.
func only(g *prometheus.GaugeVec, one outbox.Mode, modes ...outbox.Mode) {
	for _, o := range modes {
		boolGauge(g.WithLabelValues(string(o)), o == one)
	}
}

// streamLabel bounds the label: aggregate types are the writers' choice.
func (m *metrics) streamLabel(stream string) string {
	if m.streams[stream] {
		return stream
	}
	if len(m.streams) >= maxStreamLabels {
		return reasonOther
	}
	m.streams[stream] = true
	for _, mode := range []outbox.Mode{outbox.ModeCDC, outbox.ModePoll} {
		m.published.WithLabelValues(string(mode), stream)
	}
	return stream
}

func (m *metrics) observe(mode outbox.Mode, events []*outbox.Record, now time.Time) {
	h := m.commitToPublish.WithLabelValues(string(mode))
	// Only the slowest event gets an exemplar: it is the one of interest, and reading headers is the most expensive
	// step here.
	var slowest *outbox.Record
	for _, e := range events {
		if len(e.Headers) > 0 && (slowest == nil || e.Time.Before(slowest.Time)) {
			slowest = e
		}
	}
	for _, e := range events {
		traceparent := ""
		if e == slowest {
			traceparent = e.TraceParent()
		}
		exemplar.Observe(h, max(now.Sub(e.Time).Seconds(), 0), traceparent)
	}
}

func boolGauge(g prometheus.Gauge, on bool) {
	if on {
		g.Set(1)
	} else {
		g.Set(0)
	}
}

// knownReason keeps the label set closed.
func knownReason(reason string) string {
	if slices.Contains(switchReasons, reason) {
		return reason
	}
	return reasonOther
}

// Why a slot was made, the values of the reason label of outbox_slot_created_total.
const (
	madeNew         = "new"         // there was none, as far as this process knows, or it had dropped it itself
	madeMissing     = "missing"     // somebody dropped it
	madeLost        = "lost"        // the server had given it up
	madePublication = "publication" // the publication had not been whole while it existed
)
