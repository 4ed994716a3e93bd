package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"posthaste/internal/lab/local"
	"posthaste/internal/lab/testenv"
)

func TestPostgresUnreachableAtTheStart(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	proxy := testenv.NewLink(t, hostOf(t, w.db.URL))
	proxy.Down()
	w.pgURL = testenv.Through(w.pgURL, proxy.Addr())
	relay, api := w.spawn("relay"), w.spawn("serve")
	relay.waitUnready("postgres")
	api.waitUnready("postgres")
	for _, words := range [][]string{{"mode"}, {"status"}, {"dead", "list"}, {"migrate"}} {
		w.once(words...).oneLine(t, 1, "")
	}
	doctor := w.once("doctor")
	doctor.says(t, 1, "fail  postgres ")
	proxy.Up()
	relay.becomes("leader")
	testenv.Eventually(t, 20*time.Second, func() error {
		a, err := placeOrder(t.Context(), api.http, 5)
		return testenv.FailIf(err != nil || a.status != http.StatusCreated, "order: status %d, %w", a.status, err)
	})
	w.oracle.WaitEmpty(t, 20*time.Second)
	hides(t, testenv.Password(w.pgURL), relay.output(), api.output(), doctor.out+doctor.errOut)
}

func TestDatabaseThatComesLater(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	name := w.db.Name + "_later"
	w.pgURL = strings.Replace(w.db.URL, "/"+w.db.Name, "/"+name, 1)
	r := w.spawn("relay")
	r.waitUnready(name)
	for _, words := range [][]string{{"mode"}, {"status"}, {"dead", "list"}} {
		res := w.once(words...)
		res.oneLine(t, 1, name)
		hides(t, testenv.Password(w.pgURL), res.errOut)
	}
	first := w.db
	first.Exec(t, "CREATE DATABASE "+name)
	t.Cleanup(func() {
		r.kill()
		dropDatabase(t, first, name)
	})
	w.db = reached(t, first, w.pgURL)
	w.db.Name, w.oracle.DB = name, w.db
	// Postgres is up, but has no tables.
	r.waitUnready("posthaste migrate")
	w.once("mode").oneLine(t, 1, "posthaste migrate")
	w.once("migrate").says(t, 0, "applied")
	r.becomes("leader")
	w.delivers()
	hides(t, testenv.Password(w.pgURL), r.output())
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
	r.waitReady("wal_level")
	w.delivers()
	w.once("doctor").says(t, 1, "fail  wal_level",
		"\n1 problem, 1 warning: the relay cannot run safely before this is fixed: wal_level\n")
	r.setMode("cdc")
	r.waitUnready("wal_level")
	w.delivers() // not ready, but publishing
	w.once("doctor", "--json").says(t, 1, `"ok": false`)
	r.setMode("poll")
	r.waitReady("")
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
	r.waitReady("no_replication_right")
	r.waitReady("REPLICATION") // the remedy
	w.delivers()
	w.once("doctor").says(t, 1, "fail  replication right")
	w.db.Exec(t, "ALTER ROLE role_"+w.db.Relay+" REPLICATION")
	w.waitMode("cdc")
	w.delivers()
	w.waitMode("cdc")
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
		w.waitMode("cdc")
		w.delivers()
		w.has(true,
			"SELECT pubinsert AND NOT pubupdate AND NOT pubdelete FROM pg_publication WHERE pubname = 'posthaste'")
	})
	t.Run("not ours to make", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)
		w.db.Exec(t, "DROP PUBLICATION posthaste")
		w.pgURL = w.role("REPLICATION")
		r := w.spawn("relay")
		r.waitReady("publication")
		w.delivers()
		r.setMode("cdc")
		r.waitUnready("CREATE PUBLICATION")
		w.delivers()
		w.db.Exec(t, "CREATE PUBLICATION posthaste FOR TABLE outbox WITH (publish = 'insert')")
		w.waitMode("cdc")
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
	r.waitUnready("redis")
	api.waitReady("redis")
	doctor := w.once("doctor")
	doctor.says(t, 1, "fail  redis")
	if n := testenv.Value[int](t, w.db, "SELECT count(*) FROM outbox_backlog"); n < 300 {
		t.Errorf("%d rows are owed, want all of them", n)
	}
	must(t, w.redis.Start(t.Context(), "requirepass "+secret))
	r.becomes("leader")
	w.oracle.WaitEmpty(t, 20*time.Second)
	w.oracle.Redis = redis.NewClient(&redis.Options{Addr: w.redis.Addr(), Password: secret})
	defer w.oracle.Redis.Close()
	w.oracle.Check(t, load, 20*time.Second)
	hides(t, secret, r.output(), api.output(), doctor.out+doctor.errOut)
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

