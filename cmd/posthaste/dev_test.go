package main

import (
	"net/http"
	"testing"
	"time"

	"github.com/google/uuid"

	"posthaste/internal/testenv"
)

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
