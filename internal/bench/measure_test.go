package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"

	"posthaste/internal/app"
	"posthaste/internal/cli"
	"posthaste/internal/lab/local/natslog"
	"posthaste/internal/lab/testenv"
	"posthaste/internal/lab/testenv/commandline"
	"posthaste/internal/secretfile"
)

func TestMain(m *testing.M) { os.Exit(testenv.Main(m)) }

// world is a database and a Redis that are in use by others.
type world struct {
	t     *testing.T
	db    *testenv.Database
	redis *testenv.RedisServer
	nats  string // the URL of a server, "" without one
}

// newWorld puts an event and a key on servers that a benchmark borrows; the benchmark must not touch them.
func newWorld(t *testing.T) *world {
	t.Helper()
	w := &world{t: t, db: testenv.Postgres(t), redis: testenv.Redis(t)}
	w.db.Exec(t, `INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload)
		VALUES ($1, 'order', '1', 'order.created', '{}')`, uuid.New())
	w.redis.Client.Set(t.Context(), "neighbour", "not ours", 0)
	return w
}

// run runs a benchmark on the world's servers, with the default settings otherwise. It fails unless everything that the
// benchmark made is removed.
func (w *world) run(ctx context.Context, b any) (out string, err error) {
	w.t.Helper()
	c := commandline.Config(w.t, "--postgres-url="+w.db.URL, "--redis-url="+w.redis.URL(), "--relay-name="+w.db.Relay,
		"--admin-addr=127.0.0.1:0", "--log-level=error", "--sink-url="+w.nats)
	var text, errOut bytes.Buffer
	o := cli.IO{Stdout: &text, Stderr: &errOut}
	switch b := b.(type) {
	case Drain:
		b.External, b.JSON = true, true
		err = b.Run(ctx, c, o)
	case Latency:
		b.External, b.JSON = true, true
		err = b.Run(ctx, c, o)
	case Orders:
		b.External, b.JSON = true, true
		err = b.Run(ctx, c, o)
	}
	w.untouched(errOut.String())
	return text.String(), err
}

// measure is run for a benchmark that ends, whose report it returns.
func (w *world) measure(b any) (r report, err error) {
	w.t.Helper()
	out, err := w.run(w.t.Context(), b)
	if jerr := json.Unmarshal([]byte(out), &r); jerr != nil {
		w.t.Fatalf("%v, %v: %s", err, jerr, out)
	}
	return r, err
}

// alone runs a benchmark on servers of its own, or on those of the settings, and returns what it writes.
func alone(t *testing.T, b interface {
	Run(ctx context.Context, c app.Config, o cli.IO) error
}, c app.Config,
) string {
	t.Helper()
	var out, errOut bytes.Buffer
	if err := b.Run(t.Context(), c, cli.IO{Stdout: &out, Stderr: &errOut}); err != nil {
		t.Fatalf("%v: %s", err, errOut.String())
	}
	return out.String()
}

// untouched fails unless the foreign data is there and the objects that the benchmark has announced are gone.
func (w *world) untouched(errOut string) {
	w.t.Helper()
	m := regexp.MustCompile(`posthaste_bench_[0-9a-f]{8}_`).FindString(errOut)
	if m == "" {
		w.t.Fatalf("the benchmark does not say what it makes: %s", errOut)
	}
	left := testenv.Value[[]string](w.t, w.db, `SELECT coalesce(array_agg(name), '{}') FROM (
		SELECT datname::text FROM pg_database UNION ALL SELECT slot_name::text FROM pg_replication_slots
	) AS all_of (name) WHERE starts_with(name, $1)`, m)
	keys := lasting(w.redis.Client.Keys(w.t.Context(), "*").Val())
	rows := testenv.Value[int](w.t, w.db, "SELECT count(*) FROM outbox")
	if len(left) > 0 || len(keys) != 1 || rows != 1 {
		w.t.Errorf("left behind: %v, %d keys: %q; the outbox that was there has %d rows", left, len(keys)-1,
			keys[:min(5, len(keys))], rows)
	}
}

