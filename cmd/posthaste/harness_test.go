package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"posthaste/consumer"
	"posthaste/internal/lab/testenv"
	"posthaste/internal/pause"
)

// result is the output and exit code of a command that has ended.
type result struct {
	code        int
	out, errOut string
}

// program is a command of the program: of this test binary, or of another build, exe.
func program(ctx context.Context, exe string, env []string, args ...string) *exec.Cmd {
	if exe == "" {
		exe, _ = os.Executable() // it runs
	}
	cmd := exec.CommandContext(ctx, exe, args...)
	// Without the option, a race build sleeps for a second at every exit.
	cmd.Env = slices.Concat(os.Environ(), []string{"POSTHASTE_TEST_MAIN=1", "GORACE=atexit_sleep_ms=0"}, env)
	return cmd
}

// runToEnd runs the program to its end.
func runToEnd(t *testing.T, args ...string) result {
	t.Helper()
	return runAs(t, nil, args...)
}

// runAs is runToEnd with additional environment variables.
func runAs(t *testing.T, env []string, args ...string) result {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	cmd := program(ctx, "", env, args...)
	var out, errOut bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errOut
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) || ctx.Err() != nil {
		t.Fatalf("%v: %v: %s", args, err, errOut.String())
	}
	return result{cmd.ProcessState.ExitCode(), out.String(), errOut.String()}
}

// runHere runs a command to its end in this process.
func runHere(t *testing.T, args ...string) result {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	var out, errOut bytes.Buffer
	code := run(ctx, args, strings.NewReader(""), &out, &errOut)
	return result{code, out.String(), errOut.String()}
}

// once runs a command with the world's settings to its end, in this process unless the world has an environment. Flags
// given here override the settings.
func (w *world) once(args ...string) result {
	w.t.Helper()
	n := slices.IndexFunc(args, func(a string) bool { return strings.HasPrefix(a, "--") })
	if n < 0 {
		n = len(args)
	}
	args = slices.Concat(args[:n], w.args("--log-level=error"), args[n:])
	if w.env == nil {
		return runHere(w.t, args...)
	}
	return runAs(w.t, w.env, args...)
}

// oneLine fails unless the exit code is code and the error output is one line that contains text.
func (r result) oneLine(t *testing.T, code int, text string) {
	t.Helper()
	if r.code != code || strings.Count(r.errOut, "\n") != 1 || !strings.HasPrefix(r.errOut, "posthaste: ") ||
		!strings.Contains(r.errOut, text) {
		t.Errorf("exit %d, error output %q; want exit %d and one line with %q", r.code, r.errOut, code, text)
	}
}

// says fails unless the exit code is code and the standard output contains texts.
func (r result) says(t *testing.T, code int, texts ...string) {
	t.Helper()
	var missing []string
	for _, text := range texts {
		if !strings.Contains(r.out, text) {
			missing = append(missing, text)
		}
	}
	if r.code != code || len(missing) > 0 {
		t.Fatalf("exit %d: %s%s; want exit %d and %q", r.code, r.out, r.errOut, code, missing)
	}
}

// warns is says for the error output.
func (r result) warns(t *testing.T, code int, texts ...string) {
	t.Helper()
	result{r.code, r.errOut, r.out}.says(t, code, texts...)
}

// compact is the output without spaces.
func (r result) compact() string { return strings.Join(strings.Fields(r.out), "") }

// json decodes the output into v. It fails unless the exit code is 0.
func (r result) json(t *testing.T, v any) {
	t.Helper()
	if err := json.Unmarshal([]byte(r.out), v); err != nil || r.code != 0 {
		t.Fatalf("exit %d, %v: %s%s", r.code, err, r.out, r.errOut)
	}
}

// readiness is the body of /readyz.
type readiness struct {
	Role     string
	Reasons  []string
	Degraded []string
	Remedy   []string
}

// waitReady waits until /readyz answers that the process is ready, and with text somewhere in what is degraded.
func (c *child) waitReady(text string) {
	c.t.Helper()
	c.waitStatus(http.StatusOK, text)
}

// waitUnready waits until /readyz answers that the process is not ready, and with text somewhere in its reasons.
func (c *child) waitUnready(text string) {
	c.t.Helper()
	c.waitStatus(http.StatusServiceUnavailable, text)
}

func (c *child) waitStatus(status int, text string) {
	c.t.Helper()
	testenv.Eventually(c.t, 30*time.Second, func() error {
		var h readiness
		got, err := c.get("/readyz", &h)
		texts := strings.Join(slices.Concat(h.Reasons, h.Degraded, h.Remedy), "\n")
		return testenv.FailIf(err != nil || got != status || !strings.Contains(texts, text),
			"readyz: %d %+v, %w; want %d and %q", got, h, err, status, text)
	})
}

