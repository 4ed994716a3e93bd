package main

import (
	"errors"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"posthaste/internal/testenv"
)

// A running process accepts a key printed by keygen after SIGHUP. The signal does not end the process.
func TestKeygenMakesKeysThatARunningAPITakes(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	file := filepath.Join(t.TempDir(), "keys")
	add := func(args ...string) string {
		t.Helper()
		r := w.once(append([]string{"keygen"}, args...)...)
		line, key := r.out, strings.TrimSpace(r.errOut)
		if r.code != 0 || strings.Count(line, "\n") != 1 || len(key) < 20 || strings.Contains(line, key) {
			t.Fatalf("exit %d: %q, %q", r.code, line, key)
		}
		f, err := os.OpenFile(file, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
		if err == nil {
			_, err = f.WriteString(line)
		}
		must(t, errors.Join(err, f.Close()))
		return key
	}
	first := add("--user=*", "--name=shop", "--scopes=read", "--expires=2999-01-01")
	c := w.spawn("serve", "--auth=keys", "--auth-keys-file="+file)
	takes := func(key string) {
		t.Helper()
		testenv.Eventually(t, 20*time.Second, func() error {
			url := c.http + "/orders?user_id=0b3c1f9e-8a57-4d0e-9d55-2f4a6b1c7e22"
			a, err := testenv.Request(t.Context(), http.MethodGet, url, "", "Authorization", "Bearer "+key)
			return testenv.FailIf(err != nil || a.Status != http.StatusOK, "status %d, %w", a.Status, err)
		})
	}
	takes(first)
	second := add("--user=*")
	c.signal(syscall.SIGHUP)
	takes(second)
	takes(first)
	w.once("keygen", "--user=nobody").oneLine(t, 2, "neither a user id nor *")
	w.once("keygen", "--user=*", "--name=a b").oneLine(t, 2, "space")
	c.stop()
}
