package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"

	"posthaste/internal/cli"
	"posthaste/internal/testenv"
)

// neighbours puts an event and a key on the world's servers that are none of a benchmark's business.
func (w *world) neighbours() {
	w.t.Helper()
	w.db.Exec(w.t, `INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload) VALUES ($1, 'order', '1', 'order.created', '{}')`, uuid.New())
	w.redis.Client.Set(w.t.Context(), "neighbour", "not ours", 0)
}

// bench runs a small benchmark on the world's servers.
func (w *world) bench(args ...string) (result, report) {
	w.t.Helper()
	w.neighbours()
	res := w.once(append([]string{"bench"}, append(args, "--external", "--json")...)...)
	w.untouched(res.errOut)
	var r report
	if err := json.Unmarshal([]byte(res.out), &r); err != nil {
		w.t.Fatalf("exit %d, %v: %s %s", res.code, err, res.out, res.errOut)
	}
	return res, r
}

// untouched fails unless the neighbours are there, and nothing that a benchmark has announced.
func (w *world) untouched(errOut string) {
	w.t.Helper()
	m := regexp.MustCompile(`posthaste_bench_[0-9a-f]{8}_`).FindString(errOut)
	if m == "" {
		w.t.Fatalf("the benchmark does not say what it makes: %s", errOut)
	}
	left := testenv.Value[[]string](w.t, w.db, `SELECT coalesce(array_agg(name), '{}') FROM (
		SELECT datname::text FROM pg_database UNION ALL SELECT slot_name::text FROM pg_replication_slots) AS all_of (name) WHERE starts_with(name, $1)`, m)
	keys := w.redis.Client.Keys(w.t.Context(), "*").Val()
	rows := testenv.Value[int](w.t, w.db, "SELECT count(*) FROM outbox")
	if len(left) > 0 || len(keys) != 1 || rows != 1 {
		w.t.Errorf("left behind: %v, %d keys: %q; the outbox that was there has %d rows", left, len(keys)-1, keys[:min(5, len(keys))], rows)
	}
}

// positive fails unless every one of the rows is there, with every figure and ratio above zero.
func positive(t *testing.T, rows []*row, runs int, names ...string) {
	t.Helper()
	var have []string
	for _, r := range rows {
		have = append(have, r.Name)
		for name, f := range r.Figures {
			// Processor time comes in ticks of 10 ms; what took less has none, or is all idle.
			ticks := strings.HasSuffix(name, "_cpu_us") || name == "busy_percent"
			if len(f.Runs) != runs && !ticks || f.Min < 0 || f.Min == 0 && !ticks && name != "behind_ms" ||
				f.Median < f.Min || f.Median > f.Max {
				t.Errorf("%s: %s is %+v", r.Name, name, *f)
			}
		}
		for name, v := range r.Ratios {
			if v <= 0 {
				t.Errorf("%s: ratio to %s is %v", r.Name, name, v)
			}
		}
	}
	if !slices.Equal(have, names) {
		t.Errorf("rows %q, want %q", have, names)
	}
}

func TestBenchDrain(t *testing.T) {
	t.Parallel()
	res, r := newWorld(t).bench("drain", "--events=700", "--runs=2")
	if res.code != 0 {
		t.Fatalf("exit %d: %s", res.code, res.errOut)
	}
	positive(t, r.Limits, 2, "insert", "slot", "delete", "xadd")
	positive(t, r.Results, 2, "backlog cdc", "backlog poll", "stream cdc", "stream poll")
	for _, w := range r.Results {
		if want := (check{Committed: 1400, Found: 1400, Recorded: 1400}); w.Check == nil || *w.Check != want {
			t.Errorf("%s: counted %+v, want %+v", w.Name, w.Check, want)
		}
		if _, ok := w.Ratios["slot"]; ok != (w.Name == "stream cdc") || w.Ratios["delete"] == 0 || w.Ratios[together] == 0 || w.Bound == "" {
			t.Errorf("%s: ratios %v, bound %q", w.Name, w.Ratios, w.Bound)
		}
	}
	if r.Machine.Durability["fsync"] != "off" || r.Machine.Durability["appendfsync"] != "no" || r.Machine.Versions["postgres"] == "" {
		t.Errorf("machine: %+v", r.Machine)
	}
}

func TestBenchLatency(t *testing.T) {
	t.Parallel()
	res, r := newWorld(t).bench("latency", "--rate=100", "--duration=500ms", "--runs=1")
	if res.code != 0 {
		t.Fatalf("exit %d: %s", res.code, res.errOut)
	}
	positive(t, r.Limits, 1, "commit", "xadd")
	positive(t, r.Results, 1, "cdc", "poll")
	for _, w := range r.Results {
		if want := (check{Committed: 100, Found: 100, Recorded: 100}); w.Check == nil || *w.Check != want || len(w.Ratios) != 2 {
			t.Errorf("%s: counted %+v, want %+v; ratios %v", w.Name, w.Check, want, w.Ratios)
		}
		if got := w.median("per_second"); got != 100 {
			t.Errorf("%s: %v events/s were counted, want 100", w.Name, got)
		}
	}
}

