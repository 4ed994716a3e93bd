package consumer_test

import (
	"fmt"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"posthaste/internal/lab/testenv"
)

// Consumer processes are killed under load, one after the other, and replaced: every event is printed, and nothing is
// pending at the end.
func TestKillUnderLoadPrintsEverything(t *testing.T) {
	t.Parallel()
	for _, n := range []int{2, 5} {
		t.Run(strconv.Itoa(n), func(t *testing.T) {
			t.Parallel()
			r := testenv.Redis(t)
			cfg := childConfig{Redis: r.Addr(), Prefix: "outbox.", Group: "g", ClaimIdle: time.Second, Workers: 8}
			var all, alive []*process
			for range n {
				p := spawn(t, cfg)
				all, alive = append(all, p), append(alive, p)
			}
			var ids []string // the loader's until it has ended
			var wg sync.WaitGroup
			quit := make(chan struct{})
			wg.Go(func() {
				tick := time.NewTicker(20 * time.Millisecond)
				defer tick.Stop()
				for {
					ids = append(ids, fill(t, r.Client, "outbox.order", scale(500, 100), 50)...)
					select {
					case <-quit:
						return
					case <-tick.C:
					}
				}
			})
			// Every process is killed once, in the middle of its work, and replaced.
			for i := range n {
				before := alive[i].printed()
				testenv.Eventually(t, 30*time.Second, func() error {
					got := alive[i].printed()
					return testenv.FailIf(got < before+scale(2000, 50), "process %d has printed %d", i, got)
				})
				alive[i].kill()
				p := spawn(t, cfg)
				all, alive[i] = append(all, p), p
			}
			close(quit)
			wg.Wait()
			settled(t, r.Client, 60*time.Second, "g", "outbox.order")
			for _, p := range alive {
				p.stop(t)
			}
			got := map[string]int{}
			for _, p := range all {
				for id, k := range p.ids {
					got[id] += k
				}
			}
			repeated := 0
			for _, id := range ids {
				if got[id] == 0 {
					t.Fatalf("event %s was acknowledged and never printed", id)
				}
				repeated += got[id] - 1
			}
			t.Logf("%d events, %d printed again after a kill", len(ids), repeated)
			testenv.Equal(t, "different ids printed", len(got), len(ids))
		})
	}
}

// The effect in Postgres has each event exactly once: one event in a hundred fails twice after its effect, and
// processes are killed and paused meanwhile. A paused one wakes up with events in hand that others have finished.
func TestEffectExactlyOnce(t *testing.T) {
	t.Parallel()
	r := testenv.Redis(t)
	d := testenv.Postgres(t)
	d.Exec(t, "CREATE TABLE effect (id uuid NOT NULL)") // no unique key: it would hide a second effect
	n := scale(100_000, 4000)
	ids := fill(t, r.Client, "outbox.order", n, 200)
	cfg := childConfig{
		Redis: r.Addr(), Prefix: "outbox.", Group: "g", ClaimIdle: time.Second, Workers: 8, Effect: d.URL,
		FailEvery: 100,
	}
	procs := []*process{spawn(t, cfg), spawn(t, cfg), spawn(t, cfg)}
	reached := func(share float64) {
		testenv.Eventually(t, time.Duration(scale(600, 60))*time.Second, func() error {
			c := testenv.Value[int](t, d, "SELECT count(*) FROM effect")
			return testenv.FailIf(float64(c) < share*float64(n), "%d of %d effects", c, n)
		})
	}
	for i := range 3 {
		reached(0.2 * float64(i+1))
		if i == 1 {
			must(t, procs[1].cmd.Process.Signal(syscall.SIGSTOP))
			defer func() { _ = procs[1].cmd.Process.Signal(syscall.SIGCONT) }()
			continue
		}
		procs[i].kill()
		procs[i] = spawn(t, cfg)
	}
	reached(0.95)
	must(t, procs[1].cmd.Process.Signal(syscall.SIGCONT))
	settled(t, r.Client, 2*time.Minute, "g", "outbox.order")
	for _, p := range procs {
		p.stop(t)
	}
	testenv.Equal(t, "effects", testenv.Value[int](t, d, "SELECT count(*) FROM effect"), n)
	different := "SELECT count(DISTINCT id) FROM effect WHERE id = ANY($1::uuid[])"
	testenv.Equal(t, "different events with their effect", testenv.Value[int](t, d, different, ids), n)
	testenv.Equal(t, "dead events", r.Client.XLen(t.Context(), "dead.outbox.order").Val(), 0)
}

