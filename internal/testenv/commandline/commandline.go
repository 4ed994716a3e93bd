// Package commandline gives tests the settings that a command line means. It is apart from testenv, because packages
// that internal/app imports use that in tests of their own package: it cannot import internal/app.
package commandline

import (
	"testing"

	"github.com/alecthomas/kong"

	"posthaste/internal/app"
)

// Settings are those of a command line without arguments, or with those given.
func Settings(tb testing.TB, args ...string) app.Settings {
	tb.Helper()
	var line struct{ app.Settings }
	parser, err := kong.New(&line)
	if err != nil {
		tb.Fatal(err)
	}
	if _, err := parser.Parse(args); err != nil {
		tb.Fatal(err)
	}
	return line.Settings
}

// Config is what the Settings mean.
func Config(tb testing.TB, args ...string) app.Config {
	tb.Helper()
	c, err := Settings(tb, args...).Parse()
	if err != nil {
		tb.Fatal(err)
	}
	return c
}
