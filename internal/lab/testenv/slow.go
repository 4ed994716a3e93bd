package testenv

import (
	"cmp"
	_ "embed"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"
)

//go:embed testdata/slowsync.c
var slowSync []byte

// RedisOnASlowDisk starts a server whose append-only file is synced every second, the default, on a disk that needs
// delay for each sync. During a sync, Redis delays its writes to the file for up to 2 s, but still answers. It needs
// a C compiler, as the race detector does.
func RedisOnASlowDisk(tb testing.TB, delay time.Duration) *RedisServer {
	tb.Helper()
	bin := redisBin(tb)
	dir := tb.TempDir()
	source, library, wrapper := filepath.Join(dir, "slowsync.c"), filepath.Join(dir, "slowsync.so"),
		filepath.Join(dir, "redis")
	cc := cmp.Or(os.Getenv("CC"), "cc")
	script := fmt.Sprintf("#!/bin/sh\nLD_PRELOAD=%s SLOWSYNC_MS=%d exec %s \"$@\"\n", library, delay.Milliseconds(),
		bin)
	for file, content := range map[string][]byte{source: slowSync, wrapper: []byte(script)} {
		Must(tb, os.WriteFile(file, content, 0o700))
	}
	if out, err := exec.CommandContext(tb.Context(), cc, "-shared", "-fPIC", "-O", "-o", library,
		source).CombinedOutput(); err != nil {
		tb.Fatalf("%s: %v: %s", cc, err, out)
	}
	return redisWith(tb, wrapper, nil, "appendfsync everysec")
}
