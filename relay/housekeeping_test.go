package relay

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"posthaste/outbox"
)

// keeps runs the housekeeping of a leader for so long.
func (l *leadership) keeps(d time.Duration) {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	defer cancel()
	l.housekeeper.backlog = time.Time{}
	l.housekeeper.run(ctx)
}

// The leader's gauges show the table, parked events and losses. The sink's own gauges are refreshed for at most as many
// streams as may have labels.
func TestHousekeeping(t *testing.T) {
	t.Parallel()
	asked := 0
	o := Options{Observe: func(_ context.Context, streams []string) error {
		asked = len(streams)
		return nil
	}}
	inLeadership(t, o, func(w *world, l *leadership) {
		for n := range maxStreamLabels + 10 {
			w.pg.streams = append(w.pg.streams, streamsOf(fmt.Sprintf("outbox.t%d", n))...)
		}
		w.event("order", "a")
		w.event("order", "a")
		w.pg.dead = make([]outbox.Dead, 3)
		w.pg.suspected["outbox.order"] = true
		l.keeps(10 * time.Second)
		m := l.metrics
		if value(t, m.backlogRows) != 2 || value(t, m.dead) != 3 || value(t, m.lost) != 1 {
			t.Errorf("backlog %v, dead %v, lost %v; want 2, 3, 1", value(t, m.backlogRows), value(t, m.dead), value(t,
				m.lost))
		}
		if asked != maxStreamLabels || w.count("Sink.Trim") < len(w.pg.streams) {
			t.Errorf("%d streams are observed, %d trims", asked, w.count("Sink.Trim"))
		}
		if n := w.count("Store.KeepHistory"); n < 1 || n > 2 || w.count("Store.Backlog") > 6 {
			t.Errorf("history kept %d times, backlog counted %d times in 10 s", w.count("Store.KeepHistory"),
				w.count("Store.Backlog"))
		}
	})
}

// Events that are published and wait for the mark do not count as backlog. Those that are routed, and not published,
// count.
func TestTheBacklogIsWhatIsNotPublished(t *testing.T) {
	t.Parallel()
	inLeadership(t, Options{}, func(w *world, l *leadership) {
		w.event("order", "a")
		w.event("order", "a")
		_ = l.housekeeper.window.acquire(context.Background(), 3, 3, false)
		for published, want := range []struct{ rows, oldest float64 }{{2, 60}, {1, 60}, {0, 0}, {0, 0}} {
			if published > 0 {
				l.housekeeper.window.published(1, 1, 0)
			}
			l.keeps(time.Second / 2)
			m := l.metrics
			if value(t, m.backlogRows) != want.rows || value(t, m.backlogOldest) != want.oldest {
				t.Errorf("%d published: backlog %v, the oldest %v s; want %v", published, value(t, m.backlogRows),
					value(t, m.backlogOldest), want)
			}
		}
	})
}

// A stream whose server is down is asked last from then on: the others are trimmed, and all are observed.
func TestOthersAreTrimmedBesideAStreamThatStandsStill(t *testing.T) {
	t.Parallel()
	observed := 0
	o := Options{Observe: func(context.Context, []string) error { observed++; return nil }}
	inLeadership(t, o, func(w *world, l *leadership) {
		w.pg.streams = streamsOf("outbox.a", "outbox.b", "outbox.c")
		w.rd.away["outbox.b"] = true
		for range 3 {
			l.keeps(time.Second / 2)
		}
		i := l.o.Sink.(memSink).i
		if n := len(i.trimmed); n < 5 || !slices.Contains(i.trimmed, "outbox.c") || observed < 3 {
			t.Errorf("trimmed %v, observed %d times", i.trimmed, observed)
		}
	})
}

// A failed read is counted, and the gauges keep their last value. A sink that is down is called once a round, not once
// for each stream.
func TestHousekeepingWithoutAnswers(t *testing.T) {
	t.Parallel()
	inLeadership(t, Options{Poison: PoisonBlockKey}, func(w *world, l *leadership) {
		w.pg.streams = streamsOf("outbox.order", "outbox.user")
		w.event("order", "a")
		l.keeps(time.Second / 2)
		trims := w.count("Sink.Trim")
		w.rd.down = true
		l.keeps(time.Second / 2)
		if n := w.count("Sink.Trim") - trims; n != 1 {
			t.Errorf("a sink that is gone is asked %d times in a round", n)
		}
		w.rd.down = false
		for call, collector := range map[string]string{
			"Store.Backlog": "backlog", "Store.Missing": "losses", "Store.Housekeep": "dead", "Store.Parked": "dead",
			"Store.Streams": "streams",
		} {
			before := value(t, l.metrics.scrapeErrors.WithLabelValues(collector))
			w.plan, w.struck = fault{call, w.counts[call], refused}, false
			l.keeps(time.Second / 2)
			if n := value(t, l.metrics.scrapeErrors.WithLabelValues(collector)); n != before+1 ||
				value(t, l.metrics.backlogRows) != 1 {
				t.Errorf("%s: %v errors of %s, backlog %v", call, n-before, collector, value(t, l.metrics.backlogRows))
			}
		}
	})
}

// History that cannot be deleted is tried again soon, and logged once. After a while health names it, until it works.
func TestHistoryThatCannotBeDeleted(t *testing.T) {
	t.Parallel()
	var log strings.Builder
	o := Options{Logger: slog.New(slog.NewTextHandler(&log, nil))}
	inLeadership(t, o, func(w *world, l *leadership) {
		working := l.o.Store
		h := &noHistory{Store: working}
		l.o.Store = h
		l.keeps(3 * historyInterval)
		if h.asked < 2 || h.asked > 4 || strings.Count(log.String(), "what=history") != 1 {
			t.Errorf("asked %d times in %v, and said:\n%s", h.asked, 3*historyInterval, log.String())
		}
		l.keeps(steady)
		l.health.says(t, "degraded: history: ")
		l.o.Store = working
		l.keeps(historyInterval)
		l.health.says(t)
	})
}

