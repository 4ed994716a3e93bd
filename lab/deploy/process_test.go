package deploy

import (
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// TestManifestsProcesses gives the program what the pods give it. It takes the settings, and without the Secret's token
// it refuses to start.
func TestManifestsProcesses(t *testing.T) {
	t.Parallel()
	program := filepath.Join(t.TempDir(), "posthaste")
	output(t, "go", "-C", "..", "build", "-o", program, "./cmd/posthaste")
	m := render(t, example)
	for name, d := range m.deployments {
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
			env = append(env, key+"="+value)
		}
		run := func(env []string, args ...string) (int, string) {
			cmd := exec.CommandContext(t.Context(), program, args...)
			cmd.Env = env
			out, _ := cmd.CombinedOutput()
			return cmd.ProcessState.ExitCode(), string(out)
		}
		if code, out := run(env, c.Args...); code != 2 || !strings.Contains(out, "set --admin-token") {
			t.Errorf("%s without a token: exit %d, want 2: %s", name, code, out)
		}
		code, out := run(append(env, "POSTHASTE_ADMIN_TOKEN=token"), "settings")
		if code != 0 || strings.Contains(out, "not a setting") {
			t.Errorf("%s: settings: exit %d: %s", name, code, out)
		}
	}
}
