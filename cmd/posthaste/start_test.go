package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"posthaste/internal/local"
	"posthaste/internal/testenv"
)

func TestPostgresUnreachableAtTheStart(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	proxy := testenv.NewProxy(t, hostOf(t, w.db.URL))
	proxy.Down()
	w.pgURL = withPassword(t, w.pgURL, proxy.Addr())
	relay, api := w.spawn("relay"), w.spawn("serve")
	relay.waitReady(t, http.StatusServiceUnavailable, "postgres")
	api.waitReady(t, http.StatusServiceUnavailable, "postgres")
	for _, words := range [][]string{{"mode"}, {"status"}, {"dead", "list"}, {"migrate"}} {
		w.once(words...).oneLine(t, 1, "")
	}
	doctor := w.once("doctor")
	if doctor.code != 1 || !strings.Contains(doctor.out, "fail  postgres ") {
		t.Errorf("doctor: exit %d: %s%s", doctor.code, doctor.out, doctor.errOut)
	}
	proxy.Up()
	testenv.Eventually(t, 20*time.Second, func() error { return ready(relay, "leader") })
	testenv.Eventually(t, 20*time.Second, func() error {
		if a, err := placeOrder(t.Context(), api.http, 5); err != nil || a.status != http.StatusCreated {
			return fmt.Errorf("order: status %d, %w", a.status, err)
		}
		return nil
	})
	w.oracle.WaitEmpty(t, 20*time.Second)
	for name, out := range map[string]string{"relay": relay.output(), "serve": api.output(), "doctor": doctor.out +
		doctor.errOut} {
		if strings.Contains(out, secret) {
			t.Errorf("%s shows the password", name)
		}
	}
}

func TestDatabaseThatComesLater(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	name := w.db.Name + "_later"
	w.pgURL = withPassword(t, strings.Replace(w.db.URL, "/"+w.db.Name, "/"+name, 1), "")
	r := w.spawn("relay")
	r.waitReady(t, http.StatusServiceUnavailable, name)
	for _, words := range [][]string{{"mode"}, {"status"}, {"dead", "list"}} {
		res := w.once(words...)
		res.oneLine(t, 1, name)
		if strings.Contains(res.errOut, secret) {
			t.Errorf("%v shows the password", words)
		}
	}
	first := w.db
	first.Exec(t, "CREATE DATABASE "+name)
	later := &testenv.Database{Name: name, URL: w.pgURL, Relay: w.db.Relay}
	var err error
	if later.Pool, err = pgxpool.New(t.Context(), w.pgURL); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		r.kill()
		later.Pool.Close()
		dropDatabase(t, first, name, later.Relay)
	})
	// There, but without tables.
	r.waitReady(t, http.StatusServiceUnavailable, "posthaste migrate")
	w.once("mode").oneLine(t, 1, "posthaste migrate")
	if m := w.once("migrate"); m.code != 0 || !strings.Contains(m.out, "applied") {
		t.Fatalf("migrate: exit %d: %s%s", m.code, m.out, m.errOut)
	}
	testenv.Eventually(t, 20*time.Second, func() error { return ready(r, "leader") })
	w.db, w.oracle.DB = later, later
	w.delivers()
	if strings.Contains(r.output(), secret) {
		t.Error("the relay shows the password")
	}
}

// dropDatabase drops the named database and the relay's slot in it, over a connection to another one.
func dropDatabase(t *testing.T, via *testenv.Database, name, relay string) {
	t.Helper()
	// After the test its context is over.
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	testenv.Eventually(t, 15*time.Second, func() error {
		_, err := via.Pool.Exec(ctx,
			"SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = $1 AND active",
			"posthaste_"+relay)
		if err == nil {
			_, err = via.Pool.Exec(ctx,
				"SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name = $1",
				"posthaste_"+relay)
		}
		if err == nil {
			_, err = via.Pool.Exec(ctx, "DROP DATABASE IF EXISTS "+name+" WITH (FORCE)")
		}
		return err
	})
}

