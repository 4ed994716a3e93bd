// Package local runs Postgres and Redis servers of its own as child processes: for the demo, and for tests through
// internal/testenv. A server lives in a directory of the caller's, listens on a free loopback port, and dies with this
// process: on Linux whatever kills it, elsewhere when it stops in order.
package local

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"sync"
	"syscall"
	"time"
)

// Process is a child whose life is bound to this process's.
type Process struct {
	cmd  *exec.Cmd
	done chan struct{}
	err  error
}

// StartProcess runs cmd in a process group of its own, so that it does not get what a terminal sends to this process.
// Whatever ends this process sends deathSignal to the child.
func StartProcess(cmd *exec.Cmd, deathSignal syscall.Signal) (*Process, error) {
	return start(cmd, deathSignal, nil)
}

// start runs cmd. The starting thread is kept until the child ends, because Linux sends the parent-death signal when
// the thread that forked dies, not the process.
func start(cmd *exec.Cmd, deathSignal syscall.Signal, cred *syscall.Credential) (*Process, error) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Credential: cred}
	dieWithParent(cmd.SysProcAttr, deathSignal)
	p := &Process{cmd: cmd, done: make(chan struct{})}
	started := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine, after the child
		if err := cmd.Start(); err != nil {
			close(p.done)
			started <- err
			return
		}
		started <- nil
		p.err = cmd.Wait()
		close(p.done)
	}()
	return p, <-started
}

// Running tells whether it has not ended yet.
func (p *Process) Running() bool {
	select {
	case <-p.done:
		return false
	default:
		return true
	}
}

// Signal sends sig; a process that is gone already is no error.
func (p *Process) Signal(sig os.Signal) error {
	if err := p.cmd.Process.Signal(sig); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	return nil
}

// PID is the number of the process.
func (p *Process) PID() int { return p.cmd.Process.Pid }

// ExitCode is that of a process that has ended; -1 if a signal has ended it.
func (p *Process) ExitCode() int { return p.cmd.ProcessState.ExitCode() }

// Stop sends sig and waits; after the grace period it kills.
func (p *Process) Stop(sig os.Signal, grace time.Duration) error {
	if err := p.Signal(sig); err != nil {
		return err
	}
	select {
	case <-p.done:
	case <-time.After(grace):
		_ = p.Signal(syscall.SIGKILL)
		<-p.done
	}
	return nil
}

// ReservePort takes a free loopback port and keeps it until hold is closed: a socket that is bound and does not listen.
// A server that asks for just this port gets it, now and after every restart, because both let their address be shared;
// whoever asks for any free port gets another one, and clients are refused while the server is down.
func ReservePort() (port int, hold *os.File, err error) { return reserve(0) }

// reserve is ReservePort for one port in particular. It fails if somebody has it, reserved it may be and no more.
func reserve(want int) (port int, hold *os.File, err error) {
	fd, err := socket()
	if err != nil {
		return 0, nil, fmt.Errorf("reserve a port: %w", err)
	}
	hold = os.NewFile(uintptr(fd), "reserved port")
	share := func() error { return syscall.SetsockoptInt(fd, syscall.SOL_SOCKET, syscall.SO_REUSEADDR, 1) }
	if want == 0 {
		err = share()
	}
	if err == nil {
		err = syscall.Bind(fd, &syscall.SockaddrInet4{Port: want, Addr: [4]byte{127, 0, 0, 1}})
	}
	if err == nil {
		err = share() // before, it would have shared the port with whoever has reserved it
	}
	var at syscall.Sockaddr
	if err == nil {
		at, err = syscall.Getsockname(fd)
	}
	if err != nil {
		_ = hold.Close()
		return 0, nil, fmt.Errorf("reserve a port: %w", err)
	}
	return at.(*syscall.SockaddrInet4).Port, hold, nil
}

// socket makes a TCP socket that no child inherits.
func socket() (int, error) {
	syscall.ForkLock.RLock()
	defer syscall.ForkLock.RUnlock()
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM, 0)
	if err == nil {
		syscall.CloseOnExec(fd)
	}
	return fd, err
}

// tail keeps the last bytes a child printed, for error messages.
type tail struct {
	mu  sync.Mutex
	buf []byte
}

var _ io.Writer = (*tail)(nil)

func (t *tail) Write(b []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.buf = append(t.buf, b...)
	if over := len(t.buf) - 16<<10; over > 0 {
		t.buf = t.buf[over:]
	}
	return len(b), nil
}

func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return string(t.buf)
}
