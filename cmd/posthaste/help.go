package main

import (
	"fmt"
	"strings"

	"github.com/alecthomas/kong"
)

// help prints the help of a command. All commands accept the settings. Only relay and serve explain them; the help of
// other commands lists their names after the command's own flags.
func help(options kong.HelpOptions, ctx *kong.Context) error {
	if cmd := ctx.Selected(); cmd != nil && (cmd.Name == "relay" || cmd.Name == "serve") {
		return kong.DefaultHelpPrinter(options, ctx)
	}
	const width = 78
	lines := []string{""}
	for _, f := range ctx.Model.Flags {
		if f.Name == "help" {
			continue
		}
		f.Hidden = true // hides the flag from the list; the process ends after it has printed the help
		last := &lines[len(lines)-1]
		if len(*last)+len(" --"+f.Name) > width {
			lines = append(lines, "")
			last = &lines[len(lines)-1]
		}
		*last += " --" + f.Name
	}
	if err := kong.DefaultHelpPrinter(options, ctx); err != nil {
		return err
	}
	_, err := fmt.Fprintf(ctx.Stdout,
		"\nSettings, explained by posthaste relay --help and in docs/configuration.md:\n %s\n",
		strings.Join(lines, "\n "))
	return err
}
