package relay

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	"posthaste/internal/pause"
	"posthaste/outbox"
	"posthaste/relay/stream"
)

// opens opens a session for locks.
func (i *instance) opens() *lockSession {
	s, err := memLocks{i}.Open(context.Background())
	i.w.must(err)
	return s.(*lockSession)
}

// shares has another instance poll.
func (w *world) shares() *lockSession {
	s := w.instance("two").opens()
	if ok, err := s.TryPipe(context.Background(), false); err != nil || !ok {
		w.t.Fatalf("another poller: %v, %v", ok, err)
	}
	return s
}

// lead gives the instance the leader lock and returns its leadership, which is not running.
func (i *instance) lead(t *testing.T) *leadership {
	t.Helper()
	locks := i.opens()
	if ok, err := locks.TryLead(context.Background()); err != nil || !ok {
		t.Fatalf("leads: %v, %v", ok, err)
	}
	i.relay.health.clear(conditionPostgres)
	l := i.relay.newLeadership(locks)
	l.mode, l.reason = outbox.ModeStandby, outbox.ReasonLeadership
	return l
}

// inLeadership runs do with a leadership that is not running.
func inLeadership(t *testing.T, o Options, do func(w *world, l *leadership)) {
	t.Helper()
	inWorld(t, o, func(w *world) {
		i := w.instance("one")
		do(w, i.lead(t))
	})
}

// adopting adopts in the background.
func (l *leadership) adopting() <-chan error {
	return background(func() error {
		_, err := l.adopt(context.Background())
		return err
	})
}

// adopts adopts once.
func (l *leadership) adopts(t testing.TB) {
	t.Helper()
	if _, err := l.adopt(context.Background()); err != nil {
		t.Fatal(err)
	}
}

// First the pipe, then the state again, then the server, then the table, then the gates; only then is anything read.
func TestAdoptionHasAnOrder(t *testing.T) {
	t.Parallel()
	inLeadership(t, Options{Poison: PoisonBlockKey}, func(w *world, l *leadership) {
		w.pg.streams = streamsOf("outbox.order", "outbox.user")
		from := len(w.trace)
		tr, err := l.adopt(context.Background())
		want := []string{
			"Store.State", "Locks.TryPipe", "Store.State", "Store.Streams", "Sink.Bind", "Store.Newest", "Sink.Look",
			"Store.Ungated", "Store.Delivered", "Store.Adopt", "Store.State",
			"Store.Streams", "Sink.Adopt", "Sink.Adopt", "Store.Gated", "Store.AwaitLayout", "Store.Repairs",
			"Store.Parked",
		}
		if got := w.calls(from); err != nil || tr != onWantStream || !slices.Equal(got, want) {
			t.Errorf("%s, %v; calls\n%v, want\n%v", tr, err, got, want)
		}
		if st := w.pg.state; st.Owner != l.gates.owner || st.Owner.Epoch != 1 || st.Sink != "run 1" ||
			l.activity.epoch() != 1 {
			t.Errorf("state %+v", st)
		}
	})
}

// slowLook is a sink in whose streams there is much to read.
type slowLook struct{ stream.Sink }

func (s slowLook) Look(ctx context.Context, source uuid.UUID, streams []string, noted map[string]string) (
	[]outbox.StreamState, error,
) {
	if err := pause.For(ctx, 20*publishTimeout); err != nil {
		return nil, err
	}
	return s.Sink.Look(ctx, source, streams, noted)
}

// Reading a stream may take longer than a publish: it also reads the entries that others have put into a shared stream.
func TestALookTakesItsTime(t *testing.T) {
	t.Parallel()
	inLeadership(t, Options{}, func(w *world, l *leadership) {
		w.pg.streams = streamsOf("outbox.order")
		l.o.Sink = slowLook{l.o.Sink}
		ctx, cancel := context.WithTimeout(context.Background(), 40*publishTimeout)
		defer cancel()
		if _, err := l.adopt(ctx); err != nil || w.count("Sink.Adopt") != 1 {
			t.Errorf("%v, %d gates were raised", err, w.count("Sink.Adopt"))
		}
	})
}

// If another instance has adopted since the state was read, this leadership ends without raising any gate.
func TestAnAdoptionThatComesTooLate(t *testing.T) {
	t.Parallel()
	for name, overtake := range map[string]func(w *world, l *leadership){
		"before it began": func(w *world, l *leadership) {
			w.pg.state.Owner.Epoch++
		},
		"while it was on its way": func(w *world, l *leadership) {
			w.after(3*time.Millisecond+callTime/2, func() { w.pg.state.Owner.Epoch++ })
		},
	} {
		inLeadership(t, Options{}, func(w *world, l *leadership) {
			l.adopts(w.t)
			n := w.count("Sink.Adopt")
			w.pg.streams = streamsOf("outbox.order")
			w.do(func() { overtake(w, l) })
			if _, err := l.adopt(context.Background()); !errors.Is(err, outbox.ErrSuperseded) {
				t.Errorf("%s: %v", name, err)
			}
			if w.count("Sink.Adopt") != n {
				t.Errorf("%s: a gate was raised", name)
			}
		})
	}
}

