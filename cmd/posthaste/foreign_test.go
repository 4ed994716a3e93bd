package main

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"posthaste/internal/lab/testenv"
)

// adopt runs posthaste adopt.
func (w *world) adopt() {
	w.t.Helper()
	w.once("adopt", "--yes").says(w.t, 0, "outbox.order belongs to this database now")
}

// refused waits until the relay names the foreign stream. It checks that doctor, status and console report the same,
// and that the relay has kept its events.
func (w *world) refused(r *child, load *testenv.Load) {
	w.t.Helper()
	r.waitUnready("foreign_stream")
	r.waitUnready("posthaste adopt")
	var h readiness
	if _, err := r.get("/readyz", &h); err != nil || len(h.Reasons) != 1 {
		w.t.Fatalf("readyz: %+v, %v; want one reason", h, err)
	}
	text := strings.TrimPrefix(h.Reasons[0], "foreign_stream: ")
	what, remedy, _ := strings.Cut(text, "; remedy: ")
	testenv.Eventually(w.t, 20*time.Second, func() error {
		out := strings.ToLower(w.once("status").out)
		return testenv.FailIf(!strings.Contains(out, strings.ToLower(what)) ||
			!strings.Contains(out, strings.ToLower(remedy)), "status: %s; want %s", out, text)
	})
	testenv.Eventually(w.t, 20*time.Second, func() error {
		var state struct {
			Verdict struct{ Title, Why, Remedy string }
		}
		_, err := r.get("/console/api/state", &state)
		v := state.Verdict
		return testenv.FailIf(err != nil || v.Title != "A stream belongs to another database" ||
			!strings.Contains(strings.ToLower(v.Why), strings.ToLower(what)) ||
			!strings.EqualFold(v.Remedy, remedy+"."), "console: %+v, %w; want %s", v, err, text)
	})
	w.once("doctor").says(w.t, 1, what, "-> "+remedy)
	if n := testenv.Value[int](w.t, w.db, "SELECT count(*) FROM outbox_backlog"); n < load.Committed() {
		w.t.Errorf("%d rows are owed, want %d", n, load.Committed())
	}
}

// calm checks that nothing is reported about streams for which posthaste adopt was run.
func (w *world) calm() {
	w.t.Helper()
	if n := w.unrepaired() + testenv.Value[int](w.t, w.db,
		"SELECT count(*) FROM outbox_reconcile WHERE stream = '' OR missing <> 0 OR phantoms > 0"); n > 0 {
		w.t.Errorf("%d alarms after the adoption: %s", n, w.once("status").out)
	}
	if out := w.once("status").out + w.once("doctor").out; strings.Contains(out, "back in time") {
		w.t.Errorf("after the adoption: %s", out)
	}
}

func TestSecondDatabaseOnTheSameRedis(t *testing.T) {
	t.Parallel()
	redis := testenv.Redis(t)
	first, second := worldOf(t, testenv.Postgres(t), redis), worldOf(t, testenv.Postgres(t), redis)
	r1 := first.relayIn("cdc")
	load1 := testenv.StartLoad(t, first.db, testenv.LoadOptions{Rate: 300, Tag: "first-"})
	first.waitLen("outbox.order", 1)
	load2 := second.wrote(testenv.LoadOptions{Total: 300, Tag: "second-"})
	r2 := second.spawn("relay")
	second.refused(r2, load2)
	first.waitCommitted(load1, load1.Committed()+300)
	first.ended(load1)
	r1.becomes("leader") // not affected
	r1.stop()
	second.oracle.Others = []*testenv.Load{load1}
	second.adopt()
	r2.becomes("leader")
	second.oracle.Check(t, load2, 30*time.Second)
	second.waitMode("cdc")
	second.calm()
	// The first database is the foreign one now, and reports that.
	load3 := first.wrote(testenv.LoadOptions{Total: 60, Tag: "third-"})
	first.refused(first.spawn("relay"), load3)
	// the second relay was not affected
	r2.becomes("leader")
}

