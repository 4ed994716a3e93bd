package main

import (
	"errors"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"posthaste/internal/lab/testenv"
)

func TestRelayKilledUnderLoad(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	load := testenv.StartLoad(t, w.db, testenv.LoadOptions{Rate: 1000})
	kills := scale(8, 3)
	for i := range kills {
		r := w.spawn("relay")
		want := load.Committed() + 300
		w.waitLen("outbox.order", int64(want))
		if i%2 == 0 {
			w.waitMode("cdc")
		}
		r.kill()
	}
	w.spawn("relay")
	w.ended(load)
}

func TestLeaderKilledStandbyTakesOver(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	first := w.relayIn("cdc")
	second := w.spawn("relay")
	load := testenv.StartLoad(t, w.db, testenv.LoadOptions{Rate: 1000})
	second.becomes("standby")
	w.waitCommitted(load, 500)
	first.kill()
	at := time.Now()
	second.becomes("leader")
	t.Logf("takeover after %v", time.Since(at).Round(time.Millisecond))
	w.waitMode("cdc")
	w.waitCommitted(load, load.Committed()+500)
	w.ended(load)
}

// waitCommitted waits until the load has committed want events.
func (w *world) waitCommitted(load *testenv.Load, want int) {
	w.t.Helper()
	testenv.Eventually(w.t, 30*time.Second, func() error {
		n := load.Committed()
		return testenv.FailIf(n < want, "%d of %d committed", n, want)
	})
}

// ready checks that /readyz answers 200 with the role.
func ready(c *child, role string) error {
	var h struct {
		Role    string
		Reasons []string
	}
	status, err := c.get("/readyz", &h)
	return testenv.FailIf(err != nil || status != 200 || h.Role != role, "readyz: %d %+v %w", status, h, err)
}

// The leader is cut off from Redis, which the standby reaches: the standby leads.
func TestALeaderWithoutRedisIsReplaced(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	link, direct := testenv.NewLink(t, w.redis.Addr()), w.rdURL
	w.rdURL = "redis://" + link.Addr() + "/0"
	first := w.relayIn("cdc")
	w.rdURL = direct
	second := w.spawn("relay")
	load := testenv.StartLoad(t, w.db, testenv.LoadOptions{Rate: 100})
	second.becomes("standby")
	link.Down()
	second.becomes("leader")
	w.waitMode("cdc")
	link.Up()
	first.becomes("standby")
	w.ended(load)
}

func TestTwoRelaysSweepTogether(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	first := w.spawn("relay")
	second := w.relayIn("cdc")
	load := testenv.StartLoad(t, w.db, testenv.LoadOptions{Rate: 1000})
	w.switches(first, "poll")
	first.waitLogged(`"to":"poll"`)
	second.waitLogged(`"to":"poll"`)
	leader := first
	if ready(first, "leader") != nil {
		leader = second
	}
	leader.kill()
	w.waitMode("poll")
	other := first
	if leader == first {
		other = second
	}
	w.switches(other, "auto")
	w.ended(load)
}

func TestFrozenLeaderIsReplacedAndPublishesNothingWhenItWakes(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	first := w.relayIn("cdc")
	second := w.spawn("relay")
	load := testenv.StartLoad(t, w.db, testenv.LoadOptions{Rate: 300})
	second.becomes("standby")
	const observed = "outbox_stream_length{"
	testenv.Eventually(t, 20*time.Second, func() error { return first.shows(observed, true) })
	first.signal(syscall.SIGSTOP)
	at := time.Now()
	second.becomes("leader")
	t.Logf("replaced after %v", time.Since(at).Round(time.Millisecond))
	w.waitMode("cdc")
	first.signal(syscall.SIGCONT)
	first.becomes("standby")
	// Otherwise the former leader's readings would be reported in addition to those of the new leader.
	testenv.Eventually(t, 20*time.Second, func() error { return first.shows(observed, false) })
	w.ended(load)
}

func TestRedisDownForAWhile(t *testing.T) {
	t.Parallel()
	w, r, load := underLoad(t, "cdc", 500)
	w.waitCommitted(load, 500)
	must(t, w.redis.Kill())
	down := scale(10*time.Second, 3*time.Second)
	r.waitUnready("")
	wait(t, down)
	must(t, w.redis.Start(t.Context()))
	r.becomes("leader")
	w.ended(load)
}

func TestPostgresStoppedImmediate(t *testing.T) {
	t.Parallel()
	w, server := onServer(t)
	r := w.relayIn("cdc")
	load := testenv.StartLoad(t, w.db, testenv.LoadOptions{Rate: 1000, Tolerant: true})
	for range 2 {
		w.waitCommitted(load, load.Committed()+500)
		must(t, server.Stop("immediate"))
		r.waitUnready("")
		must(t, server.Start(t.Context()))
		r.becomes("leader")
	}
	w.ended(load)
}