func TestWALLevelTooLow(t *testing.T) {
	t.Parallel()
	server := testenv.NewServer(t, "wal_level=replica")
	w := worldOf(t, server.Database(t), testenv.Redis(t))
	r := w.spawn("relay")
	r.waitReady(t, http.StatusOK, "wal_level")
	w.delivers()
	if d := w.once("doctor"); d.code != 1 || !strings.Contains(d.out, "fail  wal_level") {
		t.Errorf("doctor in auto: exit %d: %s", d.code, d.out)
	}
	r.setMode("cdc")
	r.waitReady(t, http.StatusServiceUnavailable, "wal_level")
	w.delivers() // unready, but flowing
	if d := w.once("doctor", "--json"); d.code != 1 || !strings.Contains(d.out, `"ok": false`) {
		t.Errorf("doctor in cdc: exit %d: %s", d.code, d.out)
	}
	r.setMode("poll")
	r.waitReady(t, http.StatusOK, "")
	if d := w.once("doctor"); d.code != 0 || !strings.Contains(d.out, "warn  wal_level") {
		t.Errorf("doctor in poll: exit %d: %s", d.code, d.out)
	}
	w.delivers()
}

// role makes a login role with the rights a relay needs on the tables, owning nothing.
func (w *world) role(attributes string) string {
	w.t.Helper()
	name := "role_" + w.db.Relay
	for _, stmt := range []string{
		"CREATE ROLE " + name + " LOGIN " + attributes,
		"GRANT USAGE ON SCHEMA public TO " + name,
		"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO " + name,
	} {
		w.db.Exec(w.t, stmt)
	}
	return strings.Replace(w.db.URL, "postgres@", name+"@", 1)
}

func TestRoleWithoutReplication(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.pgURL = w.role("NOREPLICATION")
	r := w.spawn("relay")
	r.waitReady(t, http.StatusOK, "no_replication_right")
	r.waitReady(t, http.StatusOK, "REPLICATION") // the fix
	w.delivers()
	if d := w.once("doctor"); d.code != 1 || !strings.Contains(d.out, "fail  replication right") {
		t.Errorf("doctor: exit %d: %s", d.code, d.out)
	}
	w.db.Exec(t, "ALTER ROLE role_"+w.db.Relay+" REPLICATION")
	w.waitMode("cdc", 30*time.Second)
	w.delivers()
	w.waitMode("cdc", 5*time.Second)
}

func TestMissingPublication(t *testing.T) {
	t.Parallel()
	t.Run("made again", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)
		w.db.Exec(t, "DROP PUBLICATION posthaste")
		before := testenv.StartLoad(t, w.db, testenv.LoadOptions{Total: 120, Tag: "before-"})
		before.Wait()
		w.spawn("relay")
		w.oracle.Check(t, before, 20*time.Second)
		w.oracle.Others = append(w.oracle.Others, before)
		w.waitMode("cdc", 20*time.Second)
		w.delivers()
		if !testenv.Value[bool](t, w.db,
			"SELECT pubinsert AND NOT pubupdate AND NOT pubdelete FROM pg_publication WHERE pubname = 'posthaste'") {
			t.Error("the publication is not what migrate makes")
		}
	})
	t.Run("not ours to make", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)
		w.db.Exec(t, "DROP PUBLICATION posthaste")
		w.pgURL = w.role("REPLICATION")
		r := w.spawn("relay")
		r.waitReady(t, http.StatusOK, "publication")
		w.delivers()
		r.setMode("cdc")
		r.waitReady(t, http.StatusServiceUnavailable, "CREATE PUBLICATION")
		w.delivers()
		w.db.Exec(t, "CREATE PUBLICATION posthaste FOR TABLE outbox WITH (publish = 'insert')")
		w.waitMode("cdc", 20*time.Second)
		w.delivers()
	})
}

