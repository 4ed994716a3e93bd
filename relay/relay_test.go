package relay

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"posthaste/outbox"
)

// unfit is a Store that cannot be registered with.
type unfit struct {
	Store
	err func() error
}

func (u unfit) Register(ctx context.Context) error {
	if err := u.err(); err != nil {
		return err
	}
	return u.Store.Register(ctx)
}

// schemaError is what a store says of a schema that it cannot work with.
type schemaError struct{}

func (schemaError) Error() string     { return "the schema is newer" }
func (schemaError) Condition() string { return conditionSchema }

// An error that waiting cannot solve ends a relay at its start, and never later. The relay waits for everything else.
func TestRunEndsOnlyAtItsStart(t *testing.T) {
	t.Parallel()
	inWorld(t, Options{}, func(w *world) {
		second := &outbox.SecondNameError{Name: "a", Existing: "b"}
		i := w.instance("one")
		i.relay.o.Store = unfit{memStore{i}, func() error { return second }}
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if err := i.relay.Run(ctx); !errors.Is(err, second) {
			t.Errorf("a second name: %v", err)
		}
		i = w.instance("two")
		var registered atomic.Int64
		i.relay.o.Store = unfit{memStore{i}, func() error {
			if registered.Add(1) > 1 {
				return second // somebody has registered while we were away
			}
			return nil
		}}
		ctx, cancel = context.WithCancel(context.Background())
		defer cancel()
		done := background(func() error { return i.relay.Run(ctx) })
		soon()
		w.do(func() { i.session.end(); i.session.notice() })
		pass(time.Minute)
		if len(done) > 0 || registered.Load() < 10 {
			t.Errorf("ended, or tried %d times in a minute", registered.Load())
		}
		i.complains("postgres: " + second.Error())
		cancel()
		if err := <-done; err != nil || i.relay.Status().Phase != string(phaseStopped) {
			t.Errorf("%v, status %+v", err, i.relay.Status())
		}
	})
}

// There is one reason why there is no session, under its own name, and none when there is one.
func TestWhyThereIsNoSession(t *testing.T) {
	t.Parallel()
	inWorld(t, Options{}, func(w *world) {
		i := w.instance("one")
		trouble := error(schemaError{})
		i.relay.o.Store = unfit{memStore{i}, func() error { return trouble }}
		if bad, _ := i.reasons(); !slices.Equal(bad, []string{"postgres: not connected yet"}) {
			t.Errorf("before: %v", bad)
		}
		for _, c := range []struct {
			err  error
			want string
		}{{trouble, "schema: the schema is newer"}, {errors.New("refused"), "postgres: refused"}} {
			trouble = c.err
			if err := i.relay.session(context.Background()); !errors.Is(err, c.err) {
				t.Errorf("session: %v", err)
			}
			if bad, _ := i.reasons(); !slices.Equal(bad, []string{c.want}) {
				t.Errorf("reasons %v, want %s", bad, c.want)
			}
		}
		trouble = nil
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		_ = i.relay.session(ctx)
		i.says(t)
	})
}

// unadoptable is a Store that can be read but refuses adoptions while refuses is set.
type unadoptable struct {
	Store
	refuses *atomic.Bool
}

func (u unadoptable) Adopt(ctx context.Context, a outbox.Adoption) (bool, error) {
	if u.refuses.Load() {
		return false, errors.New("read only")
	}
	return u.Store.Adopt(ctx, a)
}

// A failure that repeats twice a second is not logged each time, neither a failed session nor a leader whose phases
// fail.
func TestWhatFailsAgainAndAgainIsCounted(t *testing.T) {
	t.Parallel()
	var log strings.Builder
	inWorld(t, Options{Logger: slog.New(slog.NewTextHandler(&log, nil))}, func(w *world) {
		said := func(while string, want map[string]int) {
			t.Helper()
			for text, n := range want {
				if got := strings.Count(log.String(), text); got != n {
					t.Errorf("%s: %q is said %d times, want %d:\n%s", while, text, got, n, log.String())
				}
			}
			log.Reset()
		}
		i := w.instance("one")
		var gone, refuses atomic.Bool
		gone.Store(true)
		refuses.Store(true)
		i.relay.o.Store = unadoptable{unfit{memStore{i}, func() error {
			if gone.Load() {
				return errors.New("connection refused")
			}
			return nil
		}}, &refuses}
		ctx, cancel := context.WithCancel(context.Background())
		done := background(func() error { return i.relay.Run(ctx) })
		pass(70 * time.Second)
		said("without a session", map[string]int{
			"relay session ended": 3, "relay session ended\" component=relay failures=": 2,
		})
		gone.Store(false)
		pass(70 * time.Second)
		said("without an adoption", map[string]int{
			"relay session works again\" component=relay failures=1": 1, "seconds=7": 1, "phase ended": 3,
		})
		refuses.Store(false)
		pass(70 * time.Second)
		said("when it works", map[string]int{"phases work again": 1, "ended": 0, "session": 0})
		cancel()
		_ = <-done
	})
}

