package main

import (
	"fmt"
	"net/url"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"posthaste/internal/lab/testenv"
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
	return reached(w.t, w.db, testenv.Through(w.db.URL, addr))
}

// arrived waits until the standby has n rows of the outbox, and returns its database.
func (r *replicated) arrived(n int) *testenv.Database {
	r.t.Helper()
	other := r.other()
	testenv.Eventually(r.t, 20*time.Second, func() error {
		var have int
		err := other.Pool.QueryRow(r.t.Context(), "SELECT count(*) FROM outbox").Scan(&have)
		return testenv.FailIf(err != nil || have < n, "the standby has %d rows, %w", have, err)
	})
	return other
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
		other.Exec(r.t, stmt)
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
		r := w.relayIn(mode, "--sweep-workers=1")
		first := w.wrote(testenv.LoadOptions{Total: events})
		w.oracle.Check(t, first, 20*time.Second)
		w.beSynchronous()
		r.signal(syscall.SIGSTOP) // otherwise its mark may arrive before the standby is cut off
		w.wrote(testenv.LoadOptions{Total: events})
		other := w.arrived(2 * events)
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
		w.relayIn(mode)
		w.oracle.WaitEmpty(t, 20*time.Second)
		w.hasLen("outbox.order", 2*events)
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
			r := w.relayIn(mode)
			r.stop()
		}
		load := w.wrote(testenv.LoadOptions{Total: events})
		other := w.arrived(events)
		w.link.To("127.0.0.1:1") // cuts off the standby
		r := w.relayIn(mode)
		w.oracle.Check(t, load, 20*time.Second)
		r.stop()
		w.promote(other)
		r = w.relayIn(mode)
		w.oracle.Check(t, load, 20*time.Second)
		w.hasLen("outbox.order", events)
		w.has(events, "SELECT coalesce(sum(recalled), 0)::int FROM outbox_reconcile WHERE back")
		if list := w.losses(); len(list) != 1 || list[0].Stream != "" || list[0].Missing != -1 {
			t.Errorf("told: %+v", list)
		}
		present(t, r, "outbox_postgres_failovers_total 1")
		w.once("status").says(t, 0, "Postgres has gone back in time")
		r.waitReady("")
	})
}

// An asynchronous standby takes over under load, some commits behind. The events that it has are in the stream once.
// The events that it lacks, and only those, are named, counted and reported, until they are acknowledged.
func TestAnAsynchronousStandbyIsPromotedUnderLoad(t *testing.T) {
	t.Parallel()
	inModes(t, func(t *testing.T, mode string) {
		w := newReplicated(t, mode)
		relays := []*child{w.spawn("relay")}
		w.waitMode(mode)
		if mode == "poll" { // the second relay sweeps, and must not publish before the leader has adopted
			relays = append(relays, w.spawn("relay"))
			relays[1].waitLogged(`"to":"poll"`)
		}
		w.once("phantoms").says(t, 0, "no phantoms")
		load := testenv.StartLoad(t, w.db, testenv.LoadOptions{Rate: 600, Tolerant: true})
		w.waitCommitted(load, 600)
		other := w.other()
		w.link.To("127.0.0.1:1") // cuts off the standby
		w.waitLen("outbox.order", int64(load.Committed())+300)
		w.waitCommitted(load, load.Committed()+300)
		w.promote(other)
		w.waitHas(true, "SELECT count(*) > 0 FROM outbox_reconcile WHERE phantoms > 0")
		w.waitMode(mode)
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
		var named []struct{ ID, Stream, Entry string }
		w.once("phantoms", "--json", "--limit=100000").json(t, &named)
		for _, p := range named {
			entry := w.redis.Client.XRange(t.Context(), p.Stream, p.Entry, p.Entry).Val()
			if !want[p.ID] || len(entry) != 1 || entry[0].Values["id"] != p.ID {
				t.Errorf("%s at %s is named, and is none", p.ID, p.Entry)
			}
			delete(want, p.ID)
		}
		if len(want) > 0 || len(named) < 100 {
			t.Errorf("%d phantoms are named, %d are not", len(named), len(want))
		}
		counted := func(want int) {
			t.Helper()
			testenv.Eventually(t, 20*time.Second, func() error {
				sum := 0.0
				for _, r := range relays {
					sum += r.value("outbox_phantom_events")
				}
				return testenv.FailIf(int(sum) != want, "%v phantoms are counted, want %d", sum, want)
			})
		}
		counted(len(named))
		w.once("status").says(t, 0, fmt.Sprintf("%d events are in their streams", len(named)), "posthaste phantoms")
		if !slices.ContainsFunc(relays, func(r *child) bool {
			return r.logged("postgres has lost commits whose events are in the stream")
		}) {
			t.Error("no relay logs the phantoms")
		}
		var acked struct {
			Phantoms []struct{ ID string }
			WentBack bool `json:"went_back"`
		}
		w.once("phantoms", "--ack", "--json").json(t, &acked)
		if len(acked.Phantoms) != len(named) || !acked.WentBack {
			t.Errorf("%d are acknowledged, want %d; %v", len(acked.Phantoms), len(named), acked.WentBack)
		}
		counted(0)
		if out := w.once("status").out; strings.Contains(out, "not in Postgres") || strings.Contains(out, "gone back") {
			t.Errorf("acknowledged, and status still names it: %s", out)
		}
		w.once("phantoms", "--ack").says(t, 0, "no phantoms to acknowledge\n")
		t.Logf("%d events, %d phantoms", len(seen), len(named))
	})
}

