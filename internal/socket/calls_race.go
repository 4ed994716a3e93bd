//go:build race && linux && (amd64 || arm64)

package socket

import (
	"errors"
	"syscall"
)

// The race detector needs Go's own calls: they announce the memory they touch, and order everything before any write
// to a connection before everything after a read of any other. Tests that wait for a server's answer depend on that.

func recv(fd uintptr, b []byte) (int, syscall.Errno) { return told(syscall.Read, fd, b) }

func send(fd uintptr, b []byte) (int, syscall.Errno) { return told(syscall.Write, fd, b) }

func told(call func(fd int, b []byte) (int, error), fd uintptr, b []byte) (int, syscall.Errno) {
	for {
		n, err := call(int(fd), b)
		var no syscall.Errno
		if errors.As(err, &no); no != syscall.EINTR {
			return max(n, 0), no
		}
	}
}
