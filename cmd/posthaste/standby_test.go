package main

import (
	"fmt"
	"net/http"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"posthaste/internal/testenv"
)

// replicated is a world whose Postgres has a standby.
type replicated struct {
	*world
	server, standby *testenv.Server
	// link is the connection from the standby to the server. front is the address of the current primary.
	link, front *testenv.Link
}

// newReplicated starts a replicated world. The standby has its own settings, each "name=value".
func newReplicated(t *testing.T, mode string, settings ...string) *replicated {
	t.Helper()
	server := testenv.NewServer(t)
	r := &replicated{world: worldOf(t, server.Database(t), testenv.Redis(t)), server: server}
	r.link = testenv.NewLink(t, hostOf(t, server.URL("")))
	r.standby = server.Standby(t, r.link.Addr(), settings...)
	r.front = testenv.NewLink(t, hostOf(t, server.URL("")))
	r.pgURL = strings.Replace(r.db.URL, hostOf(t, r.db.URL), r.front.Addr(), 1)
	r.desire(map[string]string{"cdc": "auto", "poll": "poll"}[mode])
	return r
}

// other returns the database on the standby.
func (r *replicated) other() *testenv.Database {
	r.t.Helper()
	return r.at(hostOf(r.t, r.standby.URL("")))
}

// at returns the database at another address.
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

// beSynchronous makes commits wait for the standby.
func (r *replicated) beSynchronous() {
	r.t.Helper()
	r.db.Standby(r.t, "*")
	testenv.Eventually(r.t, 20*time.Second, func() error {
		var state string
		err := r.db.Pool.QueryRow(r.t.Context(), "SELECT sync_state FROM pg_stat_replication").Scan(&state)
		return testenv.FailIf(err != nil || state != "sync", "the standby is %q, %w", state, err)
	})
}

// promote kills the server and promotes the standby. The world then uses the standby's database.
func (r *replicated) promote(other *testenv.Database) {
	r.t.Helper()
	must(r.t, r.server.Stop("immediate"))
	// On a standby, a sequence may be ahead by more than the claims made since the standby last received WAL. Then no
	// gate refuses a claim made there.
	for _, stmt := range []string{"SELECT pg_promote()", "SELECT setval('outbox_claim', 1000000)"} {
		if _, err := other.Pool.Exec(r.t.Context(), stmt); err != nil {
			r.t.Fatal(err)
		}
	}
	r.front.To(hostOf(r.t, r.standby.URL("")))
	r.db, r.oracle.DB = other, other
}

