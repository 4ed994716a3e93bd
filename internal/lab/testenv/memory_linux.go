package testenv

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
)

const (
	// room is how many bytes must be free: several times what the servers of the tests use at once.
	room = 6 << 30
	// noexec is the flag of a file system that does not allow executing programs.
	noexec = 0x8
)

// inMemory makes a folder for this process in root, a file system in memory, or returns "" if there is not enough
// room. The user of Postgres may pass through. It first removes the folders of killed processes: memory is scarcer
// than disk.
func inMemory(root string) string {
	stem := filepath.Join(root, "posthaste-test-")
	left, _ := filepath.Glob(stem + "*") // the pattern is valid
	for _, dir := range left {
		pid, err := strconv.Atoi(strings.TrimPrefix(dir, stem))
		if err == nil && errors.Is(syscall.Kill(pid, 0), syscall.ESRCH) {
			disks, _ := filepath.Glob(filepath.Join(dir, "posthaste-disk-*"))
			for _, disk := range disks {
				_ = syscall.Unmount(disk, syscall.MNT_DETACH)
			}
			_ = os.RemoveAll(dir)
		}
	}
	var fs syscall.Statfs_t
	if syscall.Statfs(root, &fs) != nil || fs.Flags&noexec != 0 || fs.Bavail*uint64(fs.Bsize) < room {
		return ""
	}
	dir := stem + strconv.Itoa(os.Getpid())
	if os.Mkdir(dir, 0o700) != nil || os.Chmod(dir, 0o755) != nil { // Mkdir applies the umask
		return ""
	}
	return dir
}

// Disk returns the path of a disk of so many bytes. It skips the test if mounting is not allowed: without root, or in a
// restricted container.
func Disk(tb testing.TB, bytes int) string {
	tb.Helper()
	disk, err := os.MkdirTemp("", "posthaste-disk-")
	Must(tb, err)
	if err := syscall.Mount("tmpfs", disk, "tmpfs", 0, "mode=755,size="+strconv.Itoa(bytes)); err != nil {
		_ = os.Remove(disk)
		tb.Skipf("a disk cannot be mounted here: %v", err)
	}
	tb.Cleanup(func() {
		if err := syscall.Unmount(disk, syscall.MNT_DETACH); err != nil {
			tb.Errorf("unmount %s: %v", disk, err)
		}
		_ = os.Remove(disk)
	})
	return disk
}

// SmallDisk moves the WAL of s to a Disk, and returns its path. s is restarted.
func (s *Server) SmallDisk(tb testing.TB, bytes int) string {
	tb.Helper()
	disk := Disk(tb, bytes)
	tb.Cleanup(func() { _ = s.Stop("immediate") }) // it may be using the disk
	Must(tb, s.Stop("fast"))
	wal := filepath.Join(s.Dir, "data", "pg_wal")
	if out, err := exec.CommandContext(tb.Context(), "cp", "-a", wal, disk).CombinedOutput(); err != nil {
		tb.Fatalf("copy the WAL: %v: %s", err, out)
	}
	Must(tb, errors.Join(os.RemoveAll(wal), os.Symlink(filepath.Join(disk, "pg_wal"), wal), s.Start(tb.Context())))
	return disk
}
