package main

import (
	"strings"
	"testing"
)

// Every command warns in its log about a secret on the command line, without showing the secret.
func TestASecretAmongTheFlagsIsWarnedAbout(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		flag  string
		lines int
	}{
		{"--admin-token=" + secret, 1},
		{"--redis-url=redis://:" + secret + "@127.0.0.1", 1},
		{"--redis-url=redis://127.0.0.1", 0},
	} {
		r := runToEnd(t, "version", "--log-format=json", c.flag)
		warned := strings.Count(r.errOut, `"level":"WARN"`)
		if r.code != 0 || warned != c.lines || strings.Count(r.errOut, "\n") != c.lines ||
			strings.Contains(r.errOut, secret) {
			t.Errorf("%s: exit %d, %q", c.flag, r.code, r.errOut)
		}
	}
}
