package main

import (
	"context"
	"fmt"
	"net/http"
	"strings"
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
	proxy := testenv.NewLink(t, hostOf(t, w.db.URL))
	proxy.Down()
	w.pgURL = testenv.Through(w.pgURL, proxy.Addr())
	relay, api := w.spawn("relay"), w.spawn("serve")
	relay.waitReady(t, http.StatusServiceUnavailable, "postgres", 30*time.Second)
	api.waitReady(t, http.StatusServiceUnavailable, "postgres", 30*time.Second)
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
		a, err := placeOrder(t.Context(), api.http, 5)
		return testenv.FailIf(err != nil || a.status != http.StatusCreated, "order: status %d, %w", a.status, err)
	})
	w.oracle.WaitEmpty(t, 20*time.Second)
	for name, out := range map[string]string{"relay": relay.output(), "serve": api.output(), "doctor": doctor.out +
		doctor.errOut} {
		if strings.Contains(out, testenv.Password(w.pgURL)) {
			t.Errorf("%s shows the password", name)
		}
	}
}

func TestDatabaseThatComesLater(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	name := w.db.Name + "_later"
	w.pgURL = strings.Replace(w.db.URL, "/"+w.db.Name, "/"+name, 1)
	r := w.spawn("relay")
	r.waitReady(t, http.StatusServiceUnavailable, name, 30*time.Second)
	for _, words := range [][]string{{"mode"}, {"status"}, {"dead", "list"}} {
		res := w.once(words...)
		res.oneLine(t, 1, name)
		if strings.Contains(res.errOut, testenv.Password(w.pgURL)) {
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
		dropDatabase(t, first, name)
	})
	// Postgres is up, but has no tables.
	r.waitReady(t, http.StatusServiceUnavailable, "posthaste migrate", 30*time.Second)
	w.once("mode").oneLine(t, 1, "posthaste migrate")
	w.once("migrate").says(t, 0, "applied")
	testenv.Eventually(t, 20*time.Second, func() error { return ready(r, "leader") })
	w.db, w.oracle.DB = later, later
	w.delivers()
	if strings.Contains(r.output(), testenv.Password(w.pgURL)) {
		t.Error("the relay shows the password")
	}
}

// dropDatabase drops the named database and its slots, over a connection to another one.
func dropDatabase(t *testing.T, via *testenv.Database, name string) {
	t.Helper()
	// After the test, its context has ended.
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	must(t, local.DropDatabase(ctx, via.Pool, name))
}

func TestWALLevelTooLow(t *testing.T) {
	t.Parallel()
	w, _ := onServer(t, "wal_level=replica")
	r := w.spawn("relay")
	r.waitReady(t, http.StatusOK, "wal_level", 30*time.Second)
	w.delivers()
	if d := w.once("doctor"); d.code != 1 || !strings.Contains(d.out, "fail  wal_level") ||
		!strings.HasSuffix(d.out, "\n1 problem, 1 warning: the relay cannot run safely before this is fixed: "+
			"wal_level\n") {
		t.Errorf("doctor in auto: exit %d: %s", d.code, d.out)
	}
	r.setMode("cdc")
	r.waitReady(t, http.StatusServiceUnavailable, "wal_level", 30*time.Second)
	w.delivers() // not ready, but publishing
	w.once("doctor", "--json").says(t, 1, `"ok": false`)
	r.setMode("poll")
	r.waitReady(t, http.StatusOK, "", 30*time.Second)
	w.once("doctor").says(t, 0, "warn  wal_level")
	w.delivers()
}

// role creates a login role that owns nothing and has the rights that a relay needs on the tables.
func (w *world) role(attributes string) string {
	w.t.Helper()
	name := "role_" + w.db.Relay
	for _, stmt := range []string{
		"CREATE ROLE " + name + " " + testenv.Login(w.db.URL) + " " + attributes,
		"GRANT USAGE ON SCHEMA public TO " + name,
		"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO " + name,
		"GRANT SELECT, USAGE ON ALL SEQUENCES IN SCHEMA public TO " + name,
	} {
		w.db.Exec(w.t, stmt)
	}
	return testenv.As(w.db.URL, name)
}

