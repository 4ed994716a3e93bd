package app_test

import (
	"errors"
	"log/slog"
	"strings"
	"testing"
	"time"

	"posthaste/internal/app"
	"posthaste/internal/testenv/commandline"
	"posthaste/relay"
)

// defaults are the settings of a command line without arguments.
func defaults(t *testing.T) app.Settings {
	t.Helper()
	return commandline.Settings(t)
}

// faults returns the errors that Parse has joined.
func faults(err error) []error {
	var joined interface{ Unwrap() []error }
	if !errors.As(err, &joined) {
		return nil
	}
	return joined.Unwrap()
}

func TestDefaults(t *testing.T) {
	t.Parallel()
	c, err := defaults(t).Parse()
	must(t, err)
	if c.Slot != "posthaste_default" || c.History != 72*time.Hour || c.WALBudget != 1<<30 ||
		c.Poison != relay.PoisonSkip ||
		c.Restore != time.Hour || c.LogLevel != slog.LevelInfo || c.TrimForce || !c.PubSub || c.AuthKeys {
		t.Errorf("the defaults are %+v", c)
	}
}

// Every fault is named at once, by the name of its flag, and none of them quotes a password.
func TestParseNamesEveryFault(t *testing.T) {
	t.Parallel()
	const secret = "s3cret"
	s := defaults(t)
	spoils := map[string]func(s *app.Settings){
		"postgres-url":       func(s *app.Settings) { s.PostgresURL = "mysql://u:" + secret + "@h/d" },
		"redis-url":          func(s *app.Settings) { s.RedisURL = "redis://:" + secret + "@h/first" },
		"http-addr":          func(s *app.Settings) { s.HTTPAddr = "localhost" },
		"admin-addr":         func(s *app.Settings) { s.AdminAddr = ":70000" },
		"admin-read-token":   func(s *app.Settings) { s.AdminReadToken = "look" },
		"admin-hosts":        func(s *app.Settings) { s.AdminHosts = "ops.example:9091" },
		"admin-open":         func(s *app.Settings) { s.AdminOpen = "yes" },
		"admin-pprof":        func(s *app.Settings) { s.AdminPprof = "1" },
		"http-tls-key":       func(s *app.Settings) { s.HTTPTLSCert = "cert.pem" },
		"admin-client-ca":    func(s *app.Settings) { s.AdminClientCA = "ca.pem" },
		"schema":             func(s *app.Settings) { s.Schema = "a b" },
		"relay-name":         func(s *app.Settings) { s.RelayName = "A" },
		"channel-prefix":     func(s *app.Settings) { s.ChannelPrefix = "__keyspace@0__:" },
		"stream-prefix":      func(s *app.Settings) { s.StreamPrefix = "a b" },
		"pubsub":             func(s *app.Settings) { s.Pubsub = "maybe" },
		"history":            func(s *app.Settings) { s.History = "soon" },
		"restore":            func(s *app.Settings) { s.Restore = "0" },
		"wal-budget":         func(s *app.Settings) { s.WALBudget = "1KiB" },
		"redis-durability":   func(s *app.Settings) { s.RedisDurability = "some" },
		"window":             func(s *app.Settings) { s.Window = "0" },
		"window-bytes":       func(s *app.Settings) { s.WindowBytes = "1" },
		"sweep-workers":      func(s *app.Settings) { s.SweepWorkers = "17" },
		"poison":             func(s *app.Settings) { s.Poison = "eat" },
		"trim":               func(s *app.Settings) { s.Trim = "all" },
		"stream-maxlen":      func(s *app.Settings) { s.StreamMaxlen = "-1" },
		"rate-limit":         func(s *app.Settings) { s.RateLimit = "NaN" },
		"key-max-age":        func(s *app.Settings) { s.KeyMaxAge = "-1s" },
		"auth-keys-file":     func(s *app.Settings) { s.Auth = "keys" },
		"drain-timeout":      func(s *app.Settings) { s.DrainTimeout = "10" },
		"log-level":          func(s *app.Settings) { s.LogLevel = "loud" },
		"log-format":         func(s *app.Settings) { s.LogFormat = "xml" },
		"address-rate-limit": func(s *app.Settings) { s.AddressRateLimit = "-1" },
		"trusted-proxies":    func(s *app.Settings) { s.TrustedProxies = "10.0.0.1,proxy" },
		"max-connections":    func(s *app.Settings) { s.MaxConnections = "0" },
	}
	for name, spoil := range spoils {
		spoil(&s)
		one := defaults(t)
		spoil(&one)
		_, err := one.Parse()
		if list := faults(err); len(list) != 1 || !strings.Contains(list[0].Error(), "--"+name) {
			t.Errorf("%s: %v", name, err)
		}
	}
	_, err := s.Parse()
	if list := faults(err); len(list) != len(spoils) || strings.Contains(err.Error(), secret) {
		t.Errorf("%d faults, want %d, one for each flag above, without the password: %v", len(list), len(spoils), err)
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
			good && (!c.AuthJWT || c.AuthKeys || c.Tokens.JWKS != place) {
			t.Errorf("%q: %v", place, err)
		}
	}
	s.Auth = "token"
	if _, err := s.Parse(); err == nil || !strings.Contains(err.Error(), "--auth=") {
		t.Errorf("%v", err)
	}
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
	if got := parsed(""); got != "postgres://localhost:5432/postgres" {
		t.Errorf("without anything: %q", got)
	}
	t.Setenv("PGHOST", "elsewhere")
	if got := parsed(""); got != "" {
		t.Errorf("with PGHOST: %q", got)
	}
	if got := parsed("host=here"); got != "host=here" {
		t.Errorf("with a setting: %q", got)
	}
}
