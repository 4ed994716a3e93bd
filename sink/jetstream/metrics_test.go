package jetstream_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/nats-io/nats.go"
	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"posthaste/sink/jetstream"
)

// shown returns the series of a registry: counts of histograms, and values of all others.
func shown(f *fixture, reg *prometheus.Registry) map[string]float64 {
	f.Helper()
	all := map[string]float64{}
	families, err := reg.Gather()
	f.Must(err)
	for _, family := range families {
		for _, m := range family.GetMetric() {
			var labels []string
			for _, l := range m.GetLabel() {
				labels = append(labels, l.GetValue())
			}
			value := m.GetGauge().GetValue() + m.GetCounter().GetValue()
			if family.GetType() == dto.MetricType_HISTOGRAM {
				value = float64(m.GetHistogram().GetSampleCount())
			}
			all[strings.Join(append([]string{family.GetName()}, labels...), " ")] = value
		}
	}
	return all
}

// TestMetrics compares the metrics with what the sink has done: a group has read 10 of 43 events and acknowledged 4, an
// event is poison, a second owner suppresses, and trimming removes what the group has not read.
func TestMetrics(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	reg := prometheus.NewRegistry()
	s, _, l := f.adopted(1, jetstream.Options{Registerer: reg, MaxLen: 5, TrimForce: true})
	streams, events := []string{order, "outbox.none"}, makeEvents(43)
	f.Must(s.Regroup(t.Context(), order, []string{"g"}))
	f.Publish(l, events[:3]...)
	f.Publish(l, events[3:]...)
	sub, err := f.nc.JS.PullSubscribe(jetstream.EventsFilter(order), "g", nats.Bind(jetstream.StreamName(order), "g"))
	f.Must(err)
	list, err := sub.Fetch(10)
	f.Must(err)
	for _, m := range list[:4] {
		f.Must(m.AckSync())
	}
	f.Must(s.Observe(t.Context(), streams))
	got := shown(f, reg)
	i, _ := f.info(order)
	want := map[string]float64{
		"outbox_publish_seconds": 2, "outbox_stream_length outbox.order": float64(i.State.Last),
		"outbox_group_pending g outbox.order": 6, "outbox_group_lag g outbox.order": 33,
		"outbox_trim_lost_total g outbox.order": 0, "outbox_publish_errors_total too_large": 0,
		"outbox_suppressed_total doubt": 0,
	}
	f.shows(got, want)
	for _, name := range []string{"outbox_group_oldest_pending_seconds", "outbox_group_idle_seconds"} {
		if v := got[name+" g outbox.order"]; v <= 0 {
			t.Errorf("%s is %v, want that events wait", name, v)
		}
	}
	if _, there := got["outbox_stream_length outbox.none"]; there {
		t.Error("a stream that does not exist has a length")
	}

	poison := makeEvents(1)
	f.target().Poison(poison[0])
	if err := second(l.Deliver(poison).Publish(t.Context())); err == nil {
		t.Error("the poison was published")
	}
	o := f.Owner(2)
	f.Must(s.Adopt(t.Context(), order, o, true))
	l = s.Lane(order, o, streamLane(o))
	f.Publish(l, events[40:]...)
	l.Settled(f.Publish(l, makeEvents(1)...).Number)
	f.Must(s.ForgetDoubt(t.Context(), o, order))
	f.Publish(l, makeEvents(40)...)
	f.Must(s.Trim(t.Context(), order))
	f.Must(s.Observe(t.Context(), streams))
	got = shown(f, reg)
	left := len(f.stored(order))
	f.shows(got, map[string]float64{
		"outbox_publish_seconds": 5, "outbox_publish_errors_total too_large": 1, "outbox_suppressed_total doubt": 3,
		"outbox_trim_lost_total g outbox.order": float64(84 - 10 - left),
		"outbox_group_lag g outbox.order":       float64(left),
	})

	f.server.kill()
	if s.Observe(t.Context(), streams) == nil {
		t.Error("a server that does not run was observed")
	}
	f.shows(shown(f, reg), map[string]float64{
		"outbox_stream_length outbox.order":   got["outbox_stream_length outbox.order"],
		"outbox_group_lag g outbox.order":     float64(left),
		"outbox_group_pending g outbox.order": got["outbox_group_pending g outbox.order"],
	})
	f.server.start()

	f.call("STREAM.DELETE."+jetstream.StreamName(order), nil, nil)
	f.Must(s.Observe(t.Context(), streams))
	for name := range shown(f, reg) {
		if strings.Contains(name, order) {
			t.Errorf("%s is that of a deleted stream", name)
		}
	}
}

func (f *fixture) shows(got, want map[string]float64) {
	f.Helper()
	for name, v := range want {
		if n, there := got[name]; !there || n != v {
			f.Errorf("%s is %v (%v), want %v", name, n, there, v)
		}
	}
	if f.Failed() {
		f.Log(fmt.Sprint(got))
	}
}
