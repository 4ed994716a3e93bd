package main

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/google/uuid"

	"posthaste/internal/lab/testenv"
)

// healthcheck queries a process behind TLS, and behind TLS with client certificates, with the settings of that process.
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
		{
			"other files are gone", nil,
			[]string{"--http-tls-cert=gone", "--redis-ca=gone", "--auth=keys", "--auth-keys-file=gone"},
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

// With the configured certificate, every process and command reaches a Redis that accepts only TLS and requires a
// certificate. Without one, or with another CA, each fails and prints a remedy.
func TestRedisBehindTLS(t *testing.T) {
	t.Parallel()
	ca, stranger := testenv.NewCA(t), testenv.NewCA(t)
	cert, key, caFile := ca.Files(t, t.TempDir())
	w := worldOf(t, testenv.Postgres(t), testenv.RedisTLS(t, ca))
	trust := []string{"--redis-ca=" + caFile, "--guard-redis-url=" + w.rdURL}
	files := append(trust, "--redis-cert="+cert, "--redis-key="+key)
	relay, api := w.spawn("relay", files...), w.spawn("serve", files...)
	group := w.spawn("consume", append([]string{"--group=g"}, files...)...)
	relay.waitReady("")
	w.post(api, "/orders", uuid.NewString(), fmt.Sprintf(`{"user_id":%q,"amount":5,"currency":"USD"}`,
		uuid.NewString()), http.StatusCreated)
	group.waitLogged("order.created")
	w.waitMode("cdc") // the slot waits for transactions of other tests, which doctor reports
	for _, command := range []string{"status", "doctor", "groups list", "dead list", "credits reconcile"} {
		if r := w.once(append(strings.Fields(command), files...)...); r.code != 0 ||
			command == "doctor" && strings.Contains(r.out, "redis TLS") {
			t.Errorf("posthaste %s: exit %d: %s%s", command, r.code, r.out, r.errOut)
		}
	}
	var state struct{ Verdict struct{ Word string } }
	if code, err := relay.get("/console/api/state", &state); err != nil || code != http.StatusOK {
		t.Errorf("the console: %d, %v", code, err)
	}

	_, _, wrong := stranger.Files(t, t.TempDir())
	own := []string{"--redis-cert=" + cert, "--redis-key=" + key}
	for _, command := range []string{"groups list", "doctor"} {
		r := w.once(append(append(strings.Fields(command), "--redis-ca="+wrong), own...)...)
		result{r.code, r.out + r.errOut, ""}.says(t, 1, "check the certificates: --redis-ca")
		w.once(append(strings.Fields(command), "--redis-ca="+caFile)...).says(t, 1)
	}
	trusting := append([]string{"--redis-skip-verify=on"}, own...)
	loud := w.spawn("consume", append([]string{"--group=h", "--redis-ca=" + wrong}, trusting...)...)
	loud.waitLogged("the certificate of Redis is not verified")
	loud.waitLogged("order.created")
	w.once(append([]string{"doctor"}, trusting...)...).says(t, 0, "--redis-skip-verify=off")
}