func TestDatabaseRecreatedOnTheSameRedis(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	via := testenv.Empty(t)
	r := w.spawn("relay")
	w.delivers()
	r.stop()
	w.db.Pool.Reset()
	dropDatabase(t, via, w.db.Name)
	via.Exec(t, "CREATE DATABASE "+w.db.Name)
	w.once("migrate").says(t, 0)
	load := w.wrote(testenv.LoadOptions{Total: 300, Tag: "again-"})
	r = w.spawn("relay")
	w.refused(r, load)
	r.stop()
	w.redis.Client.Set(t.Context(), "{cr:owner}", "the dropped one", 0)
	w.adopt()
	w.has(w.redis.Client.Get(t.Context(), "{cr:owner}").Val(), "SELECT source::text FROM relay_state")
	w.spawn("relay")
	w.all(load)
	w.waitMode("cdc")
	w.calm()
	w.delivers()
}

// A copy on the same server is another database, even while its original is in use.
func TestACopyOnTheSameServer(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	via := testenv.Empty(t)
	r := w.spawn("relay")
	w.delivers()
	r.stop()
	name := w.db.Name + "_copy"
	w.copyDatabase(via, w.db.Name, name)
	t.Cleanup(func() { dropDatabase(t, via, name) })
	d := reached(t, w.db, strings.Replace(w.db.URL, "/"+w.db.Name, "/"+name, 1))
	d.Name = name
	c := worldOf(t, d, w.redis)
	c.desire("poll") // the slot with this name belongs to the original
	r = w.relayIn("cdc")
	still := w.leads(r)
	load := c.wrote(testenv.LoadOptions{Total: 60, Tag: "copy-"})
	c.refused(c.spawn("relay"), load)
	w.delivers()
	still()
	r.stop()
	c.adopt()
	c.waitMode("poll")
	c.oracle.WaitEmpty(t, 30*time.Second)
	// The original has published them since it was copied.
	c.has(w.oracle.Others[len(w.oracle.Others)-1].Committed(), "SELECT count(*) FROM outbox_phantom")
}

func TestDatabaseRestoredToAnEarlierTime(t *testing.T) {
	t.Parallel()
	inModes(t, func(t *testing.T, mode string) {
		w := newWorld(t)
		via := testenv.Empty(t)
		r := w.relayIn(mode)
		w.delivers()
		r.stop()
		backup := w.db.Name + "_backup"
		w.copyDatabase(via, w.db.Name, backup)
		// This is the time that the restore loses: epochs and part claims rise, and events are delivered.
		for range 3 {
			r = w.relayIn(mode)
			w.delivers()
			r.stop()
		}
		forgotten := testenv.Value[int64](t, w.db, "SELECT epoch FROM relay_state")
		w.db.Pool.Reset()
		dropDatabase(t, via, w.db.Name)
		w.copyDatabase(via, backup, w.db.Name)
		via.Exec(t, "DROP DATABASE "+backup)
		// Unlike such a copy, a backup of the server's files has the database with its original number.
		w.db.Exec(t, `UPDATE relay_state SET database_oid =
			(SELECT oid FROM pg_database WHERE datname = current_database())`)
		before := testenv.Value[int64](t, w.db, "SELECT epoch FROM relay_state")
		if before >= forgotten {
			t.Fatalf("epoch %d after the restore, %d before it: nothing was restored", before, forgotten)
		}
		load := w.wrote(testenv.LoadOptions{Total: 300, Tag: "restored-"})
		w.relayIn(mode)
		w.all(load)
		w.delivers()
		if after := testenv.Value[int64](t, w.db, "SELECT epoch FROM relay_state"); after <= forgotten {
			t.Errorf("epoch %d, the gate has seen %d", after, forgotten)
		}
	})
}

