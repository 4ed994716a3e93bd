package main

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"posthaste/internal/testenv"
)

// schema returns a world with the same servers and database whose outbox is in another schema. Its streams begin with
// prefix.
func (w *world) schema(prefix string) *world {
	w.t.Helper()
	name := "s_" + w.db.Relay
	db := *w.db
	db.Relay = name // the default for this schema
	config, err := pgxpool.ParseConfig(w.db.URL)
	must(w.t, err)
	config.ConnConfig.RuntimeParams["search_path"] = name
	db.Pool, err = pgxpool.NewWithConfig(w.t.Context(), config)
	must(w.t, err)
	w.t.Cleanup(db.Pool.Close)
	other := worldOf(w.t, &db, w.redis)
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
		a.waitMode(mode, 20*time.Second)
		a.oracle.Others = append(a.oracle.Others, loads[a])
		a.delivers()
		slots := testenv.Value[int](t, a.db, "SELECT count(*) FROM pg_replication_slots WHERE slot_name = $1",
			"posthaste_"+b.db.Relay)
		publications := testenv.Value[string](t, a.db, "SELECT string_agg(pubname, ' ') FROM pg_publication")
		if slots != 0 || publications != "posthaste" {
			t.Errorf("after the removal: %d slots, publications %s", slots, publications)
		}
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
	b.spawn("relay").waitReady(t, http.StatusServiceUnavailable, "foreign_stream", 30*time.Second)
	a.delivers()
	still()
	testenv.Eventually(t, 10*time.Second, func() error { return ready(relay, "leader") })
	b.once("uninstall", "--yes", "--relay-name="+a.db.Relay).oneLine(t, 1,
		fmt.Sprintf("relay name %q is taken by the outbox in schema %q", a.db.Relay, "public"))
}
