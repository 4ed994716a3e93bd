//go:build !linux

package testenv

import "testing"

// inMemory returns "": not every system has such a folder.
func inMemory(string) string { return "" }

// Disk skips the test: not every system mounts a disk in memory the same way.
func Disk(tb testing.TB, _ int) string {
	tb.Helper()
	tb.Skip("a disk in memory is mounted on Linux alone")
	return ""
}

// SmallDisk skips the test as Disk does.
func (s *Server) SmallDisk(tb testing.TB, bytes int) string {
	tb.Helper()
	return Disk(tb, bytes)
}