func TestRedisUnreachableAtTheStart(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	if err := w.redis.Kill(); err != nil {
		t.Fatal(err)
	}
	w.rdURL = withPassword(t, w.rdURL, "")
	load := testenv.StartLoad(t, w.db, testenv.LoadOptions{Total: 300})
	load.Wait()
	r, api := w.spawn("relay"), w.spawn("serve")
	r.waitReady(t, http.StatusServiceUnavailable, "redis")
	api.waitReady(t, http.StatusOK, "redis")
	doctor := w.once("doctor")
	if doctor.code != 1 || !strings.Contains(doctor.out, "fail  redis") {
		t.Errorf("doctor: exit %d: %s", doctor.code, doctor.out)
	}
	if n := testenv.Value[int](t, w.db, "SELECT count(*) FROM outbox"); n < 300 {
		t.Errorf("%d rows in the outbox, want all of them", n)
	}
	if err := w.redis.Start(t.Context(), "requirepass "+secret); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, 20*time.Second, func() error { return ready(r, "leader") })
	w.oracle.WaitEmpty(t, 20*time.Second)
	w.oracle.Redis = redis.NewClient(&redis.Options{Addr: w.redis.Addr(), Password: secret})
	defer w.oracle.Redis.Close()
	w.oracle.Check(t, load, 20*time.Second)
	for name, out := range map[string]string{"relay": r.output(), "serve": api.output(), "doctor": doctor.out +
		doctor.errOut} {
		if strings.Contains(out, secret) {
			t.Errorf("%s shows the password", name)
		}
	}
}

func TestBadSettingsAreNamedAtOnce(t *testing.T) {
	t.Parallel()
	faults := []string{
		"--postgres-url=mysql://u:" + secret + "@h/d", "--redis-url=http://u:" + secret + "@h", "--pubsub=maybe",
		"--wal-budget=1KiB", "--window=0",
		"--poison=eat", "--trim=all", "--redis-durability=replicas=x", "--history=soon", "--log-level=loud",
		"--relay-name=A-B", "--sweep-workers=17",
	}
	for _, command := range []string{"relay", "serve", "status"} {
		r := runToEnd(t, append([]string{command}, faults...)...)
		if r.code != 2 || strings.Count(r.errOut, "\n") != len(faults) || r.out != "" {
			t.Errorf("%s: exit %d, %d lines for %d faults: %s", command, r.code, strings.Count(r.errOut, "\n"),
				len(faults), r.errOut)
		}
		for _, f := range faults {
			name, _, _ := strings.Cut(f, "=")
			if !strings.Contains(r.errOut, "posthaste: "+name) {
				t.Errorf("%s: no line for %s", command, name)
			}
		}
		if strings.Contains(r.errOut, secret) {
			t.Errorf("%s shows a password", command)
		}
	}
	for _, command := range []string{"migrate", "relay", "version"} {
		r := runToEnd(t, command, "--postgres-url=postgres://u:"+secret+"@h/d?sslmode=sometimes",
			"--redis-url=redis://:"+secret+"@h/first", "--window=0")
		if r.code != 2 || strings.Count(r.errOut, "\n") != 3 || strings.Count(r.errOut, "posthaste: --") != 3 ||
			strings.Contains(r.errOut, secret) {
			t.Errorf("%s with unknown words in URLs: exit %d: %s", command, r.code, r.errOut)
		}
	}
	for _, args := range [][]string{
		{"relay", "--no-such-flag"},
		{"no-such-command"},
		{"mode", "sometimes"},
		{"dead", "retry"},
		{"dead", "drop", "not-an-id"},
		{"consume"},
	} {
		runToEnd(t, args...).oneLine(t, 2, "")
	}
}

func TestStartsThatWaitingCannotMend(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	taken := l.Addr().String()
	w.once("relay", "--admin-addr="+taken).oneLine(t, 1, "address already in use")
	w.once("serve", "--http-addr="+taken).oneLine(t, 1, "address already in use")

	r := w.spawn("relay")
	w.waitMode("cdc", 20*time.Second)
	w.once("relay", "--relay-name=another").oneLine(t, 1, w.db.Relay)
	w.once("mode", "--relay-name=another").oneLine(t, 1, w.db.Relay)
	w.delivers()
	if code := r.stop(); code != 0 {
		t.Errorf("exit %d after SIGTERM", code)
	}

	w.db.Exec(t, "INSERT INTO posthaste_migrations (version_id, is_applied) VALUES (99999, true)")
	for _, command := range []string{"relay", "serve", "mode", "status"} {
		w.once(command).oneLine(t, 1, "newer")
	}
}