// lasting omits the heartbeats of relays, which expire after some seconds.
func lasting(keys []string) []string {
	return slices.DeleteFunc(keys, func(key string) bool { return strings.HasSuffix(key, ":alive") })
}

// positive fails unless every row is there, with every figure and ratio above zero.
func positive(t *testing.T, rows []*row, runs int, names ...string) {
	t.Helper()
	var have []string
	for _, r := range rows {
		have = append(have, r.Name)
		for name, f := range r.Figures {
			if name == "settle_wal_bytes" {
				continue // while streaming it is a difference, which may be below the noise
			}
			// Processor time may come in ticks of 10 ms; shorter work has none, or is all idle. WAL is that of the
			// whole server, which other tests use too.
			ticks := strings.HasSuffix(name, "_cpu_us") || name == "busy_percent" || name == "wal_bytes"
			// A relay that has kept up is behind by nothing.
			behind := name == "behind_ms" || name == "backlog_rows"
			if len(f.Runs) != runs && !ticks || f.Min < 0 || f.Min == 0 && !ticks && !behind ||
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

// counts fails unless all n events of a row, over its repetitions, are in their place.
func counts(t *testing.T, w *row, n int) {
	t.Helper()
	if want := (check{Committed: n, Found: n, Recorded: n}); w.Check == nil || *w.Check != want {
		t.Errorf("%s: counted %+v, want %+v", w.Name, w.Check, want)
	}
}

func TestBenchDrain(t *testing.T) {
	t.Parallel()
	r, err := newWorld(t).measure(Drain{
		Options: Options{Runs: 2}, Events: 700, Size: 300, Transaction: 1, Streams: 1, Mode: "both", Load: "both",
	})
	testenv.Must(t, err)
	positive(t, r.Limits, 2, "insert", "slot", "settle", "xadd")
	positive(t, r.Results, 2, "backlog cdc", "backlog poll", "stream cdc", "stream poll")
	if got := r.find("insert").median("wal_bytes"); got < 300 {
		t.Errorf("an insert writes %v bytes of WAL, which is less than its payload", got)
	}
	for _, w := range r.Results {
		counts(t, w, 1400)
		streamed := strings.HasPrefix(w.Name, "stream")
		if bytes := w.median("redis_bytes"); bytes < 300 || bytes > 3000 {
			t.Errorf("%s: an event takes %v bytes of Redis", w.Name, bytes)
		}
		if w.Figures["settle_wal_bytes"] == nil || (w.median("wal_bytes") > 300) != streamed {
			t.Errorf("%s: bytes of WAL are %v", w.Name, w.Figures["wal_bytes"])
		}
		if _, ok := w.Ratios["slot"]; ok != (w.Name == "stream cdc") || w.Ratios["settle"] == 0 ||
			w.Ratios[together] == 0 ||
			w.Bound == "" {
			t.Errorf("%s: ratios %v, bound %q", w.Name, w.Ratios, w.Bound)
		}
	}
	if r.Machine.Durability["fsync"] != "off" || r.Machine.Durability["appendfsync"] != "no" ||
		r.Machine.Versions["postgres"] == "" {
		t.Errorf("machine: %+v", r.Machine)
	}
}

// Events in several streams are all published, counted and removed.
func TestBenchDrainIntoStreams(t *testing.T) {
	t.Parallel()
	r, err := newWorld(t).measure(Drain{
		Options: Options{Runs: 1}, Events: 70, Size: 100_000, Transaction: 1, Streams: 8, Mode: "cdc", Load: "backlog",
	})
	testenv.Must(t, err)
	w := r.Results[0]
	counts(t, w, 70)
	mib := w.median("published_per_second") * 100_000 / (1 << 20)
	if w.median("relay_peak_rss_mib") < 1 || w.median("payload_mib_per_second") != mib {
		t.Errorf("figures %v", w.Figures)
	}
}

// On NATS the same is measured, and no stream stays.
func TestBenchNats(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.nats = testenv.Nats(t).URL()
	to := Sink{Sink: "nats"}
	r, err := w.measure(Drain{
		Options: Options{Runs: 1}, Sink: to, Events: 700, Size: 300, Transaction: 1, Streams: 2, Mode: "cdc",
		Load: "both",
	})
	testenv.Must(t, err)
	positive(t, r.Limits, 1, "insert", "slot", "settle", "batches")
	positive(t, r.Results, 1, "backlog cdc", "stream cdc")
	for _, row := range r.Results {
		counts(t, row, 700)
		if bytes := row.median("nats_bytes"); row.Ratios["batches"] == 0 || bytes < 300 || bytes > 3000 {
			t.Errorf("%s: ratios %v, an event takes %v bytes", row.Name, row.Ratios, bytes)
		}
	}
	half := 500 * time.Millisecond
	r, err = w.measure(Latency{
		Options: Options{Runs: 1}, Sink: to, Rate: []float64{100}, Duration: half, Size: 300, Mode: "cdc", Hold: half,
	})
	testenv.Must(t, err)
	positive(t, r.Limits, 1, "commit", "publish")
	positive(t, r.Results, 1, "cdc")
	counts(t, r.Results[0], 200)
	if row := r.Results[0]; row.median("per_second") != 100 || row.Ratios["p50 of commit + publish"] == 0 {
		t.Errorf("figures %v, ratios %v", row.Figures, row.Ratios)
	}
	log, err := natslog.Open(w.nats)
	testenv.Must(t, err)
	defer log.Close()
	for name := range log.JS.StreamNames() {
		if strings.Contains(name, "BENCH") {
			t.Errorf("stream %s is left", name)
		}
	}
}

func TestBenchIdle(t *testing.T) {
	t.Parallel()
	r, err := newWorld(t).measure(Latency{
		Options: Options{Runs: 1}, Rate: []float64{0}, Duration: 100 * time.Millisecond, Size: 300, Mode: "both",
	})
	testenv.Must(t, err)
	names := func(rows []*row) (list []string) {
		for _, w := range rows {
			list = append(list, w.Name)
		}
		return list
	}
	rows := append(names(r.Limits), names(r.Results)...)
	if want := []string{"servers", "idle cdc", "idle poll"}; !slices.Equal(rows, want) {
		t.Errorf("rows %q, want %q", rows, want)
	}
	for _, w := range r.Results {
		counts(t, w, idleEvents)
		// Redis may use no measurable time in so short a run.
		if w.median("relay_core_percent") <= 0 || w.median("relay_rss_mib") < 1 ||
			w.Figures["wal_bytes_per_second"] == nil {
			t.Errorf("%s: figures %v", w.Name, w.Figures)
		}
	}
}

func TestBenchLatency(t *testing.T) {
	t.Parallel()
	rates := []float64{50, 100}
	r, err := newWorld(t).measure(Latency{
		Options: Options{Runs: 1}, Rate: rates, Duration: 500 * time.Millisecond, Size: 300, Mode: "both",
	})
	testenv.Must(t, err)
	positive(t, r.Limits, 1, "commit 50/s", "xadd 50/s", "commit 100/s", "xadd 100/s")
	positive(t, r.Results, 1, "cdc 50/s", "poll 50/s", "cdc 100/s", "poll 100/s")
	for i, w := range r.Results {
		rate := rates[i/2]
		// Half a second of warm-up, half a second that counts, and half a second for the costs.
		counts(t, w, int(rate)+int(rate/2))
		testenv.Equal(t, w.Name+": ratios", len(w.Ratios), 2)
		testenv.Equal(t, w.Name+": events/s", w.median("per_second"), rate)
		if w.median("relay_cpu_us") == 0 || w.median("wal_bytes") < 300 {
			t.Errorf("%s: an event costs %v", w.Name, w.Figures)
		}
	}
}

// With a single rate, no name has it. With a transaction open, the events that were written before the measurement are
// counted, and their times are not.
func TestBenchLatencyWithATransactionOpen(t *testing.T) {
	t.Parallel()
	const half = 500 * time.Millisecond
	r, err := newWorld(t).measure(Latency{
		Options: Options{Runs: 1}, Rate: []float64{100}, Duration: half, Size: 300, Mode: "both", Hold: half,
	})
	testenv.Must(t, err)
	positive(t, r.Limits, 1, "commit", "xadd")
	positive(t, r.Results, 1, "cdc", "poll")
	for _, w := range r.Results {
		counts(t, w, 200)
		if w.median("per_second") != 100 || w.Figures["backlog_rows"] == nil ||
			(w.Figures["kept_wal_mib"] != nil) != (w.Name == "cdc") || w.median("p999_ms") < w.median("p99_ms") {
			t.Errorf("%s: figures %v", w.Name, w.Figures)
		}
	}
}

func TestBenchOrders(t *testing.T) {
	t.Parallel()
	for name, rate := range map[string]float64{"clients": 0, "rate": 150} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r, err := newWorld(t).measure(Orders{
				Options: Options{Runs: 1}, Concurrency: 4, Rate: rate, Duration: 500 * time.Millisecond, Repeat: 20,
			})
			testenv.Must(t, err)
			positive(t, r.Limits, 1, "empty", "transaction")
			positive(t, r.Results, 1, "unguarded", "guarded")
			for _, w := range r.Results {
				if w.Check == nil || !w.Check.holds() || w.Check.Committed == 0 || w.Check.Replayed == 0 ||
					len(w.Ratios) == 0 {
					t.Errorf("%s: counted %+v, ratios %v", w.Name, w.Check, w.Ratios)
				}
			}
		})
	}
}