// journaled returns, by subject, the numbers that the processes have noted, first occurrences only: repetitions are
// allowed, going back is not.
func journaled(t *testing.T, r *testenv.RedisServer) map[string][]int {
	t.Helper()
	out := map[string][]int{}
	seen := map[string]bool{}
	for _, l := range r.Client.LRange(t.Context(), "journal", 0, -1).Val() {
		if seen[l] {
			continue
		}
		seen[l] = true
		subject, num, _ := strings.Cut(l, " ")
		n, err := strconv.Atoi(num)
		if err != nil {
			t.Fatalf("journal line %q", l)
		}
		out[subject] = append(out[subject], n)
	}
	return out
}

func ascending(t *testing.T, bySubject map[string][]int, want int) {
	t.Helper()
	total := 0
	for s, ns := range bySubject {
		total += len(ns)
		for i := 1; i < len(ns); i++ {
			if ns[i] <= ns[i-1] {
				t.Fatalf("subject %s: event %d came after event %d", s, ns[i], ns[i-1])
			}
		}
	}
	testenv.Equal(t, "different events that ran", total, want)
}

// lease is the key of the lease in these tests.
const lease = "{outbox.order}:lease:g"

// owner is the holder of the lease.
func owner(t *testing.T, r *testenv.RedisServer) string {
	t.Helper()
	return r.Client.Get(t.Context(), lease).Val()
}

// ran is how many events the processes have noted.
func ran(t *testing.T, r *testenv.RedisServer) int64 {
	t.Helper()
	return r.Client.LLen(t.Context(), "journal").Val()
}

// orderedConfig is a process in ordered mode that keeps a journal.
func orderedConfig(r *testenv.RedisServer, idle time.Duration) childConfig {
	return childConfig{
		Redis: r.Addr(), Prefix: "outbox.", Group: "g", ClaimIdle: idle, Workers: 8, Ordered: true, Journal: "journal",
	}
}

// In ordered mode the order per subject holds over kills and over all processes.
func TestOrderedModeKeepsOrderOverProcesses(t *testing.T) {
	t.Parallel()
	r := testenv.Redis(t)
	cfg := orderedConfig(r, time.Second)
	n := scale(20_000, 4000)
	fill(t, r.Client, "outbox.order", n, 20)
	byPID := map[string]*process{}
	for range 3 {
		p := spawn(t, cfg)
		byPID[strconv.Itoa(p.cmd.Process.Pid)] = p
	}
	for i := range 2 {
		testenv.Eventually(t, 60*time.Second, func() error {
			got := ran(t, r)
			return testenv.FailIf(got < int64(n*(i+1)/4), "%d events", got)
		})
		var holder *process
		testenv.Eventually(t, 20*time.Second, func() error {
			name := owner(t, r)
			if part := strings.Split(name, ":"); len(part) == 3 && byPID[part[1]] != nil {
				holder = byPID[part[1]]
				return nil
			}
			return fmt.Errorf("the lease is held by %q", name)
		})
		holder.kill()
	}
	settled(t, r.Client, 60*time.Second, "g", "outbox.order")
	ascending(t, journaled(t, r), n)
}