func TestSIGTERMEndsTheRelayInTime(t *testing.T) {
	t.Parallel()
	const drain = 3 * time.Second
	for _, name := range []string{"all is well", "Redis down", "Postgres silent"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			inModes(t, func(t *testing.T, mode string) {
				w := newWorld(t)
				proxy := testenv.NewProxy(t, hostOf(t, w.db.URL))
				w.pgURL = withPassword(t, w.pgURL, proxy.Addr())
				r := w.relayIn(mode, fmt.Sprintf("--drain-timeout=%v", drain))
				load := testenv.StartLoad(t, w.db, testenv.LoadOptions{Rate: 500})
				w.waitCommitted(load, 200)
				switch name {
				case "Redis down":
					if err := w.redis.Kill(); err != nil {
						t.Fatal(err)
					}
					r.waitReady(t, http.StatusServiceUnavailable, "")
				case "Postgres silent":
					proxy.Toxic(`{"name":"lost","type":"timeout","stream":"downstream","attributes":{"timeout":0}}`)
				}
				at := time.Now()
				if code := r.stop(); code != 0 {
					t.Errorf("exit %d after SIGTERM: %s", code, r.output())
				}
				took := time.Since(at)
				t.Logf("stopped after %v", took.Round(time.Millisecond))
				if took > drain+6*time.Second { // less than the default
					t.Errorf("the stop took %v, the drain timeout is %v", took, drain)
				}
				load.Stop()
				switch name {
				case "Redis down":
					if err := w.redis.Start(t.Context()); err != nil {
						t.Fatal(err)
					}
				case "Postgres silent":
					proxy.Remove("lost")
				}
				w.spawn("relay")
				w.oracle.Check(t, load, 30*time.Second)
			})
		})
	}
}

func TestConsumePrintsOneLinePerEvent(t *testing.T) {
	t.Parallel()
	const events = 200
	w := newWorld(t)
	w.spawn("relay")
	c := w.launch("consume", "--group=g")
	load := testenv.StartLoad(t, w.db, testenv.LoadOptions{Total: events, Types: []string{"order", "invoice"}})
	load.Wait()
	w.oracle.Check(t, load, 20*time.Second)
	testenv.Eventually(t, 20*time.Second, func() error {
		if n := strings.Count(c.text(), "\n"); n < load.Committed() {
			return fmt.Errorf("%d lines", n)
		}
		return nil
	})
	entries := map[string]testenv.Entry{}
	for _, e := range w.oracle.Entries(t, "order", "invoice") {
		entries[e.ID] = e
	}
	for line := range strings.Lines(c.text()) {
		var fields map[string]json.RawMessage
		var v struct {
			ID, Type, Subject, Time, Stream string
			EntryID                         string `json:"entry_id"`
			Data                            map[string]any
		}
		if json.Unmarshal([]byte(line), &fields) != nil || json.Unmarshal([]byte(line), &v) != nil ||
			len(fields) != 7 || v.Data == nil {
			t.Fatalf("line %s", line)
		}
		e, ok := entries[v.ID]
		delete(entries, v.ID)
		if !ok || v.Type != e.Type || v.Subject != e.Subject || v.Time != e.Time || v.Stream != e.Stream ||
			v.EntryID != e.EntryID {
			t.Errorf("line %s for entry %+v", line, e)
		}
	}
	if len(entries) > 0 {
		t.Errorf("%d events were not printed", len(entries))
	}
	if err := c.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	<-c.done
	if code := c.cmd.ProcessState.ExitCode(); code != 0 {
		t.Errorf("exit %d after SIGTERM", code)
	}
}

