package app_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"posthaste/internal/app"
	"posthaste/internal/lab/testenv"
)

// adminTLS is a configuration with a certificate of the admin listener, and with a CA of its clients.
func adminTLS(t *testing.T, mutual bool) app.Config {
	t.Helper()
	s := defaults(t)
	var ca string
	s.AdminTLSCert, s.AdminTLSKey, ca = testenv.NewCA(t).Files(t, t.TempDir())
	if mutual {
		s.AdminClientCA = ca
	}
	c, err := s.Parse()
	must(t, err)
	return c
}

// TLS files that cannot be used are faults that name the setting and the file.
func TestFilesOfTLSAreRead(t *testing.T) {
	t.Parallel()
	cert, key, ca := testenv.NewCA(t).Files(t, t.TempDir())
	gone := filepath.Join(t.TempDir(), "gone.pem")
	for name, c := range map[string]struct{ args, flag, named string }{
		"no certificate": {"--http-tls-cert=" + gone + " --http-tls-key=" + key, "--http-tls-cert", gone},
		"no CA": {
			"--admin-tls-cert=" + cert + " --admin-tls-key=" + key + " --admin-client-ca=" + gone,
			"--admin-tls-cert", gone,
		},
		"no key":   {"--admin-tls-cert=" + cert, "--admin-tls-key", "need each other"},
		"only key": {"--admin-tls-key=" + key, "--admin-tls-cert", "need each other"},
		"swapped":  {"--http-tls-cert=" + key + " --http-tls-key=" + cert, "--http-tls-cert", key},
		"CA alone": {"--http-client-ca=" + ca, "--http-client-ca", "--http-tls-cert"},
	} {
		list := faultsOf(t, strings.Fields(c.args)...)
		if text := fmt.Sprint(list); len(list) != 1 || !strings.Contains(text, c.flag) ||
			!strings.Contains(text, c.named) || strings.Contains(text, "BEGIN") {
			t.Errorf("%s: %v", name, list)
		}
	}
}

// Each listener uses TLS with its own certificate and does not serve HTTP. The listener with a CA of clients refuses
// clients without a certificate.
func TestListenersSpeakTLS(t *testing.T) {
	t.Parallel()
	ca, clients := testenv.NewCA(t), testenv.NewCA(t)
	c, s, dir := config(t), defaults(t), t.TempDir()
	s.HTTPTLSCert, s.HTTPTLSKey, _ = ca.Files(t, t.TempDir())
	s.AdminTLSCert, s.AdminTLSKey, _ = ca.Files(t, dir)
	s.AdminClientCA = testenv.WriteFile(t, dir, "clients.crt", clients.PEM)
	with, err := s.Parse()
	must(t, err)
	c.HTTPTLS, c.AdminTLS, c.AdminClientCA = with.HTTPTLS, with.AdminTLS, with.AdminClientCA
	serve, err := app.NewServe(t.Context(), c, testenv.Logger(t))
	must(t, err)
	stop := testenv.Background(t, serve.Run)
	ask := func(ca *testenv.CA, url string, certs ...tls.Certificate) (int, string, error) {
		tr := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: ca.Pool, Certificates: certs}}
		defer tr.CloseIdleConnections()
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
		must(t, err)
		resp, err := (&http.Client{Transport: tr, Timeout: time.Minute}).Do(req)
		if err != nil {
			return 0, "", err
		}
		defer resp.Body.Close()
		body, err := io.ReadAll(resp.Body)
		return resp.StatusCode, string(body), err
	}
	public, admin := serve.PublicAddr().String(), serve.AdminAddr().String()
	if code, _, err := ask(ca, "https://"+public+"/openapi.yaml"); err != nil || code != http.StatusOK {
		t.Errorf("the API: %d, %v", code, err)
	}
	var unknown x509.UnknownAuthorityError
	if _, _, err := ask(clients, "https://"+public+"/openapi.yaml"); !errors.As(err, &unknown) {
		t.Errorf("the API with a certificate of nobody: %v", err)
	}
	for _, path := range []string{"/healthz", "/metrics", "/relay"} {
		if code, _, err := ask(ca, "https://"+admin+path); err == nil {
			t.Errorf("%s without a certificate: %d", path, code)
		}
		if code, _, err := ask(ca, "https://"+admin+path, ca.Pair(t)); err == nil {
			t.Errorf("%s with a certificate of another CA: %d", path, code)
		}
	}
	code, text, err := ask(ca, "https://"+admin+"/metrics", clients.Pair(t))
	for _, use := range []string{"http", "admin"} {
		if err != nil || code != http.StatusOK ||
			!strings.Contains(text, `tls_certificate_expiry_timestamp_seconds{use="`+use+`"} 1.`) {
			t.Errorf("/metrics with a certificate does not show when that of %s ends: %d, %v", use, code, err)
		}
	}
	for _, addr := range []string{public, admin} {
		refusesLargeFrames(t, addr, &tls.Config{
			RootCAs: ca.Pool, Certificates: []tls.Certificate{clients.Pair(t)}, NextProtos: []string{"h2"},
		})
		if code, _, err := ask(ca, "http://"+addr+"/healthz"); err != nil || code != http.StatusBadRequest {
			t.Errorf("HTTP: %d, %v", code, err)
		}
	}
	if err := stop(); err != nil && !errors.Is(err, context.Canceled) {
		t.Errorf("ended with %v", err)
	}
}

