package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"posthaste/internal/lab/testenv"
)

// The test binary is also the program: with POSTHASTE_TEST_MAIN set, it runs main. Crash tests start and kill it that
// way.
func TestMain(m *testing.M) {
	if os.Getenv("POSTHASTE_TEST_MAIN") != "" {
		main()
		return
	}
	os.Exit(testenv.Main(m))
}

// full reports whether the tests run with full counts instead of small ones.
func full() bool { return os.Getenv("POSTHASTE_TEST_FULL") != "" }

// scale is n in full mode, less otherwise.
func scale[T any](n, less T) T {
	if full() {
		return n
	}
	return less
}

// world is a database and a Redis server, with helpers.
type world struct {
	t      *testing.T
	db     *testenv.Database
	redis  *testenv.RedisServer
	oracle testenv.Oracle
	pgURL  string // the URL for the processes; it may lead through a proxy
	rdURL  string
	env    []string // added to the environment of the processes
}

func newWorld(t *testing.T, redisConfig ...string) *world {
	t.Helper()
	return worldOf(t, testenv.Postgres(t), testenv.Redis(t, redisConfig...))
}

func worldOf(t *testing.T, db *testenv.Database, redis *testenv.RedisServer) *world {
	t.Helper()
	return &world{
		t: t, db: db, redis: redis, pgURL: db.URL, rdURL: redis.URL(),
		oracle: testenv.Oracle{DB: db, Redis: redis.Client, Prefix: "outbox."},
	}
}

// onServer returns a world on a Postgres server of its own.
func onServer(t *testing.T, settings ...string) (*world, *testenv.Server) {
	t.Helper()
	server := testenv.NewServer(t, settings...)
	return worldOf(t, server.Database(t), testenv.Redis(t)), server
}

// args returns the flags with the world's addresses.
func (w *world) args(extra ...string) []string {
	args := []string{
		"--relay-name=" + w.db.Relay, "--admin-addr=127.0.0.1:0", "--http-addr=127.0.0.1:0", "--log-level=debug",
		"--log-format=json",
	}
	if w.pgURL != "" { // else the addresses come from the environment
		args = append(args, "--postgres-url="+w.pgURL, "--redis-url="+w.rdURL)
	}
	return append(args, extra...)
}

// child is a process of the program. It collects standard output and standard error.
type child struct {
	t     *testing.T
	cmd   *exec.Cmd
	admin string
	http  string
	mu    sync.Mutex
	log   bytes.Buffer
	read  int           // bytes of the log that were searched for the addresses
	ready chan struct{} // closed when the process has logged its addresses
	done  <-chan struct{}
}

// spawn starts a command of the program as a process and waits until it has logged its addresses.
func (w *world) spawn(command string, extra ...string) *child {
	w.t.Helper()
	return w.spawnAs("", w.env, command, extra...)
}

// spawnAs is spawn for another build of the program and other environment variables than the world's.
func (w *world) spawnAs(exe string, env []string, command string, extra ...string) *child {
	w.t.Helper()
	c := w.fork(exe, env, command, extra...)
	c.started()
	return c
}

// started waits until the child listens.
func (c *child) started() {
	c.t.Helper()
	select {
	case <-c.ready:
	case <-c.done:
		c.t.Fatalf("%s ended: %s", c.cmd.Args[1], c.output())
	case <-time.After(time.Minute):
		c.t.Fatalf("%s does not start: %s", c.cmd.Args[1], c.output())
	}
}

// fork is spawnAs without the wait.
func (w *world) fork(exe string, env []string, command string, extra ...string) *child {
	w.t.Helper()
	args := append([]string{command}, w.args(extra...)...)
	return launch(w.t, program(context.Background(), exe, env, args...), nil)
}

// start starts a command that logs errors only and has no admin listener.
func (w *world) start(args ...string) *child {
	w.t.Helper()
	args = append(args, w.args("--log-level=error", "--admin-addr=")...)
	return launch(w.t, program(context.Background(), "", w.env, args...), nil)
}

// launch starts a process of the program, which ends with the test. terminal is where it writes to, if not nil.
func launch(t *testing.T, cmd *exec.Cmd, terminal io.Reader) *child {
	t.Helper()
	c := &child{t: t, cmd: cmd, ready: make(chan struct{})}
	if terminal == nil {
		cmd.Stdout, cmd.Stderr = c, c
	}
	c.done = testenv.Start(t, cmd).Done()
	if terminal != nil {
		ended, done := c.done, make(chan struct{})
		c.done = done
		go func() {
			_, _ = io.Copy(c, terminal) // until the program has ended
			<-ended
			close(done)
		}()
	}
	t.Cleanup(c.kill)
	return c
}