// copyDatabase creates a copy of a database. No session may be connected to the original.
func (w *world) copyDatabase(via *testenv.Database, from, to string) {
	w.t.Helper()
	testenv.Eventually(w.t, 20*time.Second, func() error {
		w.db.Pool.Reset()
		_, err := via.Pool.Exec(w.t.Context(), "CREATE DATABASE "+to+" TEMPLATE "+from)
		return err
	})
}

// Rows committed while the publication excludes the table are published before those streamed after it includes the
// table again.
func TestAPublicationThatIsWholeAgain(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	r := w.relayIn("cdc")
	ways := [][2]string{
		{"DROP TABLE outbox", "ADD TABLE outbox"},
		{"SET (publish = 'update')", "SET (publish = 'insert')"},
	}
	if testenv.Value[int](t, w.db, "SELECT current_setting('server_version_num')::int") >= 150000 {
		ways = append(ways, [2]string{"SET TABLE outbox WHERE (seq < 0)", "SET TABLE outbox"})
	}
	want := []string{}
	for i, way := range ways {
		insert := func(event string) {
			want = append(want, fmt.Sprint(i, event))
			w.db.Exec(t, `INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload)
				VALUES (gen_random_uuid(), 'order', 'one', $1, '{}')`, want[len(want)-1])
		}
		streams := strings.Count(r.output(), `"to":"cdc"`)
		insert("streamed")
		w.waitLen("outbox.order", int64(len(want)))
		w.db.Exec(t, "ALTER PUBLICATION posthaste "+way[0])
		insert("left out")
		w.db.Exec(t, "ALTER PUBLICATION posthaste "+way[1])
		insert("behind it")
		w.waitLen("outbox.order", int64(len(want)))
		var got []string
		for _, e := range w.oracle.Entries(t, "order") {
			got = append(got, e.Type)
		}
		if !slices.Equal(got, want) {
			t.Fatalf("%s: got %q, want %q", way[0], got, want)
		}
		testenv.Eventually(t, 20*time.Second, func() error {
			return testenv.FailIf(strings.Count(r.output(), `"to":"cdc"`) == streams, "it does not stream again")
		})
	}
	if !r.logged(`"reason":"publication"`) || r.logged(`"reason":"missed"`) {
		t.Error("the relay has not noticed that the publication was changed, or too late")
	}
}

// A row that no publication streams as an event is published late, and that is reported.
func TestARowOfAChildTable(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	r := w.relayIn("cdc")
	w.db.Exec(t, "CREATE TABLE child () INHERITS (outbox)")
	w.db.Exec(t, `INSERT INTO child (seq, id, aggregate_type, aggregate_id, event_type, payload) VALUES
		(nextval(pg_get_serial_sequence('outbox', 'seq')), gen_random_uuid(), 'order', 'one', 'order.created', '{}')`)
	w.waitLen("outbox.order", 1)
	r.waitLogged("perhaps behind later ones of its aggregate")
}

// pooled returns a database with a pool of other parameters of the URL.
func pooled(t *testing.T, d *testenv.Database, parameters string) *testenv.Database {
	t.Helper()
	other := reached(t, d, d.URL+parameters)
	other.URL = d.URL
	return other
}

// wide has more connections than the number of commits that are blocked.
const wide = "&pool_max_conns=24"