// A lost lock ends the leadership at once, because another instance may lead. The health conditions of the leadership
// are cleared.
func TestALostLockEndsTheLeadership(t *testing.T) {
	t.Parallel()
	forgotten := 0
	inWorld(t, Options{Unobserve: func() { forgotten++ }}, func(w *world) {
		i := w.start("one")
		pass(3 * time.Second)
		if st := i.relay.Status(); !st.Leader || st.Mode != outbox.ModeCDC || st.Epoch != 1 {
			t.Errorf("status %+v", st)
		}
		tx := w.begin("order a")
		tx.write() // something is in flight
		soon()
		i.relay.health.fail(conditionPublish, "left over")
		i.relay.metrics.backlogRows.Set(7)
		w.do(func() { i.session.end(); i.session.notice() })
		pass(100 * time.Millisecond)
		if st := i.relay.Status(); st.Leader || st.Mode != outbox.ModeStandby || st.Inflight != 0 ||
			i.relay.Health().Role != "standby" {
			t.Errorf("status %+v, health %+v", st, i.relay.Health())
		}
		if bad, _ := i.reasons(); strings.Contains(strings.Join(bad, "; "), "publish") {
			t.Errorf("reasons %v", bad)
		}
		m := i.relay.metrics
		if value(t, m.leader) != 0 || value(t, m.backlogRows) != 0 ||
			value(t, m.mode.WithLabelValues("standby")) != 1 || forgotten != 1 {
			t.Errorf("gauges of a leader are left, or %d times unobserved", forgotten)
		}
		tx.show()
		w.ends(outbox.ModeCDC)
	})
}

// A stop is recorded, so that other instances see that none is active and do not sweep without a leader.
func TestAStopIsRecorded(t *testing.T) {
	t.Parallel()
	inWorld(t, Options{}, func(w *world) {
		i := w.start("one")
		w.event("order", "a")
		w.settles(outbox.ModeCDC)
		i.stop()
		if st := w.pg.state; st.Active != outbox.ModeStandby || w.pg.leader != nil || !i.anyone {
			t.Errorf("state %+v, leader %v, bound %v", st, w.pg.leader, !i.anyone)
		}
		if n := value(t, i.relay.metrics.switches.WithLabelValues("cdc", "standby", "stop")); n != 1 {
			t.Errorf("%v switches to standby by a stop, want 1", n)
		}
	})
}

// The sink's part of readiness is kept on every instance, and a stop is no trouble with the sink.
func TestTheSinkIsWatched(t *testing.T) {
	t.Parallel()
	for name, want := range map[string]string{"": "redis: no replicas", "nats": "nats: no replicas"} {
		synctest.Test(t, func(t *testing.T) {
			var trouble atomic.Pointer[string]
			r := New(Options{SinkName: name, SinkReady: func(ctx context.Context) error {
				why := trouble.Load()
				if why == nil {
					return nil
				}
				<-ctx.Done() // it does not answer
				return errors.New(*why)
			}})
			replicas, stopping := "no replicas", "asked while stopping"
			r.health.clear(conditionPostgres)
			ctx, stop := context.WithCancel(t.Context())
			done := make(chan struct{})
			go func() { r.watchSink(ctx); close(done) }()
			trouble.Store(&replicas)
			pass(5 * time.Second)
			if h := r.Health(); h.Ready || !slices.Equal(h.Reasons, []string{want}) || h.Role != "standby" {
				t.Errorf("health %+v", h)
			}
			trouble.Store(nil)
			pass(5 * time.Second)
			if h := r.Health(); !h.Ready {
				t.Errorf("health %+v", h)
			}
			trouble.Store(&stopping)
			pass(1500 * time.Millisecond)
			stop()
			<-done
			if h := r.Health(); !h.Ready {
				t.Errorf("after the stop: %+v", h)
			}
		})
	}
}

// A ready standby reports nothing as degraded: only the leader reports problems with the slot.
func TestHealthOfAStandby(t *testing.T) {
	t.Parallel()
	r := New(Options{})
	r.health.clear(conditionPostgres)
	r.health.degrade(conditionSlot, "lost")
	if h := r.Health(); !h.Ready || h.Role != "standby" || h.Degraded != nil {
		t.Errorf("standby: %+v", h)
	}
	r.activity.leading.Store(true)
	if h := r.Health(); !h.Ready || h.Role != "leader" || !slices.Equal(h.Degraded, []string{"slot: lost"}) {
		t.Errorf("leader: %+v", h)
	}
}

