package main

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"posthaste/internal/link"
	"posthaste/internal/testenv"
)

// replicated is a world whose Postgres has a standby.
type replicated struct {
	*world
	server, standby *testenv.Server
	// link is how the standby hears of the server, front where everybody looks for the primary.
	link, front *link.Link
}

// newReplicated starts one. The standby has settings of its own, each "name=value".
func newReplicated(t *testing.T, mode string, settings ...string) *replicated {
	t.Helper()
	server := testenv.NewServer(t)
	r := &replicated{world: worldOf(t, server.Database(t), testenv.Redis(t)), server: server}
	r.link = testenv.NewSwitch(t, hostOf(t, server.URL("")))
	r.standby = server.Standby(t, r.link.Addr(), settings...)
	r.front = testenv.NewSwitch(t, hostOf(t, server.URL("")))
	r.pgURL = strings.Replace(r.db.URL, hostOf(t, r.db.URL), r.front.Addr(), 1)
	r.desire(map[string]string{"cdc": "auto", "poll": "poll"}[mode])
	return r
}

// other is the database of the standby.
func (r *replicated) other() *testenv.Database {
	r.t.Helper()
	return r.at(hostOf(r.t, r.standby.URL("")))
}

// at is the database by another address.
func (w *world) at(addr string) *testenv.Database {
	w.t.Helper()
	d := *w.db
	d.URL = testenv.Through(w.db.URL, addr)
	var err error
	if d.Pool, err = pgxpool.New(w.t.Context(), d.URL); err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(d.Pool.Close)
	return &d
}

// beSynchronous has commits wait for the standby from now on.
func (r *replicated) beSynchronous() {
	r.t.Helper()
	r.db.Standby(r.t, "*")
	testenv.Eventually(r.t, 20*time.Second, func() error {
		var state string
		err := r.db.Pool.QueryRow(r.t.Context(), "SELECT sync_state FROM pg_stat_replication").Scan(&state)
		if err != nil || state != "sync" {
			return fmt.Errorf("the standby is %q, %w", state, err)
		}
		return nil
	})
}

// promote has the standby take over from a server that is killed. Its database is that of the world from then on.
func (r *replicated) promote(other *testenv.Database) {
	r.t.Helper()
	if err := r.server.Stop("immediate"); err != nil {
		r.t.Fatal(err)
	}
	// A sequence is ahead on a standby, which may be more than what was claimed since the server was heard last: then
	// no gate refuses what is claimed there.
	for _, stmt := range []string{"SELECT pg_promote()", "SELECT setval('outbox_claim', 1000000)"} {
		if _, err := other.Pool.Exec(r.t.Context(), stmt); err != nil {
			r.t.Fatal(err)
		}
	}
	r.front.To(hostOf(r.t, r.standby.URL("")))
	r.db, r.oracle.DB = other, other
}

// A synchronous standby takes over that was cut off between a commit and the mark that settles it: it has everything
// that was acknowledged, and no event is published twice.
func TestASynchronousStandbyIsPromoted(t *testing.T) {
	t.Parallel()
	inModes(t, func(t *testing.T, mode string) {
		const events = 60
		w := newReplicated(t, mode)
		r := w.spawn("relay", "--sweep-workers=1")
		w.waitMode(mode, 20*time.Second)
		first := testenv.StartLoad(t, w.db, testenv.LoadOptions{Total: events})
		first.Wait()
		w.oracle.Check(t, first, 20*time.Second)
		w.beSynchronous()
		r.signal(syscall.SIGSTOP) // or its mark may be there before the standby is cut off
		last := testenv.StartLoad(t, w.db, testenv.LoadOptions{Total: events})
		last.Wait()
		other := w.other()
		testenv.Eventually(t, 20*time.Second, func() error {
			var n int
			err := other.Pool.QueryRow(t.Context(), "SELECT count(*) FROM outbox").Scan(&n)
			if err != nil || n < 2*events {
				return fmt.Errorf("the standby has %d rows, %w", n, err)
			}
			return nil
		})
		w.link.To("127.0.0.1:1")
		r.signal(syscall.SIGCONT)
		testenv.Eventually(t, 20*time.Second, func() error {
			if n := len(w.oracle.Entries(t, "order")); n == events {
				return fmt.Errorf("%d entries", n)
			}
			return nil
		})
		testenv.Eventually(t, 20*time.Second, func() error { // a mark is written, and must not be told
			waits := testenv.Value[bool](t, w.db,
				"SELECT EXISTS (SELECT FROM pg_stat_activity WHERE wait_event = 'SyncRep')")
			if n := w.settled(); n <= events || !waits {
				return fmt.Errorf("%d events are settled, somebody waits for the standby is %t", n, waits)
			}
			return nil
		})
		r.kill()
		w.promote(other)
		w.spawn("relay")
		w.waitMode(mode, 30*time.Second)
		w.oracle.WaitEmpty(t, 20*time.Second)
		if n := len(w.oracle.Entries(t, "order")); n != 2*events {
			t.Errorf("%d entries, want %d", n, 2*events)
		}
	})
}