// While the relay of a copy of the database is at work, nothing is written: neither an owner nor a gate. A sign that is
// not renewed is of one that has ended.
func TestNobodyAdoptsBesideACopy(t *testing.T) {
	t.Parallel()
	inLeadership(t, Options{}, func(w *world, l *leadership) {
		w.pg.streams = streamsOf("outbox.order")
		w.rd.alive = &outbox.Sign{Member: outbox.Member{ID: "x", Server: "other", Holder: "host-2"}, Text: "1"}
		told := func() string {
			bad, _ := l.health.lists()
			return strings.Join(bad, ", ")
		}
		done := l.adopting()
		elapse(5 * time.Second)
		if text := told(); !strings.HasPrefix(text, "adopt: host-2") {
			t.Errorf("before it has signed anew: %s", text)
		}
		w.do(func() { w.rd.alive = &outbox.Sign{Member: w.rd.alive.Member, Text: "2"} })
		elapse(5 * time.Second)
		if text := told(); !strings.HasPrefix(text, "copy: host-2") || strings.Contains(text, ", adopt") {
			t.Errorf("after it has: %s", text)
		}
		if w.count("Sink.Adopt") > 0 || w.count("Store.Adopt") > 0 {
			t.Error("something was adopted")
		}
		w.do(func() { w.rd.alive = nil })
		w.must(<-done)
		if text := told(); text != "" || w.count("Sink.Adopt") != 1 {
			t.Errorf("at last: %s, %d gates", text, w.count("Sink.Adopt"))
		}
	})
}

// A gate that has seen a later owner than the table belongs to a database that went back in time: it is overtaken, and
// said.
func TestAGateAheadOfTheTableIsOvertaken(t *testing.T) {
	t.Parallel()
	inLeadership(t, Options{}, func(w *world, l *leadership) {
		w.pg.streams = streamsOf("outbox.order")
		w.rd.gates["outbox.order"] = &gate{owner: outbox.Owner{Source: w.pg.state.Owner.Source, Epoch: 41}}
		l.adopts(w.t)
		if e := w.pg.state.Owner.Epoch; e != 42 || w.rd.gates["outbox.order"].owner != w.pg.state.Owner {
			t.Errorf("epoch %d in the table, %d at the gate; want 42", e, w.rd.gates["outbox.order"].owner.Epoch)
		}
		if len(w.pg.uncounted) != 1 || w.pg.uncounted[0].Stream != "" {
			t.Errorf("noted %+v, want that the table went back", w.pg.uncounted)
		}
		// Fenced in the middle of a sweep: the same, at the next adoption.
		l.fence = 60
		if _, err := l.adopt(context.Background()); err != nil || w.pg.state.Owner.Epoch != 61 || l.fence != 0 {
			t.Errorf("epoch %d, %v; want 61", w.pg.state.Owner.Epoch, err)
		}
	})
}

// A stream of another database is not taken over. Health names it until an operator releases it; then the relay
// continues.
func TestAForeignStreamIsNamed(t *testing.T) {
	t.Parallel()
	inLeadership(t, Options{}, func(w *world, l *leadership) {
		w.pg.streams = streamsOf("outbox.order")
		w.rd.gates["outbox.order"] = &gate{owner: outbox.Owner{Source: [16]byte{9}, Epoch: 3}}
		done := l.adopting()
		pass(time.Minute)
		bad, _ := l.health.lists()
		if len(bad) != 1 || !strings.HasPrefix(bad[0], "foreign_stream: ") ||
			!strings.Contains(bad[0], "posthaste adopt") {
			t.Errorf("reasons %v", bad)
		}
		w.do(func() { delete(w.rd.gates, "outbox.order") })
		w.must(<-done)
		l.health.says(t)
	})
}

// An adoption waits for a sink that does not answer, reports it, and ends when it is superseded during the wait.
func TestAnAdoptionWaitsForTheSink(t *testing.T) {
	t.Parallel()
	for _, superseded := range []bool{false, true} {
		inLeadership(t, Options{}, func(w *world, l *leadership) {
			w.rd.down = true
			done := l.adopting()
			pass(time.Minute)
			l.health.says(t, "adopt: ")
			w.do(func() {
				if w.rd.down = superseded; superseded {
					w.pg.state.Owner.Epoch++
				}
			})
			if err := <-done; errors.Is(err, outbox.ErrSuperseded) != superseded || err != nil && !superseded {
				t.Errorf("superseded %v: %v", superseded, err)
			}
		})
	}
}