// The disk of the WAL is full under load. Postgres crashes, and crashes again after a restart. Readiness reports it.
// When there is room again, publishing continues.
func TestTheDiskOfTheWALIsFull(t *testing.T) {
	t.Parallel()
	inModes(t, func(t *testing.T, mode string) {
		w, server := onServer(t, "min_wal_size=32MB", "max_wal_size=32MB")
		disk := server.SmallDisk(t, 256<<20)
		r := w.relayIn(mode)
		load := testenv.StartLoad(t, w.db, testenv.LoadOptions{Rate: 500, Tolerant: true})
		w.waitCommitted(load, 500)
		filler := filepath.Join(disk, "filler")
		if err := os.WriteFile(filler, make([]byte, 256<<20), 0o600); !errors.Is(err, syscall.ENOSPC) {
			t.Fatalf("the disk is not full: %v", err)
		}
		crashes := 0
		testenv.Eventually(t, time.Minute, func() error {
			// A large message makes Postgres need another segment soon.
			_, err := w.db.Pool.Exec(t.Context(), "SELECT pg_logical_emit_message(false, 'x', repeat('x', 1000000))")
			status, rerr := r.get("/readyz", nil)
			if err != nil {
				crashes++
			}
			return testenv.FailIf(crashes == 0 || status != http.StatusServiceUnavailable,
				"readyz is %d, %w; Postgres: %w", status, rerr, err)
		})
		must(t, os.Remove(filler))
		testenv.Eventually(t, 20*time.Second, func() error {
			if !server.Running() {
				return server.Start(t.Context())
			}
			return w.db.Pool.Ping(t.Context())
		})
		w.waitMode(mode)
		r.waitReady("")
		w.waitCommitted(load, load.Committed()+500)
		w.ended(load)
	})
}

func TestSlotDropped(t *testing.T) {
	t.Parallel()
	w, r, load := underLoad(t, "cdc", 500)
	// While the relay runs.
	w.dropSlot()
	r.waitLogged("the stream ended")
	testenv.Eventually(t, 20*time.Second, func() error {
		// pg_replication_slots does not show this: a slot that is still being created is also active, and disappears
		// with its session.
		return testenv.FailIf(strings.Count(r.output(), `"stream opened"`) < 2, "the slot is not streamed again")
	})
	present(t, r, `outbox_slot_created_total{reason="new"} 1`, `outbox_slot_created_total{reason="missing"} 1`)
	// While the relay is down.
	r.stops()
	w.dropSlot()
	w.relayIn("cdc")
	w.ended(load)
}

// dropSlot drops the slot that the relay uses.
func (w *world) dropSlot() {
	w.t.Helper()
	slot := "posthaste_" + w.db.Relay
	testenv.Eventually(w.t, 20*time.Second, func() error {
		_, err := w.db.Pool.Exec(w.t.Context(),
			`SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = $1 AND active`, slot)
		if err == nil {
			_, err = w.db.Pool.Exec(w.t.Context(), `SELECT pg_drop_replication_slot($1)`, slot)
		}
		return err
	})
}

// If Redis loses data while no relay leads, the loss is reported. An ordinary restart is not reported as a loss.
func TestRedisForgetsWhileNobodyLeads(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	restart := func(wanted float64) {
		t.Helper()
		r := w.spawn("relay")
		// the mode in the database may still be the former leader's, if it stopped slowly
		r.waitLogged(`"stream opened"`)
		w.waitMode("cdc")
		testenv.Eventually(t, 20*time.Second, func() error {
			n := r.value(`outbox_publish_errors_total{class="gap"}`)
			return testenv.FailIf(n != wanted, "%v streams were missed at the start, want %v", n, wanted)
		})
		if testenv.Value[int](t, w.db, "SELECT count(*) FROM outbox_history") == 0 {
			load := testenv.StartLoad(t, w.db, testenv.LoadOptions{Rate: 200})
			w.waitCommitted(load, 50)
			w.ended(load)
		}
		r.stops()
	}
	// The first relay ended before it created the gate.
	w.db.Exec(t, "INSERT INTO outbox_stream (stream, base, adopted_epoch) VALUES ('outbox.order', 'outbox.order', 1)")
	restart(0)
	restart(0)
	must(t, w.redis.Client.FlushAll(t.Context()).Err())
	restart(1)
	restart(0)
}

// A slot is visible while it is being created, and an open transaction makes that take long. Such a slot must be
// treated as new, and not as dropped and created by an operator.
func TestSlotThatIsLongInTheMakingIsNew(t *testing.T) {
	t.Parallel()
	w, _ := onServer(t)
	tx := w.begin("CREATE TABLE held ()")
	r := w.spawn("relay")
	// the relay has seen it
	testenv.Eventually(t, 20*time.Second, func() error { return r.shows("outbox_slot_active 1", true) })
	must(t, tx.Rollback(t.Context()))
	w.waitMode("cdc")
	present(t, r, `outbox_slot_created_total{reason="new"} 1`, `outbox_slot_created_total{reason="missing"} 0`)
}
