package docs_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/uuid"

	"posthaste/internal/lab/local"
	"posthaste/internal/lab/testenv"
)

// notRun begins the comment above a block of commands that no test runs. The reason follows.
const notRun = "<!-- Not run by a test: "

// block is one fenced block of a page.
type block struct {
	line int // of the opening fence
	lang string
	text string
	// reason is why no test runs it; empty if a test does.
	reason string
}

// runnable are the languages of blocks that are commands; others are only shown.
var runnable = []string{"sh", "sql"}

// blocks returns the page's fenced blocks.
func (p page) blocks() []block {
	var list []block
	var current *block
	reason, paragraph := "", false // of the paragraph above
	for i, line := range strings.Split(p.text, "\n") {
		trimmed := strings.TrimSpace(line)
		switch {
		case current == nil && strings.HasPrefix(trimmed, "```"):
			current = &block{line: i + 1, lang: strings.TrimPrefix(trimmed, "```"), reason: reason}
			reason, paragraph = "", false
		case current != nil && trimmed == "```":
			list = append(list, *current)
			current = nil
		case current != nil:
			current.text += line + "\n"
		case trimmed == "":
			paragraph = false
		case !paragraph:
			paragraph = true
			reason, _ = strings.CutPrefix(trimmed, notRun)
			if reason == trimmed {
				reason = ""
			}
		}
	}
	return list
}

var commandPattern = regexp.MustCompile(`(?m)^\s*(?:\$ ` +
	`)?(?:\./bin/)?(?:posthaste|curl|psql|redis-cli|docker|make|go|sudo) `)

// TestDocsBlocks: commands are in blocks that are marked as such, so that TestDocsRun finds them.
func TestDocsBlocks(t *testing.T) {
	t.Parallel()
	for _, p := range pages(t) {
		for _, b := range p.blocks() {
			if slices.Contains(runnable, b.lang) {
				continue
			}
			if (b.lang == "" || b.lang == "bash" || b.lang == "shell" || b.lang == "console") &&
				commandPattern.MatchString(b.text) {
				t.Errorf("%s:%d: commands in a block of language %q: say sh, or sql", p.name, b.line, b.lang)
			}
			if b.reason != "" {
				t.Errorf("%s:%d: no test would run this block anyway: %q", p.name, b.line, b.reason)
			}
		}
	}
}

// TestDocsRun runs every block of commands of every page, in order, in one shell per page, against a database, a Redis,
// an API and a relay of the page's own. The paragraph above a block that cannot be run gives the reason:
//
//	<!-- Not run by a test: needs Docker. -->
//
// The reader fills in assignments with HOST or PORT in capitals; here they name the page's servers.
func TestDocsRun(t *testing.T) {
	t.Parallel()
	for _, p := range pages(t) {
		run := slices.DeleteFunc(p.blocks(), func(b block) bool {
			return b.reason != "" || !slices.Contains(runnable, b.lang)
		})
		if len(run) == 0 {
			continue
		}
		t.Run(p.name, func(t *testing.T) {
			t.Parallel()
			newGuide(t).run(p, run)
		})
	}
}

// guide is the environment of a page: its servers and processes.
type guide struct {
	t     *testing.T
	dir   string // looks like the repository, with bin/posthaste
	env   map[string]string
	redis *testenv.RedisServer
	db    *testenv.Database
}

