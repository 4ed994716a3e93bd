package relay

import (
	"context"
	"errors"
	"maps"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"posthaste/internal/pause"
	"posthaste/outbox"
)

func TestWatchdog(t *testing.T) {
	t.Parallel()
	type state struct {
		first map[int16]int64
		moves int64
		deaf  bool
	}
	for name, c := range map[string]struct {
		at   func(s int64) state // by the second
		all  time.Duration       // from when on everything is said to stand still; 0: never
		part time.Duration       // the same for a part
	}{
		"nothing waits": {at: func(int64) state { return state{} }},
		"nothing moves": {
			at:  func(int64) state { return state{first: map[int16]int64{1: 7, 2: 8}} },
			all: stallAfter,
		},
		"the table says nothing": {at: func(int64) state { return state{deaf: true} }, all: stallAfter},
		"the table says nothing, but events move": {at: func(s int64) state {
			return state{deaf: true, moves: s}
		}, part: partStallAfter},
		"the table says nothing, and then nothing moves": {at: func(s int64) state {
			return state{deaf: true, moves: min(s, 50)}
		}, all: 50*time.Second + stallAfter},
		"a part stands": {
			at:   func(s int64) state { return state{first: map[int16]int64{1: 7, 2: s}, moves: s} },
			part: partStallAfter,
		},
		"a part waits its turn": {at: func(s int64) state {
			return state{first: map[int16]int64{1: s / 100, 2: s}, moves: s}
		}},
		"another instance sweeps": {
			at:   func(s int64) state { return state{first: map[int16]int64{1: 7, 2: s}} },
			part: partStallAfter,
		},
		"new rows behind": {at: func(s int64) state { return state{first: map[int16]int64{1: s}} }},
		// A part that fills while another one stands is no movement.
		"rows come, none leaves": {at: func(s int64) state {
			first := map[int16]int64{}
			for part := range min(s, 16) {
				first[int16(part)] = part
			}
			return state{first: first}
		}, all: stallAfter + time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w, began := &watchdog{}, time.Now()
			var all, part time.Duration
			for s := range int64(300) {
				now := time.Duration(s) * time.Second
				st := c.at(s)
				f := func(now time.Time) finding { return w.untold(st.moves, now) }
				if !st.deaf {
					f = func(now time.Time) finding { return w.check(maps.Clone(st.first), st.moves, now) }
				}
				switch f := f(began.Add(now)); {
				case f.text == "":
				case f.all && all == 0:
					all = now
				case !f.all && part == 0:
					part = now
				}
			}
			for _, of := range []struct {
				what      string
				got, want time.Duration
			}{{"everything", all, c.all}, {"a part", part, c.part}} {
				if of.want != 0 {
					of.want += time.Second
				}
				if of.got != of.want {
					t.Errorf("%s stands from %v on, want %v", of.what, of.got, of.want)
				}
			}
		})
	}
}

// standingStore is a Store whose table has one row that never moves.
type standingStore struct {
	Audits
	gone atomic.Bool
	err  atomic.Bool
}

func (s *standingStore) Audit(context.Context) (outbox.AuditMark, error) {
	switch {
	case s.err.Load():
		return outbox.AuditMark{}, errors.New("no answer")
	case s.gone.Load():
		return outbox.AuditMark{}, nil
	}
	return outbox.AuditMark{First: map[int16]int64{3: 11}}, nil
}

// A leader that makes no progress reports it in its health, and clears it afterwards.
func TestALeaderSaysThatItStands(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		store := &standingStore{}
		r := New(Options{})
		r.health.clear(conditionPostgres)
		r.activity.leading.Store(true)
		ctx, stop := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() {
			(&watchdog{reporter: r.reporter, store: store, activity: r.activity}).run(ctx)
			close(done)
		}()
		after := func(d time.Duration, want string) {
			t.Helper()
			pause.For(t.Context(), d)
			synctest.Wait()
			bad, _ := r.health.lists()
			if got := strings.Join(bad, "; "); (want == "") != (got == "") || !strings.Contains(got, want) {
				t.Fatalf("health %q, want %q", got, want)
			}
		}
		after(stallAfter, "")
		after(2*watchInterval, "stalled: rows wait in 1 parts, and nothing has moved for 40s; part 3 stands at row 11")
		store.gone.Store(true)
		after(watchInterval, "")
		store.err.Store(true)
		after(stallAfter, "")
		after(2*watchInterval, "stalled: the table has not answered")
		store.err.Store(false)
		after(watchInterval, "")
		stop()
		<-done
	})
}

// A standby is not ready while rows wait and the holder of the leader's lock makes no progress. It ends a session that
// is no relay's, or whose relay does not reach the sink if this one does, and no other.
func TestALockThatIsHeldByNobodyWhoWorks(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ relay, sinkless, without, ends bool }{
		{ends: true},
		{relay: true},
		{relay: true, sinkless: true, ends: true},
		{relay: true, sinkless: true, without: true},
	} {
		ready := func(context.Context) error {
			if c.without {
				return errors.New("gone")
			}
			return nil
		}
		inWorld(t, Options{SinkReady: ready}, func(w *world) {
			w.pg.leader = &lockSession{}
			w.pg.leaderSession = outbox.LeaderSession{
				PID: 7, Application: "psql", Relay: c.relay, Sinkless: c.sinkless,
			}
			i := w.start("one")
			leader := func() string {
				for _, why := range i.relay.Health().Reasons {
					if strings.HasPrefix(why, "leader: ") {
						return why
					}
				}
				return ""
			}
			pass(2 * stallAfter)
			if why, role := leader(), i.relay.Health().Role; why != "" || role != "standby" {
				t.Errorf("while nothing waits: %s, %s", role, why)
			}
			w.event("order", "a")
			pass(stallAfter - 2*watchInterval)
			if why := leader(); why != "" {
				t.Errorf("at once: %s", why)
			}
			pass(5 * watchInterval)
			if why := leader(); !strings.Contains(why, "pid 7") || strings.Contains(why, "no relay") == c.relay {
				t.Errorf("%+v: %q", c, why)
			}
			if ended := slices.Contains(w.pg.endedSessions, 7); ended != c.ends {
				t.Errorf("%+v, and its session was ended: %v", c, ended)
			}
			w.do(func() { w.pg.leader = nil })
			pass(10 * time.Second)
			if h := i.relay.Health(); leader() != "" || h.Role != "leader" || h.Ready == c.without {
				t.Errorf("without it: %+v", h)
			}
		})
	}
}

// A leader shows that it does not reach the sink when it has not for a while, not when one probe has failed.
func TestALeaderShowsThatItMissesTheSink(t *testing.T) {
	t.Parallel()
	var gone atomic.Bool
	ready := func(context.Context) error {
		if gone.Load() {
			return errors.New("gone")
		}
		return nil
	}
	inWorld(t, Options{SinkReady: ready}, func(w *world) {
		i := w.start("one")
		pass(10 * time.Second)
		shows := func(after time.Duration, want bool) {
			t.Helper()
			pass(after)
			var got bool
			w.do(func() { got = i.session.sinkless })
			if got != want {
				t.Errorf("sinkless is %v", got)
			}
		}
		gone.Store(true)
		shows(sinkPatience/2, false)
		gone.Store(false)
		shows(5*time.Second, false)
		gone.Store(true)
		shows(sinkPatience+5*time.Second, true)
		gone.Store(false)
		shows(5*time.Second, false)
	})
}
