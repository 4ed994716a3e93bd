//go:build unix

package sql

import (
	"errors"
	"syscall"
)

// endedByPeer reports whether the server has closed an idle connection: data on it is a final message of the server, or
// the end of the stream.
func endedByPeer(fd uintptr) bool {
	_, _, err := syscall.Recvfrom(int(fd), make([]byte, 1), syscall.MSG_PEEK|syscall.MSG_DONTWAIT)
	return !errors.Is(err, syscall.EAGAIN)
}