// newGuide starts servers, serve and relay, places an order, and causes the problems that the pages explain: a parked
// event, a consumer group that is behind, and one without consumers.
func newGuide(t *testing.T) *guide {
	t.Helper()
	server := testenv.NewServer(t)
	g := &guide{t: t, dir: t.TempDir(), redis: testenv.Redis(t), db: server.Database(t)}
	g.env = map[string]string{
		"POSTHASTE_POSTGRES_URL": g.db.URL, "POSTHASTE_REDIS_URL": g.redis.URL(), "POSTHASTE_DB_PASSWORD": "owner",
		"POSTHASTE_API_DB_PASSWORD": "api",
		"PGOPTIONS":                 "-c client_min_messages=warning", "POSTHASTE_ADMIN_ADDR": "127.0.0.1:0",
		"POSTHASTE_HTTP_ADDR": "127.0.0.1:0",
	}
	g.layOut()
	g.env["API"], g.env["API_ADMIN"] = g.start("serve")
	_, g.env["RELAY"] = g.start("relay")
	// Objects that the pages expect the reader to have.
	g.db.Exec(t, "CREATE DATABASE "+readersDatabase)
	g.db.Exec(t, "CREATE TABLE invoice (number text PRIMARY KEY, total int)")
	g.db.Exec(t, "CREATE ROLE app LOGIN")
	for _, cmd := range [][]any{
		{"set", "outbox.broken", "not a stream"},
		{"xgroup", "create", "outbox.order", "mailer", "0", "mkstream"},
		{"xgroup", "create", "outbox.order", "abandoned", "0"},
	} {
		must(t, g.redis.Client.Do(t.Context(), cmd...).Err())
	}
	g.db.Exec(t, `INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload) VALUES `+
		`(gen_random_uuid(), 'broken', '1', 'broken.made', '{}')`)
	g.order()
	testenv.Eventually(t, 30*time.Second, func() error {
		var parked, waiting int
		var mode string
		err := g.db.Pool.QueryRow(t.Context(),
			"SELECT (SELECT count(*) FROM outbox_dead), (SELECT count(*) FROM outbox_backlog), active_mode "+
				"FROM relay_state").
			Scan(&parked, &waiting, &mode)
		return testenv.FailIf(err != nil || parked != 1 || waiting != 0 || mode != "cdc",
			"%d events parked, %d waiting, mode %s, %w", parked, waiting, mode, err)
	})
	// The cause is removed, so that a retry succeeds.
	must(t, g.redis.Client.Del(t.Context(), "outbox.broken").Err())
	return g
}

// layOut makes the folder that commands run in.
func (g *guide) layOut() {
	g.t.Helper()
	root := testenv.Root(g.t)
	entries, err := os.ReadDir(root)
	must(g.t, err)
	for _, e := range entries {
		if e.Name() != "bin" {
			must(g.t, os.Symlink(filepath.Join(root, e.Name()), filepath.Join(g.dir, e.Name())))
		}
	}
	bin := filepath.Join(g.dir, "bin")
	must(g.t, os.Mkdir(bin, 0o755))
	// Blocks that run until they are interrupted are interrupted.
	must(g.t, os.WriteFile(filepath.Join(bin, "posthaste"), []byte(`#!/bin/sh
case " $* " in
*" --watch "* | " consume "*) exec timeout --foreground --preserve-status -s INT 6 `+testenv.Program(g.t, "")+` "$@" ;;
esac
exec `+testenv.Program(g.t, "")+` "$@"
`), 0o755))
	pgBin, err := local.PostgresBin(g.t.Context(), os.Getenv("POSTHASTE_TEST_PG_BIN"))
	must(g.t, err)
	if _, err := os.Stat(filepath.Join(pgBin, "psql")); err == nil {
		must(g.t, os.Symlink(filepath.Join(pgBin, "psql"), filepath.Join(bin, "psql")))
	}
	g.env["PATH"] = bin + ":" + os.Getenv("PATH")
}

func (g *guide) environ() []string {
	env := os.Environ()
	for k, v := range g.env {
		env = append(env, k+"="+v)
	}
	return env
}

// start runs a command of posthaste until the test ends, and returns its addresses.
func (g *guide) start(command string) (api, admin string) {
	g.t.Helper()
	cmd := exec.Command(testenv.Program(g.t, ""), command, "--log-format=json") //nolint:noctx // ended below
	cmd.Env = g.environ()
	log, err := cmd.StderrPipe()
	must(g.t, err)
	testenv.Start(g.t, cmd)
	lines := bufio.NewScanner(log)
	for lines.Scan() {
		var line struct{ Admin, HTTP string }
		if json.Unmarshal(lines.Bytes(), &line) == nil && line.Admin != "" {
			go func() { _, _ = io.Copy(io.Discard, log) }()
			return "http://" + line.HTTP, "http://" + line.Admin
		}
	}
	g.t.Fatalf("%s ended before it said where it listens", command)
	return "", ""
}

