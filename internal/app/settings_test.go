package app_test

import (
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"posthaste/internal/app"
	"posthaste/internal/lab/testenv"
	"posthaste/internal/lab/testenv/commandline"
	"posthaste/relay"
)

// defaults are the settings of a command line without arguments.
func defaults(t *testing.T) app.Settings {
	t.Helper()
	return commandline.Settings(t)
}

// faultsOf returns the faults of the settings of a command line.
func faultsOf(t *testing.T, args ...string) []error {
	t.Helper()
	_, err := commandline.Settings(t, args...).Parse()
	return faults(err)
}

// faults returns the errors that Parse has joined.
func faults(err error) []error {
	var joined interface{ Unwrap() []error }
	if !errors.As(err, &joined) {
		return nil
	}
	return joined.Unwrap()
}

// wantFaults reports another number of faults, or that a text is in none of them.
func wantFaults(t *testing.T, what string, list []error, n int, text ...string) {
	t.Helper()
	testenv.Equal(t, what+": faults", len(list), n)
	testenv.Contains(t, what, fmt.Sprint(list), text...)
}

func TestDefaults(t *testing.T) {
	t.Parallel()
	c, err := defaults(t).Parse()
	must(t, err)
	if c.Slot != "posthaste_default" || c.History != 72*time.Hour || c.WALBudget != 1<<30 ||
		c.Poison != relay.PoisonSkip || c.Restore != time.Hour || c.LogLevel != slog.LevelInfo ||
		c.Trim != "acked" || !c.Pubsub.On() || c.Auth != "none" {
		t.Errorf("the defaults are %+v", c)
	}
}

// A fault from the environment has the name of its variable, too.
func TestParseNamesTheVariable(t *testing.T) {
	t.Setenv("POSTHASTE_WINDOW", "0")
	wantFaults(t, "from the environment", faultsOf(t), 1, `--window="0" (POSTHASTE_WINDOW): `)
}

// Every fault is named at once, by the name of its flag, and none of them quotes a password.
func TestParseNamesEveryFault(t *testing.T) {
	t.Parallel()
	const secret = "s3cret"
	spoils := map[string]string{
		"postgres-url": "--postgres-url=mysql://u:" + secret + "@h/d",
		"redis-url":    "--redis-url=redis://:" + secret + "@h/first",
		"http-tls-key": "--http-tls-cert=cert.pem", "auth-keys-file": "--auth=keys",
	}
	for _, bad := range []string{
		"http-addr=localhost", "admin-addr=:70000", "admin-read-token=look", "admin-hosts=ops.example:9091",
		"admin-open=yes", "admin-pprof=1", "admin-client-ca=ca.pem", "schema=a b", "relay-name=A",
		"channel-prefix=__keyspace@0__:", "stream-prefix=a b", "pubsub=maybe", "history=soon", "restore=0",
		"wal-budget=1KiB", "redis-durability=some", "window=0", "window-bytes=1", "sweep-workers=17", "poison=eat",
		"trim=all", "stream-maxlen=-1", "rate-limit=NaN", "key-max-age=-1s", "drain-timeout=10", "log-level=loud",
		"log-format=xml", "address-rate-limit=-1", "trusted-proxies=10.0.0.1,proxy", "max-connections=0",
		"sink-replicas=0",
	} {
		name, _, _ := strings.Cut(bad, "=")
		spoils[name] = "--" + bad
	}
	for name, spoil := range spoils {
		wantFaults(t, name, faultsOf(t, spoil), 1, "--"+name)
	}
	all := slices.Collect(maps.Values(spoils))
	if list := faultsOf(t, all...); len(list) != len(spoils) || strings.Contains(fmt.Sprint(list), secret) {
		t.Errorf("%d faults, want %d, one for each flag above, without the password: %v", len(list), len(spoils), list)
	}
}

// Names have a greatest length.
func TestParseBoundsNames(t *testing.T) {
	t.Parallel()
	for name, most := range map[string]int{
		"schema": 63, "relay-name": 50, "stream-prefix": 64, "channel-prefix": 64, "admin-hosts": 253,
	} {
		flag := "--" + name + "="
		wantFaults(t, name, faultsOf(t, flag+strings.Repeat("x", most)), 0)
		wantFaults(t, name, faultsOf(t, flag+strings.Repeat("x", most+1)), 1)
	}
}

// The settings of tokens are checked with auth=jwt only, and then all of them are.
func TestParseNamesEveryFaultOfTokens(t *testing.T) {
	t.Parallel()
	const secret = "s3cret"
	s := defaults(t)
	s.JWTUserClaim, s.JWTScopeClaim, s.JWTJWKS = "", "", "http://issuer.example/?key="+secret
	if _, err := s.Parse(); err != nil {
		t.Errorf("without auth=jwt: %v", err)
	}
	s.Auth = "jwt"
	_, err := s.Parse()
	if list := faults(err); len(list) != 5 || strings.Contains(err.Error(), secret) {
		t.Errorf("%d faults: %v", len(list), err)
	}
	for place, good := range map[string]bool{
		"": false, "http://issuer.example/k": false, "ftp://127.0.0.1/k": false, "https://": false,
		"/nonexistent/keys": false, "http://127.0.0.1.example/k": false, "http://127.0.0.1@issuer.example/k": false,
		"https://issuer.example/k": true, "http://127.0.0.1:80/k": true, "http://[::1]/k": true,
		"http://localhost:80/k": true, "settings_test.go": true,
	} {
		s.JWTIssuer, s.JWTAudience, s.JWTUserClaim, s.JWTScopeClaim, s.JWTJWKS = "i", "a", "sub", "scope", place
		c, err := s.Parse()
		if (err == nil) != good || err != nil && !strings.Contains(err.Error(), "--jwt-jwks") ||
			good && c.JWTJWKS != place {
			t.Errorf("%q: %v", place, err)
		}
	}
	wantFaults(t, "a method that is unknown", faultsOf(t, "--auth=token"), 1, "--auth=")
}

// The setting beats libpq's variables.
func TestPostgresFromTheEnvironment(t *testing.T) {
	parsed := func(setting string) string {
		s := defaults(t)
		s.PostgresURL = setting
		c, err := s.Parse()
		must(t, err)
		return c.PostgresURL
	}
	for _, name := range []string{"PGHOST", "PGHOSTADDR", "PGPORT", "PGDATABASE", "PGUSER", "PGPASSWORD", "PGSERVICE"} {
		t.Setenv(name, "")
	}
	testenv.Equal(t, "without anything", parsed(""), "postgres://localhost:5432/postgres")
	t.Setenv("PGHOST", "elsewhere")
	testenv.Equal(t, "with PGHOST", parsed(""), "")
	testenv.Equal(t, "with a setting", parsed("host=here"), "host=here")
}