// A phase is entered once, however often it is named, and an adoption is no mode of its own.
func TestActivity(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := New(Options{})
		a := r.activity
		mode := func(want outbox.Mode) {
			t.Helper()
			for _, m := range []outbox.Mode{outbox.ModeCDC, outbox.ModePoll, outbox.ModeStandby} {
				if on := value(t, r.metrics.mode.WithLabelValues(string(m))) == 1; on != (m == want) {
					t.Errorf("mode %s is shown: %v, want %s alone", m, on, want)
				}
			}
		}
		mode(outbox.ModeStandby)
		a.enter(phaseSweep, "")
		began := a.status().Since
		pass(time.Minute)
		a.enter(phaseSweep, "")
		if st := a.status(); !st.Since.Equal(began) || st.Mode != outbox.ModePoll || st.Phase != "sweep" {
			t.Errorf("status %+v", st)
		}
		mode(outbox.ModePoll)
		a.enter(phaseAdopt, "")
		mode(outbox.ModePoll)
		if st := a.status(); st.Since.Equal(began) || st.Mode != outbox.ModeStandby || a.current() != phaseAdopt {
			t.Errorf("status %+v", st)
		}
		a.own(outbox.Owner{Epoch: 6})
		if a.epoch() != 6 || value(t, r.metrics.epoch) != 6 {
			t.Errorf("epoch %d, shown %v", a.epoch(), value(t, r.metrics.epoch))
		}
	})
}

// Label sets are closed, and streams share one label when there are too many: writers choose their names.
func TestLabelsAreBounded(t *testing.T) {
	t.Parallel()
	reg := prometheus.NewRegistry()
	r := New(Options{Registerer: reg})
	for n := range 3 * maxStreamLabels {
		stream := "outbox." + string(rune('a'+n%26)) + strings.Repeat("x", n/26)
		r.published(outbox.ModePoll, stream, 1, []*outbox.Record{{}, {}})
		r.published(outbox.ModePoll, stream, 1, []*outbox.Record{{}})
	}
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() != "outbox_published_total" {
			continue
		}
		var sum float64
		for _, m := range f.GetMetric() {
			sum += m.GetCounter().GetValue()
		}
		if len(f.GetMetric()) != 2*maxStreamLabels+1 || sum != 9*maxStreamLabels {
			t.Errorf("%d series, %v events; want %d, %d", len(f.GetMetric()), sum, 2*maxStreamLabels+1,
				9*maxStreamLabels)
		}
	}
	r.switched(outbox.ModeCDC, outbox.ModePoll, "made up")
	r.switched(outbox.ModeCDC, outbox.ModeCDC, "made up")
	if n := value(t, r.metrics.switches.WithLabelValues("cdc", "poll", reasonOther)); n != 1 {
		t.Errorf("a made-up reason is counted %v times as other", n)
	}
}

// OnPublished is called with the events of a publish, and the watchdog sees that events move.
func TestWhatIsPublishedIsTold(t *testing.T) {
	t.Parallel()
	var told []string
	r := New(Options{OnPublished: func(mode outbox.Mode, stream string, events []*outbox.Record) {
		told = append(told, string(mode)+" "+stream)
	}})
	r.published(outbox.ModeCDC, "outbox.order", 1, make([]*outbox.Record, 0))
	r.published(outbox.ModePoll, "outbox.user.7", 8, []*outbox.Record{{}})
	r.settled(2)
	r.parked(&outbox.Record{}, errors.New("too large"))
	if !slices.Equal(told, []string{"cdc outbox.order", "poll outbox.user.7"}) || r.moved.Load() != 4 ||
		value(t, r.metrics.parked) != 1 || !r.metrics.streams["outbox.user"] {
		t.Errorf("told %v, %d moves", told, r.moved.Load())
	}
}

// A failed publish is a reason only if repeating it is what is left to do: a poison event shows that the sink answers,
// and so does one stream that takes nothing; a cancelled attempt shows nothing, and what another adoption repairs is
// not reported.
func TestOutcomes(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		err  error
		want string
	}{
		"trouble":   {errDown, "publish"},
		"cancelled": {context.Canceled, "before"},
		"poison":    {&outbox.PoisonError{Err: errPoison}, ""},
		"success":   {nil, ""},
		"a gap":     {outbox.ErrGap, "before"},
		"fenced":    {&outbox.FencedError{}, "before"},
		"foreign":   {&outbox.ForeignError{Stream: "s"}, "foreign_stream"},
		"a stream":  {&outbox.StreamError{Stream: "s", Err: errDown}, "streams: publishing to s is blocked"},
	} {
		r := New(Options{})
		r.health.clear(conditionPostgres)
		before := "publish: before"
		r.health.fail(conditionPublish, "before")
		r.outcome(c.err)
		bad, _ := r.health.lists()
		text := strings.Join(bad, "; ")
		switch {
		case c.want == "" && text != "", c.want == "before" && text != before,
			strings.HasPrefix(c.want, "streams") && strings.Contains(text, before):
			t.Errorf("%s: reasons %q", name, text)
		case c.want == "publish" && text != "publish: "+errDown.Error(), !strings.Contains(text, c.want):
			t.Errorf("%s: reasons %q", name, text)
		}
	}
}
