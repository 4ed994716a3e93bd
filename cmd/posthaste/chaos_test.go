package main

import (
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"syscall"
	"testing"
	"time"

	"posthaste/internal/testenv"
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
	c := &chaos{t: t, rand: random, server: testenv.NewServer(t)}
	c.w = worldOf(t, c.server.Database(t), testenv.Redis(t))
	for i := range c.relays {
		c.relays[i] = c.w.spawn("relay", "--drain-timeout=2s")
	}
	c.w.waitMode("cdc", 30*time.Second)
	load := testenv.StartLoad(t, c.w.db, testenv.LoadOptions{
		Rate: 800, Tolerant: true,
		Types: []string{"order", "invoice", "parcel"},
	})
	rounds := scale(60, 12)
	for i := range rounds {
		name := c.fault()
		t.Logf("%d: %s", i, name)
		want := load.Committed() + c.rand.IntN(400)
		c.w.waitCommitted(load, want)
	}
	load.Stop()
	c.mode("auto")
	c.w.oracle.Check(t, load, 60*time.Second)
	c.w.waitMode("cdc", 60*time.Second)
}

type chaos struct {
	t      *testing.T
	rand   *rand.Rand
	server *testenv.Server
	w      *world
	relays [2]*child
}

// fault applies one fault and returns its description.
func (c *chaos) fault() string {
	i := c.rand.IntN(len(c.relays))
	switch c.rand.IntN(9) {
	case 0:
		c.relays[i].kill()
		c.relays[i] = c.w.spawn("relay", "--drain-timeout=2s")
		return fmt.Sprintf("relay %d killed and restarted", i)
	case 1:
		code := c.relays[i].stop()
		if code != 0 {
			c.t.Errorf("relay %d stopped with exit code %d", i, code)
		}
		c.relays[i] = c.w.spawn("relay", "--drain-timeout=2s")
		return fmt.Sprintf("relay %d stopped in order and restarted", i)
	case 2:
		c.relays[i].signal(syscall.SIGSTOP)
		pause := time.Duration(c.rand.IntN(1500)) * time.Millisecond
		wait(c.t, pause)
		c.relays[i].signal(syscall.SIGCONT)
		return fmt.Sprintf("relay %d frozen for %v", i, pause)
	case 3:
		must(c.t, c.w.redis.Kill())
		wait(c.t, time.Duration(c.rand.IntN(500))*time.Millisecond)
		must(c.t, c.w.redis.Start(c.t.Context()))
		return "redis killed and restarted"
	case 4:
		must(c.t, c.server.Stop("immediate"))
		must(c.t, c.server.Start(c.t.Context()))
		return "postgres stopped immediately and restarted"
	case 5:
		c.mode("poll")
		return "mode poll"
	case 6:
		c.mode("auto")
		return "mode auto"
	case 7:
		_, _ = c.w.db.Pool.Exec(c.t.Context(),
			"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE 'posthaste%' AND pid "+
				"<> pg_backend_pid() AND random() < 0.5")
		return "half of the relays' connections ended"
	default:
		slot := "posthaste_" + c.w.db.Relay
		_, _ = c.w.db.Pool.Exec(c.t.Context(),
			"SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = $1 AND active", slot)
		_, err := c.w.db.Pool.Exec(c.t.Context(), "SELECT pg_drop_replication_slot($1)", slot)
		return fmt.Sprintf("slot dropped (%v)", err)
	}
}

// mode sets the desired mode in the database, whichever relay leads.
func (c *chaos) mode(mode string) {
	testenv.Eventually(c.t, 20*time.Second, func() error {
		_, err := c.w.db.Pool.Exec(c.t.Context(), "UPDATE relay_state SET desired_mode = $1", mode)
		return err
	})
}
