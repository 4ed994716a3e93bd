package gendocs

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/alecthomas/kong"
)

// HelpTexts gives commands and flags without a help in their tag that of a file. There, a text follows the name of
// its command or flag; that of a flag of several commands follows the name of the command above them. A line that
// begins with "$" is an example of a command.
func HelpTexts(file string) kong.Option {
	return kong.PostBuild(func(k *kong.Kong) error {
		texts, examples := map[string]string{}, map[string]string{}
		for block := range strings.SplitSeq(file, "\n\n") {
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
	})
}

// Help prints the help of a command. All commands accept all settings: the help shows the groups that the command
// uses.
func Help(options kong.HelpOptions, ctx *kong.Context) error {
	shown := SettingGroups(ctx.Selected())
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

// Meaning is the help of a flag. The help of a setting does not repeat the variable, which follows from its name.
func Meaning(v *kong.Value) string {
	if v.Flag != nil && v.Flag.Group != nil {
		return v.Help
	}
	return kong.DefaultHelpValueFormatter(v)
}