// A synchronous standby takes over. It was cut off between a commit and the mark that settles it. It has all
// acknowledged commits, and no event is published twice.
func TestASynchronousStandbyIsPromoted(t *testing.T) {
	t.Parallel()
	inModes(t, func(t *testing.T, mode string) {
		const events = 60
		w := newReplicated(t, mode)
		r := w.spawn("relay", "--sweep-workers=1")
		w.waitMode(mode, 20*time.Second)
		first := w.wrote(testenv.LoadOptions{Total: events})
		w.oracle.Check(t, first, 20*time.Second)
		w.beSynchronous()
		r.signal(syscall.SIGSTOP) // otherwise its mark may arrive before the standby is cut off
		w.wrote(testenv.LoadOptions{Total: events})
		other := w.other()
		testenv.Eventually(t, 20*time.Second, func() error {
			var n int
			err := other.Pool.QueryRow(t.Context(), "SELECT count(*) FROM outbox").Scan(&n)
			return testenv.FailIf(err != nil || n < 2*events, "the standby has %d rows, %w", n, err)
		})
		w.link.To("127.0.0.1:1")
		r.signal(syscall.SIGCONT)
		testenv.Eventually(t, 20*time.Second, func() error {
			n := len(w.oracle.Entries(t, "order"))
			return testenv.FailIf(n == events, "%d entries", n)
		})
		testenv.Eventually(t, 20*time.Second, func() error { // a mark is written, and its commit is not acknowledged
			waits := testenv.Value[bool](t, w.db,
				"SELECT EXISTS (SELECT FROM pg_stat_activity WHERE wait_event = 'SyncRep')")
			n := w.settled()
			return testenv.FailIf(n <= events || !waits,
				"%d events are settled, somebody waits for the standby is %t", n, waits)
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

// An asynchronous standby takes over. It has the rows but not their marks. The relay finds the events in their stream
// and does not publish them again. The failover is reported.
func TestAnAsynchronousStandbyIsPromoted(t *testing.T) {
	t.Parallel()
	inModes(t, func(t *testing.T, mode string) {
		const events = 60
		w := newReplicated(t, mode)
		if mode == "cdc" { // the standby has the old timeline; in the other mode only the gates are ahead of it
			r := w.spawn("relay")
			w.waitMode(mode, 20*time.Second)
			r.stop()
		}
		load := w.wrote(testenv.LoadOptions{Total: events})
		other := w.other()
		testenv.Eventually(t, 20*time.Second, func() error {
			var n int
			err := other.Pool.QueryRow(t.Context(), "SELECT count(*) FROM outbox").Scan(&n)
			return testenv.FailIf(err != nil || n < events, "the standby has %d rows, %w", n, err)
		})
		w.link.To("127.0.0.1:1") // cuts off the standby
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
		n := testenv.Value[int](t, w.db, "SELECT coalesce(sum(recalled), 0)::int FROM outbox_reconcile WHERE back")
		if n != events {
			t.Errorf("%d events were found in the stream, want %d: not the case", n, events)
		}
		if list := w.losses(); len(list) != 1 || list[0].Stream != "" || list[0].Missing != -1 {
			t.Errorf("told: %+v", list)
		}
		present(t, r, "outbox_postgres_failovers_total 1")
		if out := w.once("status").out; !strings.Contains(out, "Postgres has gone back in time") {
			t.Errorf("status: %s", out)
		}
		r.waitReady(t, http.StatusOK, "", 20*time.Second)
	})
}

// An asynchronous standby takes over under load, some commits behind. The events that it has are in the stream once.
// The events that it lacks, and only those, are named.
func TestAnAsynchronousStandbyIsPromotedUnderLoad(t *testing.T) {
	t.Parallel()
	inModes(t, func(t *testing.T, mode string) {
		w := newReplicated(t, mode)
		relays := []*child{w.spawn("relay")}
		w.waitMode(mode, 20*time.Second)
		if mode == "poll" { // the second relay sweeps, and must not publish before the leader has adopted
			relays = append(relays, w.spawn("relay"))
			relays[1].waitLogged(`"to":"poll"`)
		}
		load := testenv.StartLoad(t, w.db, testenv.LoadOptions{Rate: 600, Tolerant: true})
		w.waitCommitted(load, 600)
		other := w.other()
		w.link.To("127.0.0.1:1") // cuts off the standby
		w.waitLen("outbox.order", int64(load.Committed())+300, 20*time.Second)
		w.waitCommitted(load, load.Committed()+300)
		w.promote(other)
		testenv.Eventually(t, 30*time.Second, func() error {
			var n int
			err := w.db.Pool.QueryRow(t.Context(), "SELECT count(*) FROM outbox_reconcile WHERE phantoms > 0").Scan(&n)
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
		w.once("phantoms", "--json", "--limit=100000").json(t, &named)
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
				n, _ := sample(text, "outbox_phantom_events")
				if counted += int(n); err != nil {
					return err
				}
			}
			return testenv.FailIf(counted != len(named), "%d phantoms are counted, want %d", counted, len(named))
		})
		t.Logf("%d events, %d phantoms", len(seen), len(named))
	})
}

// Services move to a server with replicated rows and marks. It is a clone of the first one, with the same or with its
// own identifier, and its transaction ids are lower or higher. Settled events stay settled. Unsettled events, and those
// written there before a relay started, are published.
func TestALogicalReplicaTakesOver(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ ahead, other bool }{
		"of the same identifier, behind": {}, "of the same identifier, ahead": {ahead: true},
		"of another identifier, behind": {other: true}, "of another identifier, ahead": {ahead: true, other: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w, server := onServer(t)
			blue := w.db
			r := w.relayIn("cdc", "--stream-maxlen=0")
			load := testenv.StartLoad(t, blue, testenv.LoadOptions{Rate: 400})
			w.waitSettled(100)
			load.Stop()
			w.oracle.WaitEmpty(t, 20*time.Second)
			r.kill()
			blue.Exec(t, "CREATE PUBLICATION all_of_it FOR ALL TABLES")
			clone := server.Snapshot(t)
			must(t, clone.Start(t.Context()))
			t.Cleanup(func() { _ = clone.Stop("immediate") })
			blue.Pool.Reset()
			green := w.at(hostOf(t, clone.URL("")))
			green.Exec(t, fmt.Sprintf(`CREATE SUBSCRIPTION green CONNECTION '%s' PUBLICATION all_of_it
				WITH (copy_data = false)`, blue.URL))
			for _, d := range map[bool][]*testenv.Database{true: {green}, false: {blue}}[c.ahead] {
				d.Exec(t, `DO $$ BEGIN FOR i IN 1..5000 LOOP PERFORM pg_current_xact_id(); COMMIT; END LOOP; END $$`)
			}

			r = w.relayIn("cdc", "--stream-maxlen=0")
			second := testenv.StartLoad(t, blue, testenv.LoadOptions{Rate: 400, Tag: "second-"})
			w.waitSettled(w.settled() + 300)
			r.kill()
			w.waitCommitted(second, second.Committed()+100)
			second.Stop()
			testenv.Eventually(t, 20*time.Second, func() error {
				// What the killed relay has sent may still be committed.
				want, have := testenv.Value[string](t, blue, states), testenv.Value[string](t, green, states)
				return testenv.FailIf(have != want, "%s on green, %s on blue", have, want)
			})
			if c.other {
				w.pgURL = green.URL
				early := w.spawn("relay")
				early.waitReady(t, http.StatusServiceUnavailable, `DROP SUBSCRIPTION "green"`, 30*time.Second)
				early.kill()
			}
			green.Exec(t, "ALTER SUBSCRIPTION green DISABLE")
			green.Exec(t, "ALTER SUBSCRIPTION green SET (slot_name = NONE)")
			green.Exec(t, "DROP SUBSCRIPTION green")
			green.Exec(t, "SELECT setval('outbox_seq_seq', (SELECT max(seq) FROM outbox))")
			if c.other {
				green.Exec(t, "UPDATE relay_state SET system_identifier = 1")
			}
			must(t, server.Stop("immediate"))

			w.db, w.oracle.DB, w.pgURL = green, green, green.URL
			third := testenv.StartLoad(t, green, testenv.LoadOptions{Total: 60, Tag: "third-"})
			third.Wait()
			green.Exec(t, "UPDATE outbox SET headers = '{}' WHERE aggregate_id LIKE 'third-%1'")
			green.Exec(t, `DO $$ BEGIN FOR i IN 1..10 LOOP
				BEGIN
					INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload)
					VALUES ('saved', i, 'saved', '{}');
				EXCEPTION WHEN division_by_zero THEN
				END;
			END LOOP; END $$`)
			r = w.spawn("relay", "--stream-maxlen=0")
			if c.other || !c.ahead {
				r.waitReady(t, http.StatusServiceUnavailable, "foreign_stream", 30*time.Second)
				w.adopt()
			}
			w.waitMode("cdc", 30*time.Second)
			w.oracle.Others = []*testenv.Load{load}
			w.all(third, second)
			if n := w.redis.Client.XLen(t.Context(), "outbox.saved").Val(); n != 10 {
				t.Errorf("%d events of savepoints, want 10", n)
			}
		})
	}
}

// states summarizes the state that a replica must have.
const states = `SELECT concat_ws(' ', (SELECT count(*) FROM outbox), (SELECT max(id) FROM outbox_mark),
	(SELECT epoch FROM relay_state), (SELECT changed_at FROM relay_state))`

// Two servers have the same files, and their relays use one Redis. The working relay is not affected. The other one
// stops publishing and reports why, until an operator decides.
func TestACopyOfTheFilesBesideTheOriginal(t *testing.T) {
	t.Parallel()
	for _, promoted := range []bool{true, false} {
		t.Run(fmt.Sprintf("promoted is %t", promoted), func(t *testing.T) {
			t.Parallel()
			w, server := onServer(t)
			r := w.relayIn("cdc")
			w.delivers()
			r.stop() // the server will be restarted
			var other *testenv.Server
			if promoted {
				other = server.Standby(t, hostOf(t, server.URL("")))
			} else {
				other = server.Snapshot(t)
				must(t, other.Start(t.Context()))
				t.Cleanup(func() { _ = other.Stop("immediate") })
			}
			r = w.spawn("relay")
			r.waitLogged(`"to":"cdc"`)
			w.delivers()
			d := w.at(hostOf(t, other.URL("")))
			if promoted {
				d.Exec(t, "SELECT pg_promote()")
			}
			c := worldOf(t, d, w.redis)
			still := w.leads(r)
			load := testenv.StartLoad(t, d, testenv.LoadOptions{Total: 60, Tag: "copy-"})
			load.Wait()
			cr := c.spawn("relay")
			cr.waitReady(t, http.StatusServiceUnavailable, "copy: ", 30*time.Second)
			cr.waitReady(t, http.StatusServiceUnavailable, "SET database_oid = 0", 30*time.Second)
			w.delivers()
			w.delivers()
			still()
			testenv.Eventually(t, 10*time.Second, func() error { return ready(r, "leader") })
			if promoted { // the copy becomes its own database
				cr.stop()
				d.Exec(t, "UPDATE relay_state SET database_oid = 0")
				c.refused(c.spawn("relay"), load)
				w.delivers()
				return
			}
			r.kill() // or the copy continues where the original has ended
			c.oracle.WaitEmpty(t, 90*time.Second)
		})
	}
}
