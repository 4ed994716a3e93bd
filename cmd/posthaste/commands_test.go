package main

import (
	"fmt"
	"net/http"
	"testing"
	"time"

	"github.com/google/uuid"

	"posthaste/internal/lab/local"
	"posthaste/internal/lab/testenv"
)

func TestCommands(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	says := func(r result, code int, texts ...string) {
		t.Helper()
		if r.says(t, code, texts...); r.errOut != "" {
			t.Errorf("error output %q", r.errOut)
		}
	}
	says(w.once("migrate"), 0, "up to date")
	says(w.once("mode"), 0, "desired auto", "active standby")
	says(w.once("mode", "poll"), 0, "desired poll")
	says(w.once("version"), 0, "posthaste ")
	says(w.once("doctor"), 0, "ok    postgres", "ok    redis", "warn  max_slot_wal_keep_size", "->",
		": the relay can run\n")
	// The port is reserved: a free port might be taken by another process before the command tries it.
	port, hold, err := local.ReservePort()
	must(t, err)
	defer hold.Close()
	addr := fmt.Sprintf("127.0.0.1:%d", port)
	r := w.spawn("relay", "--admin-addr="+addr)
	w.waitMode("poll")
	says(w.once("mode", "auto"), 0, "desired auto")
	w.waitMode("cdc")
	w.delivers()
	says(w.once("status"), 0, "mode", "cdc (desired auto)", "backlog", "slot", "streaming", "dead")
	w.sameStatus(r)
	says(w.once("healthcheck", "--addr="+addr), 0, "200")
	says(w.once("healthcheck", "--addr="+addr, "--ready"), 0, "200", "leader")
	says(w.once("healthcheck", "--admin-addr="+addr), 0, "200")
	says(w.once("healthcheck", addr), 0, "200")
	says(w.once("healthcheck", "http://"+addr), 0, "200")
	says(w.once("healthcheck", "http://"+addr+"/readyz"), 0, "200", "leader")
	w.once("healthcheck", "ftp://"+addr).oneLine(t, 2, "is host:port, or http://host:port")
	w.once("healthcheck", addr, "--addr="+addr).oneLine(t, 2, "once")
	r.stop()
	w.once("healthcheck", "--addr="+addr).oneLine(t, 1, "refuses the connection: start the process, or pass")
	w.once("uninstall").oneLine(t, 1, "--yes")
	says(w.once("uninstall", "--yes"), 0, "slot posthaste_"+w.db.Relay+" is gone", "publication posthaste is gone")
	w.has(0, `SELECT (SELECT count(*) FROM pg_replication_slots WHERE slot_name = $1)
		+ (SELECT count(*) FROM pg_publication) + (CASE WHEN to_regclass('outbox') IS NULL THEN 1 ELSE 0 END)`,
		"posthaste_"+w.db.Relay) // no slot and no publication, and the tables
	says(w.once("uninstall", "--yes", "--tables"), 0, "the tables are gone")
	w.has(0, "SELECT count(*) FROM pg_tables WHERE schemaname = 'public'")
	w.once("status").oneLine(t, 1, "posthaste migrate")
}

// sameStatus compares the output of status --json with the response of GET /relay.
func (w *world) sameStatus(r *child) {
	w.t.Helper()
	var printed, answered map[string]any
	w.once("status", "--json").json(w.t, &printed)
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

// uninstall keeps the tables while a relay leads, and while they have unpublished or dead events. --force drops them.
func TestUninstallRefusesWhatWouldBeLost(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	refused := func(why string) {
		t.Helper()
		w.once("uninstall", "--tables", "--yes").oneLine(t, 1, why)
		w.has(1, "SELECT count(*) FROM pg_class WHERE relname = 'outbox'")
	}
	w.insert("order", "a", 1)
	refused("1 unpublished event and 0 dead events")
	r := w.relayIn("cdc")
	refused("a relay leads")
	w.waitLen("outbox.order", 1)
	r.stop()
	w.park()
	refused("0 unpublished events and 1 dead event")
	w.db.Exec(t, "DELETE FROM outbox_dead")
	tx := w.begin(`INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload)
		VALUES ('order', 'a', 'x', '{}')`) // the event is not visible when the command counts
	p := w.start("uninstall", "--tables", "--yes")
	w.waitHas(true, "SELECT count(*) > 0 FROM pg_locks WHERE NOT granted AND relation = 'outbox'::regclass")
	must(t, tx.Commit(t.Context()))
	p.ends(1, "1 unpublished event and 0 dead events")
	w.once("uninstall", "--tables", "--yes", "--force").says(t, 0)
	w.has(0, "SELECT count(*) FROM pg_tables WHERE schemaname = 'public'")
}

// posthaste dev needs servers and nothing else: it migrates, relays, and prints the event.
func TestDev(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.db.Exec(t, "CREATE SCHEMA fresh")
	dev := w.spawn("dev", "--schema=fresh", "--relay-name="+w.db.Relay+"_dev")
	id := uuid.NewString()
	testenv.Eventually(t, 30*time.Second, func() error {
		_, err := w.db.Pool.Exec(t.Context(), `INSERT INTO fresh.outbox
			(id, aggregate_type, aggregate_id, event_type, payload) VALUES ($1, 'tried', 'a', 'x', '{}')`, id)
		return testenv.FailIf(err != nil, "%v: %s", err, dev.output())
	})
	dev.waitLogged(`"id":"` + id + `"`)
	dev.waitLogged("Console: " + dev.admin + "/console/")
	if status, err := dev.get("/console/", nil); err != nil || status != http.StatusOK {
		t.Errorf("the console answers %d, %v", status, err)
	}
	if code := dev.stop(); code != 0 {
		t.Errorf("dev exits with %d: %s", code, dev.output())
	}
}