func TestCommitHeldBackBySynchronousReplication(t *testing.T) {
	t.Parallel()
	server := testenv.NewServer(t)
	for _, during := range []string{"streaming", "toggle", "hand-over"} {
		w := worldOf(t, pooled(t, server.Database(t), wide), testenv.Redis(t))
		if during != "streaming" {
			// Otherwise the relay's own commits would also be blocked, and so would every change of mode.
			w.pgURL += "&synchronous_commit=local"
		}
		r := w.relayIn("cdc", "--drain-timeout=1s")
		w.delivers()
		if during == "hand-over" {
			r.stop()
		}
		load := w.held(testenv.LoadOptions{Writers: 12, Total: 72, Tag: "held-"})
		switch during {
		case "toggle":
			// Events that were streamed but could not be settled must not be swept again when they become visible.
			w.waitLen("outbox.order", int64(len(w.oracle.Others)*120+6))
			w.switches(r, "poll")
			r.setMode("auto")
			testenv.Eventually(t, 20*time.Second, func() error {
				return testenv.FailIf(strings.Count(r.output(), `"to":"handover"`) < 2, "no hand-over yet")
			})
		case "hand-over":
			r = w.spawn("relay")
			// The log comes first, because the mode may still be the former leader's cdc: its drain timeout was short.
			// At the hand-over, the relay has noticed that commits are blocked.
			r.waitLogged("streaming without the short cut")
			w.waitMode("cdc")
		default:
			w.waitLen("outbox.order", 120+6)
		}
		w.db.Standby(t, "")
		load.Wait()
		w.oracle.Check(t, load, 30*time.Second)
		w.waitMode("cdc")
		r.kill()
	}
}

// A walsender sends nothing although the WAL grows. On Postgres 17 and later, a standby named in
// synchronized_standby_slots is down. On earlier versions, the test stops the walsender process for the same effect.
func TestStreamThatStandsStillIsNoticed(t *testing.T) {
	t.Parallel()
	w, _ := onServer(t)
	r := w.relayIn("cdc")
	w.delivers()
	reasons, release := w.freezeStream()
	load := testenv.StartLoad(t, w.db, testenv.LoadOptions{Rate: 200})
	at := time.Now()
	testenv.Eventually(t, 40*time.Second, func() error {
		said := func(reason string) bool { return r.logged(`"reason":"` + reason + `"`) }
		return testenv.FailIf(!slices.ContainsFunc(reasons, said), "nobody noticed")
	})
	t.Logf("noticed after %v", time.Since(at).Round(100*time.Millisecond))
	w.waitMode("poll")
	w.waitLen("outbox.order", int64(120+load.Committed()))
	release()
	w.waitMode("cdc")
	w.ended(load)
}

// freezeStream blocks the stream. It returns the reasons by which the relay may notice that, and a function that
// unblocks it.
func (w *world) freezeStream() (reasons []string, release func()) {
	w.t.Helper()
	if testenv.Value[int](w.t, w.db, "SELECT current_setting('server_version_num')::int") >= 170000 {
		w.db.Exec(w.t, "SELECT pg_create_physical_replication_slot('ghost', true)")
		set := func(to string) {
			w.db.Exec(w.t, "ALTER SYSTEM SET synchronized_standby_slots = '"+to+"'")
			w.db.Exec(w.t, "SELECT pg_reload_conf()")
		}
		set("ghost")
		return []string{"stalled"}, func() { set("") }
	}
	pid := testenv.Value[int](w.t, w.db, "SELECT active_pid FROM pg_replication_slots WHERE slot_name = $1",
		"posthaste_"+w.db.Relay)
	p, err := os.FindProcess(pid)
	if err == nil {
		err = p.Signal(syscall.SIGSTOP)
	}
	must(w.t, err)
	release = func() { _ = p.Signal(syscall.SIGCONT) }
	w.t.Cleanup(release)
	return []string{"stalled", "silent"}, release
}

