package main

import (
	"strings"
	"testing"
)

// The line about a secret on the command line is one of every command's log, and the secret is not in it.
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