// Streams are suspected of a loss if the server is another one than at the last adoption, or if they or their gates are
// gone or know of less, or of less than is there; all is well otherwise. Before anything was delivered there is nothing
// to lose, but something may be there that the gate does not know.
func TestSuspects(t *testing.T) {
	t.Parallel()
	well := outbox.StreamState{Stream: "well", Gate: true}
	all := []outbox.StreamState{
		well,
		{Stream: "no gate"},
		{Stream: "forgot", Gate: true, Forgot: true},
		{Stream: "fewer", Gate: true, Missing: 2},
		{Stream: "older", Gate: true, Behind: true, Last: "1-1"},
		{Stream: "no gate, but events", Behind: true, Last: "1-1"},
	}
	for name, c := range map[string]struct {
		before, now string
		states      []outbox.StreamState
		delivered   bool
		want        int
	}{
		"the same server":         {"a", "a", []outbox.StreamState{well}, true, 0},
		"something is missing":    {"a", "a", all, true, 5},
		"another server":          {"a", "b", all, true, 6},
		"for the first time":      {"", "b", []outbox.StreamState{well}, true, 1},
		"nobody knows the server": {"a", "", []outbox.StreamState{well}, true, 0},
		"nothing was delivered":   {"a", "b", all, false, 2},
	} {
		inLeadership(t, Options{}, func(w *world, l *leadership) {
			w.pg.delivered = c.delivered
			f := found{server: c.now}
			err := l.suspect(context.Background(), outbox.State{Sink: c.before}, &f, c.states)
			if err != nil || len(f.suspects) != c.want || f.intact["no gate"] || f.intact["forgot"] ||
				f.intact["fewer"] || !f.intact["well"] {
				t.Errorf("%s: %d suspects, %v; want %d; intact %v", name, len(f.suspects), err, c.want, f.intact)
			}
		})
	}
}

// The pipe is held as the mode needs it, and the other hold is given back only when the new one is there.
func TestTakePipe(t *testing.T) {
	t.Parallel()
	inLeadership(t, Options{}, func(w *world, l *leadership) {
		holds := func(step string, alone, shared bool) {
			t.Helper()
			s := l.locks.(*lockSession)
			if (w.pg.alone == s) != alone || (w.pg.sharing[s] == 1) != shared || l.exclusive != alone ||
				l.shared != shared {
				t.Errorf("%s: alone %v (%d times), sharing %d times; want %v, %v", step, w.pg.alone == s, w.pg.alones,
					w.pg.sharing[s],
					alone, shared)
			}
		}
		take := func(poll, want bool) {
			t.Helper()
			if alone, err := l.takePipe(context.Background(), poll); err != nil || alone != want {
				t.Errorf("poll %v: alone %v, %v; want %v", poll, alone, err, want)
			}
		}
		take(false, true)
		holds("streaming", true, false)
		take(true, false)
		holds("polling", false, true)
		other := w.shares()
		take(false, false) // shared for the time being
		holds("streaming is wanted beside another poller", false, true)
		other.Close()
		take(false, true)
		holds("streaming again", true, false)
		if w.pg.alones != 1 {
			t.Errorf("held %d times", w.pg.alones)
		}
	})
}

// Entries that an adoption has read in a stream may have disappeared when it reports them to the gate. The report makes
// the gate detect that.
func TestWhatIsRecalledIsGone(t *testing.T) {
	t.Parallel()
	inLeadership(t, Options{}, func(w *world, l *leadership) {
		w.pg.streams = streamsOf("outbox.order")
		w.event("order", "a")
		w.rd.ids++
		e := entry{id: w.rd.ids, Record: w.pg.log[0].rows[0].Record}
		w.rd.streams["outbox.order"] = &memStream{last: e.id, entries: []entry{e}}
		w.pg.delivered = true
		w.plan = fault{"Sink.Recall", 0, dropped}
		if _, err := l.adopt(context.Background()); err != nil || !w.struck {
			t.Fatalf("%v, recalled: %v", err, w.struck)
		}
		if g := w.rd.gates["outbox.order"]; len(g.doubt) != 1 || !w.rd.forgot("outbox.order") {
			t.Errorf("%d events are in doubt", len(g.doubt))
		}
	})
}

// A repair does not republish events that it does not check because a consumer or a trim may have removed them. It does
// republish events that later marks have settled.
func TestARepairPublishesWhatIsMissing(t *testing.T) {
	t.Parallel()
	for _, missing := range []int64{0, 1} { // the world's log has mark 1
		inRig(t, Options{}, func(r *rig) {
			rows := r.transactions(3)
			r.settleAll()
			r.pg.repairs = []outbox.Repair{{Stream: "outbox.order", To: 1, Missing: missing}}
			r.must(r.gates.Ensure(context.Background(), "outbox.order"))
			repairs := r.i.relay.newLeadership(nil).reconciler
			_, err := repairs.run(context.Background(), r.gates.owner, &gates{}, nil)
			r.must(err)
			r.publishes("outbox.order", len(rows)*int(1-missing))
		})
	}
}
