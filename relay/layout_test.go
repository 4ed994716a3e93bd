package relay

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"posthaste/outbox"
)

// inLayout runs do with one instance that is to give a type so many streams, after an event was published under the
// layout before, to which a consumer group has come. waits returns what it last waited for.
func inLayout(t *testing.T, shards int, do func(w *world, two *instance, waits func() string)) {
	t.Helper()
	inWorld(t, Options{}, func(w *world) {
		w.pg.state.Desired = outbox.ModePoll
		first := w.start("one")
		w.event("order", "a")
		w.settles(outbox.ModePoll)
		w.do(func() { w.spreading, w.rd.readers = shards, map[string]int64{} })
		var last string
		two := w.start("two")
		w.do(func() { two.relay.o.Spread.Waiting = func(why string) { w.do(func() { last = why }) } })
		waits := func() (why string) { w.do(func() { why = last }); return why }
		elapse(5 * time.Second)
		if why := waits(); why != "a relay leads: one; stop every relay" {
			t.Errorf("while a relay leads it waits for %q", why)
		}
		first.stop()
		do(w, two, waits)
	})
}

// publishesAfter waits for the end of a spread, and has a relay publish an event: everything must be as it should be.
// It returns the error of the spread.
func (w *world) publishesAfter(two *instance, row *tableRow, shards int) error {
	w.t.Helper()
	<-two.done
	err := two.err
	two.err = nil
	w.do(func() { w.spreading = 0 })
	w.start("three")
	w.settles(outbox.ModePoll)
	w.do(func() {
		name := w.pg.stream(row)
		if w.pg.state.Shards != shards || !w.rd.has(name, row.ID) || (shards == 1) != (name == "outbox.order") {
			w.t.Errorf("event %d is in %s: %s", row.Seq, name, w.describe())
		}
	})
	w.judge()
	return err
}

// While a group has not read everything, nothing is published, and that is reported to the caller and in the state.
func TestAChangeOfTheLayoutWaits(t *testing.T) {
	t.Parallel()
	inLayout(t, 4, func(w *world, two *instance, waits func() string) {
		w.event("order", "b")
		w.eventually("the state has what is waited for", time.Minute, func() bool {
			return strings.HasPrefix(w.pg.state.Degraded, "layout: ")
		})
		elapse(5 * time.Minute)
		late := w.event("order", "c")
		elapse(5 * time.Minute)
		if why := waits(); !strings.Contains(why, `group "group" of stream "outbox.order"`) {
			t.Errorf("it waits for %q", why)
		}
		w.do(func() {
			if w.pg.state.Active != outbox.ModeStandby || !w.pg.owed(late) || w.pg.state.Shards > 1 {
				t.Errorf("something was done: %s", w.describe())
			}
			w.rd.readers["outbox.order"] = w.rd.ids
		})
		if err := w.publishesAfter(two, late, 4); err != nil {
			t.Errorf("the spread: %v", err)
		}
	})
}

// A change that is called off while it waits has changed nothing.
func TestAChangeOfTheLayoutIsCalledOff(t *testing.T) {
	t.Parallel()
	inLayout(t, 4, func(w *world, two *instance, _ func() string) {
		w.eventually("it waits", time.Minute, func() bool { return strings.HasPrefix(w.pg.state.Degraded, "layout: ") })
		late := w.event("order", "c")
		two.stop()
		if err := w.publishesAfter(two, late, 1); err != nil {
			t.Errorf("the spread: %v", err)
		}
	})
}

// A number of streams that a type cannot have is refused, also if that shows when everything is read; and nothing has
// changed.
func TestALayoutThatCannotBeIsRefused(t *testing.T) {
	t.Parallel()
	for _, later := range []bool{false, true} {
		t.Run(fmt.Sprint(later), func(t *testing.T) {
			t.Parallel()
			inLayout(t, impossibleShards, func(w *world, two *instance, _ func() string) {
				w.do(func() { w.pg.impossibleLater = later })
				row := w.event("order", "b")
				if later {
					w.later(time.Minute, func() { w.rd.readers["outbox.order"] = w.rd.ids })
				}
				if err := w.publishesAfter(two, row, 1); !errors.Is(err, outbox.ErrLayout) {
					t.Errorf("the spread: %v", err)
				}
			})
		})
	}
}

// Before the first event a prefix is recorded at once, whatever transactions are open.
func TestTheFirstPrefixIsRecordedAtOnce(t *testing.T) {
	t.Parallel()
	inWorld(t, Options{}, func(w *world) {
		w.pg.state.Desired = outbox.ModePoll
		long := w.begin("user x")
		w.do(func() { w.prefix = "events." })
		w.start("one")
		row := w.event("order", "a")
		w.eventually("it is published", time.Minute, func() bool { return w.rd.has("events.order", row.ID) })
		long.commitNow()
		w.ends(outbox.ModePoll)
	})
}

// Nothing is published before a standby knows of the layout that was changed before the adoption.
func TestAnAdoptionAwaitsTheLayout(t *testing.T) {
	t.Parallel()
	inWorld(t, Options{}, func(w *world) {
		w.pg.state.Desired = outbox.ModePoll
		w.pg.unawaited = true
		row := w.event("order", "a")
		one := w.start("one")
		w.eventually("it is said what is waited for", time.Minute, func() bool {
			h := one.relay.Health()
			return len(h.Reasons) == 1 && strings.HasPrefix(h.Reasons[0], "adopt: ")
		})
		elapse(5 * time.Minute)
		w.arrives(row, false)
		w.hasUnsettled(1)
		w.do(func() { w.pg.unawaited = false })
		w.ends(outbox.ModePoll)
	})
}

// A leader that has been replaced, and has a row of a new type, does not publish it: no adoption has raised the gate of
// the stream that the row would go to under the old layout.
func TestWhoIsReplacedMeetsNoNewStream(t *testing.T) {
	t.Parallel()
	inRig(t, Options{}, func(r *rig) {
		old := r.gates
		r.adopt()
		if err := old.Ensure(r.intake, "outbox.new"); err == nil {
			t.Error("a stream is made ready for an owner that was replaced")
		}
		r.do(func() {
			if len(r.pg.streams) > 0 || len(r.rd.gates) > 0 {
				t.Errorf("noted %v, gates %v", r.pg.streams, r.rd.gates)
			}
		})
	})
}

// The text names the group that has been idle longest.
func TestUnreadText(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		list []outbox.Unread
		want string
	}{
		{[]outbox.Unread{{Stream: "s"}}, `stream "s" is new; consumers find it within seconds`},
		{
			[]outbox.Unread{{Stream: "s"}, {Stream: "s", Group: "g", Entries: 3}},
			`group "g" of stream "s" has 3 entries before it; and 1 more`,
		},
		{
			[]outbox.Unread{
				{Stream: "s", Group: "g", Entries: 3}, {Stream: "t", Group: "h", Entries: 7, Idle: time.Hour},
			},
			`group "h" of stream "t" has 7 entries before it, and has not read for 1h0m0s; and 1 more`,
		},
	} {
		if got := unreadText(c.list); got != c.want {
			t.Errorf("%q, want %q", got, c.want)
		}
	}
}