// A standby takes over, and the old primary runs on without writes. The sessions that the relay has there do not end,
// and see none of the events that follow. They are published, also if the mode is switched.
func TestAnOldPrimaryRunsOnWithoutWrites(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ before, after string }{{"poll", "poll"}, {"poll", "cdc"}, {"cdc", "cdc"}} {
		t.Run(c.before+" "+c.after, func(t *testing.T) {
			t.Parallel()
			w := newReplicated(t, c.before)
			first, second := hostOf(t, w.server.URL("")), hostOf(t, w.standby.URL(""))
			both, err := url.Parse(testenv.Through(w.db.URL, first+","+second))
			must(t, err)
			q := both.Query()
			q.Set("target_session_attrs", "read-write")
			both.RawQuery = q.Encode()
			w.pgURL = both.String()
			w.relayIn(c.before)
			w.oracle.Check(t, w.wrote(testenv.LoadOptions{Total: 20}), 20*time.Second)
			w.db.Exec(t, "ALTER SYSTEM SET default_transaction_read_only = on")
			w.db.Exec(t, "SELECT pg_reload_conf()")
			testenv.Eventually(t, 20*time.Second, func() error {
				lag := testenv.Value[int](t, w.db,
					"SELECT (pg_current_wal_insert_lsn() - min(replay_lsn))::int FROM pg_stat_replication")
				return testenv.FailIf(lag > 0, "the standby is %d bytes behind", lag)
			})
			other := w.other()
			other.Exec(t, "SELECT pg_promote()")
			w.db, w.oracle.DB = other, other
			w.waitHas(true, "SELECT count(*) > 0 FROM pg_stat_activity WHERE application_name = 'posthaste relay'")
			w.wrote(testenv.LoadOptions{Total: 20, Tag: "after-"})
			if c.after != c.before {
				w.desire("auto")
				w.waitMode("cdc")
			}
			w.oracle.WaitEmpty(t, 20*time.Second)
			w.hasLen("outbox.order", testenv.Value[int64](t, w.db, "SELECT count(*) FROM outbox"))
		})
	}
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
				early.waitUnready(`DROP SUBSCRIPTION "green"`)
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
				r.waitUnready("foreign_stream")
				w.adopt()
			}
			w.waitMode("cdc")
			w.oracle.Others = []*testenv.Load{load}
			w.all(third, second)
			w.hasLen("outbox.saved", 10)
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
			cr.waitUnready("copy: ")
			cr.waitUnready("SET database_oid = 0")
			w.delivers()
			w.delivers()
			still()
			r.becomes("leader")
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
