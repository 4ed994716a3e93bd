package main

import (
	"slices"
	"strings"
	"testing"
)

// A command's help explains the command's own flags. The settings, which all commands accept, would fill pages.
func TestHelpIsAboutTheCommand(t *testing.T) {
	t.Parallel()
	const explained, named = "--window-bytes=", "--window-bytes"
	for args, own := range map[string]string{
		"": "  doctor ", "bench": "  bench drain ", "bench drain": "--transaction=1", "doctor": "--json",
	} {
		page := runToEnd(t, append(strings.Fields(args), "--help")...)
		settings := strings.Index(page.out, "posthaste relay --help")
		if page.code != 0 || strings.Contains(page.out, explained) || settings < 0 ||
			settings < strings.Index(page.out, own) || !slices.Contains(strings.Fields(page.out[settings:]), named) {
			t.Errorf("%s --help: exit %d, want %q, and then names:\n%s", args, page.code, own, page.out)
		}
		for line := range strings.Lines(page.out) {
			if len(line) > 81 {
				t.Errorf("%s --help: a line of %d characters: %s", args, len(line), line)
			}
		}
	}
	for _, command := range []string{"relay", "serve"} {
		if page := runToEnd(t, command, "--help"); page.code != 0 || !strings.Contains(page.out, explained) {
			t.Errorf("%s --help: exit %d:\n%s", command, page.code, page.out)
		}
	}
}
