package app_test

import (
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"posthaste/internal/app"
	"posthaste/internal/lab/testenv"
	"posthaste/internal/redisurl"
)

// secretFile writes a file and returns its path.
func secretFile(t *testing.T, content string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "secret")
	must(t, os.WriteFile(path, []byte(content), 0o600))
	return path
}

// Every setting that may hold a secret is read from the file that its variable names, without the trailing newline.
func TestSecretsComeFromFiles(t *testing.T) {
	for variable, content := range map[string]string{
		"POSTHASTE_POSTGRES_URL":     "postgres://u:of-a-file@pg/d\n",
		"POSTHASTE_REDIS_URL":        "redis://:of-a-file@rd\r\n",
		"POSTHASTE_GUARD_REDIS_URL":  "redis://:of-a-file@guard",
		"POSTHASTE_ADMIN_TOKEN":      "of-a-file\n",
		"POSTHASTE_ADMIN_READ_TOKEN": "of another file ",
	} {
		t.Setenv(variable+"_FILE", secretFile(t, content))
	}
	c, err := defaults(t).Parse()
	must(t, err)
	address := func(withFile string) string {
		return regexp.MustCompile(`\?posthaste_secret=.*`).ReplaceAllString(withFile, "")
	}
	got := []string{
		address(c.PostgresURL), address(c.RedisURL), address(c.GuardRedisURL), c.AdminToken, c.AdminReadToken,
	}
	want := []string{
		"postgres://u:of-a-file@pg/d", "redis://:of-a-file@rd", "redis://:of-a-file@guard", "of-a-file",
		"of another file ",
	}
	testenv.Equal(t, "the secrets", strings.Join(got, "|"), strings.Join(want, "|"))
}

// A file that cannot be used is a fault that names the variable and the file, and does not quote its content.
func TestAFileOfASecretThatCannotBeTaken(t *testing.T) {
	gone := filepath.Join(t.TempDir(), "gone")
	for _, c := range []struct{ path, want string }{
		{gone, gone},
		{secretFile(t, "\n"), "is empty"},
		{secretFile(t, "   \n"), "is empty"},
		{secretFile(t, "hidden\nhidden\n"), "more than one line"},
	} {
		t.Setenv("POSTHASTE_ADMIN_TOKEN_FILE", c.path)
		_, err := defaults(t).Parse()
		list := faults(err)
		if len(list) != 1 || !strings.Contains(err.Error(), "POSTHASTE_ADMIN_TOKEN_FILE: ") ||
			!strings.Contains(err.Error(), c.path) || !strings.Contains(err.Error(), c.want) ||
			strings.Contains(err.Error(), "hidden") {
			t.Errorf("%s: %v", c.want, err)
		}
	}
	t.Setenv("POSTHASTE_ADMIN_TOKEN_FILE", "")
	t.Setenv("POSTHASTE_REDIS_URL_FILE", secretFile(t, "http://u:hidden@h"))
	if _, err := defaults(t).Parse(); err == nil || strings.Contains(err.Error(), "hidden") {
		t.Errorf("a bad URL in a file: %v", err)
	}
}

// Variable and file together are a fault; a flag beats both.
func TestASecretGivenTwice(t *testing.T) {
	t.Setenv("POSTHASTE_ADMIN_TOKEN", "variable-secret")
	t.Setenv("POSTHASTE_ADMIN_TOKEN_FILE", secretFile(t, "file-secret"))
	s := defaults(t)
	if _, err := s.Parse(); len(faults(err)) != 1 || !strings.Contains(err.Error(), "POSTHASTE_ADMIN_TOKEN_FILE") ||
		strings.Contains(err.Error(), "-secret") {
		t.Errorf("both: %v", err)
	}
	s.AdminToken, s.Given = "of the flag", []string{"admin-token"}
	if c, err := s.Parse(); err != nil || c.AdminToken != "of the flag" {
		t.Errorf("with a flag: %v", err)
	}
}

