//go:build versions

package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"posthaste/internal/testenv"
)

// These need servers or binaries of several versions: make test-versions.

// newFollowed starts a world whose standby may take over: nothing is streamed that it does not have. With synchronized
// it has a copy of the relay's slot, too.
func newFollowed(t *testing.T, synchronized bool) *replicated {
	t.Helper()
	settings := []string{
		"primary_slot_name=standby", "hot_standby_feedback=on", "wal_retrieve_retry_interval=200ms",
	}
	if synchronized {
		settings = append(settings, "sync_replication_slots=on")
	}
	w := newReplicated(t, "cdc", settings...)
	needFailoverSlots(t, w.db)
	for _, stmt := range []string{
		"SELECT pg_create_physical_replication_slot('standby', true)",
		"ALTER SYSTEM SET synchronized_standby_slots = 'standby'", "SELECT pg_reload_conf()",
	} {
		w.db.Exec(t, stmt)
	}
	testenv.Eventually(t, 20*time.Second, func() error {
		var active bool
		const query = "SELECT active FROM pg_replication_slots WHERE slot_name = 'standby'"
		if err := w.db.Pool.QueryRow(t.Context(), query).Scan(&active); err != nil || !active {
			return fmt.Errorf("the standby does not follow, %w", err)
		}
		return nil
	})
	return w
}

func needFailoverSlots(t *testing.T, db *testenv.Database) {
	t.Helper()
	if v := testenv.Value[int](t, db, "SELECT current_setting('server_version_num')::int") / 10000; v < 17 {
		t.Fatalf("Postgres %d has no failover slots: POSTHASTE_TEST_PG_BIN has to name a later one", v)
	}
}

// waitCopied waits until the standby has a copy of the relay's slot that it would keep.
func (r *replicated) waitCopied(other *testenv.Database) {
	r.t.Helper()
	testenv.Eventually(r.t, 60*time.Second, func() error {
		var n int
		err := other.Pool.QueryRow(r.t.Context(), `SELECT count(*) FROM pg_replication_slots
			WHERE slot_name = $1 AND synced AND NOT temporary AND invalidation_reason IS NULL`,
			"posthaste_"+r.db.Relay).Scan(&n)
		if err != nil || n == 0 {
			return fmt.Errorf("the slot is not synchronized, %w", err)
		}
		return nil
	})
}

// The primary is killed under load, and a standby takes over, with or without the relay's slot. What is in the streams
// is what the standby has, once and in order: with a synchronous standby, everything that was acknowledged.
func TestVersionsFailover(t *testing.T) {
	for name, c := range map[string]struct{ synchronized, synchronous, killed bool }{
		"synchronous with the slot":                    {synchronized: true, synchronous: true},
		"synchronous without the slot":                 {synchronous: true},
		"asynchronous with the slot":                   {synchronized: true},
		"asynchronous with the slot, the relay killed": {synchronized: true, killed: true},
		"asynchronous without the slot":                {},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newFollowed(t, c.synchronized)
			if c.synchronous {
				w.beSynchronous()
			}
			r := w.spawn("relay")
			w.waitMode("cdc", 20*time.Second)
			other := w.other()
			load := testenv.StartLoad(t, w.at(w.front.Addr()), testenv.LoadOptions{Rate: 300, Tolerant: true})
			w.waitCommitted(load, 300)
			if c.synchronized {
				w.waitCopied(other)
			}
			w.waitCommitted(load, load.Committed()+600)
			if c.killed {
				r.kill()
			}
			w.promote(other)
			if c.killed {
				r = w.spawn("relay")
			}
			w.waitCommitted(load, load.Committed()+300)
			streams := map[bool]int{false: 2, true: 1}[c.killed]
			testenv.Eventually(t, 60*time.Second, func() error {
				if n := strings.Count(r.output(), `"stream opened"`); n < streams {
					return fmt.Errorf("%d streams were opened, want %d", n, streams)
				}
				return nil
			})
			w.waitMode("cdc", 20*time.Second)
			load.Stop()
			if c.synchronous {
				w.oracle.Check(t, load, 20*time.Second)
			}
			w.holdsWhatIsThere()
			made := map[bool]int{false: 1, true: 0}[c.killed]
			if !c.synchronized {
				made++
			}
			if n := strings.Count(r.output(), `"slot created"`); n != made {
				t.Errorf("%d slots were made, want %d", n, made)
			}
			present(t, r, `outbox_slot_created_total{reason="missing"} 0`)
			if out := w.once("phantoms").out; strings.Contains(out, "order") {
				t.Errorf("phantoms: %s", out)
			}
		})
	}
}

