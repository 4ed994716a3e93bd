//go:build linux && (amd64 || arm64)

package socket

import (
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"unsafe"
)

// conn is a socket with this package's calls. Close, deadlines and addresses are those of the embedded connection.
type conn struct {
	net.Conn
	raw     syscall.RawConn
	network string
	in, out half
}

// half is one direction: its current call, and the function that makes it, which is allocated once.
type half struct {
	op   string
	wait func(call func(fd uintptr) bool) error
	call func(fd uintptr) bool

	mu  sync.Mutex
	buf []byte
	n   int
	err syscall.Errno
}

func quiet(c net.Conn) net.Conn {
	switch c.(type) {
	case *net.TCPConn, *net.UnixConn:
	default:
		return c
	}
	raw, err := c.(syscall.Conn).SyscallConn()
	if err != nil {
		return c
	}
	q := &conn{Conn: c, raw: raw, network: c.LocalAddr().Network()}
	q.in.op, q.in.wait, q.in.call = "read", raw.Read, q.in.read
	q.out.op, q.out.wait, q.out.call = "write", raw.Write, q.out.write
	return q
}

// read reads once. It returns false if there is nothing to read; the poller then calls it again.
func (h *half) read(fd uintptr) bool {
	n, err := recv(fd, h.buf)
	h.n, h.err = n, err
	return err != syscall.EAGAIN
}

// write writes all of buf. It returns false if there is no room; the poller then calls it again.
func (h *half) write(fd uintptr) bool {
	for h.n < len(h.buf) {
		n, err := send(fd, h.buf[h.n:])
		if n == 0 && err == 0 {
			err = syscall.EIO // neither progress nor an error
		}
		if err != 0 {
			h.err = err
			return err != syscall.EAGAIN
		}
		h.n, h.err = h.n+n, 0
	}
	return true
}

// again makes a call that does not block, and repeats it after signals. b is not empty.
func again(trap, fd uintptr, b []byte, flags uintptr) (int, syscall.Errno) {
	for {
		//nolint:gosec // a system call takes an address
		n, _, err := syscall.RawSyscall6(trap, fd, uintptr(unsafe.Pointer(&b[0])), uintptr(len(b)),
			syscall.MSG_DONTWAIT|flags, 0, 0)
		switch err {
		case 0:
			return int(n), 0
		case syscall.EINTR:
		default:
			return 0, err
		}
	}
}

func (c *conn) Read(b []byte) (int, error) {
	if len(b) == 0 {
		return 0, nil
	}
	n, err := c.do(&c.in, b)
	if n == 0 && err == nil {
		return 0, io.EOF
	}
	return n, err
}

func (c *conn) Write(b []byte) (int, error) { return c.do(&c.out, b) }

// do makes a call, and waits until the deadline at most. Its error is that of Go's own connection.
func (c *conn) do(h *half, b []byte) (int, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.buf, h.n, h.err = b, 0, 0
	err := h.wait(h.call)
	h.buf = nil
	if err == nil && h.err == 0 {
		return h.n, nil
	}
	if err == nil {
		err = os.NewSyscallError(h.op, h.err)
	}
	if raw, ok := errors.AsType[*net.OpError](err); ok { // of the wait: "raw-read"
		err = raw.Err
	}
	return h.n, &net.OpError{Op: h.op, Net: c.network, Source: c.LocalAddr(), Addr: c.RemoteAddr(), Err: err}
}

// SyscallConn implements syscall.Conn for go-redis, which checks a connection before it takes it out of its pool.
func (c *conn) SyscallConn() (syscall.RawConn, error) { return looker{c.raw}, nil }

// looker is a RawConn that calls its function only if there is data to read, or the connection has ended: the check
// of go-redis uses a call that wakes the thread.
type looker struct{ syscall.RawConn }

func (l looker) Read(f func(fd uintptr) bool) error {
	nothing := false
	err := l.Control(func(fd uintptr) {
		_, err := again(syscall.SYS_RECVFROM, fd, make([]byte, 1), syscall.MSG_PEEK)
		nothing = err == syscall.EAGAIN
	})
	if err != nil || nothing {
		return err
	}
	return l.RawConn.Read(f)
}