// A benchmark that is interrupted removes what it has made.
func TestBenchIsInterrupted(t *testing.T) {
	t.Parallel()
	for key, b := range map[string]any{
		"posthaste-bench-*.bench": Drain{
			Options: Options{Runs: 1000}, Events: 3000, Size: 300, Transaction: 1, Streams: 1, Mode: "both",
			Load: "both",
		},
		"i:*": Orders{Options: Options{Runs: 1000}, Concurrency: 4, Duration: 200 * time.Millisecond, Repeat: 20},
	} {
		t.Run(key, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			go func() {
				for ctx.Err() == nil && len(w.redis.Client.Keys(ctx, key).Val()) == 0 {
				}
				cancel()
			}()
			if _, err := w.run(ctx, b); err == nil || !strings.HasPrefix(err.Error(), "interrupted; ") {
				t.Errorf("it ends with %v", err)
			}
		})
	}
}

// Without --external, servers with settings as in production are started in --dir, and nothing of them stays.
func TestBenchStartsServersOfItsOwn(t *testing.T) {
	t.Parallel()
	dir, err := os.MkdirTemp("", "posthaste-test-bench-") // Postgres runs under another uid and cannot enter t.TempDir
	testenv.Must(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	testenv.Must(t, os.Chmod(dir, 0o711))
	b := Latency{
		Options: Options{
			Runs: 1, Dir: dir, PGBin: os.Getenv("POSTHASTE_TEST_PG_BIN"),
			RedisBin: os.Getenv("POSTHASTE_TEST_REDIS_BIN"),
		},
		Rate: []float64{50}, Duration: 300 * time.Millisecond, Size: 300, Mode: "poll",
	}
	testenv.Contains(t, "the output", alone(t, b, commandline.Config(t)),
		"fsync on, synchronous_commit on", "appendonly yes, appendfsync everysec", "\ncommit", "\npoll",
		"counted: 55 committed, 55 found, lost 0, repeated 0")
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("left behind %v, %v", left, err)
	}
}

