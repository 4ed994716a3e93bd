package main

import (
	_ "embed"
	"errors"
	"fmt"
	"reflect"
	"slices"

	"github.com/alecthomas/kong"

	"posthaste/internal/cli"
)

//go:embed help.txt
var helpFile string

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
