package main

import (
	"encoding/json"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/alecthomas/kong"

	"posthaste/internal/app"
	"posthaste/internal/lab/testenv"
)

// A command's help explains its own flags and the settings that it uses. All other settings would fill pages.
func TestHelpIsAboutTheCommand(t *testing.T) {
	t.Parallel()
	for args, want := range map[string]struct{ own, settings string }{
		"bench drain": {"--transaction=1", "Servers"},
		"dead list":   {"--json", "Servers, Names"},
		"demo":        {"--once", "Process"},
		"relay":       {"--migrate", "Servers, Names, Relay, Admin listener, Process"},
		"serve":       {"--http-addr=", "Servers, Names, API, Admin listener, Process"},
		"version":     {"--json", ""},
	} {
		page := runToEnd(t, append(strings.Fields(args), "--help")...)
		page.says(t, 0, want.own)
		var groups []string
		for line := range strings.Lines(page.out) {
			if len(line) > 81 {
				t.Errorf("%s --help: a line of %d characters: %s", args, len(line), line)
			}
			switch line = strings.TrimSpace(line); line {
			case "Servers", "Names", "Relay", "API", "Admin listener", "Process":
				groups = append(groups, line)
			}
		}
		if got := strings.Join(groups, ", "); got != want.settings {
			t.Errorf("%s --help: settings %q, want %q:\n%s", args, got, want.settings, page.out)
		}
	}
}

// Each command and flag has a help, in its tag or in help.txt, and help.txt has no others. Each command has an example
// that the parser takes.
func TestHelpsAreComplete(t *testing.T) {
	t.Parallel()
	parser, err := newParser(&commandLine{})
	must(t, err)
	used := map[string]bool{}
	must(t, kong.Visit(parser.Model, func(v kong.Visitable, next kong.Next) error {
		switch v := v.(type) {
		case *kong.Node:
			used[v.Help] = true
			if v.Help == "" {
				t.Errorf("command %q has no help", v.Path())
			}
			if v.Type == kong.CommandNode && v.Leaf() && !v.Hidden && v.Name != "help" {
				example := strings.Fields(strings.TrimPrefix(v.Detail, "Example: posthaste "))
				k, err := parser.Parse(example)
				if err != nil || !strings.HasPrefix(k.Command()+" ", v.Path()+" ") {
					t.Errorf("example %q of command %q: %v", v.Detail, v.Path(), err)
				}
			}
		case *kong.Flag:
			used[v.Help] = true
			if v.Help == "" {
				t.Errorf("flag --%s has no help", v.Name)
			}
		}
		return next(nil)
	}))
	for block := range strings.SplitSeq(helpFile, "\n\n") {
		name, text, _ := strings.Cut(block, "\n")
		text, _, _ = strings.Cut(text, "  $ ")
		if !used[strings.Join(strings.Fields(text), " ")] {
			t.Errorf("help.txt has a help of %q, which does not use it", name)
		}
	}
}

// Users try these before they have read anything.
func TestWaysToAskForHelp(t *testing.T) {
	t.Parallel()
	for args, want := range map[string]string{
		"": "Try and measure", "help": "Try and measure", "help dead": "retry", "help dead list": "of the relay",
		"--version": "posthaste devel (go", "version": "posthaste devel (go",
	} {
		runToEnd(t, strings.Fields(args)...).says(t, 0, want)
	}
	for _, args := range []string{"help nonsense", "dead"} { // TestMistakes has others
		runToEnd(t, strings.Fields(args)...).oneLine(t, exitBadUsage, "--help")
	}
}

// The settings of every origin are printed without secrets. A variable that is no setting is named.
func TestSettings(t *testing.T) {
	file := testenv.WriteFile(t, t.TempDir(), "redis", []byte("redis://user:hunter2@redis.example:6379/0\n"))
	for name, value := range map[string]string{
		"POSTHASTE_POSTGRES_URL":            "postgres://me:hunter2@db.example/shop?sslmode=require",
		"POSTHASTE_REDIS_URL_FILE":          file,
		"POSTHASTE_ADMIN_TOKEN":             "hunter2",
		"POSTHASTE_HISTORY":                 "2w",
		"POSTHASTE_WALL_BUDGET":             "hunter2",
		"POSTHASTE_RELAY_SERVICE_HOST":      "10.0.0.1",
		"POSTHASTE_SERVE_PORT_8080_TCP":     "tcp://10.0.0.1:8080",
		"POSTHASTE_GUARD_REDIS_URL":         "redis://guard.example",
		"POSTHASTE_HEALTHCHECK_CERT":        "",
		"POSTHASTE_TEST_SETTINGS_ARE_TESTS": "1",
	} {
		t.Setenv(name, value)
	}
	page := runToEnd(t, "settings", "--json", "--schema=events")
	if page.code != 0 || strings.Contains(page.out+page.errOut, "hunter2") {
		t.Fatalf("exit %d: %s%s", page.code, page.out, page.errOut)
	}
	if strings.Count(page.errOut, "not a setting") != 1 || !strings.Contains(page.errOut, "POSTHASTE_WALL_BUDGET") {
		t.Errorf("variables that are no settings: %s", page.errOut)
	}
	var list []app.Setting
	must(t, json.Unmarshal([]byte(page.out), &list))
	got := map[string][2]string{}
	for _, s := range list {
		got[s.Flag] = [2]string{s.Value, s.From}
	}
	want := map[string][2]string{
		"--postgres-url":    {"postgres://me:***@db.example/shop?sslmode=require", "environment"},
		"--redis-url":       {"***", "file"},
		"--guard-redis-url": {"redis://guard.example", "environment"},
		"--admin-token":     {"***", "environment"},
		"--history":         {"2w", "environment"},
		"--schema":          {"events", "flag"},
		"--relay-name":      {"events", "default"},
	}
	for _, flag := range slices.Sorted(maps.Keys(want)) {
		if got[flag] != want[flag] {
			t.Errorf("%s: %q, want %q", flag, got[flag], want[flag])
		}
	}
	t.Setenv("POSTHASTE_POSTGRES_URL", "")
	t.Setenv("PGHOST", "db.example")
	if text := runToEnd(t, "settings").out; !strings.Contains(text, "libpq") {
		t.Errorf("with PGHOST:\n%s", text)
	}
	t.Setenv("PGHOST", "")
	t.Setenv("POSTHASTE_POSTGRES_PASSWORD_FILE", testenv.WriteFile(t, t.TempDir(), "password", []byte("hunter2\n")))
	if text := runToEnd(t, "settings").out; !strings.Contains(text, " postgres://localhost:5432/postgres  ") {
		t.Errorf("with a file of the password:\n%s", text)
	}
	if text := runToEnd(t, "settings").out; !strings.Contains(text, "\nRelay\n") || strings.Contains(text, "hunter2") {
		t.Errorf("for people:\n%s", text)
	}
}