// holdsWhatIsThere compares the stream with the rows of the database: each is there once, in its aggregate's order, and
// nothing else is.
func (r *replicated) holdsWhatIsThere() {
	r.t.Helper()
	r.oracle.WaitEmpty(r.t, 20*time.Second)
	want := testenv.Value[[]string](r.t, r.db, `SELECT array_agg(aggregate_id || ' ' || id
		ORDER BY aggregate_id COLLATE "C", (payload ->> 'n')::int) FROM outbox`)
	entries := r.oracle.Entries(r.t, "order")
	slices.SortStableFunc(entries, func(a, b testenv.Entry) int { return strings.Compare(a.Subject, b.Subject) })
	var got []string
	for _, e := range entries {
		got = append(got, e.Subject+" "+e.ID)
	}
	if i := firstDifference(got, want); i >= 0 {
		r.t.Errorf("%d entries, %d rows; they differ from %d on: %q, want %q", len(got), len(want), i,
			got[i:min(i+3, len(got))], want[min(i, len(want)):min(i+3, len(want))])
	}
}

// firstDifference returns the first index at which a and b differ, -1 for none.
func firstDifference(a, b []string) int {
	for i := range a {
		if i >= len(b) || a[i] != b[i] {
			return i
		}
	}
	if len(a) < len(b) {
		return len(a)
	}
	return -1
}

// A standby that synchronized_standby_slots names is dead. The stream stands still, and the slot cannot be moved,
// because the server waits for that standby whoever asks: events are swept meanwhile.
func TestVersionsDeadStandby(t *testing.T) {
	t.Parallel()
	server := testenv.NewServer(t)
	w := worldOf(t, server.Database(t), testenv.Redis(t))
	needFailoverSlots(t, w.db)
	r := w.relayIn("cdc")
	load := testenv.StartLoad(t, w.db, testenv.LoadOptions{Rate: 100})
	w.entriesAtLeast(100)
	_, release := w.freezeStream()
	r.waitLogged(`"reason":"stalled"`)
	w.waitMode("poll", 20*time.Second)
	w.entriesAtLeast(load.Committed()) // what waited for the stream
	// Each attempt to move the slot takes half a minute. Events are published in each of them.
	type attempt struct {
		began, seen time.Time
		from, to    int64
	}
	attempts := map[time.Time]*attempt{}
	testenv.Eventually(t, 60*time.Second, func() error {
		var at *time.Time
		const query = "SELECT min(query_start) FROM pg_stat_activity WHERE wait_event = 'WaitForStandbyConfirmation' " +
			"AND query LIKE '%pg_replication_slot_advance%'"
		if err := w.db.Pool.QueryRow(t.Context(), query).Scan(&at); err != nil {
			return err
		}
		entries, err := w.redis.Client.XLen(t.Context(), "outbox.order").Result()
		if err != nil {
			return err
		}
		now := time.Now()
		if at != nil {
			if attempts[*at] == nil {
				attempts[*at] = &attempt{began: now, from: entries}
			}
			attempts[*at].seen, attempts[*at].to = now, entries
		}
		if len(attempts) < 4 {
			return fmt.Errorf("%d attempts to move the slot", len(attempts))
		}
		return nil
	})
	for _, a := range attempts {
		took := a.seen.Sub(a.began).Round(time.Millisecond)
		t.Logf("%d events in the %v of an attempt to move the slot", a.to-a.from, took)
		if took > 20*time.Second && a.to == a.from {
			t.Errorf("no event in the %v of an attempt to move the slot", took)
		}
	}
	release()
	w.waitMode("cdc", 60*time.Second)
	load.Stop()
	w.oracle.Check(t, load, 20*time.Second)
}

