package deploy

import (
	"bufio"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// build builds the program once more, from Go's cache.
func build(t *testing.T) string {
	t.Helper()
	program := filepath.Join(t.TempDir(), "posthaste")
	cmd := exec.CommandContext(t.Context(), "go", "build", "-o", program, "./cmd/posthaste")
	cmd.Dir = ".."
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return program
}

// TestManifestsProcesses runs what the pods run, with their settings (on other ports), and with servers that are down:
// it is alive, not ready, and stops in order. Without the Secret's token, it refuses to start.
func TestManifestsProcesses(t *testing.T) {
	t.Parallel()
	program, m := build(t), render(t, example)
	for name, d := range m.deployments {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := container(t, d.Spec.Template)
			env := []string{
				"POSTHASTE_POSTGRES_URL=postgres://127.0.0.1:1/x", "POSTHASTE_REDIS_URL=redis://127.0.0.1:1/0",
			}
			for _, config := range m.configs {
				for key, value := range config.Data {
					env = append(env, key+"="+value)
				}
			}
			for key, value := range environment(c) {
				host, _, _ := strings.Cut(value, ":")
				env = append(env, key+"="+host+":0")
			}
			cmd := exec.CommandContext(t.Context(), program, c.Args...)
			cmd.Env = env
			var exit *exec.ExitError
			if out, err := cmd.CombinedOutput(); !errors.As(err, &exit) || exit.ExitCode() != 2 {
				t.Errorf("without a token: %v, want exit code 2\n%s", err, out)
			}
			cmd = exec.CommandContext(t.Context(), program, c.Args...)
			cmd.Env = append(env, "POSTHASTE_ADMIN_TOKEN=token")
			url := "http://" + start(t, cmd)
			if got := status(t, url+c.LivenessProbe.HTTPGet.Path); got != http.StatusOK {
				t.Errorf("servers that are down restart the pod: %s says %d", c.LivenessProbe.HTTPGet.Path, got)
			}
			if got := status(t, url+c.ReadinessProbe.HTTPGet.Path); got != http.StatusServiceUnavailable {
				t.Errorf("servers that are down leave the pod ready: %s says %d", c.ReadinessProbe.HTTPGet.Path, got)
			}
			if got := status(t, url+m.monitors["posthaste"].Spec.Endpoints[0].Path); got != http.StatusOK {
				t.Errorf("the scrape is answered with %d", got)
			}
			if err := errors.Join(cmd.Process.Signal(syscall.SIGTERM), cmd.Wait()); err != nil {
				t.Errorf("stop: %v", err)
			}
		})
	}
}

// start starts a process and returns the address of its admin listener, which it logs.
func start(t *testing.T, cmd *exec.Cmd) string {
	t.Helper()
	r, w, err := os.Pipe()
	must(t, err)
	cmd.Stderr = w
	must(t, cmd.Start())
	_ = w.Close()
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = r.Close()
	})
	lines := bufio.NewScanner(r)
	for lines.Scan() {
		var line struct{ Admin string }
		if json.Unmarshal(lines.Bytes(), &line) == nil && line.Admin != "" {
			go func() { _, _ = io.Copy(io.Discard, r) }()
			return strings.Replace(line.Admin, "[::]", "127.0.0.1", 1)
		}
	}
	t.Fatalf("no admin listener; the end of its log: %s, %v", lines.Text(), lines.Err())
	return ""
}

func status(t *testing.T, url string) int {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, http.NoBody)
	must(t, err)
	resp, err := http.DefaultClient.Do(req)
	must(t, err)
	defer resp.Body.Close()
	_, _ = io.Copy(io.Discard, resp.Body)
	return resp.StatusCode
}
