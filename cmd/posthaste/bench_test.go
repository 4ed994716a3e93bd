package main

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	"posthaste/internal/testenv"
)

// neighbours adds an event and a key to the world's servers. A benchmark must not touch them.
func (w *world) neighbours() {
	w.t.Helper()
	w.db.Exec(w.t, `INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload) VALUES ($1, 'order', `+
		`'1', 'order.created', '{}')`, uuid.New())
	w.redis.Client.Set(w.t.Context(), "neighbour", "not ours", 0)
}

// untouched fails unless the neighbours still exist and the objects that the benchmark announced are gone.
func (w *world) untouched(errOut string) {
	w.t.Helper()
	m := regexp.MustCompile(`posthaste_bench_[0-9a-f]{8}_`).FindString(errOut)
	if m == "" {
		w.t.Fatalf("the benchmark does not say what it makes: %s", errOut)
	}
	left := testenv.Value[[]string](w.t, w.db, `SELECT coalesce(array_agg(name), '{}') FROM (
		SELECT datname::text FROM pg_database UNION ALL SELECT slot_name::text FROM pg_replication_slots) AS all_of `+
		`(name) WHERE starts_with(name, $1)`, m)
	var keys []string
	testenv.Eventually(w.t, 40*time.Second, func() error { // the heartbeat key of a relay expires
		if keys = w.redis.Client.Keys(w.t.Context(), "*").Val(); slices.ContainsFunc(keys, func(key string) bool {
			return strings.HasSuffix(key, ":alive")
		}) {
			return fmt.Errorf("keys %q", keys)
		}
		return nil
	})
	rows := testenv.Value[int](w.t, w.db, "SELECT count(*) FROM outbox")
	if len(left) > 0 || len(keys) != 1 || rows != 1 {
		w.t.Errorf("left behind: %v, %d keys: %q; the outbox that was there has %d rows", left, len(keys)-1,
			keys[:min(5, len(keys))], rows)
	}
}

func TestBenchRemovesItsTracesWhenInterrupted(t *testing.T) {
	t.Parallel()
	for key, args := range map[string][]string{
		"posthaste-bench-*.bench": {"drain", "--events=3000", "--runs=1000"},
		"i:*":                     {"orders", "--duration=200ms", "--runs=1000"},
	} {
		t.Run(args[0], func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			w.neighbours()
			exe, err := os.Executable()
			must(t, err)
			cmd := exec.CommandContext(t.Context(), exe, slices.Concat([]string{"bench"}, args,
				w.args("--external", "--log-level=error"))...)
			cmd.Env = append(os.Environ(), "POSTHASTE_TEST_MAIN=1", "GORACE=atexit_sleep_ms=0")
			var errOut bytes.Buffer
			cmd.Stderr = &errOut
			must(t, cmd.Start())
			testenv.Eventually(t, 30*time.Second, func() error {
				n := len(w.redis.Client.Keys(t.Context(), key).Val())
				return testenv.FailIf(n == 0, "it has written nothing yet")
			})
			must(t, cmd.Process.Signal(os.Interrupt))
			_ = cmd.Wait()
			if code := cmd.ProcessState.ExitCode(); code != exitFailure ||
				!strings.Contains(errOut.String(), "posthaste: interrupted") {
				t.Errorf("exit %d: %s", code, errOut.String())
			}
			w.untouched(errOut.String())
		})
	}
}

func TestBenchStartsServersOfItsOwn(t *testing.T) {
	t.Parallel()
	dir, err := os.MkdirTemp("", "posthaste-test-bench-") // Postgres runs under another uid and cannot enter t.TempDir
	must(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	must(t, os.Chmod(dir, 0o711))
	res := runToEnd(t, "bench", "latency", "--rate=50", "--duration=300ms", "--runs=1", "--mode=poll", "--dir="+dir)
	for _, want := range []string{
		"fsync on, synchronous_commit on", "appendonly yes, appendfsync everysec", "\ncommit",
		"\npoll", "counted: 55 committed, 55 found, lost 0, repeated 0",
	} {
		if !strings.Contains(res.out, want) {
			t.Errorf("the output has no %q", want)
		}
	}
	left, err := filepath.Glob(dir + "/*")
	if res.code != 0 || err != nil || len(left) > 0 {
		t.Errorf("exit %d, %s\n%s; left behind %v, %v", res.code, res.errOut, res.out, left, err)
	}
}

func TestBenchRefusesWhatItCannotMeasure(t *testing.T) {
	t.Parallel()
	for _, args := range []string{
		"drain --events=0", "drain --size=1", "drain --transaction=0", "drain --runs=0", "drain --mode=auto",
		"drain --streams=0", "latency --rate=-1", "latency --rate=100,-1", "latency --duration=0s",
		"orders --concurrency=0", "orders --repeat=51",
	} {
		if res := runToEnd(t, append([]string{"bench"}, strings.Fields(args)...)...); res.code != exitBadUsage ||
			!strings.Contains(res.errOut, "--") {
			t.Errorf("bench %s: exit %d, %s", args, res.code, res.errOut)
		}
	}
}