// TestBenchSaysThatEventsAreRepeated adds an entry to the benchmark's stream during the run.
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
	r, err := w.measure(Drain{
		Options: Options{Runs: 1}, Events: 5000, Size: 300, Transaction: 1, Streams: 1, Mode: "poll", Load: "backlog",
	})
	cancel()
	<-done
	testenv.ErrorIs(t, "the end", err, ErrFound)
	if c := r.Results[0].Check; c.Repeated == 0 || c.Lost != 0 || c.Found != 5000 {
		t.Errorf("counted %+v", c)
	}
}

// Options that cannot be measured are usage errors, before anything is started.
func TestRefusals(t *testing.T) {
	t.Parallel()
	for _, run := range []func(context.Context, app.Config, cli.IO) error{
		Drain{}.Run, Drain{Options: Options{Runs: 1}, Events: 1, Transaction: 1, Streams: 1, Size: 1}.Run,
		Drain{Events: 1, Transaction: 1, Streams: 1, Size: 16}.Run,                // no runs
		Drain{Options: Options{Runs: 1}, Events: 1, Transaction: 1, Size: 16}.Run, // no streams
		Latency{Rate: []float64{1}, Size: 300}.Run,
		Latency{Rate: []float64{1}, Size: 300, Duration: 1, Hold: -1, Options: Options{Runs: 1}}.Run,
		Orders{Concurrency: 1, Duration: time.Second, Repeat: 51}.Run,
	} {
		var usage *cli.UsageError
		if err := run(t.Context(), app.Config{}, cli.IO{}); !errors.As(err, &usage) ||
			!strings.Contains(err.Error(), "--") {
			t.Errorf("%v is no usage error", err)
		}
	}
}

