package main

import (
	"strings"
	"testing"

	"posthaste/internal/testenv"
)

// The health of a process behind TLS, and behind TLS with client certificates, is asked for with its own settings.
func TestHealthcheckBehindTLS(t *testing.T) {
	t.Parallel()
	ca, clients := testenv.NewCA(t), testenv.NewCA(t)
	dir := t.TempDir()
	cert, key, caFile := ca.Files(t, dir, testenv.Elsewhere)
	clientCA := testenv.WriteFile(t, dir, "clients.crt", clients.PEM)
	certFlag, keyFlag, _ := clients.Files(t, t.TempDir())
	w := newWorld(t)
	files := []string{"--admin-tls-cert=" + cert, "--admin-tls-key=" + key}
	for _, c := range []struct {
		name      string
		ca, extra []string
		code      int
		says      string
	}{
		{"TLS", nil, nil, 0, "200 ok"},
		{"its own certificate", []string{"--admin-client-ca=" + caFile}, nil, 0, "200 ok"},
		{"no certificate of the clients", []string{"--admin-client-ca=" + clientCA}, nil, 1, "certificate"},
		{
			"a certificate of the clients",
			[]string{"--admin-client-ca=" + clientCA},
			[]string{"--cert=" + certFlag, "--key=" + keyFlag},
			0, "200 ok",
		},
		{"half of it", nil, []string{"--cert=" + certFlag}, 2, "--key"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			settings := append(c.ca, files...)
			p := w.spawn("serve", settings...)
			addr := strings.TrimPrefix(p.admin, "http://")
			r := w.once(append(append([]string{"healthcheck", "--addr=" + addr}, settings...), c.extra...)...)
			if r.code != c.code || !strings.Contains(r.out+r.errOut, c.says) {
				t.Errorf("exit %d: %s%s", r.code, r.out, r.errOut)
			}
			if r := w.once("healthcheck", "--addr="+addr); r.code == 0 {
				t.Errorf("by HTTP: %s", r.out)
			}
		})
	}
}