func TestBenchOrders(t *testing.T) {
	t.Parallel()
	for name, rate := range map[string]string{"clients": "0", "rate": "150"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			res, r := newWorld(t).bench("orders", "--concurrency=4", "--rate="+rate, "--duration=500ms", "--repeat=20", "--runs=1")
			if res.code != 0 {
				t.Fatalf("exit %d: %s", res.code, res.errOut)
			}
			positive(t, r.Limits, 1, "empty", "transaction")
			positive(t, r.Results, 1, "unguarded", "guarded")
			for _, w := range r.Results {
				if w.Check == nil || !w.Check.holds() || w.Check.Committed == 0 || w.Check.Replayed == 0 || len(w.Ratios) == 0 {
					t.Errorf("%s: counted %+v, ratios %v", w.Name, w.Check, w.Ratios)
				}
			}
		})
	}
}

// TestBenchSaysThatEventsAreRepeated adds an entry to the benchmark's stream behind its back.
func TestBenchSaysThatEventsAreRepeated(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		for ctx.Err() == nil {
			for _, key := range w.redis.Client.Keys(ctx, "posthaste-bench-*.bench").Val() {
				if first, err := w.redis.Client.XRangeN(ctx, key, "-", "+", 1).Result(); err == nil && len(first) == 1 {
					w.redis.Client.XAdd(ctx, &redis.XAddArgs{Stream: key, NoMkStream: true, Values: first[0].Values})
				}
			}
		}
	}()
	res, r := w.bench("drain", "--events=5000", "--runs=1", "--mode=poll", "--load=backlog")
	cancel()
	<-done
	if res.code != exitFailure || !strings.Contains(res.errOut, errFound.Error()) {
		t.Errorf("exit %d: %s", res.code, res.errOut)
	}
	if c := r.Results[0].Check; c.Repeated == 0 || c.Lost != 0 || c.Found != 5000 {
		t.Errorf("counted %+v", c)
	}
}

func TestCheckHolds(t *testing.T) {
	t.Parallel()
	good := check{Committed: 3, Found: 3, Recorded: 3, Replayed: 1}
	if !good.holds() {
		t.Errorf("%+v does not hold", good)
	}
	for _, bad := range []check{{Lost: 1}, {Repeated: 1}, {Unknown: 1}, {Committed: 1}, {Found: 1}, {Recorded: -1}} {
		sum := good
		sum.add(bad)
		if sum.holds() {
			t.Errorf("%+v holds", sum)
		}
		r := report{Results: []*row{{Check: &sum}}}
		if err := r.finish(&env{IO: cli.IO{Stdout: &bytes.Buffer{}}}, true); !errors.Is(err, errFound) {
			t.Errorf("a report with %+v ends with %v", sum, err)
		}
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
			if err != nil {
				t.Fatal(err)
			}
			cmd := exec.CommandContext(t.Context(), exe, slices.Concat([]string{"bench"}, args, w.args("--external", "--log-level=error"))...)
			cmd.Env = append(os.Environ(), "POSTHASTE_TEST_MAIN=1", "GORACE=atexit_sleep_ms=0")
			var errOut bytes.Buffer
			cmd.Stderr = &errOut
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			testenv.Eventually(t, 30*time.Second, func() error {
				if n := len(w.redis.Client.Keys(t.Context(), key).Val()); n == 0 {
					return errors.New("it has written nothing yet")
				}
				return nil
			})
			if err := cmd.Process.Signal(os.Interrupt); err != nil {
				t.Fatal(err)
			}
			_ = cmd.Wait()
			if code := cmd.ProcessState.ExitCode(); code != exitFailure || !strings.Contains(errOut.String(), "posthaste: interrupted") {
				t.Errorf("exit %d: %s", code, errOut.String())
			}
			w.untouched(errOut.String())
		})
	}
}

