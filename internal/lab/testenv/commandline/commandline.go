// Package commandline gives tests the settings of a command line. It is separate from testenv, which cannot import
// internal/app: tests inside packages that internal/app imports use testenv.
package commandline

import (
	"testing"

	"github.com/alecthomas/kong"

	"posthaste/internal/app"
)

// Settings returns those of a command line with args.
func Settings(tb testing.TB, args ...string) app.Settings {
	tb.Helper()
	var line struct{ app.Settings }
	parser, err := kong.New(&line, line.Decoding())
	if err != nil {
		tb.Fatal(err)
	}
	if _, err := parser.Parse(args); err != nil {
		tb.Fatal(err)
	}
	return line.Settings
}

// Config returns the parsed Settings.
func Config(tb testing.TB, args ...string) app.Config {
	tb.Helper()
	c, err := Settings(tb, args...).Parse()
	if err != nil {
		tb.Fatal(err)
	}
	return c
}
