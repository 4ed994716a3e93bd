package jetstream_test

import (
	"errors"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"posthaste/internal/testenv"
)

// TestDiskFull fills the disk of the server, which disables JetStream until it is restarted. The relay is not ready,
// names the disk, and continues when there is room again.
func TestDiskFull(t *testing.T) {
	t.Parallel()
	disk := testenv.Disk(t, 64<<20)
	s := startServer(t, 1)
	s.nodes[0].Folder = disk
	s.start()
	w := newShop(t, "", s)
	p := w.relay()
	w.works()
	filler := filepath.Join(disk, "filler")
	if err := os.WriteFile(filler, make([]byte, 64<<20), 0o600); !errors.Is(err, syscall.ENOSPC) {
		t.Fatalf("the disk is not full: %v", err)
	}
	testenv.Eventually(t, time.Minute, func() error {
		status, body := p.readyz(t)
		return testenv.FailIf(status != http.StatusServiceUnavailable || !strings.Contains(body, "disk"),
			"readyz is %d: %s", status, body)
	})
	testenv.Must(t, os.Remove(filler))
	s.restart()
	w.works()
	testenv.Eventually(t, time.Minute, func() error {
		status, body := p.readyz(t)
		return testenv.FailIf(status != http.StatusOK, "readyz is %d: %s", status, body)
	})
	w.check()
}

// readyz requests the readiness of a relay, at the address that its log has.
func (p *process) readyz(t *testing.T) (int, string) {
	t.Helper()
	log, err := os.ReadFile(p.log)
	testenv.Must(t, err)
	at := regexp.MustCompile(`"admin":"([^"]+)"`).FindSubmatch(log)
	if at == nil {
		return 0, "it does not listen"
	}
	resp, err := http.Get("http://" + string(at[1]) + "/readyz") //nolint:noctx // of a test
	if err != nil {
		return 0, err.Error()
	}
	defer func() { _ = resp.Body.Close() }()
	body, err := io.ReadAll(resp.Body)
	testenv.Must(t, err)
	return resp.StatusCode, string(body)
}
