package ops_test

import (
	"context"
	"crypto/tls"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/redis/go-redis/v9"

	"posthaste/internal/lab/testenv"
	"posthaste/internal/ops"
)

// withTLS makes a server use TLS with a certificate of ca.
func withTLS(t *testing.T, pg *testenv.Server, ca *testenv.CA) {
	t.Helper()
	cert, key, _ := ca.Files(t, pg.Dir)
	info, err := os.Stat(filepath.Join(pg.Dir, "data"))
	must(t, err)
	owner := info.Sys().(*syscall.Stat_t)
	for _, file := range []string{cert, key} {
		must(t, os.Chown(file, int(owner.Uid), int(owner.Gid)))
	}
	conn, err := pgx.Connect(t.Context(), pg.URL("postgres"))
	must(t, err)
	defer conn.Close(context.Background())
	for _, stmt := range []string{
		"ALTER SYSTEM SET ssl_cert_file = '" + cert + "'", "ALTER SYSTEM SET ssl_key_file = '" + key + "'",
		"ALTER SYSTEM SET ssl = on", "SELECT pg_reload_conf()",
	} {
		_, err := conn.Exec(t.Context(), stmt)
		must(t, err)
	}
}

// The doctor distinguishes connections without TLS, with TLS to an unverified server, and to a verified one.
func TestDoctorLooksAtTheTLSOfPostgres(t *testing.T) {
	t.Parallel()
	ca, stranger := testenv.NewCA(t), testenv.NewCA(t)
	dir := t.TempDir()
	good := testenv.WriteFile(t, dir, "good.crt", ca.PEM)
	wrong := testenv.WriteFile(t, dir, "wrong.crt", stranger.PEM)
	pg := testenv.NewServer(t)
	withTLS(t, pg, ca)
	connect := func(parameters string) (*pgx.Conn, error) {
		return pgx.Connect(t.Context(), strings.Replace(pg.URL("postgres"), "sslmode=disable", parameters, 1))
	}
	testenv.Eventually(t, 20*time.Second, func() error { // the server reads its files some time after the reload
		conn, err := connect("sslmode=require")
		if err != nil {
			return err
		}
		return conn.Close(t.Context())
	})
	for parameters, want := range map[string]string{
		"sslmode=disable":                            "not encrypted",
		"sslmode=prefer":                             "not verified",
		"sslmode=allow":                              "not encrypted",
		"sslmode=require":                            "not verified",
		"sslmode=verify-ca&sslrootcert=" + good:      "verify-ca",
		"sslmode=verify-full&sslrootcert=" + good:    "encrypted and verified",
		"sslmode=require&sslrootcert=" + good + "&a": "verify-ca",
	} {
		conn, err := connect(strings.TrimSuffix(parameters, "&a"))
		if err != nil {
			t.Errorf("%s: %v", parameters, err)
			continue
		}
		found := ops.Encryption(t.Context(), conn)
		_ = conn.Close(t.Context())
		if len(found) != 1 || !strings.Contains(found[0].Detail, want) ||
			(found[0].Severity == ops.SeverityOK) != (found[0].Remedy == "") {
			t.Errorf("%s: %+v, want %q", parameters, found, want)
		}
	}
	if conn, err := connect("sslmode=verify-full&sslrootcert=" + wrong); err == nil {
		_ = conn.Close(t.Context())
		t.Error("verify-full takes a certificate of another CA")
	}
}

// Local connections need no encryption.
func TestWhatGoesBeyondTheMachine(t *testing.T) {
	t.Parallel()
	for addr, want := range map[string]bool{
		"127.0.0.1:6379": false, "127.9.9.9:1": false, "[::1]:6379": false, "localhost:6379": false,
		"/run/redis.sock": false, "redis.localhost:6379": false,
		"redis:6379": true, "10.0.0.7:6379": true, "[2001:db8::1]:6379": true, "0.0.0.0:6379": true,
	} {
		testenv.Equal(t, addr, ops.Beyond(addr), want)
	}
}

// The doctor warns about a remote Redis without TLS, and about any with a certificate that is not verified.
func TestDoctorLooksAtTheTLSOfRedis(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	cancel() // no connection is made
	elsewhere := &redis.UniversalOptions{Addrs: []string{"192.0.2.1:6379"}}
	verified := &redis.UniversalOptions{Addrs: []string{"192.0.2.1:6379"}}
	verified.TLSConfig = &tls.Config{MinVersion: tls.VersionTLS12}
	cluster := &redis.UniversalOptions{Addrs: []string{"127.0.0.1:1", "192.0.2.1:6379"}, IsClusterMode: true}
	trusting := &redis.UniversalOptions{Addrs: []string{"127.0.0.1:1"}, TLSConfig: &tls.Config{
		InsecureSkipVerify: true, MinVersion: tls.VersionTLS12,
	}}
	for name, c := range map[string]struct {
		redis, guard *redis.UniversalOptions
		want         string
	}{
		"plain":          {elsewhere, nil, "redis TLS: rediss:// in --redis-url, or a tunnel\n"},
		"one of several": {cluster, nil, "redis TLS: rediss:// in --redis-url, or a tunnel\n"},
		"the guard":      {verified, elsewhere, "guard redis TLS: rediss:// in --guard-redis-url, or a tunnel\n"},
		"not verified": {
			trusting, nil, "redis TLS: --redis-skip-verify=off, and --redis-ca for the CA of its certificate\n",
		},
		"verified": {verified, verified, ""},
	} {
		var got strings.Builder
		for _, f := range ops.Diagnose(ctx, ops.DoctorOptions{Redis: c.redis, Guard: c.guard}).Findings {
			if strings.HasSuffix(f.Check, "TLS") {
				fmt.Fprintf(&got, "%s: %s\n", f.Check, f.Remedy)
			}
		}
		testenv.Equal(t, name, got.String(), c.want)
	}
}