// order places an order; pages know it as ORDER, placed by USER_ID with KEY.
func (g *guide) order() {
	g.t.Helper()
	user, key := uuid.NewString(), uuid.NewString()
	testenv.Eventually(g.t, 20*time.Second, func() error {
		a, err := testenv.Request(g.t.Context(), http.MethodPost, g.env["API"]+"/orders",
			fmt.Sprintf(`{"user_id":%q,"amount":1999,"currency":"USD"}`, user), "Idempotency-Key", key)
		var order struct{ ID string }
		err = errors.Join(err, json.Unmarshal(a.Body, &order))
		g.env["ORDER"], g.env["USER_ID"], g.env["KEY"] = order.ID, user, key
		return testenv.FailIf(err != nil || a.Status != http.StatusCreated, "POST /orders: %d, %w", a.Status, err)
	})
}

// readersDatabase is the pages' name for the database of a service that writes events.
const readersDatabase = "shop"

// fillPattern is an assignment that the reader fills in.
var fillPattern = regexp.MustCompile(`(?m)^(?:export )?([A-Z_]+)=\S*\b(?:HOST|PORT)\b\S*.*$`)

// foreground is a process that the reader keeps running in another terminal; here it has a moment to fail.
var foreground = regexp.MustCompile(`(?m)^posthaste (?:relay|serve)\b[^&\n]*$`)

// run runs blocks of a page as one script.
func (g *guide) run(p page, list []block) {
	g.t.Helper()
	var script strings.Builder
	script.WriteString("set -eE\ntrap 'echo \"failed: $at: $BASH_COMMAND\" >&2' ERR\n")
	for _, b := range list {
		fmt.Fprintf(&script, "at=%s:%d\n", p.name, b.line)
		text := fillPattern.ReplaceAllStringFunc(b.text, func(line string) string {
			name := fillPattern.FindStringSubmatch(line)[1]
			value := g.env[name]
			if value == "" {
				g.t.Errorf("%s:%d: the reader fills in %s, and the test has no value for it", p.name, b.line, name)
			}
			if strings.Contains(line, "/"+readersDatabase) {
				value = strings.Replace(value, "/"+g.db.Name, "/"+readersDatabase, 1)
			}
			return "export " + name + "='" + value + "'"
		})
		text = foreground.ReplaceAllString(text, "timeout --foreground --preserve-status -s INT 6 $0")
		if b.lang == "sql" {
			text = "psql -X -q -v ON_ERROR_STOP=1 \"$POSTHASTE_POSTGRES_URL\" <<'END_OF_BLOCK'\n" + text +
				"END_OF_BLOCK\n"
		}
		script.WriteString(text)
	}
	ctx, cancel := context.WithTimeout(g.t.Context(), 10*time.Minute)
	defer cancel()
	file := filepath.Join(g.dir, "page.sh")
	must(g.t, os.WriteFile(file, []byte(script.String()), 0o600))
	// A file, not a pipe: processes that the page leaves running keep it open, and end with the page's process group.
	out, err := os.Create(filepath.Join(g.dir, "page.out"))
	must(g.t, err)
	defer out.Close()
	cmd := exec.CommandContext(ctx, "bash", "-x", file)
	cmd.Dir, cmd.Env, cmd.Stdout, cmd.Stderr = g.dir, g.environ(), out, out
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	<-testenv.Start(g.t, cmd).Done()
	_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
	failed := !cmd.ProcessState.Success()
	if failed || os.Getenv("POSTHASTE_TEST_LOGS") != "" {
		g.t.Logf("%s:\n%s", p.name, read(g.t, out.Name()))
	}
	if failed {
		g.t.Errorf("%s: %v", p.name, cmd.ProcessState)
	}
}

var must = testenv.Must

func read(tb testing.TB, name string) string {
	tb.Helper()
	b, err := os.ReadFile(name)
	must(tb, err)
	return string(b)
}
