package main

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"posthaste/internal/lab/testenv"
	"posthaste/internal/prove"
)

// campaign runs a campaign in a process.
func campaign(t *testing.T, args ...string) (result, string) {
	t.Helper()
	dir := t.TempDir()
	args = append([]string{
		"prove", "--seed=1", "--rate=" + scale("300", "100"), "--report=" + dir,
		"--pg-bin=" + os.Getenv("POSTHASTE_TEST_PG_BIN"),
		"--redis-bin=" + os.Getenv("POSTHASTE_TEST_REDIS_BIN"),
	}, args...)
	return runToEnd(t, args...), dir
}

// A short campaign with faults of every kind keeps its promises, and is reported as JSON, as a page and as a chart.
func TestProve(t *testing.T) {
	t.Parallel()
	duration, faults := scale("2m", "3s"), scale(10, 1)
	r, dir := campaign(t, "--duration="+duration, "--json")
	var report prove.Report
	r.json(t, &report)
	n := report.Counts
	if !report.Holds || n.Committed < 100 || n.Found != n.Committed || n.Orders < 1 || n.Effects != n.Orders ||
		n.Faults < faults || n.Credits == 0 || len(report.Samples) < 3 {
		t.Errorf("report: holds %v, %+v", report.Holds, n)
	}
	for name, want := range map[string]string{
		"report.json": `"seed": 1`, "report.md": "--seed=1", "timeline.svg": "</svg>",
		"logs/relay-0.log": "relay starting",
	} {
		text, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil || !strings.Contains(string(text), want) {
			t.Errorf("%s is without %q, %v", name, want, err)
		}
	}
}

// A campaign with NATS keeps its promises while streams are lost and the server is killed, and notices what is spoiled.
func TestProveNats(t *testing.T) {
	t.Parallel()
	for fault, promise := range map[string]string{"nats-*": "", "sabotage-duplicate": "duplicated"} {
		r, _ := campaign(t, "--duration=3s", "--sink=nats", "--nats-bin="+testenv.NatsBin(t), "--faults="+fault)
		kept := strings.Contains(r.out, "every promise was kept") && strings.Contains(r.out, "effects with the inbox")
		if promise == "" && (r.code != 0 || !kept) ||
			promise != "" && (r.code != 1 || !strings.Contains(r.out, "BROKEN: "+promise+": ")) {
			t.Errorf("%s: exit %d: %s\n%s", fault, r.code, r.out, r.errOut)
		}
	}
}

// A campaign on an external NATS deletes its streams, and does not start if they exist.
func TestProveNatsExternal(t *testing.T) {
	t.Parallel()
	db, rd, server := testenv.NewServer(t).Database(t), testenv.Redis(t), testenv.Nats(t)
	nc, err := nats.Connect(server.URL())
	must(t, err)
	t.Cleanup(nc.Close)
	js, err := nc.JetStream()
	must(t, err)
	args := []string{
		"--duration=1s", "--faults=relay-*", "--external", "--yes", "--postgres-url=" + db.URL,
		"--redis-url=" + rd.URL(), "--sink=nats", "--sink-url=" + server.URL(),
	}
	r, _ := campaign(t, args...)
	r.says(t, 0, "every promise was kept")
	for name := range js.StreamNames() {
		t.Errorf("stream %s is left", name)
	}
	_, err = js.AddStream(&nats.StreamConfig{Name: "OUTBOX_CART"})
	must(t, err)
	r, _ = campaign(t, args...)
	r.warns(t, exitFailure, "nats has a stream OUTBOX_CART")
}

// A campaign continues on a clone of its server, and beside a relay of a copy of its database.
func TestProveOnCopies(t *testing.T) {
	t.Parallel()
	for _, fault := range []string{"database-copied", "database-moved"} {
		r, _ := campaign(t, "--duration=1s", "--faults="+fault, "--json")
		var report prove.Report
		if r.json(t, &report); !report.Holds || report.Counts.Faults != 1 || report.Counts.Failed != 0 {
			t.Errorf("%s: %s\n%s", fault, r.out, r.errOut)
		}
	}
}

// A fault outside the product is detected: the campaign ends with exit code 1, prints the history of the event, and
// prints how to repeat the campaign.
func TestProveNoticesABrokenPromise(t *testing.T) {
	t.Parallel()
	for fault, promise := range map[string]string{
		// An event that is missing in front of a later one of its aggregate counts as reordered.
		"sabotage-lose": "(lost|reordered)", "sabotage-duplicate": "duplicated", "sabotage-phantom": "phantom",
		"sabotage-history": "lost", "sabotage-effect": "effects", "sabotage-balance": "overspent",
		"sabotage-group": "lost",
	} {
		if !full() && fault != "sabotage-duplicate" && fault != "sabotage-group" {
			continue // internal/prove tests the oracle for these without processes
		}
		r, _ := campaign(t, "--duration=2s", "--faults="+fault)
		if r.code != 1 || !regexp.MustCompile("BROKEN: "+promise+": ").MatchString(r.out) ||
			!strings.Contains(r.out, "posthaste prove --seed=1 --duration=2s --faults="+fault) {
			t.Errorf("%s: exit %d: %s\n%s", fault, r.code, r.out, r.errOut)
		}
		if promise != "duplicated" {
			continue
		}
		for _, want := range []string{
			"its writer says: committed", "outbox: row ", "trace: ", "stream: outbox.", "relay_state: ", "slot: ",
			"fault in round 1 (auto): " + fault, "relay-0: ",
		} {
			r.says(t, 1, want)
		}
	}
}

// A campaign on external servers does not start if they have data. Ctrl-C ends a campaign in order: it verifies and
// reports the events written so far, and removes everything. Addresses with passwords may be in files.
func TestProveExternal(t *testing.T) {
	t.Parallel()
	server, rd := testenv.NewServer(t), testenv.Redis(t)
	db := server.Database(t)
	must(t, rd.Client.Set(t.Context(), "theirs", "1", 0).Err())
	args := func(redisURL string) []string {
		return []string{
			"--duration=1h", "--faults=relay-*,mode-flap", "--external", "--yes", "--redis-url=" + redisURL,
		}
	}
	r, _ := campaign(t, append(args(rd.URL()), "--postgres-url="+db.URL)...)
	r.warns(t, exitFailure, "database 0 of Redis has 1 keys")
	p := launch(t, program(t.Context(), "", []string{
		"POSTHASTE_POSTGRES_URL_FILE=" + testenv.WriteFile(t, t.TempDir(), "url", []byte(db.URL+"\n")),
	}, append([]string{"prove", "--seed=2"}, args("redis://"+rd.Addr()+"/7")...)...), nil)
	testenv.Eventually(t, time.Minute, func() error {
		return testenv.FailIf(!p.logged("recovered in"), "no round yet: %s", p.output())
	})
	p.signal(os.Interrupt)
	p.ends(0, "The campaign was interrupted.", "every promise was kept")
	if n := testenv.Value[int](t, db, "SELECT count(*) FROM pg_database WHERE datname LIKE 'posthaste_prove%'") +
		testenv.Value[int](t, db, "SELECT count(*) FROM pg_replication_slots"); n != 0 {
		t.Errorf("%d databases and slots are left", n)
	}
	info := rd.Client.InfoMap(t.Context(), "keyspace").Val()["Keyspace"]
	if len(info) != 1 || !strings.HasPrefix(info["db0"], "keys=1,") {
		t.Errorf("keys are left: %v", info)
	}
}
