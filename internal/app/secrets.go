package app

import (
	"log/slog"
	"net/url"
	"os"
	"regexp"
	"slices"
	"strings"

	"posthaste/internal/secretfile"
)

// secret is a setting that may hold a secret.
type secret struct {
	flag, variable string
	value          *string
	// inURL marks an address, which may contain a password.
	inURL bool
}

// The passwords that have a file and no flag.
const (
	postgresPassword = "postgres-password"
	redisPassword    = "redis-password"
)

// secrets returns the settings that may come from a file. The variable with _FILE appended names the file.
func (s *Settings) secrets() []secret {
	return []secret{
		{"postgres-url", "POSTHASTE_POSTGRES_URL", &s.PostgresURL, true},
		{"redis-url", "POSTHASTE_REDIS_URL", &s.RedisURL, true},
		{"guard-redis-url", "POSTHASTE_GUARD_REDIS_URL", &s.GuardRedisURL, true},
		{"sink-url", "POSTHASTE_SINK_URL", &s.SinkURL, true},
		{postgresPassword, "POSTHASTE_POSTGRES_PASSWORD", new(string), false},
		{redisPassword, "POSTHASTE_REDIS_PASSWORD", new(string), false},
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
			p.fault("%s and %s: set one of them", x.variable, variable)
		default:
			file := secretfile.File{Setting: variable, Path: path}
			line, err := file.Read()
			if err != nil {
				p.faults = append(p.faults, err)
				continue
			}
			*x.value, p.files[x.flag] = line, file
		}
	}
}

// rereads returns address, the value of flag, with the file that each connection reads its password from: the file of
// the password, else that of the address. A flag beats the files. known is whether the address has a password.
func (p *parser) rereads(s Settings, flag, password, address string, known bool) string {
	file, ok := p.files[password]
	switch {
	case ok && !known:
		return file.Into(address)
	case ok && !slices.Contains(s.Given, flag):
		p.fault("%s: the address has a password, too: set one of them", file.Setting)
	}
	if file, ok = p.files[flag]; ok {
		return file.Into(address)
	}
	return address
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
