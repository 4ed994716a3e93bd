package prove

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"posthaste/internal/lab/local"
)

// process is a child: this binary, run with a command. It keeps its addresses and its log across restarts.
type process struct {
	name string
	args []string
	env  []string
	// admin and http are its addresses; http is empty if the child has no public listener.
	admin, http string
	log         string
	holds       []*os.File // keep its ports reserved

	mu   sync.Mutex
	proc *local.Process
}

// newProcess prepares a child without starting it. The log goes to a file in dir.
func newProcess(name, dir string, env []string, args ...string) (*process, error) {
	p := &process{name: name, env: env, log: filepath.Join(dir, name+".log"), args: args}
	listen := func(flag string) (string, error) {
		port, hold, err := local.ReservePort()
		addr := fmt.Sprintf("127.0.0.1:%d", port)
		p.args, p.holds = append(p.args, flag+addr), append(p.holds, hold)
		return addr, err
	}
	var err error
	if p.admin, err = listen("--admin-addr="); err == nil && args[0] == "serve" {
		p.http, err = listen("--http-addr=")
	}
	return p, err
}

func (p *process) start() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.proc != nil && p.proc.Running() {
		return nil
	}
	exe, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find this binary: %w", err)
	}
	file, err := os.OpenFile(p.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return fmt.Errorf("open the log of %s: %w", p.name, err)
	}
	defer func() { _ = file.Close() }() // the child has its own
	cmd := exec.Command(exe, p.args...) //nolint:noctx // the campaign itself ends the child
	cmd.Env = append(environment(), p.env...)
	cmd.Stderr = file
	if p.proc, err = local.StartProcess(cmd, syscall.SIGKILL); err != nil {
		return fmt.Errorf("start %s: %w", p.name, err)
	}
	return nil
}

// environment returns the environment of this process without settings: only the campaign configures its children.
func environment() []string {
	return slices.DeleteFunc(os.Environ(), func(v string) bool {
		return strings.HasPrefix(v, "PG") || strings.HasPrefix(v, "POSTHASTE_") &&
			!strings.HasPrefix(v, "POSTHASTE_TEST_")
	})
}

// kill ends the child with SIGKILL, even if it is frozen.
func (p *process) kill() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.proc.Stop(syscall.SIGKILL, 10*time.Second)
}

// stop ends the child in order and returns its exit code.
func (p *process) stop(grace time.Duration) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.proc.Running() {
		return 0, nil
	}
	err := p.proc.Stop(syscall.SIGTERM, grace)
	return p.proc.ExitCode(), err
}

// freeze suspends the child, thaw resumes it.
func (p *process) freeze() error { return p.signal(syscall.SIGSTOP) }
func (p *process) thaw() error   { return p.signal(syscall.SIGCONT) }

func (p *process) signal(s syscall.Signal) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.proc.Signal(s)
}

func (p *process) ended() (bool, int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.proc == nil || p.proc.Running() {
		return false, 0
	}
	return true, p.proc.ExitCode()
}

// close ends the child and releases its ports.
func (p *process) close() {
	if p.proc != nil {
		_ = p.kill()
	}
	for _, h := range p.holds {
		_ = h.Close()
	}
}

// readiness is the answer of a process to GET /readyz.
type readiness struct {
	Status   int      `json:"-"`
	Role     string   `json:"role"`
	Reasons  []string `json:"reasons"`
	Degraded []string `json:"degraded"`
}

// ready requests /readyz. If the process does not answer, the status is 0.
func (p *process) ready(ctx context.Context) (r readiness) {
	a, err := p.get(ctx, "/readyz")
	if err != nil || json.Unmarshal(a.Body, &r) != nil {
		return readiness{}
	}
	r.Status = a.Status
	return r
}

// get sends a request to the child's admin listener.
func (p *process) get(ctx context.Context, path string) (local.Answer, error) {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	return local.Request(ctx, http.MethodGet, "http://"+p.admin+path, "")
}
