//go:build race && linux && (amd64 || arm64)

package socket

import (
	"errors"
	"syscall"
)

// For the race detector the calls are Go's own: they tell it what memory they touch, and that everything before any
// write to a connection is in front of everything behind a read of any other. Tests that wait for what a server says
// rest on that.

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