// A fresh database takes over the streams of another one, before or after its first relay has started. Its Postgres has
// not gone back in time, and no place reports that, even later.
func TestAFreshInstallationAdopts(t *testing.T) {
	t.Parallel()
	for started, mode := range map[bool]string{false: "cdc", true: "poll"} {
		t.Run(fmt.Sprintf("started is %t", started), func(t *testing.T) {
			t.Parallel()
			inMode(t, mode, func(t *testing.T, mode string) {
				redis := testenv.Redis(t)
				first, second := worldOf(t, testenv.Postgres(t), redis), worldOf(t, testenv.Postgres(t), redis)
				r := first.relayIn(mode)
				first.delivers()
				r.kill()
				second.desire(mode)
				second.wrote(testenv.LoadOptions{Total: 200, Tag: "second-"})
				if started {
					r = second.spawn("relay")
					r.waitUnready("foreign_stream")
				}
				second.adopt()
				for n := range 3 {
					if n > 0 || !started {
						r = second.spawn("relay")
					}
					second.waitMode(mode)
					second.oracle.WaitEmpty(t, 20*time.Second)
					second.calm()
					present(t, r, "outbox_postgres_failovers_total 0")
					if r.logged("back in time") || r.logged("ahead of the table") {
						t.Errorf("logged: %s", r.output())
					}
					r.kill()
				}
			})
		})
	}
}

// schema returns a world with the same servers and database whose outbox is in another schema. Its streams begin with
// prefix.
func (w *world) schema(prefix string) *world {
	w.t.Helper()
	name := "s_" + w.db.Relay
	db := pooled(w.t, w.db, "&search_path="+name)
	db.Relay = name // the default for this schema
	other := worldOf(w.t, db, w.redis)
	other.env = []string{"POSTHASTE_SCHEMA=" + name, "POSTHASTE_STREAM_PREFIX=" + prefix}
	other.oracle.Prefix = prefix
	other.once("migrate").says(w.t, 0)
	return other
}

// Two outboxes in one database, with one Redis: each relay publishes the events of its schema, and the kill, the mode
// and the removal of one do not concern the other.
func TestTwoSchemas(t *testing.T) {
	t.Parallel()
	inModes(t, func(t *testing.T, mode string) {
		a := newWorld(t)
		b := a.schema("sales.")
		first := a.relayIn(mode)
		killed := b.relayIn(mode)
		loads := map[*world]*testenv.Load{}
		for _, w := range []*world{a, b} {
			loads[w] = testenv.StartLoad(t, w.db, testenv.LoadOptions{Rate: 200, Tag: w.oracle.Prefix})
			testenv.Eventually(t, 20*time.Second, func() error {
				n := len(w.oracle.Entries(t, "order"))
				return testenv.FailIf(n == 0, "%d entries in %s", n, w.oracle.Prefix)
			})
		}
		still := a.leads(first)
		killed.kill()
		again := b.relayIn(mode)
		for w, load := range loads {
			w.ended(load)
		}
		still() // the kill of the other relay does not concern it
		b.desire("poll")
		if r := a.once("mode"); strings.Contains(r.out, "poll") != (mode == "poll") {
			t.Errorf("the mode of the other schema is shown: %s", r.out)
		}
		again.kill()
		b.once("uninstall", "--tables", "--yes", "--force").says(t, 0)
		a.waitMode(mode)
		a.oracle.Others = append(a.oracle.Others, loads[a])
		a.delivers()
		a.has(0, "SELECT count(*) FROM pg_replication_slots WHERE slot_name = $1", "posthaste_"+b.db.Relay)
		a.has("posthaste", "SELECT string_agg(pubname, ' ') FROM pg_publication")
	})
}

// An outbox whose streams have the names of another one's is refused, and the other one is not fenced.
func TestTwoSchemasWithOnePrefix(t *testing.T) {
	t.Parallel()
	a := newWorld(t)
	relay := a.relayIn("poll")
	a.delivers()
	still := a.leads(relay)
	b := a.schema("outbox.")
	b.desire("poll")
	b.wrote(testenv.LoadOptions{Total: 20, Tag: "b-"})
	b.spawn("relay").waitUnready("foreign_stream")
	a.delivers()
	still()
	relay.becomes("leader")
	b.once("uninstall", "--yes", "--relay-name="+a.db.Relay).oneLine(t, 1,
		fmt.Sprintf("relay name %q is taken by the outbox in schema %q", a.db.Relay, "public"))
}