// TestMistakes has an address that is taken, TestANewerVersionMigratesWhileThisOneRuns a newer schema.
func TestStartsThatWaitingCannotMend(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.relayIn("cdc")
	w.once("relay", "--relay-name=another").oneLine(t, 1, w.db.Relay)
	w.once("mode", "--relay-name=another").oneLine(t, 1, w.db.Relay)
	w.delivers()
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
					r.waitUnready("")
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

// A newer version has migrated the database. Running processes continue, and can still become leader. A process that
// starts reports the newer schema.
func TestANewerVersionMigratesWhileThisOneRuns(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	r, api := w.spawn("relay"), w.spawn("serve")
	w.waitMode("cdc")
	api.waitReady("")
	w.db.Exec(t, "INSERT INTO posthaste_migrations (line, version) VALUES ('outbox', 99999)")
	api.waitReady("schema_newer")
	epoch := w.epoch()
	w.db.Exec(t, `SELECT pg_terminate_backend(pid) FROM pg_locks
		WHERE locktype = 'advisory' AND database = (SELECT oid FROM pg_database WHERE datname = current_database())`)
	w.waitHas(true, "SELECT epoch > $1 FROM relay_state", epoch)
	r.becomes("leader")
	if a, err := placeOrder(t.Context(), api.http, 7); err != nil || a.status != http.StatusCreated {
		t.Fatalf("order: %d, %v", a.status, err)
	}
	w.oracle.WaitEmpty(t, 20*time.Second)
	for _, command := range []string{"relay", "serve"} {
		w.once(command).oneLine(t, 1, "newer")
	}
}

// ofShop matches the words of the shop, and errors about its tables.
var ofShop = regexp.MustCompile(`(?i)\b(orders?|credits?|payments?|shop\b[^":]|idem)|credits?_|orders?_|does not exist`)

// A relay migrates an empty database to an outbox without the shop, and publishes. All processes and commands work
// without the shop's tables, which a later migration adds.
func TestAnOutboxAlone(t *testing.T) {
	t.Parallel()
	w := worldOf(t, testenv.Empty(t), testenv.Redis(t))
	r := w.relayIn("cdc", "--migrate")
	id := w.insert("invoice", "a", 1)
	w.waitIDs("outbox.invoice", id)
	w.oracle.WaitEmpty(t, 20*time.Second)
	w.has(0, `SELECT count(*) FROM pg_class
		WHERE relnamespace = 'public'::regnamespace AND relname ~ '^(orders|order_|credit_)'`)
	for _, args := range [][]string{
		{"status"},
		{"status", "--json"},
		{"doctor"},
		{"trace", id},
		{"dead", "list"},
		{"groups", "list"},
		{"replay", "--all", "--rate=0"},
		{"migrate", "--only=outbox"},
		{"mode", "poll"},
	} {
		if res := w.once(args...); res.code != 0 || ofShop.MatchString(res.out+res.errOut) {
			t.Errorf("%v: exit %d: %s%s", args, res.code, res.out, res.errOut)
		}
	}
	w.waitMode("poll")
	r.waitReady("")
	text, err := r.metrics()
	must(t, err)
	for _, path := range []string{"/readyz", "/relay", "/console/api/trace?id=" + id, "/console/api/state"} {
		var answer json.RawMessage
		if status, err := r.get(path, &answer); err != nil || status != 200 {
			t.Errorf("%s: %d, %v", path, status, err)
		}
		text += path + string(answer)
	}
	if found := ofShop.FindAllString(text, -1); len(found) > 0 {
		t.Errorf("the relay's pages have %q", found)
	}
	if log := r.output(); ofShop.MatchString(log) || strings.Contains(log, `"level":"ERROR"`) {
		t.Errorf("the relay logs %s", log)
	}
	if list := w.redis.Client.FunctionList(t.Context(), redis.FunctionListQuery{}).Val(); len(list) != 0 {
		t.Errorf("the relay has loaded functions: %v", list)
	}
	w.once("migrate").says(t, 0, "applied migration 1 of shop\n")
	present(t, r, "credits_sync_lag_seconds 0")
	w.once("trace", id).says(t, 0)
}

// A relay reports to systemd why it is not ready, that it is ready, that it runs, and that it stops.
func TestSystemdIsNotified(t *testing.T) {
	t.Parallel()
	w := worldOf(t, testenv.Empty(t), testenv.Redis(t))
	socket := filepath.Join(t.TempDir(), "notify")
	heard, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: socket, Net: "unixgram"})
	must(t, err)
	defer heard.Close()
	wait := func(text string) {
		t.Helper()
		must(t, heard.SetReadDeadline(time.Now().Add(time.Minute)))
		for b := make([]byte, 4096); ; {
			n, err := heard.Read(b)
			if err != nil {
				t.Fatalf("nothing with %q: %v", text, err)
			}
			if strings.Contains(string(b[:n]), text) {
				return
			}
		}
	}
	w.env = append(w.env, "NOTIFY_SOCKET="+socket, "WATCHDOG_USEC=100000")
	r := w.spawn("relay")
	wait("STATUS=not ready: schema")
	w.once("migrate").says(t, 0)
	wait("READY=1")
	wait("WATCHDOG=1")
	r.stops()
	wait("STOPPING=1")
}

// A relay started with --migrate waits for Postgres.
func TestARelayMigratesWhenPostgresIsThere(t *testing.T) {
	t.Parallel()
	server := testenv.NewServer(t)
	d := server.Empty(t)
	w := worldOf(t, d, testenv.Redis(t))
	must(t, server.Stop("immediate"))
	r := w.spawn("relay", "--migrate")
	r.waitUnready("postgres: ")
	must(t, server.Start(t.Context()))
	r.waitReady("")
	w.waitMode("cdc")
}

// If a session that is not a relay holds the leader's lock, relays are soon able to lead anyway.
func TestAStrandedLeadersLock(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.db.Strand(t)
	w.wrote(testenv.LoadOptions{Total: 10})
	w.spawn("relay")
	w.oracle.WaitEmpty(t, 90*time.Second)
}