func TestCommands(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	says := func(r result, code int, texts ...string) {
		t.Helper()
		for _, text := range texts {
			if !strings.Contains(r.out, text) {
				t.Errorf("no %q in %q", text, r.out)
			}
		}
		if r.code != code || r.errOut != "" {
			t.Errorf("exit %d, error output %q", r.code, r.errOut)
		}
	}
	says(w.once("migrate"), 0, "up to date")
	says(w.once("mode"), 0, "desired auto", "active standby")
	says(w.once("mode", "poll"), 0, "desired poll")
	says(w.once("version"), 0, "posthaste ")
	says(w.once("doctor"), 0, "ok    postgres", "ok    redis", "warn  max_slot_wal_keep_size", "->")
	// A port of its own: one that anybody may take would be taken again, now and then, before it is asked in vain.
	port, hold, err := local.ReservePort()
	if err != nil {
		t.Fatal(err)
	}
	defer hold.Close()
	addr := fmt.Sprintf("127.0.0.1:%d", port)
	r := w.spawn("relay", "--admin-addr="+addr)
	w.waitMode("poll", 20*time.Second)
	says(w.once("mode", "auto"), 0, "desired auto")
	w.waitMode("cdc", 20*time.Second)
	w.delivers()
	says(w.once("status"), 0, "mode", "cdc (desired auto)", "backlog", "slot", "streaming", "dead")
	w.sameStatus(r)
	says(w.once("healthcheck", "--addr="+addr), 0, "200")
	says(w.once("healthcheck", "--addr="+addr, "--ready"), 0, "200", "leader")
	r.stop()
	w.once("healthcheck", "--addr="+addr).oneLine(t, 1, "refused")
	w.once("uninstall").oneLine(t, 1, "--yes")
	says(w.once("uninstall", "--yes"), 0, "slot posthaste_"+w.db.Relay+" is gone", "publication posthaste is gone")
	if n := testenv.Value[int](t, w.db, `SELECT (SELECT count(*) FROM pg_replication_slots WHERE slot_name = $1)
		+ (SELECT count(*) FROM pg_publication) + (CASE WHEN to_regclass('outbox') IS NULL THEN 1 ELSE 0 END)`,
		"posthaste_"+w.db.Relay); n != 0 {
		t.Error("uninstall left the slot or the publication, or took the tables")
	}
	says(w.once("uninstall", "--yes", "--tables"), 0, "the tables are gone")
	if n := testenv.Value[int](t, w.db, "SELECT count(*) FROM pg_tables WHERE schemaname = 'public'"); n != 0 {
		t.Errorf("uninstall --tables left %d tables", n)
	}
	w.once("status").oneLine(t, 1, "posthaste migrate")
}

// sameStatus compares what status --json prints with what GET /relay answers.
func (w *world) sameStatus(r *child) {
	w.t.Helper()
	var printed, answered map[string]any
	res := w.once("status", "--json")
	if err := json.Unmarshal([]byte(res.out), &printed); err != nil || res.code != 0 {
		w.t.Fatalf("status --json: exit %d, %v: %s", res.code, err, res.out)
	}
	if status, err := r.get("/relay", &answered); err != nil || status != http.StatusOK {
		w.t.Fatalf("GET /relay: %d, %v", status, err)
	}
	for _, key := range []string{
		"mode", "desired", "epoch", "leader", "owner", "backlog", "inflight", "slot", "dead",
		"handover_lsn",
	} {
		_, a := printed[key]
		_, b := answered[key]
		if !a || !b {
			w.t.Errorf("key %q: printed %v, answered %v", key, a, b)
		}
	}
	for _, key := range []string{"mode", "desired", "epoch", "owner", "dead", "handover_lsn"} {
		if printed[key] != answered[key] {
			w.t.Errorf("%s is printed as %v and answered as %v", key, printed[key], answered[key])
		}
	}
	if answered["mode"] != "cdc" || answered["leader"] != true {
		w.t.Errorf("GET /relay: %v", answered)
	}
}