// becomes waits until the process is ready in the role.
func (c *child) becomes(role string) {
	c.t.Helper()
	testenv.Eventually(c.t, time.Minute, func() error { return ready(c, role) })
}

// waitHealthy waits until the process is ready, and nothing is degraded.
func (c *child) waitHealthy() {
	c.t.Helper()
	testenv.Eventually(c.t, 20*time.Second, func() error {
		var h readiness
		status, err := c.get("/readyz", &h)
		return testenv.FailIf(err != nil || status != http.StatusOK || len(h.Degraded) > 0,
			"readyz: %d %+v, %w", status, h, err)
	})
}

// answers checks the pages for operators that show what is in Redis.
func (c *child) answers() {
	c.t.Helper()
	for _, path := range []string{"/relay", "/relay/dead", "/console/api/state", "/console/api/dead"} {
		var page any
		if status, err := c.get(path, &page); err != nil || status != http.StatusOK {
			c.t.Errorf("%s: %d, %v", path, status, err)
		}
	}
}

// metrics reads /metrics from the admin listener.
func (c *child) metrics() (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	a, err := testenv.Request(ctx, http.MethodGet, c.admin+"/metrics", "")
	return string(a.Body), err
}

// value reads a series of /metrics. A series that is not there is 0.
func (c *child) value(series string) float64 {
	c.t.Helper()
	text, err := c.metrics()
	must(c.t, err)
	v, _ := sample(text, series)
	return v
}

// shows returns an error unless /metrics has, or does not have, a series that begins with prefix.
func (c *child) shows(prefix string, want bool) error {
	text, err := c.metrics()
	if err == nil && strings.Contains(text, "\n"+prefix) != want {
		err = fmt.Errorf("series %s: want it there: %v", prefix, want)
	}
	return err
}

// sample finds a series by its name and labels.
func sample(text, series string) (float64, bool) {
	for line := range strings.Lines(text) {
		if rest, ok := strings.CutPrefix(line, series+" "); ok {
			v, err := strconv.ParseFloat(strings.Fields(rest)[0], 64)
			return v, err == nil
		}
	}
	return 0, false
}

// secret is a password that no output may show.
const secret = "s3cret-Passw0rd"

// hostOf returns host:port of a URL.
func hostOf(t *testing.T, raw string) string {
	t.Helper()
	u, err := url.Parse(raw)
	must(t, err)
	return u.Host
}

// desire sets the desired mode by the command, with or without a running relay.
func (w *world) desire(mode string) {
	w.t.Helper()
	w.once("mode", mode).says(w.t, 0)
}

// inModes runs do once with a streaming relay and once with a sweeping one.
func inModes(t *testing.T, do func(t *testing.T, mode string)) {
	t.Helper()
	for _, mode := range []string{"cdc", "poll"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			do(t, mode)
		})
	}
}

// relayIn starts a relay in the mode and waits until it is in the mode.
func (w *world) relayIn(mode string, extra ...string) *child {
	w.t.Helper()
	if mode == "poll" {
		w.desire("poll")
	}
	r := w.spawn("relay", extra...)
	w.waitMode(mode)
	return r
}

// underLoad returns a world with a relay in the mode, and with a load of so many events a second.
func underLoad(t *testing.T, mode string, rate int, extra ...string) (*world, *child, *testenv.Load) {
	t.Helper()
	w := newWorld(t)
	r := w.relayIn(mode, extra...)
	return w, r, testenv.StartLoad(t, w.db, testenv.LoadOptions{Rate: rate})
}

// held starts a load whose commits wait for a standby that does not exist.
func (w *world) held(o testenv.LoadOptions) *testenv.Load {
	w.t.Helper()
	w.db.Standby(w.t, "nobody")
	w.db.WaitHeld(w.t)
	load := testenv.StartLoad(w.t, w.db, o)
	testenv.Eventually(w.t, 20*time.Second, func() error {
		n := testenv.Value[int](w.t, w.db,
			"SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep' AND datname = $1", w.db.Name)
		return testenv.FailIf(n < 6, "%d commits are held back", n)
	})
	return load
}

// wrote runs a load to its end.
func (w *world) wrote(o testenv.LoadOptions) *testenv.Load {
	w.t.Helper()
	load := testenv.StartLoad(w.t, w.db, o)
	load.Wait()
	return load
}

// ended stops a load and checks that its events are published.
func (w *world) ended(load *testenv.Load) {
	w.t.Helper()
	load.Stop()
	w.oracle.Check(w.t, load, 30*time.Second)
}