// An asynchronous standby takes over, and has the rows but not that they were settled: they are found in their stream,
// and not published again. That it happened is told.
func TestAnAsynchronousStandbyIsPromoted(t *testing.T) {
	t.Parallel()
	inModes(t, func(t *testing.T, mode string) {
		const events = 60
		w := newReplicated(t, mode)
		if mode == "cdc" { // the standby knows the old timeline; in the other mode the gates alone know better than it
			r := w.spawn("relay")
			w.waitMode(mode, 20*time.Second)
			r.stop()
		}
		load := testenv.StartLoad(t, w.db, testenv.LoadOptions{Total: events})
		load.Wait()
		other := w.other()
		testenv.Eventually(t, 20*time.Second, func() error {
			var n int
			if err := other.Pool.QueryRow(t.Context(), "SELECT count(*) FROM outbox").Scan(&n); err != nil ||
				n < events {
				return fmt.Errorf("the standby has %d rows, %w", n, err)
			}
			return nil
		})
		w.link.To("127.0.0.1:1") // it hears no more
		r := w.spawn("relay")
		w.waitMode(mode, 20*time.Second)
		w.oracle.Check(t, load, 20*time.Second)
		r.stop()
		w.promote(other)
		r = w.spawn("relay")
		w.waitMode(mode, 20*time.Second)
		w.oracle.Check(t, load, 20*time.Second)
		if n := len(w.oracle.Entries(t, "order")); n != events {
			t.Errorf("%d entries, want %d", n, events)
		}
		n := testenv.Value[int](t, w.db, "SELECT coalesce(sum(recalled), 0)::int FROM outbox_repair WHERE back")
		if n != events {
			t.Errorf("%d events were found in the stream, want %d: not the case", n, events)
		}
		if list := w.losses(); len(list) != 1 || list[0].Stream != "" || list[0].Events != -1 {
			t.Errorf("told: %+v", list)
		}
		present(t, r, "outbox_postgres_failovers_total 1")
		if out := w.once("status").out; !strings.Contains(out, "Postgres has gone back in time") {
			t.Errorf("status: %s", out)
		}
		waitReady(t, r, http.StatusOK, 20*time.Second)
	})
}

// An asynchronous standby takes over under load that is some commits behind: what it has is in the stream once, and
// what it lacks is named, and only that.
func TestAnAsynchronousStandbyIsPromotedUnderLoad(t *testing.T) {
	t.Parallel()
	inModes(t, func(t *testing.T, mode string) {
		w := newReplicated(t, mode)
		relays := []*child{w.spawn("relay")}
		w.waitMode(mode, 20*time.Second)
		if mode == "poll" { // the second one sweeps along, and must not go on with it before the leader has adopted
			relays = append(relays, w.spawn("relay"))
			relays[1].waitLogged(`"to":"poll"`)
		}
		load := testenv.StartLoad(t, w.db, testenv.LoadOptions{Rate: 600, Tolerant: true})
		w.waitCommitted(load, 600)
		other := w.other()
		w.link.To("127.0.0.1:1") // it hears no more
		w.waitCommitted(load, load.Committed()+600)
		w.promote(other)
		testenv.Eventually(t, 30*time.Second, func() error {
			var n int
			err := w.db.Pool.QueryRow(t.Context(), "SELECT count(*) FROM outbox_repair WHERE phantoms > 0").Scan(&n)
			if err != nil || n == 0 {
				return fmt.Errorf("no phantoms are noticed, %w", err)
			}
			return nil
		})
		w.waitMode(mode, 30*time.Second)
		load.Stop()
		after := testenv.StartLoad(t, w.db, testenv.LoadOptions{Rate: 600, Tag: "after-"})
		w.waitCommitted(after, 300)
		after.Stop()
		w.oracle.WaitEmpty(t, 20*time.Second)
		have := map[string]bool{}
		for _, id := range testenv.Value[[]string](t, w.db, "SELECT array_agg(id::text) FROM outbox") {
			have[id] = true
		}
		seen, want := map[string]bool{}, map[string]bool{}
		for _, e := range w.oracle.Entries(t, "order") {
			if seen[e.ID] {
				t.Errorf("event %s is twice in the stream", e.ID)
			}
			if seen[e.ID] = true; !have[e.ID] {
				want[e.ID] = true
			}
		}
		for id := range have {
			if !seen[id] {
				t.Errorf("event %s is not in the stream", id)
			}
		}
		var named []struct{ ID, Entry string }
		res := w.once("phantoms", "--json", "--limit=100000")
		if err := json.Unmarshal([]byte(res.out), &named); err != nil {
			t.Fatalf("%v: %s%s", err, res.out, res.errOut)
		}
		for _, p := range named {
			if !want[p.ID] {
				t.Errorf("%s at %s is named, and is none", p.ID, p.Entry)
			}
			delete(want, p.ID)
		}
		if len(want) > 0 || len(named) < 100 {
			t.Errorf("%d phantoms are named, %d are not", len(named), len(want))
		}
		testenv.Eventually(t, 20*time.Second, func() error {
			counted := 0
			for _, r := range relays {
				text, err := r.metrics()
				n, _ := sample(text, "outbox_phantom_events_total")
				if counted += int(n); err != nil {
					return err
				}
			}
			if counted != len(named) {
				return fmt.Errorf("%d phantoms are counted, want %d", counted, len(named))
			}
			return nil
		})
		t.Logf("%d events, %d phantoms", len(seen), len(named))
	})
}