func TestMetricsOfTheContractExistFromTheStart(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	r, api := w.spawn("relay"), w.spawn("serve")
	// Series of a closed label set are there before anything has happened.
	present(t, r,
		"outbox_parked_total", "outbox_publish_seconds_count", "outbox_backlog_rows", "outbox_backlog_oldest_seconds",
		"outbox_inflight_events",
		`outbox_relay_mode{mode="cdc"}`, `outbox_relay_mode{mode="poll"}`, `outbox_relay_mode{mode="standby"}`,
		"outbox_relay_leader", "outbox_relay_epoch",
		`outbox_relay_desired_mode{mode="auto"} 1`, `outbox_relay_desired_mode{mode="poll"} 0`,
		`outbox_mode_switches_total{from="poll",reason="toggle",to="cdc"}`,
		`outbox_mode_switches_total{from="cdc",reason="budget",to="poll"}`,
		`outbox_commit_to_publish_seconds_count{mode="cdc"}`, `outbox_commit_to_publish_seconds_count{mode="poll"}`,
		"outbox_slot_active", "outbox_slot_retained_bytes", "outbox_slot_confirmed_lag_bytes", "outbox_slot_lost",
		"outbox_slot_max_keep_bytes",
		"outbox_wire_idle_seconds", `outbox_scrape_errors_total{collector="slot"}`, `outbox_suppressed_total{`,
		`outbox_publish_errors_total{`,
		"redis_memory_ratio", "redis_eviction_unsafe")
	present(t, api, `idem_requests_total{`, `idem_script_seconds_count{`)
	w.waitMode("cdc", 20*time.Second)
	if a, err := placeOrder(t.Context(), api.http, 7); err != nil || a.status != http.StatusCreated {
		t.Fatalf("order: %d, %v", a.status, err)
	}
	w.oracle.WaitEmpty(t, 20*time.Second)
	// The others are named after streams, groups, types and routes, which appear with them.
	if err := w.redis.Client.XGroupCreate(t.Context(), "outbox.order", "g", "0").Err(); err != nil {
		t.Fatal(err)
	}
	present(t, r, `outbox_published_total{mode="cdc",stream="outbox.order"}`,
		`outbox_stream_length{stream="outbox.order"}`,
		`outbox_group_pending{group="g",stream="outbox.order"}`, `outbox_group_lag{group="g",stream="outbox.order"}`,
		`outbox_group_oldest_pending_seconds{group="g",stream="outbox.order"}`,
		`outbox_trim_lost_total{group="g",stream="outbox.order"}`)
	present(t, api, `outbox_events_written_total{type="order.created"}`,
		`http_request_duration_seconds_count{method="POST",route="/orders",status="201"}`)
}

// present waits until /metrics has a series that begins with each text.
func present(t *testing.T, c *child, series ...string) {
	t.Helper()
	testenv.Eventually(t, 20*time.Second, func() error {
		text, err := c.metrics()
		if err != nil {
			return err
		}
		var missing []string
		for _, s := range series {
			if !strings.Contains(text, "\n"+s) {
				missing = append(missing, s)
			}
		}
		if len(missing) > 0 {
			return fmt.Errorf("no series %s", strings.Join(missing, ", "))
		}
		return nil
	})
}

// Names of slots are the whole server's: uninstalling from one database leaves the slot of another alone.
func TestUninstallLeavesTheSlotOfAnotherDatabase(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	other, slot := testenv.Postgres(t), "posthaste_"+w.db.Relay
	other.Exec(t, "SELECT pg_create_logical_replication_slot($1, 'pgoutput')", slot)
	defer other.Exec(t, "SELECT pg_drop_replication_slot($1)", slot)
	r := w.once("uninstall", "--yes", "--tables")
	for _, text := range []string{
		"slot " + slot + " belongs to another database and was kept",
		"publication posthaste is gone", "the tables are gone",
	} {
		if r.code != 0 || !strings.Contains(r.out, text) {
			t.Errorf("exit %d, want 0 and %q: %s%s", r.code, text, r.out, r.errOut)
		}
	}
}
