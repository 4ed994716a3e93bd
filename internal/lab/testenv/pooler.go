package testenv

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"posthaste/internal/lab/local"
)

// PgBouncer starts a PgBouncer in front of the server of dsn, with a pool mode, and returns dsn through it. Settings
// are lines of its configuration. POSTHASTE_TEST_PGBOUNCER_BIN selects another program.
func PgBouncer(tb testing.TB, dsn, mode string, settings ...string) string {
	tb.Helper()
	bin := os.Getenv("POSTHASTE_TEST_PGBOUNCER_BIN")
	for _, name := range []string{"pgbouncer", "/usr/sbin/pgbouncer"} { // Debian's, which is not in every PATH
		if path, err := exec.LookPath(name); bin == "" && err == nil {
			bin = path
		}
	}
	if bin == "" {
		tb.Fatal("no pgbouncer found; scripts/ensure.sh pgbouncer installs it")
	}
	port, hold, err := local.ReservePort()
	Must(tb, err)
	tb.Cleanup(func() { _ = hold.Close() })
	dir := folder(tb, "pgbouncer")
	server := parse(dsn)
	config := append([]string{
		"[databases]", fmt.Sprintf("* = host=%s port=%s", server.Hostname(), server.Port()),
		"[pgbouncer]", "listen_addr = 127.0.0.1", fmt.Sprintf("listen_port = %d", port), "unix_socket_dir =",
		"auth_type = plain", "auth_file = " + filepath.Join(dir, "users"), "pool_mode = " + mode,
	}, settings...)
	users := fmt.Sprintf("%q %q\n", server.User.Username(), Password(dsn))
	for name, text := range map[string]string{"users": users, "ini": strings.Join(config, "\n") + "\n"} {
		Must(tb, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644))
	}
	cmd := exec.Command(bin, filepath.Join(dir, "ini")) //nolint:noctx // ended by the test
	var out bytes.Buffer
	cmd.Dir, cmd.Stdout, cmd.Stderr = dir, &out, &out
	proc, err := local.StartServer(cmd, dir, syscall.SIGKILL)
	Must(tb, err)
	tb.Cleanup(func() { _ = proc.Stop(syscall.SIGKILL, time.Second) })
	url := Through(dsn, fmt.Sprintf("127.0.0.1:%d", port))
	Eventually(tb, 20*time.Second, func() error {
		if !proc.Running() {
			tb.Fatalf("pgbouncer ended while starting: %s", out.String())
		}
		c, err := pgx.Connect(tb.Context(), url)
		if err == nil {
			_ = c.Close(context.WithoutCancel(tb.Context()))
		}
		return err
	})
	return url
}
