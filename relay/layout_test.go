package relay

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"posthaste/outbox"
)

// inLayout runs do with one instance that polls and is to give a type so many streams, after an event was published
// under the layout before, to which a consumer group has come.
func inLayout(t *testing.T, shards int, do func(w *world)) {
	t.Helper()
	inWorld(t, Options{}, func(w *world) {
		w.pg.state.Desired = outbox.ModePoll
		first := w.start("one")
		w.event("order", "a")
		w.settles(outbox.ModePoll)
		first.stop()
		w.do(func() { w.o.Shards, w.rd.readers = shards, map[string]int64{} })
		w.start("two")
		do(w)
	})
}

// While a group has something before it, nothing is published, and that is said: in readiness, in the state and with
// what to do; and it is no standstill.
func TestAChangeOfTheLayoutWaits(t *testing.T) {
	t.Parallel()
	inLayout(t, 4, func(w *world) {
		w.event("order", "b")
		two := w.instances[1]
		w.eventually("it is said what is waited for", time.Minute, func() bool {
			return strings.HasPrefix(w.pg.state.Degraded, "layout: ") && !two.relay.Health().Ready
		})
		elapse(5 * time.Minute)
		late := w.event("order", "c")
		elapse(5 * time.Minute)
		h := two.relay.Health()
		if h.Role != "leader" || len(h.Reasons) != 1 || !strings.Contains(h.Reasons[0], `group "group"`) ||
			!strings.Contains(h.Reasons[0], "--streams-per-type=1 calls it off") {
			t.Errorf("health %+v", h)
		}
		w.do(func() {
			if w.pg.state.Active != outbox.ModeStandby || !w.pg.owed(late) || w.pg.state.Shards > 1 {
				t.Errorf("something was done: %s", w.describe())
			}
			w.rd.readers["outbox.order"] = w.rd.ids
		})
		w.settles(outbox.ModePoll)
		w.do(func() {
			if name := w.pg.stream(late); w.pg.state.Shards != 4 || !w.rd.has(name, late.ID) || name == "outbox.order" {
				t.Errorf("the late event is not in %s: %s", name, w.describe())
			}
		})
		w.judge()
	})
}

// What cannot be is refused, and events flow as before; also if that shows when everything is read.
func TestALayoutThatCannotBeIsRefused(t *testing.T) {
	t.Parallel()
	for _, later := range []bool{false, true} {
		t.Run(fmt.Sprint(later), func(t *testing.T) {
			t.Parallel()
			refusesLayout(t, later)
		})
	}
}

func refusesLayout(t *testing.T, later bool) {
	t.Helper()
	inLayout(t, impossibleShards, func(w *world) {
		w.do(func() { w.pg.impossibleLater = later })
		row := w.event("order", "b")
		if later {
			elapse(time.Minute)
			w.do(func() { w.rd.readers["outbox.order"] = w.rd.ids })
		}
		w.settles(outbox.ModePoll)
		h := w.instances[1].relay.Health()
		if !h.Ready || len(h.Degraded) != 1 || !strings.HasPrefix(h.Degraded[0], "layout: ") {
			t.Errorf("health %+v", h)
		}
		w.do(func() {
			if w.pg.state.Shards > 1 || !w.rd.has("outbox.order", row.ID) {
				t.Errorf("an event is not where it was to be: %s", w.describe())
			}
		})
		w.judge()
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
		w.do(func() {
			if !w.pg.owed(row) || w.rd.has("outbox.order", row.ID) {
				t.Errorf("an event is published: %s", w.describe())
			}
			w.pg.unawaited = false
		})
		w.settles(outbox.ModePoll)
		w.judge()
	})
}

// Somebody who has been replaced, and has a row of a type that nobody has met before, publishes it nowhere: no adoption
// has raised the gate of the stream that it would have under the layout before.
func TestWhoIsReplacedMeetsNoNewStream(t *testing.T) {
	t.Parallel()
	inRig(t, Options{}, func(r *rig) {
		old := r.gates
		r.adopt()
		if err := old.ensure(r.intake, "outbox.new"); err == nil {
			t.Error("a stream is made ready for an owner that was replaced")
		}
		r.do(func() {
			if len(r.pg.streams) > 0 || len(r.rd.gates) > 0 {
				t.Errorf("noted %v, gates %v", r.pg.streams, r.rd.gates)
			}
		})
	})
}

// Who is waited for is the group that nobody has read for in the longest time.
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
			`group "h" of stream "t" has 7 entries before it, and nobody has read for it for 1h0m0s; and 1 more`,
		},
	} {
		if got := unreadText(c.list); got != c.want {
			t.Errorf("%q, want %q", got, c.want)
		}
	}
}
