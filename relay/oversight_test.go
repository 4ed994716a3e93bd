package relay

import (
	"slices"
	"strings"
	"testing"
	"time"

	"posthaste/outbox"
)

// A standby is not ready while rows wait and the holder of the leader's lock makes no progress. It ends a session that
// is no relay's, or whose relay does not reach the sink, and no other.
func TestALockThatIsHeldByNobodyWhoWorks(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ relay, sinkless, ends bool }{
		{relay: false, ends: true}, {relay: true}, {relay: true, sinkless: true, ends: true},
	} {
		inWorld(t, Options{}, func(w *world) {
			w.pg.leader = &lockSession{}
			w.pg.leaderSession = outbox.LeaderSession{PID: 7, Application: "psql", Relay: c.relay, Sinkless: c.sinkless}
			i := w.start("one")
			pass(2 * stallAfter)
			if h := i.relay.Health(); !h.Ready || h.Role != "standby" {
				t.Errorf("while nothing waits: %+v", h)
			}
			w.event("order", "a")
			pass(stallAfter - 2*watchInterval)
			if h := i.relay.Health(); !h.Ready {
				t.Errorf("at once: %+v", h)
			}
			pass(4 * watchInterval)
			h := i.relay.Health()
			if h.Ready || len(h.Reasons) != 1 || !strings.HasPrefix(h.Reasons[0], "leader: ") ||
				!strings.Contains(h.Reasons[0], "pid 7") || strings.Contains(h.Reasons[0], "no relay") == c.relay {
				t.Errorf("%+v: %+v", c, h)
			}
			if ended := slices.Contains(w.pg.endedSessions, 7); ended != c.ends {
				t.Errorf("%+v, and its session was ended: %v", c, ended)
			}
			w.do(func() { w.pg.leader = nil })
			pass(10 * time.Second)
			if h := i.relay.Health(); !h.Ready || h.Role != "leader" {
				t.Errorf("without it: %+v", h)
			}
		})
	}
}