// refusesLargeFrames announces an HTTP/2 frame of a megabyte, for which the server would allocate memory, and expects
// the error FRAME_SIZE_ERROR (RFC 9113, 4.2).
func refusesLargeFrames(t *testing.T, addr string, config *tls.Config) {
	t.Helper()
	conn, err := (&tls.Dialer{Config: config}).DialContext(t.Context(), "tcp", addr)
	must(t, err)
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(30 * time.Second))
	const settings, goAway, frameSizeError = 4, 7, 6
	hello := append([]byte("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"), 0, 0, 0, settings, 0, 0, 0, 0, 0)
	_, err = conn.Write(append(hello, 0x0f, 0xff, 0xff, 0, 0, 0, 0, 0, 1))
	must(t, err)
	for {
		head := make([]byte, 9)
		if _, err := io.ReadFull(conn, head); err != nil {
			t.Fatalf("a frame of a megabyte is not refused: %v", err)
		}
		body := make([]byte, int(head[0])<<16|int(head[1])<<8|int(head[2]))
		_, err := io.ReadFull(conn, body)
		must(t, err)
		if head[3] == goAway {
			testenv.Equal(t, "the error by which a frame of a megabyte is refused", body[7], frameSizeError)
			return
		}
	}
}

// Settings of Redis TLS that would have no effect, or would silently weaken it, are faults.
func TestSettingsOfRedisTLS(t *testing.T) {
	t.Parallel()
	_, _, ca := testenv.NewCA(t).Files(t, t.TempDir())
	for name, c := range map[string]struct{ args, want string }{
		"good":               {"--redis-url=rediss://h --redis-ca=" + ca, ""},
		"no rediss":          {"--redis-ca=" + ca, "--redis-url"},
		"neither on nor off": {"--redis-skip-verify=yes", "--redis-skip-verify"},
		"skip verify":        {"--redis-skip-verify=on", "--redis-url"},
		"the guard's": {
			"--redis-url=rediss://h --guard-redis-url=redis://h --redis-ca=" + ca, "--guard-redis-url",
		},
		"no key":     {"--redis-url=rediss://h --redis-cert=" + ca, "--redis-key"},
		"no file":    {"--redis-url=rediss://h --redis-ca=gone.pem", "gone.pem"},
		"in the URL": {"--redis-url=rediss://:hidden@h?skip_verify=true", "--redis-skip-verify"},
		"in both URLs": {
			"--redis-url=rediss://h/?skip_verify=1 --guard-redis-url=rediss://h/?db=1&skip_verify=false",
			"--redis-url: skip_verify | --guard-redis-url: skip_verify",
		},
	} {
		list := faultsOf(t, strings.Fields(c.args)...)
		want := slices.DeleteFunc(strings.Split(c.want, " | "), func(s string) bool { return s == "" })
		if len(list) != len(want) || strings.Contains(fmt.Sprint(list), "hidden") {
			t.Errorf("%s: %v", name, list)
			continue
		}
		for i, text := range want {
			testenv.ErrorSays(t, name, list[i], text)
		}
	}
}
