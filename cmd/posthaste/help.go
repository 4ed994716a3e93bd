package main

import (
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"

	"github.com/alecthomas/kong"

	"posthaste/internal/cli"
)

// usualSettings are the groups of settings of a command whose tag "settings" names no others.
const usualSettings = "Servers,Names"

// help prints the help of a command. All commands accept all settings: the help shows the groups that the command
// uses.
func help(options kong.HelpOptions, ctx *kong.Context) error {
	shown := settingGroups(ctx.Selected())
	settings := false
	for _, f := range ctx.Model.Flags {
		if f.Group != nil {
			f.Hidden = !slices.Contains(shown, f.Group.Title)
			settings = settings || !f.Hidden
		}
	}
	err := kong.DefaultHelpPrinter(options, ctx)
	if settings && err == nil {
		_, err = fmt.Fprintln(ctx.Stdout, "\nEach setting is a variable, too: --wal-budget is POSTHASTE_WAL_BUDGET.")
	}
	return err
}

// settingGroups returns the groups of settings that a command uses; nil for no command.
func settingGroups(n *kong.Node) []string {
	shown := ""
	for ; n != nil && n.Tag != nil && shown == ""; n = n.Parent {
		shown = n.Tag.Get("settings")
		if n.Parent != nil && n.Parent.Type == kong.ApplicationNode && shown == "" {
			shown = usualSettings
		}
	}
	return strings.Split(shown, ",")
}

// meaning is the help of a flag. The help of a setting does not repeat the variable, which follows from its name.
func meaning(v *kong.Value) string {
	if v.Flag != nil && v.Flag.Group != nil {
		return v.Help
	}
	return kong.DefaultHelpValueFormatter(v)
}

// helpCmd is in the list of commands. helpArgs replaces it before the parser sees it.
type helpCmd struct {
	Command []string `arg:"" optional:"" help:"The command."`
}

// Run is not reached: see helpArgs.
func (helpCmd) Run() error { return errors.ErrUnsupported }

// helpArgs replaces the command help by the flag --help. No arguments at all request the help, too.
func helpArgs(args []string) []string {
	switch {
	case len(args) == 0:
		return []string{"--help"}
	case args[0] == "help":
		return append(slices.Clone(args[1:]), "--help")
	}
	return args
}

// parseDuration is the parser's function for durations.
func parseDuration(ctx *kong.DecodeContext, target reflect.Value) error {
	var text string
	if err := ctx.Scan.PopValueInto("duration", &text); err != nil {
		return err
	}
	d, err := cli.ParseDuration(text)
	if err != nil {
		return fmt.Errorf("expected a duration such as 90s, 36h or 3d but got %q", text)
	}
	target.Set(reflect.ValueOf(d))
	return nil
}