// lastVersion builds the version before this one, which is POSTHASTE_TEST_BASE, or the newest tag, or, as long as there
// is none, the last commit before the newest migration.
func lastVersion(t *testing.T) string {
	t.Helper()
	root := testenv.Root(t)
	git := func(args ...string) (string, error) {
		cmd := exec.CommandContext(t.Context(), "git", args...)
		cmd.Dir = root
		out, err := cmd.Output()
		return strings.TrimSpace(string(out)), err
	}
	if shallow, err := git("rev-parse", "--is-shallow-repository"); err != nil || shallow != "false" {
		t.Fatalf("the version before this one is built from the history, which is not here: clone the repository, or "+
			"git fetch --unshallow --tags (%v)", err)
	}
	commit := os.Getenv("POSTHASTE_TEST_BASE")
	if commit == "" {
		commit, _ = git("describe", "--tags", "--abbrev=0", "--match=v*")
	}
	if commit == "" {
		migrations, err := filepath.Glob(filepath.Join(root, "sql/migrations/*.sql"))
		if err != nil || len(migrations) == 0 {
			t.Fatalf("no migrations: %v", err)
		}
		added, err := git("log", "--diff-filter=A", "--format=%H", "-1", "--", slices.Max(migrations))
		if err != nil || added == "" {
			t.Fatalf("no commit has added %s: %v", slices.Max(migrations), err)
		}
		commit = added + "^"
	}
	dir := t.TempDir()
	tar := filepath.Join(dir, "source.tar")
	if _, err := git("archive", "--output="+tar, commit); err != nil {
		t.Fatalf("git archive %s: %v", commit, err)
	}
	source, program := filepath.Join(dir, "source"), filepath.Join(dir, "posthaste")
	if err := os.Mkdir(source, 0o700); err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{
		{"tar", "-x", "-f", tar, "-C", source},
		{"go", "build", "-buildvcs=false", "-o", program, "./cmd/posthaste"},
	} {
		cmd := exec.CommandContext(t.Context(), args[0], args[1:]...) // nothing here comes from outside
		cmd.Dir = source
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%s of %s: %v: %s", args[0], commit, err, out)
		}
	}
	described, _ := git("describe", "--tags", "--always", commit)
	t.Logf("the version before this one is %s", described)
	return program
}

// waitLeads waits until the relay leads, and has opened a stream for the nth time.
func (c *child) waitLeads(n int) {
	c.t.Helper()
	testenv.Eventually(c.t, 30*time.Second, func() error {
		if have := strings.Count(c.output(), `"stream opened"`); have < n {
			return fmt.Errorf("%d streams were opened, want %d", have, n)
		}
		return ready(c, "leader")
	})
}