// A process that was paused for longer than its lease reads nothing more when it continues: its entries would wait for
// the claim time, and run after those that the new holder reads in between.
func TestOrderedModeKeepsOrderOverAPause(t *testing.T) {
	t.Parallel()
	r := testenv.Redis(t)
	cfg := orderedConfig(r, time.Second)
	n := scale(20_000, 8000)
	fill(t, r.Client, "outbox.order", n, 20)
	holder := spawn(t, cfg)
	testenv.Eventually(t, 60*time.Second, func() error {
		return testenv.FailIf(ran(t, r) == 0, "nothing has run")
	})
	first := owner(t, r)
	// It is stopped while all it does waits for Redis: between the look at the lease and the question that follows it
	// there is no fence.
	client := r.Client
	must(t, client.Do(t.Context(), "CLIENT", "PAUSE", time.Minute.Milliseconds(), "WRITE").Err())
	waiting, same := "", 0
	testenv.Eventually(t, 60*time.Second, func() error {
		now, err := client.InfoMap(t.Context(), "clients").Result()
		if err != nil {
			return err
		}
		if n := now["Clients"]["blocked_clients"]; n != waiting {
			waiting, same = n, 0
		}
		same++
		return testenv.FailIf(same < 20, "%s calls wait, for %d looks", waiting, same)
	})
	must(t, holder.cmd.Process.Signal(syscall.SIGSTOP))
	must(t, client.Do(t.Context(), "CLIENT", "UNPAUSE").Err())
	spawn(t, cfg)
	testenv.Eventually(t, 60*time.Second, func() error {
		now := owner(t, r)
		return testenv.FailIf(now == first || now == "", "the lease is held by %q", now)
	})
	must(t, holder.cmd.Process.Signal(syscall.SIGCONT))
	settled(t, r.Client, 60*time.Second, "g", "outbox.order")
	ascending(t, journaled(t, r), n)
}

// A process that is paused for about as long as its lease may find it expired, drop events, and have it again a moment
// later. The entries that it still holds do not run before the dropped ones.
func TestOrderedModeKeepsOrderOverShortPauses(t *testing.T) {
	t.Parallel()
	r := testenv.Redis(t)
	cfg := orderedConfig(r, 300*time.Millisecond)
	n := scale(60_000, 4000)
	fill(t, r.Client, "outbox.order", n, 20)
	p := spawn(t, cfg)
	for i := 0; ran(t, r) < int64(n); i++ {
		before := ran(t, r)
		testenv.Eventually(t, 20*time.Second, func() error {
			got := ran(t, r)
			return testenv.FailIf(got < min(before+100, int64(n)), "%d events, %d before", got, before)
		})
		must(t, p.cmd.Process.Signal(syscall.SIGSTOP))
		least := cfg.ClaimIdle/3 - time.Duration(i%10)*cfg.ClaimIdle/20
		testenv.Eventually(t, 20*time.Second, func() error {
			left := r.Client.PTTL(t.Context(), lease).Val()
			return testenv.FailIf(left >= max(least, 0), "the lease lasts for another %v", left)
		})
		must(t, p.cmd.Process.Signal(syscall.SIGCONT))
	}
	settled(t, r.Client, 60*time.Second, "g", "outbox.order")
	ascending(t, journaled(t, r), n)
}

// An event that kills the process is given up after its attempts, and takes none of the events that merely waited in
// the same process with it.
func TestEventThatKillsTheProcess(t *testing.T) {
	t.Parallel()
	r := testenv.Redis(t)
	cfg := childConfig{
		Redis: r.Addr(), Prefix: "outbox.", Group: "g", ClaimIdle: 300 * time.Millisecond, Workers: 2,
		Journal: "journal", DieAt: 40,
	}
	const n = 400
	ids := fill(t, r.Client, "outbox.order", n, 20)
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() { // what a supervisor does
		p := spawn(t, cfg)
		for {
			select {
			case <-p.gone:
				p = spawn(t, cfg)
			case <-stop:
				p.kill()
				return
			}
		}
	})
	defer wg.Wait()
	defer close(stop)
	testenv.Eventually(t, 60*time.Second, func() error {
		got := r.Client.XLen(t.Context(), "dead.outbox.order").Val()
		return testenv.FailIf(got == 0, "no dead event")
	})
	settled(t, r.Client, 30*time.Second, "g", "outbox.order")
	dead := r.Client.XRange(t.Context(), "dead.outbox.order", "-", "+").Val()
	if len(dead) != 1 || dead[0].Values["id"] != ids[40] || dead[0].Values["dead_attempts"] != "10" {
		t.Errorf("dead: %v, want only event %s after 10 attempts", dead, ids[40])
	}
	total := 0
	for _, ns := range journaled(t, r) {
		total += len(ns)
	}
	testenv.Equal(t, "other events that ran", total, n-1)
}
