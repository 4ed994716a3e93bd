package main

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"posthaste/internal/local"
	"posthaste/internal/testenv"
)

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
	says(w.once("doctor"), 0, "ok    postgres", "ok    redis", "warn  max_slot_wal_keep_size", "->",
		": the relay can run\n")
	// The port is reserved: a free port might be taken by another process before the command tries it.
	port, hold, err := local.ReservePort()
	must(t, err)
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

// Slot names are shared by all databases of a server. Uninstalling from one database keeps the slot of another.
func TestUninstallLeavesTheSlotOfAnotherDatabase(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	other, slot := testenv.Postgres(t), "posthaste_"+w.db.Relay
	other.Exec(t, "SELECT pg_create_logical_replication_slot($1, 'pgoutput')", slot)
	defer other.Exec(t, "SELECT pg_drop_replication_slot($1)", slot)
	w.once("uninstall", "--yes", "--tables").says(t, 0, "slot "+slot+" belongs to another database and was kept",
		"publication posthaste is gone", "the tables are gone")
}
