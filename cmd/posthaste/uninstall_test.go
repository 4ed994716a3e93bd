package main

import (
	"testing"
	"time"

	"posthaste/internal/testenv"
)

// uninstall keeps the tables while a relay leads, and while they have unpublished or dead events. --force drops them.
func TestUninstallRefusesWhatWouldBeLost(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	refused := func(why string) {
		t.Helper()
		w.once("uninstall", "--tables", "--yes").oneLine(t, 1, why)
		if n := testenv.Value[int](t, w.db, "SELECT count(*) FROM pg_class WHERE relname = 'outbox'"); n != 1 {
			t.Fatal("the outbox is gone")
		}
	}
	w.insert("order", "a", 1)
	refused("1 unpublished event and 0 dead events")
	r := w.relayIn("cdc")
	refused("a relay leads")
	w.waitLen("outbox.order", 1, 60*time.Second)
	r.stop()
	w.db.Exec(t, `INSERT INTO outbox_dead (id, seq, aggregate_type, aggregate_id, event_type, payload, created_at,
			error, class, attempts)
		VALUES (gen_random_uuid(), 1, 'order', 'a', 'x', '{}', now(), 'x', 'x', 1)`)
	refused("0 unpublished events and 1 dead event")
	w.db.Exec(t, "DELETE FROM outbox_dead")
	tx, err := w.db.Pool.Begin(t.Context()) // its event is not visible when the command counts
	must(t, err)
	_, err = tx.Exec(t.Context(), `INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload)
		VALUES ('order', 'a', 'x', '{}')`)
	must(t, err)
	p := w.start("uninstall", "--tables", "--yes")
	testenv.Eventually(t, 20*time.Second, func() error {
		n := testenv.Value[int](t, w.db, "SELECT count(*) FROM pg_locks "+
			"WHERE NOT granted AND relation = 'outbox'::regclass")
		return testenv.FailIf(n == 0, "it does not wait for the transaction")
	})
	must(t, tx.Commit(t.Context()))
	p.ends(1, "1 unpublished event and 0 dead events")
	w.once("uninstall", "--tables", "--yes", "--force").says(t, 0)
	if n := testenv.Value[int](t, w.db, "SELECT count(*) FROM pg_tables WHERE schemaname = 'public'"); n != 0 {
		t.Errorf("%d tables are left", n)
	}
}