// Write keeps the child's output and extracts its addresses.
func (c *child) Write(b []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.log.Write(b)
	for c.admin == "" {
		line, _, whole := bytes.Cut(c.log.Bytes()[c.read:], []byte("\n"))
		if !whole {
			break
		}
		c.read += len(line) + 1
		var at struct{ Admin, HTTP string }
		if json.Unmarshal(line, &at) == nil && at.Admin != "" {
			c.admin, c.http = "http://"+at.Admin, "http://"+at.HTTP
			close(c.ready)
		}
	}
	return len(b), nil
}

func (c *child) output() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.log.String()
}

// ends waits for the end of the process, and fails unless the exit code is code and the process has printed texts.
func (c *child) ends(code int, texts ...string) {
	c.t.Helper()
	select {
	case <-c.done:
	case <-time.After(2 * time.Minute):
		c.t.Fatalf("the process has not ended: %q", c.output())
	}
	result{code: c.cmd.ProcessState.ExitCode(), out: c.output()}.says(c.t, code, texts...)
}

// logged reports whether the log has a line with the text.
func (c *child) logged(text string) bool { return strings.Contains(c.output(), text) }

// waitLogged waits until the log has a line with the text. The log comes through a pipe, so the effect of an action may
// be visible before its line.
func (c *child) waitLogged(text string) {
	c.t.Helper()
	testenv.Eventually(c.t, 20*time.Second, func() error {
		return testenv.FailIf(!c.logged(text), "nothing is logged of %q: %s", text, c.output())
	})
}

func (c *child) signal(sig os.Signal) {
	c.t.Helper()
	must(c.t, c.cmd.Process.Signal(sig))
}

func (c *child) kill() {
	_ = c.cmd.Process.Signal(syscall.SIGCONT)
	_ = c.cmd.Process.Kill()
	<-c.done
	if c.t.Failed() && os.Getenv("POSTHASTE_TEST_LOGS") != "" {
		_ = os.WriteFile(filepath.Join(os.Getenv("POSTHASTE_TEST_LOGS"),
			fmt.Sprintf("%s-%d.log", strings.ReplaceAll(c.t.Name(), "/", "_"), c.cmd.Process.Pid)), []byte(c.output()),
			0o600)
	}
}

// stop sends SIGTERM to the child and returns its exit code.
func (c *child) stop() int {
	c.t.Helper()
	c.signal(syscall.SIGTERM)
	select {
	case <-c.done:
	case <-time.After(60 * time.Second):
		c.t.Fatalf("the process does not stop: %s", c.output())
	}
	return c.cmd.ProcessState.ExitCode()
}

// stops is stop for a process that must exit with 0.
func (c *child) stops() {
	c.t.Helper()
	if code := c.stop(); code != 0 {
		c.t.Errorf("exit code %d after SIGTERM: %s", code, c.output())
	}
}

// get sends a request to the admin listener and decodes the response.
func (c *child) get(path string, into any) (int, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	a, err := testenv.Request(ctx, http.MethodGet, c.admin+path, "")
	if err == nil && into != nil {
		err = json.Unmarshal(a.Body, into)
	}
	return a.Status, err
}

// setMode sets the mode through the admin listener.
func (c *child) setMode(mode string) {
	c.t.Helper()
	a, err := testenv.Request(c.t.Context(), http.MethodPut, c.admin+"/relay/mode", fmt.Sprintf(`{"mode":%q}`, mode))
	if err != nil || a.Status != http.StatusOK {
		c.t.Fatalf("set mode %s: status %d, %v", mode, a.Status, err)
	}
}

// waitMode waits until the relay is in the mode.
func (w *world) waitMode(mode string) {
	w.t.Helper()
	testenv.Eventually(w.t, time.Minute, func() error {
		var active string
		const query = "SELECT split_part(active_mode, '.', 1) FROM relay_state"
		err := w.db.Pool.QueryRow(w.t.Context(), query).Scan(&active)
		if err != nil {
			return err
		}
		return testenv.FailIf(active != mode, "mode is %s, want %s", active, mode)
	})
}

// switches sets the desired mode through the relay's admin listener, and waits until the relay is in the mode.
func (w *world) switches(r *child, mode string) {
	w.t.Helper()
	r.setMode(mode)
	if mode == "auto" {
		mode = "cdc"
	}
	w.waitMode(mode)
}

func TestBacklogFromBeforeTheFirstStartArrives(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	load := w.wrote(testenv.LoadOptions{Total: 5000, Types: []string{"order", "invoice"}})
	w.spawn("relay")
	w.oracle.Check(t, load, 20*time.Second)
	w.waitMode("cdc")
	more := w.wrote(testenv.LoadOptions{Total: 300, Aggregates: 5, Types: []string{"late"}})
	w.oracle.Check(t, more, 10*time.Second)
}

func TestTogglesUnderLoad(t *testing.T) {
	t.Parallel()
	w, r, load := underLoad(t, "cdc", 1000)
	toggles := scale(10, 4)
	for i := range toggles {
		w.switches(r, []string{"poll", "auto"}[i%2])
	}
	w.ended(load)
}

var must = testenv.Must