// Relays of the version before and of this one lead in turns, under load, while this one's migrations come in between:
// those of the version before go on, take over and sweep along beside this one's, until they are replaced for good.
func TestVersionsSwitch(t *testing.T) {
	t.Parallel()
	old := lastVersion(t)
	w := worldOf(t, testenv.Empty(t), testenv.Redis(t))
	run := func(args ...string) result { return runAs(t, old, slices.Concat(args, w.args("--log-level=error"))...) }
	if r := run("migrate"); r.code != 0 {
		t.Fatalf("migrate: exit %d: %s", r.code, r.errOut)
	}
	before := func() *child { return w.spawnAs(old, w.env, "relay") }
	standsBy := func(c *child) {
		t.Helper()
		testenv.Eventually(t, 20*time.Second, func() error { return ready(c, "standby") })
	}
	a := before()
	a.waitLeads(1)
	b, c := before(), before()
	standsBy(b)
	standsBy(c)
	load := testenv.StartLoad(t, w.db, testenv.LoadOptions{Rate: 300})
	flows := func() {
		t.Helper()
		w.entriesAtLeast(load.Committed() + 150)
	}
	// replaced kills who leads. The others stand still meanwhile, for one of them to take over.
	replaced := func(leader, by *child, streams int, others ...*child) {
		t.Helper()
		for _, o := range others {
			o.signal(syscall.SIGSTOP)
		}
		leader.kill()
		by.waitLeads(streams)
		flows()
		for _, o := range others {
			o.signal(syscall.SIGCONT)
			standsBy(o)
		}
	}
	flows()
	r := w.once("migrate")
	if r.code != 0 {
		t.Fatalf("migrate: exit %d: %s", r.code, r.errOut)
	}
	newer := !strings.Contains(r.out, "up to date")
	flows()
	replaced(a, b, 1, c) // the version before, on this one's schema
	d := w.spawn("relay")
	standsBy(d)
	b.setMode("poll")
	for _, relay := range []*child{b, d} {
		relay.waitLogged(`"to":"poll"`)
	}
	flows() // one of each sweeps
	d.setMode("auto")
	b.waitLeads(2)
	replaced(b, d, 1, c) // this version
	replaced(d, c, 1)    // and back
	e := w.spawn("relay")
	standsBy(e)
	if code := c.stop(); code != 0 {
		t.Errorf("exit code %d after SIGTERM", code)
	}
	e.waitLeads(1)
	flows()
	if newer {
		run("relay").oneLine(t, 1, "newer")
	} else {
		f := before()
		standsBy(f)
		replaced(e, f, 1)
		g := w.spawn("relay")
		standsBy(g)
		replaced(f, g, 1)
	}
	load.Stop()
	w.oracle.Check(t, load, 20*time.Second)
}

// pg_upgrade moves a database to another server, which may be a later version's. With the slot is what it does from
// Postgres 17 on: it makes one of the same name there. POSTHASTE_TEST_PG_UPGRADE names the folder of the later version;
// without it both servers are the same one, which pg_upgrade allows.
func TestVersionsUpgrade(t *testing.T) {
	for name, slot := range map[string]bool{"with the slot": true, "without the slot": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			server := testenv.NewServer(t)
			w := worldOf(t, server.Database(t), testenv.Redis(t))
			r := w.relayIn("cdc")
			before := testenv.StartLoad(t, w.db, testenv.LoadOptions{Total: 300, Tag: "before-"})
			before.Wait()
			w.oracle.Check(t, before, 20*time.Second)
			if code := r.stop(); code != 0 {
				t.Errorf("exit code %d after SIGTERM", code)
			}
			// What was committed after the relay went is owed there.
			owed := testenv.StartLoad(t, w.db, testenv.LoadOptions{Total: 60, Tag: "owed-"})
			owed.Wait()
			name := "posthaste_" + w.db.Relay
			version := testenv.Value[int](t, w.db, "SELECT current_setting('server_version_num')::int") / 10000
			if version >= 17 && !slot {
				w.db.Exec(t, "SELECT pg_drop_replication_slot($1)", name)
			}
			w.db.Pool.Close()
			server = server.Upgrade(t, os.Getenv("POSTHASTE_TEST_PG_UPGRADE"))
			w.db = w.at(hostOf(t, server.URL("")))
			w.pgURL, w.oracle.DB, w.oracle.Others = w.db.URL, w.db, []*testenv.Load{before}
			if version < 17 && slot {
				w.db.Exec(t, "SELECT pg_create_logical_replication_slot($1, 'pgoutput', false, false)", name)
			}
			r = w.spawn("relay")
			w.refused(r, owed)
			w.adopt()
			r.waitLogged(`"stream opened"`)
			if made := r.logged(`"slot created"`); made == slot {
				t.Errorf("a slot was made: %t", made)
			}
			w.oracle.Check(t, owed, 20*time.Second)
			w.oracle.Others = []*testenv.Load{owed}
			w.oracle.Check(t, before, 20*time.Second)
			w.oracle.Others = append(w.oracle.Others, before)
			w.delivers()
		})
	}
}
