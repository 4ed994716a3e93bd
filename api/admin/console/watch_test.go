package console

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strconv"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/go-redis/v9"

	"posthaste/internal/lab/testenv"
	"posthaste/internal/ops"
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

// Redis may have thousands of groups, and every page requests the state every second.
func TestManyGroupsAreBounded(t *testing.T) {
	t.Parallel()
	var groups []sink.Group
	for i := range 1000 {
		groups = append(groups, sink.Group{
			Stream: "outbox.order", Name: strconv.Itoa(i), Lag: 5, Pending: 1, Idle: time.Duration(i) * time.Minute,
		})
	}
	groups[999].Lost = 7
	for i := range groups {
		groups[i].Streams = make([]sink.Group, 17)
	}
	list, sum := sumUp(groups)
	if len(list) != maxGroups || list[0].Name != "999" || ops.StateOf(list[1]) != ops.Abandoned ||
		sum != (GroupSum{Groups: 1000, Unread: 5000, Pending: 1000}) {
		t.Errorf("%d groups from %s, %+v", len(list), list[0].Name, sum)
	}
	on := 0
	for _, g := range list {
		on += len(g.Streams)
	}
	if on != maxShards || len(list[0].Streams) != 17 {
		t.Errorf("they are on %d streams, the first on %d", on, len(list[0].Streams))
	}
}

// A process that was suspended during a read measures a long duration; the next read must not wait for hours. After one
// slow read the next must follow soon, because Redis may fail at any moment.
func TestARestIsBounded(t *testing.T) {
	t.Parallel()
	s := source[int]{every: time.Second}
	for _, c := range []struct{ took, before, want time.Duration }{
		{0, 0, time.Second},
		{500 * time.Millisecond, 500 * time.Millisecond, 4500 * time.Millisecond},
		{500 * time.Millisecond, time.Hour, 4500 * time.Millisecond},
		{time.Hour, 2 * time.Hour, longestGap},
		{time.Hour, time.Millisecond, time.Second},
		{time.Millisecond, time.Hour, time.Second},
	} {
		testenv.Equal(t, fmt.Sprintf("after %v and %v", c.before, c.took), s.rest(c.took, c.before), c.want)
	}
}

// A page that is opened now must not start with a result from an hour ago.
func TestAnOldLookIsNone(t *testing.T) {
	t.Parallel()
	s := source[int]{read: func(context.Context) (int, error) { return 7, nil }}
	s.fresh(t.Context())
	if l := s.look(); l.AsOf == nil || l.Value != 7 {
		t.Errorf("fresh: %+v", l)
	}
	s.looked, s.asOf = s.looked.Add(-time.Hour), s.asOf.Add(-time.Hour)
	if l := s.look(); l.AsOf != nil || l.Value != 0 {
		t.Errorf("an hour later: %+v", l)
	}
	s.read = func(context.Context) (int, error) { return 8, partial{errors.New("one is missing")} }
	s.fresh(t.Context())
	if l := s.look(); l.AsOf == nil || l.Value != 8 || l.Error == "" || time.Since(*l.Since) > time.Minute {
		t.Errorf("a part of it: %+v", l)
	}
}

// Pages share reads: between two, every passes, unless a caller needs one that began after its call.
func TestReadsAreShared(t *testing.T) {
	t.Parallel()
	reads := 0
	s := source[int]{every: time.Hour, read: func(context.Context) (int, error) { reads++; return reads, nil }}
	for i, read := range []func(context.Context){s.refresh, s.refresh, s.fresh, s.refresh} {
		read(t.Context())
		testenv.Equal(t, fmt.Sprintf("reads after call %d", i), reads, 1+i/2)
	}
}

// feed answers feed.lua for streams a and b, which have one entry each, and fails for b if failing is set.
type feed struct {
	redis.Hook
	a       []any // the answer for a
	failing error
}

func (f *feed) DialHook(next redis.DialHook) redis.DialHook { return next }

func (f *feed) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

func (f *feed) ProcessHook(redis.ProcessHook) redis.ProcessHook {
	return func(_ context.Context, cmd redis.Cmder) error {
		reply := []any{int64(1), int64(1), "5-0", int64(1)}
		switch cmd.Args()[3] {
		case "a":
			reply = f.a
		case "b":
			if f.failing != nil {
				cmd.SetErr(f.failing)
				return f.failing
			}
		}
		cmd.(*redis.Cmd).SetVal(reply)
		return nil
	}
}

// What is read of one stream is shown although another one fails in the same read: an event, and that one is missing.
func TestAReadThatFailsInTheMiddle(t *testing.T) {
	t.Parallel()
	f := &feed{a: []any{int64(1), int64(1), "5-0", int64(1)}}
	client := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1"})
	t.Cleanup(func() { _ = client.Close() })
	client.AddHook(f)
	w := newWatch(&Options{Redis: client})
	w.streams = []string{"a", "b"}
	w.feed.fresh(t.Context())
	f.failing = errors.New("i/o timeout")
	f.a = []any{int64(2), int64(2), "6-0", int64(1), []any{"6-0", "x", "t", "s", "", "0"}}
	w.feed.fresh(t.Context())
	f.a = []any{int64(0), int64(0), "", int64(0)}
	w.feed.fresh(t.Context())
	f.failing = nil
	w.feed.fresh(t.Context())
	events, lost := w.recent()
	if len(events) != 1 || lost.IsZero() || w.feed.look().Error != "" {
		t.Errorf("%d events, a loss at %v", len(events), lost)
	}
}

// A page that is closed does not cut the read that the others wait for.
func TestAPageThatIsClosed(t *testing.T) {
	t.Parallel()
	s := source[int]{read: func(ctx context.Context) (int, error) { return 1, ctx.Err() }}
	closed, closes := context.WithCancel(t.Context())
	closes()
	s.refresh(closed)
	if l := s.look(); l.Error != "" || l.Value != 1 {
		t.Errorf("%+v", l)
	}
}