// A stream that cannot be trimmed is named after a while.
func TestAStreamThatCannotBeTrimmed(t *testing.T) {
	t.Parallel()
	inLeadership(t, Options{}, func(w *world, l *leadership) {
		w.pg.streams = streamsOf("outbox.a", "outbox.b")
		w.rd.away["outbox.b"] = true
		l.keeps(steady - 2*trimInterval)
		l.health.says(t)
		l.keeps(4 * trimInterval)
		l.health.says(t, "degraded: trim: ")
		if value(t, l.metrics.scrapeErrors.WithLabelValues(conditionTrim)) < steady.Seconds() {
			t.Error("it was not counted")
		}
		delete(w.rd.away, "outbox.b")
		l.keeps(2 * trimInterval)
		l.health.says(t)
	})
}

// The groups of streams are noted when they change, by an owner that has nothing left to repair, and not those of a
// stream that has lost something: they come back with what it has lost.
func TestGroupsAreNoted(t *testing.T) {
	t.Parallel()
	inLeadership(t, Options{}, func(w *world, l *leadership) {
		noted := func(times int, want string) {
			t.Helper()
			l.keeps(3 * trimInterval)
			if got := strings.Join(w.pg.groups["outbox.a"], " "); got != want || w.count("Store.NoteGroups") != times {
				t.Errorf("noted %q, %d times; want %q, %d times", got, w.count("Store.NoteGroups"), want, times)
			}
		}
		w.pg.streams = streamsOf("outbox.a", "outbox.b")
		w.rd.groups["outbox.a"] = []string{"g", "h"}
		noted(0, "")
		l.adopts(w.t)
		noted(1, "g h")
		w.rd.groups["outbox.a"] = []string{"g"}
		noted(2, "g")
		w.rd.flush()
		noted(2, "g")
		w.pg.delivered = true
		l.adopts(w.t)
		if got := w.rd.groups["outbox.a"]; !slices.Equal(got, []string{"g"}) {
			t.Errorf("restored are %q", got)
		}
		noted(3, "g")
		w.rd.down = true
		noted(3, "g")
	})
}

// While a stream is left out, the groups of the others are noted. Its own are not, also when it answers again: it may
// have lost some, which an adoption restores.
func TestGroupsAreNotedWhileAStreamIsLeftOut(t *testing.T) {
	t.Parallel()
	inLeadership(t, Options{}, func(w *world, l *leadership) {
		w.pg.streams = streamsOf("outbox.a", "outbox.b")
		w.rd.groups["outbox.a"], w.rd.groups["outbox.b"] = []string{"g"}, []string{"h"}
		for _, away := range []bool{true, false} {
			w.rd.away["outbox.b"] = away
			if away {
				l.adopts(w.t)
			}
			l.keeps(3 * trimInterval)
			if a, b := w.pg.groups["outbox.a"], w.pg.groups["outbox.b"]; !slices.Equal(a, []string{"g"}) || b != nil {
				t.Errorf("away %v: noted %q and %q, want g only", away, a, b)
			}
		}
		l.adopts(w.t)
		l.keeps(3 * trimInterval)
		if b := w.pg.groups["outbox.b"]; !slices.Equal(b, []string{"h"}) {
			t.Errorf("noted %q after the adoption of both", b)
		}
	})
}

type noHistory struct {
	Store
	asked int
}

func (h *noHistory) KeepHistory(context.Context) error {
	h.asked++
	return errors.New("no room")
}

// Events that an adoption recorded as possibly lost are counted once, in the background. A failed count is retried.
// Events that Postgres has lost by going back in time do not count as lost.
func TestLossesAreCounted(t *testing.T) {
	t.Parallel()
	var log strings.Builder
	o := Options{Logger: slog.New(slog.NewTextHandler(&log, nil))}
	inLeadership(t, o, func(w *world, l *leadership) {
		first := time.Date(2030, 1, 2, 3, 4, 5, 0, time.UTC)
		last := first.Add(time.Second)
		w.pg.uncounted = []outbox.Report{
			{Stream: "outbox.order", Missing: 5, First: &first, Last: &last},
			{Stream: "outbox.user", Missing: -1},
			{Missing: -1},
		}
		run := func() {
			ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
			defer cancel()
			l.reconciler.watch(ctx)
		}
		run()
		if w.count("Store.CountMissing") != 0 {
			t.Error("counted, and nothing was noted")
		}
		w.plan = fault{"Store.CountMissing", 0, refused}
		l.reconciler.uncounted.Store(true)
		run()
		m := l.metrics
		if value(t, m.lostEvents) != 6 || value(t, m.failovers) != 1 || w.count("Store.CountMissing") != 2 {
			t.Errorf("lost %v, went back %v times, asked %d times; want 6 (one where nobody knows), 1, 2", value(t,
				m.lostEvents),
				value(t, m.failovers), w.count("Store.CountMissing"))
		}
		if value(t, m.scrapeErrors.WithLabelValues("losses")) != 1 {
			t.Error("the failure is not counted")
		}
		if !strings.Contains(log.String(), "posthaste replay --stream=outbox.order --since=2030-01-02T03:04:05Z") {
			t.Errorf("the remedy is not named:\n%s", log.String())
		}
	})
}
