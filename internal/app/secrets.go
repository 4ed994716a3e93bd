package app

import (
	"fmt"
	"log/slog"
	"net/url"
	"os"
	"regexp"
	"slices"
	"strings"
)

// secret is a setting that may hold a secret.
type secret struct {
	flag, variable string
	value          *string
	// inURL marks an address, which may contain a password.
	inURL bool
}

// secrets returns the settings that may come from a file. The variable with _FILE appended names the file.
func (s *Settings) secrets() []secret {
	return []secret{
		{"postgres-url", "POSTHASTE_POSTGRES_URL", &s.PostgresURL, true},
		{"redis-url", "POSTHASTE_REDIS_URL", &s.RedisURL, true},
		{"guard-redis-url", "POSTHASTE_GUARD_REDIS_URL", &s.GuardRedisURL, true},
		{"admin-token", "POSTHASTE_ADMIN_TOKEN", &s.AdminToken, false},
		{"admin-read-token", "POSTHASTE_ADMIN_READ_TOKEN", &s.AdminReadToken, false},
	}
}

// readSecrets reads the secrets from their files. A flag beats the file, as it beats the variable.
func (p *parser) readSecrets(s *Settings) {
	for _, x := range s.secrets() {
		variable := x.variable + "_FILE"
		path := os.Getenv(variable)
		switch {
		case path == "" || slices.Contains(s.Given, x.flag):
		case os.Getenv(x.variable) != "":
			p.faults = append(p.faults, fmt.Errorf("%s and %s: set one of them", x.variable, variable))
		default:
			p.readSecret(variable, path, x.value)
		}
	}
}

// readSecret reads a file of one line. Its errors do not quote it.
func (p *parser) readSecret(variable, path string, value *string) {
	text, err := os.ReadFile(path) //nolint:gosec // the operator names it
	line := strings.TrimSuffix(strings.TrimSuffix(string(text), "\n"), "\r")
	switch {
	case err != nil: // it names the path
	case strings.TrimSpace(line) == "":
		err = fmt.Errorf("%s is empty", path)
	case strings.ContainsAny(line, "\r\n"):
		err = fmt.Errorf("%s has more than one line", path)
	default:
		*value = line
		return
	}
	p.faults = append(p.faults, fmt.Errorf("%s: %w", variable, err))
}

// passwordPattern finds a password in a connection string of libpq's keyword=value form.
var passwordPattern = regexp.MustCompile(`(?i)(^|\s)(ssl)?password\s*=`)

// hasPassword reports whether an address that Parse accepts contains a password.
func hasPassword(address string) bool {
	if !strings.Contains(address, "://") {
		return passwordPattern.MatchString(address)
	}
	u, err := url.Parse(address)
	if err != nil {
		return true
	}
	_, inUser := u.User.Password()
	return inUser || u.Query().Has("password") || u.Query().Has("sslpassword")
}

// WarnOfSecrets logs a line for each secret on the command line, where other users of the machine can read it.
func (s *Settings) WarnOfSecrets(log *slog.Logger) {
	for _, x := range s.secrets() {
		if slices.Contains(s.Given, x.flag) && *x.value != "" && (!x.inURL || hasPassword(*x.value)) {
			log.Warn("a secret is on the command line, where other users of this machine can read it",
				"setting", "--"+x.flag, "remedy", "set "+x.variable+", or "+x.variable+"_FILE to a file with it")
		}
	}
}
