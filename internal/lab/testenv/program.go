package testenv

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"posthaste/internal/lab/local"
)

// building is held while a program is built.
var building sync.Mutex

// Program returns the path of posthaste built with a tag, or "" for none. It is built once.
func Program(tb testing.TB, tag string) string {
	tb.Helper()
	return build(tb, "posthaste"+tag, "-tags", "nomsgpack,"+tag, "./cmd/posthaste")
}

// NatsBin returns the path of nats-server, built from the module that go.mod requires. It is built once.
func NatsBin(tb testing.TB) string {
	tb.Helper()
	return build(tb, "nats-server", "github.com/nats-io/nats-server/v2")
}

// Start starts a process, which is killed when the test or this process ends.
func Start(tb testing.TB, cmd *exec.Cmd) *local.Process {
	tb.Helper()
	p, err := local.StartProcess(cmd, syscall.SIGKILL)
	Must(tb, err)
	tb.Cleanup(func() { _ = p.Stop(syscall.SIGKILL, time.Minute) })
	return p
}

// Nats starts a nats-server, which is killed when the test ends.
func Nats(tb testing.TB) *local.Nats {
	tb.Helper()
	n, err := local.StartNats(tb.Context(), NatsBin(tb), folder(tb, "nats"))
	Must(tb, err)
	tb.Cleanup(func() { _ = n.Kill() })
	return n
}

// build returns the path of a program in home. args are those of go build, without -o.
func build(tb testing.TB, name string, args ...string) string {
	tb.Helper()
	building.Lock()
	defer building.Unlock()
	path := filepath.Join(home, name)
	if _, err := os.Stat(path); err == nil {
		return path
	}
	cmd := exec.CommandContext(tb.Context(), "go", append([]string{"build", "-o", path}, args...)...)
	cmd.Dir = Root(tb)
	if out, err := cmd.CombinedOutput(); err != nil {
		tb.Fatalf("go build: %v: %s", err, out)
	}
	return path
}

// Traced returns the steps that programs with failpoints have written to POSTHASTE_FAILPOINT_TRACE.
func Traced(tb testing.TB, files ...string) map[string]bool {
	tb.Helper()
	steps := map[string]bool{}
	for _, file := range files {
		text, err := os.ReadFile(file)
		Must(tb, err)
		for step := range strings.Lines(string(text)) {
			steps[strings.TrimSpace(step)] = true
		}
	}
	return steps
}
