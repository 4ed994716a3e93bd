package testenv

import (
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
)

// programs are the builds for all tests of this process, by tag, in a folder that Main removes.
var programs struct {
	sync.Mutex
	dir   string
	paths map[string]string
}

// Program returns the path of posthaste built with a tag, or "" for none. It is built once.
func Program(tb testing.TB, tag string) string {
	tb.Helper()
	programs.Lock()
	defer programs.Unlock()
	if path := programs.paths[tag]; path != "" {
		return path
	}
	if programs.dir == "" {
		dir, err := os.MkdirTemp("", "posthaste-programs-")
		Must(tb, err)
		programs.dir, programs.paths = dir, map[string]string{}
	}
	path := filepath.Join(programs.dir, "posthaste"+tag)
	cmd := exec.CommandContext(tb.Context(), "go", "build", "-tags", tag, "-o", path, "./cmd/posthaste")
	cmd.Dir = Root(tb)
	if out, err := cmd.CombinedOutput(); err != nil {
		tb.Fatalf("go build: %v: %s", err, out)
	}
	programs.paths[tag] = path
	return path
}
