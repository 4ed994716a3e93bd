package testenv

import (
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"
)

// A killed test leaves its servers' data in memory: the next test removes that, and no other data.
func TestWhatTheKilledLeaveInMemoryIsRemoved(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	ended := exec.CommandContext(t.Context(), "true")
	Must(t, ended.Run())
	folder := func(pid int) string { return filepath.Join(root, "posthaste-test-"+strconv.Itoa(pid)) }
	left, others := folder(ended.Process.Pid), folder(os.Getppid())
	for _, dir := range []string{left, others} {
		Must(t, os.MkdirAll(filepath.Join(dir, "data"), 0o700))
	}
	disk := filepath.Join(left, "posthaste-disk-1")
	if err := os.Mkdir(disk, 0o700); err != nil {
		t.Fatal(err)
	}
	if syscall.Mount("tmpfs", disk, "tmpfs", 0, "") == nil { // it is root
		t.Cleanup(func() { _ = syscall.Unmount(disk, syscall.MNT_DETACH) })
	}
	if own := inMemory(root); own != "" && own != folder(os.Getpid()) { // "": a small disk
		t.Errorf("the folder is %s", own)
	}
	if _, err := os.Stat(left); err == nil {
		t.Error("the folder of a process that has ended is still there")
	}
	if _, err := os.Stat(others); err != nil {
		t.Errorf("the folder of a process that runs: %v", err)
	}
}
