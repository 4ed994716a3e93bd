package main

import (
	"fmt"
	"strings"

	"github.com/alecthomas/kong"
)

// help prints the help of a command. Every command takes the settings; they are explained by those that run by them,
// and only named by the others, behind their own flags.
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
		f.Hidden = true // from the list of the flags; the process ends behind this page
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
