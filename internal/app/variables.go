package app

import (
	"cmp"
	"log/slog"
	"net/url"
	"os"
	"regexp"
	"slices"
	"strings"

	"github.com/alecthomas/kong"
)

// nameVariables names the environment variable of each setting. The settings are the program's flags that have a group.
func nameVariables(k *kong.Kong) error {
	for _, f := range k.Model.Flags {
		if f.Group != nil {
			f.Tag.Envs = []string{variableOf(f.Name)}
			f.Envs = f.Tag.Envs
			f.Tag.TypeName = cmp.Or(f.Tag.TypeName, "string") // of a list, which is one text
		}
	}
	return nil
}

func variableOf(flag string) string {
	return "POSTHASTE_" + strings.ToUpper(strings.ReplaceAll(flag, "-", "_"))
}

// otherVariables matches variables that are not settings and still have a purpose: those of the tests, and those that
// Kubernetes sets for a service whose name begins with posthaste.
var otherVariables = regexp.MustCompile(`^POSTHASTE_(TEST_|FAILPOINT|(.*_)?SERVICE_(HOST|PORT)|(.*_)?PORT(_|$))`)

// WarnOfUnknown logs a line for each variable of the environment that begins with POSTHASTE_ and that no flag of m has.
func (s *Settings) WarnOfUnknown(m *kong.Application, log *slog.Logger) {
	known := map[string]bool{}
	for _, n := range append(m.Leaves(false), m.Node) {
		for _, f := range n.Flags {
			for _, name := range f.Envs {
				known[name] = true
			}
		}
	}
	for _, x := range s.secrets() {
		known[x.variable+"_FILE"] = true
	}
	for _, v := range os.Environ() {
		name, _, _ := strings.Cut(v, "=")
		if strings.HasPrefix(name, "POSTHASTE_") && !known[name] && !otherVariables.MatchString(name) {
			log.Warn("an environment variable is not a setting", "variable", name,
				"remedy", "posthaste settings --json lists all of them")
		}
	}
}

// Setting is the effective value of a setting and its origin.
type Setting struct {
	// Variable and Flag name the setting. Group is its heading.
	Variable string `json:"variable"`
	Flag     string `json:"flag"`
	Group    string `json:"group"`
	// Value is the effective value, with *** for passwords and tokens. It is empty if the setting is not used.
	Value string `json:"value"`
	// From is "flag", "environment", "file" (of a secret), "libpq" (variables such as PGHOST) or "default".
	From string `json:"from"`
}

// Effective returns all settings of m, which c was parsed from, in order.
func (s *Settings) Effective(m *kong.Application, c Config) (list []Setting) {
	for _, f := range m.Flags {
		if f.Group == nil {
			continue
		}
		v := Setting{
			Variable: f.Envs[0], Flag: "--" + f.Name, Group: f.Group.Title, Value: s.decoded.texts[f.Name],
			From: "default",
		}
		if text, ok := f.Target.Interface().(string); ok {
			v.Value = text
		}
		switch {
		case slices.Contains(s.Given, f.Name):
			v.From = "flag"
		case os.Getenv(v.Variable) != "":
			v.From = "environment"
		case os.Getenv(v.Variable+"_FILE") != "":
			v.From = "file"
		case f.Name == "relay-name":
			v.Value = c.RelayName
		case f.Name == "postgres-url":
			if v.Value = defaultPostgresURL; !strings.HasPrefix(c.PostgresURL, v.Value) {
				v.Value, v.From = "", "libpq"
			}
		}
		for _, x := range s.secrets() {
			if x.flag == f.Name {
				v.Value = x.masked(v)
			}
		}
		list = append(list, v)
	}
	return list
}

// masked returns the value of v with *** for what is secret in it.
func (x secret) masked(v Setting) string {
	switch {
	case v.From != "file" && (v.Value == "" || x.inURL && !hasPassword(v.Value)):
		return v.Value
	case x.inURL && v.From != "file":
		if u, err := url.Parse(v.Value); err == nil && u.User != nil && !hasQuery(v.Value, "password") &&
			!hasQuery(v.Value, "sslpassword") {
			return strings.Replace(u.Redacted(), ":xxxxx@", ":***@", 1)
		}
	}
	return "***"
}
