package main

import (
	"fmt"
	"net/http"
	"testing"
	"time"

	"posthaste/internal/testenv"
)

// A newer version has migrated the database. Running processes continue, and can still become leader. A process that
// starts reports the newer schema.
func TestANewerVersionMigratesWhileThisOneRuns(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	r, api := w.spawn("relay"), w.spawn("serve")
	w.waitMode("cdc", 20*time.Second)
	api.waitReady(t, http.StatusOK, "", 20*time.Second)
	w.db.Exec(t, "INSERT INTO posthaste_migrations (line, version) VALUES ('outbox', 99999)")
	api.waitReady(t, http.StatusOK, "schema_newer", 30*time.Second)
	var epoch int64
	must(t, w.db.Pool.QueryRow(t.Context(), "SELECT epoch FROM relay_state").Scan(&epoch))
	w.db.Exec(t, `SELECT pg_terminate_backend(pid) FROM pg_locks
		WHERE locktype = 'advisory' AND database = (SELECT oid FROM pg_database WHERE datname = current_database())`)
	testenv.Eventually(t, 20*time.Second, func() error {
		var now int64
		if err := w.db.Pool.QueryRow(t.Context(), "SELECT epoch FROM relay_state").Scan(&now); err != nil ||
			now <= epoch {
			return fmt.Errorf("epoch %d, was %d, %w", now, epoch, err)
		}
		return ready(r, "leader")
	})
	if a, err := placeOrder(t.Context(), api.http, 7); err != nil || a.status != http.StatusCreated {
		t.Fatalf("order: %d, %v", a.status, err)
	}
	w.oracle.WaitEmpty(t, 20*time.Second)
	for _, command := range []string{"relay", "serve"} {
		w.once(command).oneLine(t, 1, "newer")
	}
}
