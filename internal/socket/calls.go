//go:build !race && linux && (amd64 || arm64)

package socket

import "syscall"

func recv(fd uintptr, b []byte) (int, syscall.Errno) { return again(syscall.SYS_RECVFROM, fd, b, 0) }

func send(fd uintptr, b []byte) (int, syscall.Errno) {
	return again(syscall.SYS_SENDTO, fd, b, syscall.MSG_NOSIGNAL)
}