func TestRoleWithoutReplication(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.pgURL = w.role("NOREPLICATION")
	r := w.spawn("relay")
	r.waitReady(t, http.StatusOK, "no_replication_right", 30*time.Second)
	r.waitReady(t, http.StatusOK, "REPLICATION", 30*time.Second) // the remedy
	w.delivers()
	w.once("doctor").says(t, 1, "fail  replication right")
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
		before := w.wrote(testenv.LoadOptions{Total: 120, Tag: "before-"})
		w.spawn("relay")
		w.all(before)
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
		r.waitReady(t, http.StatusOK, "publication", 30*time.Second)
		w.delivers()
		r.setMode("cdc")
		r.waitReady(t, http.StatusServiceUnavailable, "CREATE PUBLICATION", 30*time.Second)
		w.delivers()
		w.db.Exec(t, "CREATE PUBLICATION posthaste FOR TABLE outbox WITH (publish = 'insert')")
		w.waitMode("cdc", 20*time.Second)
		w.delivers()
	})
}

func TestRedisUnreachableAtTheStart(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	must(t, w.redis.Kill())
	w.rdURL = "redis://default:" + secret + "@" + w.redis.Addr()
	load := w.wrote(testenv.LoadOptions{Total: 300})
	r, api := w.spawn("relay"), w.spawn("serve")
	r.waitReady(t, http.StatusServiceUnavailable, "redis", 30*time.Second)
	api.waitReady(t, http.StatusOK, "redis", 30*time.Second)
	doctor := w.once("doctor")
	if doctor.code != 1 || !strings.Contains(doctor.out, "fail  redis") {
		t.Errorf("doctor: exit %d: %s", doctor.code, doctor.out)
	}
	if n := testenv.Value[int](t, w.db, "SELECT count(*) FROM outbox_backlog"); n < 300 {
		t.Errorf("%d rows are owed, want all of them", n)
	}
	must(t, w.redis.Start(t.Context(), "requirepass "+secret))
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

// Every bad setting has a line. TestParseNamesEveryFault has all settings, TestMistakes the lines.
func TestBadSettingsAreNamedAtOnce(t *testing.T) {
	t.Parallel()
	faults := []string{
		"--postgres-url=mysql://u:" + secret + "@h/d", "--redis-url=http://u:" + secret + "@h", "--window=0",
		"--history=soon",
	}
	for _, command := range []string{"relay", "version"} {
		r := runToEnd(t, append([]string{command}, faults...)...)
		if r.code != 2 || strings.Count(r.errOut, "\n") != len(faults) || r.out != "" ||
			strings.Count(r.errOut, "posthaste: --") != len(faults) || strings.Contains(r.errOut, secret) {
			t.Errorf("%s: exit %d, %d lines for %d faults: %s", command, r.code, strings.Count(r.errOut, "\n"),
				len(faults), r.errOut)
		}
	}
}

// TestMistakes has an address that is taken, and a newer schema for commands.
func TestStartsThatWaitingCannotMend(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	r := w.relayIn("cdc")
	w.once("relay", "--relay-name=another").oneLine(t, 1, w.db.Relay)
	w.once("mode", "--relay-name=another").oneLine(t, 1, w.db.Relay)
	w.delivers()
	r.stops()

	w.db.Exec(t, "INSERT INTO posthaste_migrations (line, version) VALUES ('outbox', 99999)")
	for _, command := range []string{"relay", "serve"} {
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
				proxy := testenv.NewLink(t, hostOf(t, w.db.URL))
				w.pgURL = testenv.Through(w.pgURL, proxy.Addr())
				r := w.relayIn(mode, fmt.Sprintf("--drain-timeout=%v", drain))
				load := testenv.StartLoad(t, w.db, testenv.LoadOptions{Rate: 500})
				w.waitCommitted(load, 200)
				switch name {
				case "Redis down":
					must(t, w.redis.Kill())
					r.waitReady(t, http.StatusServiceUnavailable, "", 30*time.Second)
				case "Postgres silent":
					proxy.Set(testenv.Trouble{LoseReplies: true})
				}
				at := time.Now()
				r.stops()
				took := time.Since(at)
				t.Logf("stopped after %v", took.Round(time.Millisecond))
				if took > drain+6*time.Second { // less than the default
					t.Errorf("the stop took %v, the drain timeout is %v", took, drain)
				}
				load.Stop()
				switch name {
				case "Redis down":
					must(t, w.redis.Start(t.Context()))
				case "Postgres silent":
					proxy.Set(testenv.Trouble{})
				}
				w.spawn("relay")
				w.oracle.Check(t, load, 30*time.Second)
			})
		})
	}
}
