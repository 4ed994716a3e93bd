// Package local runs Postgres, Redis and NATS servers as child processes: for the demo, and for tests through
// internal/lab/testenv. A server has its data in a directory of the caller's, listens on a free loopback port, and ends
// with this process: on Linux however the process ends, elsewhere only if it stops in order.
package local

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"sync"
	"syscall"
	"time"

	"github.com/prometheus/procfs"

	"posthaste/internal/pause"
)

// Process is a child that ends with this process.
type Process struct {
	cmd  *exec.Cmd
	done chan struct{}
	out  *tail // of a server
}

// StartProcess runs cmd in its own process group, so that it does not get the terminal's signals. The child gets
// deathSignal when this process ends.
func StartProcess(cmd *exec.Cmd, deathSignal syscall.Signal) (*Process, error) {
	return start(cmd, deathSignal, nil)
}

// StartServer is StartProcess for a server that refuses to run as root: root runs it as another user, to which dir is
// given.
func StartServer(cmd *exec.Cmd, dir string, deathSignal syscall.Signal) (*Process, error) {
	cred, err := serverUser(dir)
	if err != nil {
		return nil, err
	}
	return start(cmd, deathSignal, cred)
}

// start runs cmd. It keeps its thread until the child ends, because Linux sends the parent-death signal when the
// thread that forked ends, not the process.
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
		_ = cmd.Wait()
		close(p.done)
	}()
	return p, <-started
}

// serve starts a server with its data in dir.
func serve(cmd *exec.Cmd, dir string, deathSignal syscall.Signal, cred *syscall.Credential) (*Process, error) {
	out := &tail{}
	cmd.Dir, cmd.Stdout, cmd.Stderr = dir, out, out
	p, err := start(cmd, deathSignal, cred)
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", filepath.Base(cmd.Path), err)
	}
	p.out = out
	return p, nil
}

// await waits until a server answers ping. A server that does not is ended.
func (p *Process) await(ctx context.Context, ping func(ctx context.Context) error) error {
	for deadline := time.Now().Add(60 * time.Second); ; {
		err := ping(ctx)
		switch name := filepath.Base(p.cmd.Path); {
		case err == nil:
			return nil
		case !p.Running():
			return fmt.Errorf("%s ended while starting: %s", name, p.out)
		case time.Now().After(deadline) || pause.For(ctx, 5*time.Millisecond) != nil:
			_ = p.Stop(syscall.SIGQUIT, 5*time.Second)
			return fmt.Errorf("%s does not answer: %w: %s", name, err, p.out)
		}
	}
}

// Done is closed when the process has ended.
func (p *Process) Done() <-chan struct{} { return p.done }

// CPU is the processor time that the process has used, in seconds; 0 if unknown.
func (p *Process) CPU() float64 {
	proc, err := procfs.NewProc(p.PID())
	if err != nil {
		return 0
	}
	s, err := proc.Stat()
	if err != nil {
		return 0
	}
	return s.CPUTime()
}

// Running reports whether the process has not ended.
func (p *Process) Running() bool {
	select {
	case <-p.done:
		return false
	default:
		return true
	}
}

// Signal sends sig. A process that has ended is no error.
func (p *Process) Signal(sig os.Signal) error {
	if err := p.cmd.Process.Signal(sig); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	return nil
}

func (p *Process) PID() int { return p.cmd.Process.Pid }

// ExitCode is the code of a process that has ended; -1 if a signal ended it.
func (p *Process) ExitCode() int { return p.cmd.ProcessState.ExitCode() }

// Stop sends sig and waits; after the grace period it kills the process. One that was not started is no error.
func (p *Process) Stop(sig os.Signal, grace time.Duration) error {
	if p == nil {
		return nil
	}
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

// ReservePort reserves a free loopback port until hold is closed, with a socket that is bound but does not listen. A
// server can bind just this port, now and after every restart, because both share the address. A bind to any free
// port gets another one, and connections are refused while the server is down.
func ReservePort() (port int, hold *os.File, err error) { return reserve(0) }

// reserve is ReservePort for a given port. It fails if the port is in use, even if it is only reserved.
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
		err = share() // not before bind, which would then succeed on a reserved port
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

// socket makes a TCP socket that children do not inherit.
func socket() (int, error) {
	syscall.ForkLock.RLock()
	defer syscall.ForkLock.RUnlock()
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM, 0)
	if err == nil {
		syscall.CloseOnExec(fd)
	}
	return fd, err
}

// tail keeps the last bytes of a child's output, for error messages.
type tail struct {
	mu  sync.Mutex
	buf []byte
}

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