// A warning names the setting of a secret on the command line and does not show it. Addresses without one give none.
func TestASecretOnTheCommandLineIsToldOf(t *testing.T) {
	t.Parallel()
	const hidden = "hidden"
	for name, c := range map[string]struct {
		told  bool
		spoil func(s *app.Settings)
	}{
		"admin-token":      {true, func(s *app.Settings) { s.AdminToken = hidden }},
		"admin-read-token": {true, func(s *app.Settings) { s.AdminReadToken = hidden }},
		"redis-url":        {true, func(s *app.Settings) { s.RedisURL = "redis://:" + hidden + "@h" }},
		"guard-redis-url":  {false, func(s *app.Settings) { s.GuardRedisURL = "redis://user@h/1" }},
		"postgres-url":     {true, func(s *app.Settings) { s.PostgresURL = "host=h password = " + hidden }},
	} {
		s := defaults(t)
		c.spoil(&s)
		var out strings.Builder
		s.WarnOfSecrets(app.Config{}.LoggerTo(&out))
		testenv.Equal(t, name+" from the environment", out.String(), "")
		s.Given = []string{name}
		s.WarnOfSecrets(app.Config{}.LoggerTo(&out))
		if told := strings.Contains(out.String(), `"--`+name+`"`); told != c.told ||
			strings.Contains(out.String(), hidden) || told && !strings.Contains(out.String(), "_FILE") {
			t.Errorf("%s: %s", name, out.String())
		}
	}
	for address, want := range map[string]bool{
		"postgres://u@h/d": false, "postgres://u:p@h/d": true, "postgres://h/d?user=u&password=p": true,
		"host=h dbname=passwords": false, "host=h sslpassword=p": true, "redis://h": false,
		"postgres://h/d?sslpassword=p": true, "unix:///run/redis.sock": false,
	} {
		testenv.Equal(t, address, app.HasPassword(address), want)
	}
}

// The address has the file that each connection reads. A password in the address is a fault; in a flag it beats the
// file.
func TestPasswordFiles(t *testing.T) {
	path := secretFile(t, "of-a-file\n")
	t.Setenv("POSTHASTE_POSTGRES_PASSWORD_FILE", path)
	t.Setenv("POSTHASTE_REDIS_PASSWORD_FILE", path)
	s := defaults(t)
	s.PostgresURL, s.RedisURL = "postgres://u@h/d", "redis://sentinels:theirs@s?master_name=m"
	c, err := s.Parse()
	if err != nil || strings.Contains(c.PostgresURL+c.RedisURL, "of-a-file") {
		t.Fatalf("%s %s: %v", c.PostgresURL, c.RedisURL, err)
	}
	for _, address := range []string{c.PostgresURL, c.RedisURL} {
		testenv.Contains(t, "the address", address, "_PASSWORD_FILE%3A"+url.QueryEscape(path))
	}
	o, err := redisurl.Parse(c.RedisURL)
	must(t, err)
	must(t, os.WriteFile(path, []byte("another"), 0o600))
	if _, password, err := o.CredentialsProviderContext(t.Context()); err != nil || password != "another" ||
		o.SentinelPassword != "theirs" {
		t.Errorf("%q, %q, %v", password, o.SentinelPassword, err)
	}
	s.PostgresURL = "postgres://u:hidden@h/d"
	if _, err = s.Parse(); len(faults(err)) != 1 ||
		!strings.Contains(err.Error(), "POSTHASTE_POSTGRES_PASSWORD_FILE") ||
		strings.Contains(err.Error(), "hidden") {
		t.Errorf("two passwords: %v", err)
	}
	s.Given = []string{"postgres-url"}
	if c, err = s.Parse(); err != nil || c.PostgresURL != s.PostgresURL {
		t.Errorf("a flag with a password: %s, %v", c.PostgresURL, err)
	}
}

// The names of an outbox follow from its schema.
func TestNamesOfASchema(t *testing.T) {
	t.Parallel()
	for schema, want := range map[string][2]string{
		"public":                {"default", "posthaste"},
		"Sales":                 {"sales", "posthaste_Sales"},
		strings.Repeat("s", 63): {strings.Repeat("s", 50), "posthaste_" + strings.Repeat("s", 53)},
	} {
		s := defaults(t)
		s.Schema = schema
		c, err := s.Parse()
		if err != nil || c.RelayName != want[0] || c.Publication != want[1] || c.Slot != "posthaste_"+want[0] {
			t.Errorf("%s: %s, %s, %s, %v", schema, c.RelayName, c.Publication, c.Slot, err)
		}
	}
}