// all checks that the events of loads, which have ended, are published.
func (w *world) all(loads ...*testenv.Load) {
	w.t.Helper()
	others := w.oracle.Others
	for i, load := range loads {
		w.oracle.Others = slices.Concat(others, loads[:i], loads[i+1:])
		w.oracle.Check(w.t, load, 30*time.Second)
	}
	w.oracle.Others = slices.Concat(others, loads)
}

// delivers checks that events are published.
func (w *world) delivers() {
	w.t.Helper()
	load := w.wrote(testenv.LoadOptions{
		Total: 120,
		Tag:   fmt.Sprintf("l%d-", len(w.oracle.Others)),
	})
	w.all(load)
}

// wait waits for d. Use it to check that a state lasts, not that it is reached.
func wait(t *testing.T, d time.Duration) {
	t.Helper()
	_ = pause.For(t.Context(), d)
}

// compare returns an error unless a query returns want.
func (w *world) compare(want any, query string, args ...any) error {
	var got any
	err := w.db.Pool.QueryRow(w.t.Context(), query, args...).Scan(&got)
	return testenv.FailIf(err != nil || fmt.Sprint(got) != fmt.Sprint(want), "%v, %w; want %v: %s", got, err, want,
		query)
}

// has fails unless a query returns want.
func (w *world) has(want any, query string, args ...any) {
	w.t.Helper()
	if err := w.compare(want, query, args...); err != nil {
		w.t.Error(err)
	}
}

// waitHas waits until a query returns want.
func (w *world) waitHas(want any, query string, args ...any) {
	w.t.Helper()
	testenv.Eventually(w.t, 30*time.Second, func() error { return w.compare(want, query, args...) })
}

// begin begins a transaction with a statement. It is rolled back at the end of the test: closing the pool waits for it.
func (w *world) begin(stmt string, args ...any) pgx.Tx {
	w.t.Helper()
	tx, err := w.db.Pool.Begin(w.t.Context())
	must(w.t, err)
	w.t.Cleanup(func() { _ = tx.Rollback(context.Background()) })
	_, err = tx.Exec(w.t.Context(), stmt, args...)
	must(w.t, err)
	return tx
}

// length returns the number of entries of a stream.
func (w *world) length(stream string) int64 {
	w.t.Helper()
	n, err := w.oracle.Redis.XLen(w.t.Context(), stream).Result()
	must(w.t, err)
	return n
}

// hasLen fails unless a stream has n entries.
func (w *world) hasLen(stream string, n int64) {
	w.t.Helper()
	if have := w.length(stream); have != n {
		w.t.Errorf("%d entries in %s, want %d", have, stream, n)
	}
}

// waitExactly waits until a stream has n entries, and no more.
func (w *world) waitExactly(stream string, n int64) {
	w.t.Helper()
	testenv.Eventually(w.t, 30*time.Second, func() error {
		have, err := w.oracle.Redis.XLen(w.t.Context(), stream).Result()
		return testenv.FailIf(err != nil || have != n, "%d entries in %s, want %d, %w", have, stream, n, err)
	})
}

// gaveUp adds an entry of a stream to its dead stream, as a group does.
func (w *world) gaveUp(stream, group, entry string, fields map[string]any) {
	w.t.Helper()
	values := []any{"dead_stream", stream, "dead_entry", entry, "dead_group", group, "dead_error", "no"}
	for k, v := range fields {
		values = append(values, k, v)
	}
	dead := &redis.XAddArgs{Stream: consumer.DeadStream(w.oracle.Redis, stream), Values: values}
	must(w.t, w.oracle.Redis.XAdd(w.t.Context(), dead).Err())
}

// reached returns a database by another URL, with a pool of its own.
func reached(t *testing.T, d *testenv.Database, url string) *testenv.Database {
	t.Helper()
	pool, err := pgxpool.New(t.Context(), url)
	must(t, err)
	t.Cleanup(pool.Close)
	other := *d
	other.URL, other.Pool = url, pool
	return &other
}

// park adds an event that the relay could not publish, and returns its id.
func (w *world) park() string {
	w.t.Helper()
	id := uuid.NewString()
	w.db.Exec(w.t, `INSERT INTO outbox_dead (id, seq, aggregate_type, aggregate_id, event_type, payload, created_at,
		error, class, attempts)
		VALUES ($1, 1, 'order', 'a', 'x', '{"card":"4111111111111111"}', now(), 'no', 'no', 3)`, id)
	return id
}

// hides fails if an output shows a secret.
func hides(t *testing.T, secret string, outputs ...string) {
	t.Helper()
	for _, out := range outputs {
		if strings.Contains(out, secret) {
			t.Errorf("a secret is shown: %s", strings.ReplaceAll(out, secret, "***"))
		}
	}
}