func TestBenchStartsServersOfItsOwn(t *testing.T) {
	t.Parallel()
	dir, err := os.MkdirTemp("", "posthaste-test-bench-") // Postgres runs under another uid and cannot enter t.TempDir
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o711); err != nil {
		t.Fatal(err)
	}
	res := runToEnd(t, "bench", "latency", "--rate=50", "--duration=300ms", "--runs=1", "--mode=poll", "--dir="+dir)
	for _, want := range []string{"fsync on, synchronous_commit on", "appendonly yes, appendfsync everysec", "\ncommit", "\npoll", "counted: 40 committed, 40 found, lost 0, repeated 0"} {
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
		"drain --events=0", "drain --size=1", "drain --transaction=0", "drain --runs=0", "drain --mode=auto", "latency --rate=0",
		"latency --duration=0s", "orders --concurrency=0", "orders --repeat=51",
	} {
		if res := runToEnd(t, append([]string{"bench"}, strings.Fields(args)...)...); res.code != exitBadUsage || !strings.Contains(res.errOut, "--") {
			t.Errorf("bench %s: exit %d, %s", args, res.code, res.errOut)
		}
	}
}

// TestLoadKeepsItsTimetable stalls one call: the others are due when they would have been, and what they take counts
// from then.
func TestLoadKeepsItsTimetable(t *testing.T) {
	t.Parallel()
	const stall = 200 * time.Millisecond
	var due []time.Time
	took, calls, err := load{workers: 1, rate: 100, lasts: 100 * time.Millisecond, do: func(_ context.Context, n int, at time.Time) error {
		if n == 0 {
			<-time.After(stall)
		}
		due = append(due, at)
		return nil
	}}.run(t.Context())
	if err != nil || calls != 10 || len(took) != 10 {
		t.Fatalf("%d calls, %d counted, %v; want 10", calls, len(took), err)
	}
	for n := range due {
		late := time.Duration(n) * 10 * time.Millisecond
		if due[n].Sub(due[0]) != late || took[n] < stall-late {
			t.Errorf("call %d was due %v after the first and took %v; want %v, and at least %v", n, due[n].Sub(due[0]), took[n], late, stall-late)
		}
	}
}

// TestLoadCountsACall: calls that take longer than all of the time do not leave a benchmark without a figure.
func TestLoadCountsACall(t *testing.T) {
	t.Parallel()
	const lasts = 10 * time.Millisecond
	took, calls, err := load{workers: 2, warm: lasts, lasts: lasts, do: func(_ context.Context, n int, _ time.Time) error {
		if n < 2 {
			<-time.After(3 * lasts)
		}
		return nil
	}}.run(t.Context())
	if err != nil || len(took) == 0 || calls < len(took) {
		t.Errorf("%d calls, %d counted, %v", calls, len(took), err)
	}
}

func TestFigures(t *testing.T) {
	t.Parallel()
	r := &report{}
	w := r.result("r", "")
	for _, v := range []float64{9, 1, 4, 2} {
		w.is("per_second", v)
	}
	if f := w.Figures["per_second"]; f.Median != 3 || f.Min != 1 || f.Max != 9 {
		t.Errorf("median, least and most are %+v", *f)
	}
	var took []time.Duration
	for n := range 100 {
		took = append(took, time.Duration(100-n)*time.Millisecond)
	}
	w.spread(took)
	for name, want := range map[string]float64{"p50_ms": 50, "p90_ms": 90, "p99_ms": 99, "max_ms": 100} {
		if got := w.median(name); got != want {
			t.Errorf("%s is %v, want %v", name, got, want)
		}
	}
	r.limit("a", "").is("per_second", 6)
	r.limit("b", "").is("per_second", 3)
	if lowest := r.against(w, "per_second", "a", "b"); lowest != "b" || w.Ratios["a"] != 0.5 || w.Ratios["b"] != 1 || w.Ratios[together] != 1.5 {
		t.Errorf("lowest %s, ratios %v", lowest, w.Ratios)
	}
}

func TestEventsHaveNumbers(t *testing.T) {
	t.Parallel()
	for _, n := range []int{0, 1, 255, 256, 1 << 40} {
		if got, ok := eventNumber(eventID(n).String()); !ok || got != n {
			t.Errorf("event %d has number %d, %v", n, got, ok)
		}
	}
	for _, id := range []string{"", "x", uuid.NewString(), strings.Repeat("f", 36)} {
		if n, ok := eventNumber(id); ok {
			t.Errorf("%q is event %d", id, n)
		}
	}
	for _, size := range []int{16, 300, 5000} {
		if p := benchPayload(size); len(p) != size || !json.Valid([]byte(p)) {
			t.Errorf("a payload of %d bytes has %d: %s", size, len(p), p)
		}
	}
	for dsn, want := range map[string]string{
		"postgres://u:p@h:1/db?sslmode=disable&dbname=x": "postgres://u:p@h:1/b?sslmode=disable", "host=h dbname=db": "host=h dbname=db dbname=b", "": " dbname=b",
	} {
		if got := inDatabase(dsn, "b"); got != want {
			t.Errorf("%q in another database is %q", dsn, got)
		}
	}
}
