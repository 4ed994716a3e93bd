package main

import (
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"syscall"
	"testing"
	"time"

	"posthaste/internal/lab/testenv"
)

// TestChaos applies the faults of the other tests to two relays, Redis and Postgres in random order, under load with
// several streams. POSTHASTE_TEST_SEED repeats a run's choices (not its timing).
func TestChaos(t *testing.T) {
	t.Parallel()
	seed := uint64(time.Now().UnixNano())
	if s, err := strconv.ParseUint(os.Getenv("POSTHASTE_TEST_SEED"), 10, 64); err == nil {
		seed = s
	}
	t.Logf("POSTHASTE_TEST_SEED=%d", seed)
	random := rand.New(rand.NewPCG(seed, 1))
	w, server := onServer(t)
	exec := func(query string, args ...any) error {
		_, err := w.db.Pool.Exec(t.Context(), query, args...)
		return err
	}
	desire := func(mode string) string { // in the database, whichever relay leads
		t.Helper()
		testenv.Eventually(t, 20*time.Second, func() error {
			return exec("UPDATE relay_state SET desired_mode = $1", mode)
		})
		return "mode " + mode
	}
	spawn := func() *child { return w.spawn("relay", "--drain-timeout=2s") }
	relays := []*child{spawn(), spawn()}
	fault := func() string {
		i, pause := random.IntN(len(relays)), time.Duration(random.IntN(1500))*time.Millisecond
		switch random.IntN(9) {
		case 0:
			relays[i].kill()
			relays[i] = spawn()
			return fmt.Sprintf("relay %d killed and restarted", i)
		case 1:
			relays[i].stops()
			relays[i] = spawn()
			return fmt.Sprintf("relay %d stopped in order and restarted", i)
		case 2:
			relays[i].signal(syscall.SIGSTOP)
			wait(t, pause)
			relays[i].signal(syscall.SIGCONT)
			return fmt.Sprintf("relay %d frozen for %v", i, pause)
		case 3:
			must(t, w.redis.Kill())
			wait(t, pause/3)
			must(t, w.redis.Start(t.Context()))
			return "redis killed and restarted"
		case 4:
			must(t, server.Stop("immediate"))
			must(t, server.Start(t.Context()))
			return "postgres stopped immediately and restarted"
		case 5:
			return desire("poll")
		case 6:
			return desire("auto")
		case 7:
			return fmt.Sprint("half of the relays' connections ended: ", exec(`SELECT pg_terminate_backend(pid)
				FROM pg_stat_activity
				WHERE application_name LIKE 'posthaste%' AND pid <> pg_backend_pid() AND random() < 0.5`))
		default:
			slot := "posthaste_" + w.db.Relay
			_ = exec(`SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots
				WHERE slot_name = $1 AND active`, slot)
			return fmt.Sprint("slot dropped: ", exec("SELECT pg_drop_replication_slot($1)", slot))
		}
	}
	w.waitMode("cdc")
	load := testenv.StartLoad(t, w.db, testenv.LoadOptions{
		Rate: 800, Tolerant: true,
		Types: []string{"order", "invoice", "parcel"},
	})
	for i := range scale(60, 12) {
		t.Logf("%d: %s", i, fault())
		w.waitCommitted(load, load.Committed()+random.IntN(400))
	}
	load.Stop()
	desire("auto")
	w.oracle.Check(t, load, 60*time.Second)
	w.waitMode("cdc")
}
