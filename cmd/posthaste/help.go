package main

import (
	"cmp"
	_ "embed"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"

	"github.com/alecthomas/kong"

	"posthaste/internal/cli"
	"posthaste/internal/gendocs"
)

//go:embed help.txt
var helpFile string

// helpTexts gives commands and flags without a help in their tag that of help.txt. There, a text follows the name of
// its command or flag; that of a flag of several commands follows the name of the command above them. A line that
// begins with "$" is an example of a command.
func helpTexts(k *kong.Kong) error {
	texts, examples := map[string]string{}, map[string]string{}
	for block := range strings.SplitSeq(helpFile, "\n\n") {
		name, text, _ := strings.Cut(block, "\n")
		text, examples[name], _ = strings.Cut(text, "  $ ")
		texts[name] = strings.Join(strings.Fields(text), " ")
	}
	var fill func(n *kong.Node)
	fill = func(n *kong.Node) {
		n.Help = cmp.Or(n.Help, texts[n.Path()])
		if example := strings.TrimSpace(examples[n.Path()]); example != "" {
			n.Detail = "Example: " + example
		}
		for _, f := range n.Flags {
			for at := n; at != nil && f.Help == ""; at = at.Parent {
				f.Help = texts[strings.TrimSpace(at.Path()+" --"+f.Name)]
			}
		}
		for _, c := range n.Children {
			fill(c)
		}
	}
	fill(k.Model.Node)
	return nil
}

// help prints the help of a command. All commands accept all settings: the help shows the groups that the command
// uses.
func help(options kong.HelpOptions, ctx *kong.Context) error {
	shown := gendocs.SettingGroups(ctx.Selected())
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