// On a cluster everything is measured as on one server, and no master keeps anything.
func TestBenchOnACluster(t *testing.T) {
	t.Parallel()
	t.Run("its own", func(t *testing.T) {
		t.Parallel()
		b := Orders{
			Options: Options{
				Cluster: true, JSON: true, Runs: 1, PGBin: os.Getenv("POSTHASTE_TEST_PG_BIN"),
				RedisBin: os.Getenv("POSTHASTE_TEST_REDIS_BIN"),
			},
			Concurrency: 4, Duration: 500 * time.Millisecond, Repeat: 10,
		}
		out := alone(t, b, commandline.Config(t))
		testenv.Contains(t, "the output", out, "Redis Cluster of 3 masters and 3 replicas")
	})
	t.Run("another one", func(t *testing.T) {
		t.Parallel()
		c, db := testenv.Cluster(t, 3, 0), testenv.Postgres(t)
		b := Drain{
			Options: Options{External: true, JSON: true, Runs: 1}, Events: 300, Size: 100, Transaction: 1, Streams: 1,
			Mode: "cdc", Load: "stream",
		}
		settings := commandline.Config(t, "--postgres-url="+db.URL, "--redis-url="+c.URL(), "--relay-name="+db.Relay,
			"--admin-addr=127.0.0.1:0", "--log-level=error")
		settings.PostgresURL = secretfile.File{
			Setting: "POSTHASTE_POSTGRES_URL_FILE", Path: testenv.WriteFile(t, t.TempDir(), "url", []byte(db.URL+"\n")),
		}.Into(settings.PostgresURL)
		alone(t, b, settings)
		for i := range c.Nodes {
			if keys := lasting(c.On(t, i).Keys(t.Context(), "*").Val()); len(keys) > 0 {
				t.Errorf("left on node %d: %q", i, keys)
			}
		}
	})
	var usage *cli.UsageError
	both := Orders{Options: Options{External: true, Cluster: true, Runs: 1}, Concurrency: 1, Duration: time.Second}
	if err := both.Run(t.Context(), app.Config{}, cli.IO{}); !errors.As(err, &usage) {
		t.Errorf("--external and --cluster: %v", err)
	}
}
